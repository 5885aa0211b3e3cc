#include "results/appender.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "core/file_error.h"
#include "core/output_file.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "results/reader.h"

namespace tfb {
namespace {

// Locks a result file until it is closed. Returns Unavailable where another process holds it.
absl::Status Lock(const std::string& path, int fd) {
  if (flock(fd, LOCK_EX | LOCK_NB) == 0) return absl::OkStatus();
  if (errno != EWOULDBLOCK) return FileError(path, "lock", errno);
  return absl::UnavailableError(
      absl::StrCat(path, ": another process is appending to it; name another file"));
}

// Serializes maps in a fixed order, so that equal results give equal bytes.
std::string SerializeDeterministically(const google::protobuf::Message& message) {
  std::string bytes;
  google::protobuf::io::StringOutputStream stream(&bytes);
  google::protobuf::io::CodedOutputStream coded(&stream);
  coded.SetSerializationDeterministic(true);
  message.SerializeToCodedStream(&coded);
  coded.Trim();
  return bytes;
}

std::string MakeEnvironmentId(const Environment& environment) {
  int64_t start_ns = environment.start_unix_ns();
  if (start_ns == 0) {
    start_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                   std::chrono::system_clock::now().time_since_epoch())
                   .count();
  }
  return absl::StrCat(
      absl::FormatTime("%Y%m%dT%H%M%SZ", absl::FromUnixNanos(start_ns), absl::UTCTimeZone()), "-",
      environment.host().empty() ? "host" : environment.host(), "-", getpid());
}

std::string Frame(int field, absl::string_view payload) {
  std::string frame;
  wire::AppendLengthDelimited(field, payload, &frame);
  wire::AppendChecksum(std::string(frame), &frame);
  return frame;
}

absl::Status MakeFoldersFor(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (folder.empty()) return absl::OkStatus();
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return FileError(folder.string(), "make this folder", error.value());
  return absl::OkStatus();
}

}  // namespace

ResultAppender::ResultAppender(std::string path, int fd, const AppenderOptions& options)
    : path_(std::move(path)), fd_(fd), options_(options) {}

ResultAppender::~ResultAppender() { close(fd_); }

absl::StatusOr<std::unique_ptr<ResultAppender>> ResultAppender::Open(
    const std::string& path, const AppenderOptions& options) {
  if (options.make_folders) {
    if (absl::Status status = MakeFoldersFor(path); !status.ok()) return status;
  }
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) return FileError(path, "open for appending", errno);
  std::unique_ptr<ResultAppender> appender(new ResultAppender(path, fd, options));
  if (absl::Status status = Lock(path, fd); !status.ok()) return status;
  if (absl::Status status = appender->Begin(); !status.ok()) return status;
  return appender;
}

absl::Status ResultAppender::Begin() {
  struct stat info;
  if (fstat(fd_, &info) != 0) return FileError(path_, "inspect", errno);
  if (info.st_size > 0 && options_.existing == AppenderOptions::Existing::kRefuse) {
    return absl::AlreadyExistsError(absl::StrCat(path_, ": holds ", info.st_size,
                                                 " bytes already; resume it or name another file"));
  }
  absl::StatusOr<ResultFile> file = ReadResultFile(path_);
  if (!file.ok()) return file.status();
  existing_ = std::move(file->results);
  size_bytes_ = file->whole_bytes;
  cut_bytes_ = file->torn_bytes;
  if (cut_bytes_ > 0 && ftruncate(fd_, size_bytes_) != 0) {
    return FileError(path_, "cut off its torn tail", errno);
  }
  return absl::OkStatus();
}

absl::Status ResultAppender::WriteMessage(int field, google::protobuf::Message& message) {
  const std::string payload = SerializeDeterministically(message);
  // A string that is not UTF-8 can be written, but never read again.
  message.Clear();
  if (!message.ParseFromString(payload)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": a ", message.GetTypeName(), " with text that is not UTF-8"));
  }
  return WriteRecord(field, payload);
}

absl::Status ResultAppender::WriteRecord(int field, absl::string_view payload) {
  if (static_cast<int64_t>(payload.size()) > wire::kMaxRecordBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": a record of ", payload.size(),
                                                   " bytes; at most ", wire::kMaxRecordBytes,
                                                   " are allowed"));
  }
  std::string bytes = size_bytes_ == 0 ? wire::Signature() : std::string();
  bytes += Frame(field, payload);
  const int64_t size_after = size_bytes_ + static_cast<int64_t>(bytes.size());
  if (size_after > options_.max_file_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(path_, ": would grow to ", size_after,
                                                     " bytes; at most ", options_.max_file_bytes,
                                                     " are allowed; go on in another file"));
  }
  // A short write has met a limit, and the next write returns its error.
  size_t done = 0;
  int error = 0;
  while (done < bytes.size() && error == 0) {
    const ssize_t written = write(fd_, bytes.data() + done, bytes.size() - done);
    if (written > 0) done += static_cast<size_t>(written);
    if (written == 0) error = ENOSPC;
    if (written < 0 && errno != EINTR) error = errno;
  }
  if (error != 0) {
    if (done > 0 && ftruncate(fd_, size_bytes_) != 0) {
      return FileError(path_, "append, nor cut off what was written in part", errno);
    }
    return FileError(path_, "append", error);
  }
  size_bytes_ = size_after;
  // fdatasync returns EINVAL for a file that does not support it.
  if (options_.sync && fdatasync(fd_) != 0 && errno != EINVAL) {
    return FileError(path_, "bring to disk", errno);
  }
  return absl::OkStatus();
}

absl::Status ResultAppender::Append(Environment environment) {
  if (environment.id().empty()) environment.set_id(MakeEnvironmentId(environment));
  const std::string id = environment.id();
  const absl::Status status = WriteMessage(wire::kEnvironmentsField, environment);
  if (status.ok()) environment_id_ = id;
  return status;
}

absl::Status ResultAppender::Append(Case result) {
  if (result.environment_id().empty()) {
    if (environment_id_.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat(path_, ": append an environment before the first case"));
    }
    result.set_environment_id(environment_id_);
  }
  const Outcome& outcome = result.outcome();
  if (outcome.status() == Outcome::STATUS_UNSPECIFIED) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": a case without a status: ", CaseKey(result)));
  }
  if (outcome.status() != Outcome::STATUS_OK && outcome.reason().empty()) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": a case that is ",
                                                   Name(outcome.status()),
                                                   " without a reason: ", CaseKey(result)));
  }
  if (result.key().options_text().empty()) {
    result.mutable_key()->set_options_text(CanonicalOptions(result.key()));
  }
  return WriteMessage(wire::kCasesField, result);
}

std::string SerializeResults(const ResultSet& results) {
  std::string bytes = wire::Signature();
  for (const Environment& environment : results.environments()) {
    bytes += Frame(wire::kEnvironmentsField, SerializeDeterministically(environment));
  }
  for (const Case& result : results.cases()) {
    bytes += Frame(wire::kCasesField, SerializeDeterministically(result));
  }
  ResultSet unknown;
  unknown.GetReflection()->MutableUnknownFields(&unknown)->MergeFrom(
      results.GetReflection()->GetUnknownFields(results));
  return bytes + SerializeDeterministically(unknown);
}

absl::Status WriteResultFile(const std::string& path, const ResultSet& results) {
  struct stat info;
  const bool is_plain = stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
  const int replaced = is_plain ? open(path.c_str(), O_RDONLY | O_CLOEXEC) : -1;
  absl::Status status = replaced < 0 ? absl::OkStatus() : Lock(path, replaced);
  if (status.ok()) status = WriteFile(path, SerializeResults(results));
  if (replaced >= 0) close(replaced);
  return status;
}

}  // namespace tfb
