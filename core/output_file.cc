#include "core/output_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/file_error.h"
#include "core/status.h"

namespace tfb {
namespace {

namespace fs = std::filesystem;

constexpr int kMostLinks = 40;  // as many as Linux follows

// Where a path leads: to a file, or to one that this process has open, as /dev/stdout does.
struct Target {
  std::string path;
  int descriptor = -1;  // of the open file, else -1
};

// Returns the descriptor that a link in /proc/self/fd stands for, or -1.
int DescriptorOf(const fs::path& link) {
  std::error_code error;
  const fs::path folder = fs::canonical(link.parent_path(), error);
  int descriptor = -1;
  const bool is_number = absl::SimpleAtoi(link.filename().string(), &descriptor);
  return is_number && folder == absl::StrCat("/proc/", getpid(), "/fd") ? descriptor : -1;
}

// Follows links, also to what does not exist yet.
absl::StatusOr<Target> TargetOf(const std::string& path) {
  fs::path target = path;
  std::error_code error;
  for (int links = 0; fs::is_symlink(fs::symlink_status(target, error)); ++links) {
    if (links == kMostLinks) return FileError(path, "write", ELOOP);
    if (const int descriptor = DescriptorOf(target); descriptor >= 0) {
      return Target{target.string(), descriptor};
    }
    const fs::path next = fs::read_symlink(target, error);
    if (error) return FileError(path, "write", error.value());
    target = next.is_absolute() ? next : target.parent_path() / next;
  }
  return Target{target.string()};
}

}  // namespace

absl::StatusOr<std::unique_ptr<OutputFile>> OutputFile::Open(const std::string& path) {
  struct stat info;
  const bool is_there = stat(path.c_str(), &info) == 0;
  if (!is_there && errno != ENOENT) return FileError(path, "write", errno);
  if (is_there && S_ISDIR(info.st_mode)) return FileError(path, "write", EISDIR);
  if (is_there && access(path.c_str(), W_OK) != 0) return FileError(path, "write", errno);
  if (is_there && !S_ISREG(info.st_mode)) {
    // Opened by the caller's path: /dev/stdout leads to a pipe that has no path of its own.
    const int descriptor = open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (descriptor < 0) return FileError(path, "write", errno);
    return std::unique_ptr<OutputFile>(new OutputFile(path, path, "", descriptor));
  }
  TFB_ASSIGN_OR_RETURN(const Target target, TargetOf(path));
  if (target.descriptor >= 0) {  // the file is written where its other writers have come to
    const int descriptor = fcntl(target.descriptor, F_DUPFD_CLOEXEC, 0);
    if (descriptor < 0) return FileError(path, "write", errno);
    return std::unique_ptr<OutputFile>(new OutputFile(path, path, "", descriptor));
  }
  const std::string temporary = absl::StrCat(target.path, ".", getpid(), ".tmp");
  const int descriptor =
      open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (descriptor < 0) return FileError(path, "write", errno);
  std::unique_ptr<OutputFile> file(new OutputFile(path, target.path, temporary, descriptor));
  if (is_there && fchmod(descriptor, info.st_mode & 07777) != 0) {
    return FileError(path, "write", errno);
  }
  return file;
}

OutputFile::OutputFile(std::string path, std::string target, std::string temporary, int descriptor)
    : path_(std::move(path)),
      target_(std::move(target)),
      temporary_(std::move(temporary)),
      descriptor_(descriptor) {}

OutputFile::~OutputFile() {
  if (descriptor_ < 0) return;
  close(descriptor_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

absl::Status OutputFile::Write(absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return FileError(path_, "write", errno);
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status OutputFile::WriteAt(int64_t offset, absl::string_view bytes) {
  if (temporary_.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        path_, ": cannot write: it must be a plain file, since it is not written in order"));
  }
  while (!bytes.empty()) {
    const ssize_t written = pwrite(descriptor_, bytes.data(), bytes.size(), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return FileError(path_, "write", errno);
    bytes.remove_prefix(static_cast<size_t>(written));
    offset += written;
  }
  return absl::OkStatus();
}

absl::Status OutputFile::Finish() {
  // Devices and FIFOs have no disk to wait for.
  int error = !temporary_.empty() && fsync(descriptor_) != 0 ? errno : 0;
  if (close(std::exchange(descriptor_, -1)) != 0 && error == 0) error = errno;
  if (temporary_.empty()) return error == 0 ? absl::OkStatus() : FileError(path_, "write", error);
  if (error == 0 && rename(temporary_.c_str(), target_.c_str()) != 0) error = errno;
  if (error == 0) return absl::OkStatus();
  unlink(temporary_.c_str());
  return FileError(path_, "write", error);
}

absl::Status CheckWritable(const std::string& path) {
  struct stat info;
  const bool is_special =
      stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode);
  if (!is_special) return OutputFile::Open(path).status();
  return access(path.c_str(), W_OK) == 0 ? absl::OkStatus() : FileError(path, "write", errno);
}

bool IsSamePlainFile(const std::string& a, const std::string& b) {
  std::error_code ignored;
  const fs::file_type type = fs::status(a, ignored).type();
  if (type != fs::file_type::regular && type != fs::file_type::not_found) return false;
  const auto normal = [&ignored](const std::string& path) {
    return fs::absolute(path, ignored).lexically_normal();
  };
  return normal(a) == normal(b) || fs::equivalent(a, b, ignored);
}

absl::Status WriteFile(const std::string& path, absl::string_view bytes) {
  TFB_ASSIGN_OR_RETURN(const std::unique_ptr<OutputFile> file, OutputFile::Open(path));
  TFB_RETURN_IF_ERROR(file->Write(bytes));
  return file->Finish();
}

}  // namespace tfb
