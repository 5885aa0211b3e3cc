#include "results/history/store.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/file_error.h"
#include "core/status.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/gzip_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "results/table.h"
#include "results/wire.h"

namespace tfb {
namespace {

namespace fs = std::filesystem;
namespace io = google::protobuf::io;

constexpr char kMarker[] = "tfb-history";
constexpr char kSuffix[] = ".pb.gz";
constexpr char kTemporary[] = ".tmp";
constexpr size_t kMostUnpackedBytes = size_t{1} << 30;  // a run of 800 cases has half a MiB
constexpr absl::Duration kLongestWait = absl::Minutes(1);

std::string MarkerText() {
  return absl::StrCat(
      kHistoryFormat,
      "\nRuns of //harness:sweep, one file each in runs/; //tools:history reads and adds them.\n");
}

std::string MarkerPath(const std::string& folder) { return (fs::path(folder) / kMarker).string(); }
std::string RunsPath(const std::string& folder) { return (fs::path(folder) / "runs").string(); }
std::string RunPath(const std::string& folder, absl::string_view name) {
  return (fs::path(folder) / "runs" / absl::StrCat(name, kSuffix)).string();
}

// A descriptor that is closed, and so unlocked, at the end.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return number_; }

 private:
  const int number_;
};

absl::StatusOr<std::string> ReadWhole(const std::string& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return FileError(path, "read", errno);
  std::string bytes;
  char buffer[1 << 16];
  while (true) {
    const ssize_t count = read(file.get(), buffer, sizeof(buffer));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError(path, "read", errno);
    if (count == 0) return bytes;
    bytes.append(buffer, static_cast<size_t>(count));
  }
}

absl::Status WriteAll(int descriptor, const std::string& path, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = write(descriptor, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError(path, "write", errno);
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return absl::OkStatus();
}

absl::Status SyncFolder(const std::string& path) {
  const Descriptor folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0) return FileError(path, "open", errno);
  // A file system that cannot synchronise a folder says so by EINVAL.
  if (fsync(folder.get()) != 0 && errno != EINVAL) return FileError(path, "synchronise", errno);
  return absl::OkStatus();
}

// Returns the version of a format "tfb.History/1", or nothing where the text begins otherwise.
std::optional<int64_t> VersionOf(absl::string_view format, absl::string_view known) {
  const absl::string_view stem = known.substr(0, known.find('/') + 1);
  int64_t version = 0;
  if (!absl::ConsumePrefix(&format, stem) || !absl::SimpleAtoi(format, &version)) {
    return std::nullopt;
  }
  return version;
}

absl::Status NewerVersion(const std::string& path, absl::string_view format) {
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": of the format ", Printable(format.substr(0, 40)),
                   ", which a newer version of this program wrote: update this one"));
}

// Returns an error where the folder's marker is not that of a store of this version. A marker whose
// end is missing is one that a writer was killed over, or the disk was full.
absl::Status CheckMarker(const std::string& folder, const std::string& text) {
  if (absl::StartsWith(MarkerText(), text)) return absl::OkStatus();
  const absl::string_view format = absl::string_view(text).substr(0, text.find('\n'));
  const std::optional<int64_t> version = VersionOf(format, kHistoryFormat);
  if (version.has_value() && format != kHistoryFormat) {
    return NewerVersion(MarkerPath(folder), format);
  }
  if (version.has_value()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(MarkerPath(folder), ": does not begin with ", kHistoryFormat, ": no store"));
}

// Locks the store against other writers, for as long as the descriptor is open.
absl::Status Lock(int marker, const std::string& path) {
  const absl::Time give_up = absl::Now() + kLongestWait;
  while (flock(marker, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return FileError(path, "lock", errno);
    if (absl::Now() > give_up) {
      return absl::UnavailableError(
          absl::StrCat(path, ": another process has been writing to the store for ",
                       absl::FormatDuration(kLongestWait)));
    }
    absl::SleepFor(absl::Milliseconds(20));
  }
  return absl::OkStatus();
}

// Decompresses one gzip stream, whose checksum zlib compares. Returns false where the bytes are not
// exactly one whole stream, of at most kMostUnpackedBytes.
bool Decompress(absl::string_view bytes, std::string* unpacked) {
  constexpr int kGzip = 16;  // a flag of zlib's for its header and trailer
  z_stream stream = {};
  if (inflateInit2(&stream, MAX_WBITS + kGzip) != Z_OK) return false;
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  std::string buffer(1 << 16, 0);
  int state = Z_OK;
  while (state == Z_OK && unpacked->size() < kMostUnpackedBytes) {
    stream.next_out = reinterpret_cast<Bytef*>(buffer.data());
    stream.avail_out = static_cast<uInt>(buffer.size());
    state = inflate(&stream, Z_NO_FLUSH);
    unpacked->append(buffer, 0, buffer.size() - stream.avail_out);
  }
  const bool is_whole = state == Z_STREAM_END && stream.avail_in == 0;
  inflateEnd(&stream);
  return is_whole;
}

// Files that are written but do not have their names yet. Those without are removed at the end.
class PendingFiles {
 public:
  explicit PendingFiles(std::string folder) : folder_(std::move(folder)) {}
  ~PendingFiles() {
    for (const auto& [name, temporary] : files_) unlink(temporary.c_str());
    for (const std::string& path : named_) unlink(path.c_str());
  }

  // Writes a file under a temporary name beside its own.
  absl::Status Write(const std::string& name, absl::string_view bytes) {
    const std::string path = RunPath(folder_, name);
    const std::string temporary = absl::StrCat(path, ".", getpid(), kTemporary);
    const Descriptor file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (file.get() < 0) return FileError(path, "write", errno);
    files_[name] = temporary;
    TFB_RETURN_IF_ERROR(WriteAll(file.get(), path, bytes));
    if (fsync(file.get()) != 0) return FileError(path, "write", errno);
    return absl::OkStatus();
  }

  // Gives all of them their names, or none. The caller holds the lock and has seen that no file has
  // one.
  absl::Status Publish() {
    for (const auto& [name, temporary] : files_) {
      const std::string path = RunPath(folder_, name);
      if (rename(temporary.c_str(), path.c_str()) != 0) return FileError(path, "write", errno);
      named_.push_back(path);
    }
    TFB_RETURN_IF_ERROR(SyncFolder(RunsPath(folder_)));
    files_.clear();
    named_.clear();
    return absl::OkStatus();
  }

 private:
  const std::string folder_;
  std::map<std::string, std::string> files_;  // by name, the paths of the temporary files
  std::vector<std::string> named_;            // the paths of those that have their names
};

// Removes what killed writers left. The caller holds the lock, so that no other writer lives.
void RemoveLeftovers(const std::string& folder) {
  std::error_code error;
  for (fs::directory_iterator entry(RunsPath(folder), error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->path().extension() != kTemporary) continue;
    std::error_code ignored;
    fs::remove(entry->path(), ignored);
  }
}

// Returns the processes that measured a run. Each has an environment of its own.
std::set<std::string> ProcessesOf(const HistoryRun& run) {
  std::set<std::string> processes;
  for (const Environment& environment : run.environments()) {
    processes.insert(absl::StrCat(environment.start_unix_ns(), " ", environment.id()));
  }
  return processes;
}

// Removes each run that another one continues, as a resumed sweep does.
void RemoveContinued(std::vector<StoredRun>* runs) {
  std::vector<std::set<std::string>> processes;
  std::map<std::string, std::vector<size_t>> by_process;
  for (size_t i = 0; i < runs->size(); ++i) {
    processes.push_back(ProcessesOf((*runs)[i].run));
    for (const std::string& process : processes.back()) by_process[process].push_back(i);
  }
  std::vector<StoredRun> kept;
  for (size_t i = 0; i < runs->size(); ++i) {
    const std::set<std::string>& own = processes[i];
    const auto continues = [&](size_t other) {
      const std::set<std::string>& more = processes[other];
      return more.size() > own.size() &&
             std::includes(more.begin(), more.end(), own.begin(), own.end());
    };
    const std::vector<size_t> others =
        own.empty() ? std::vector<size_t>() : by_process.at(*own.begin());
    if (std::any_of(others.begin(), others.end(), continues)) continue;
    kept.push_back(std::move((*runs)[i]));
  }
  *runs = std::move(kept);
}

}  // namespace

std::string RunName(const HistoryRun& run) {
  std::vector<std::string> ids;
  int64_t start_ns = 0;
  std::string commit;
  for (const Environment& environment : run.environments()) {
    ids.push_back(environment.id());
    if (start_ns == 0 || environment.start_unix_ns() < start_ns)
      start_ns = environment.start_unix_ns();
    if (commit.empty()) commit = environment.git_commit().substr(0, 12);
  }
  const bool is_hash =
      !commit.empty() && std::all_of(commit.begin(), commit.end(), absl::ascii_isxdigit);
  return absl::StrCat(
      absl::FormatTime("%Y%m%d%ET%H%M%SZ", absl::FromUnixNanos(start_ns), absl::UTCTimeZone()), "-",
      is_hash ? commit : "unknown", "-",
      absl::StrFormat("%08x", wire::Crc32c(absl::StrJoin(ids, "\n"))));
}

std::string PackRun(const HistoryRun& run) {
  std::string bytes;
  {
    io::StringOutputStream out(&bytes);
    io::GzipOutputStream::Options options;
    options.compression_level = 9;
    io::GzipOutputStream gzip(&out, options);
    io::CodedOutputStream coded(&gzip);
    coded.SetSerializationDeterministic(true);
    run.SerializeToCodedStream(&coded);
  }
  return bytes;
}

absl::StatusOr<HistoryRun> UnpackRun(absl::string_view bytes, const std::string& path) {
  std::string unpacked;
  if (!Decompress(bytes, &unpacked)) {
    return absl::DataLossError(absl::StrCat(path, ": cut or damaged (", bytes.size(), " bytes)"));
  }
  HistoryRun run;
  if (!run.ParseFromString(unpacked)) {
    return absl::DataLossError(absl::StrCat(path, ": no run of a store"));
  }
  if (run.format() == kHistoryRunFormat) return run;
  if (VersionOf(run.format(), kHistoryRunFormat).has_value())
    return NewerVersion(path, run.format());
  return absl::DataLossError(absl::StrCat(path, ": no run of a store"));
}

absl::StatusOr<HistoryStore> HistoryStore::Open(const std::string& folder) {
  absl::StatusOr<std::string> marker = ReadWhole(MarkerPath(folder));
  if (absl::IsNotFound(marker.status())) {
    return absl::NotFoundError(
        absl::StrCat(folder, ": no store (a file ", kMarker, " makes a folder one)"));
  }
  if (!marker.ok()) return marker.status();
  TFB_RETURN_IF_ERROR(CheckMarker(folder, *marker));
  return HistoryStore(folder);
}

absl::StatusOr<HistoryStore> HistoryStore::OpenOrCreate(const std::string& folder) {
  std::error_code error;
  const bool has_marker = fs::exists(MarkerPath(folder), error);
  if (!has_marker && fs::exists(folder, error)) {
    if (!fs::is_directory(folder, error)) {
      return absl::InvalidArgumentError(absl::StrCat(folder, ": a store is a folder"));
    }
    fs::directory_iterator first(folder, error);
    if (error) return FileError(folder, "read", error.value());
    if (first != fs::directory_iterator()) {
      return absl::InvalidArgumentError(absl::StrCat(
          folder, ": no store, and not empty: name a store, or a folder that is empty or new"));
    }
  }
  fs::create_directories(RunsPath(folder), error);
  if (error) return FileError(RunsPath(folder), "make the folder", error.value());
  const std::string path = MarkerPath(folder);
  const Descriptor marker(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (marker.get() < 0) return FileError(path, "write", errno);
  TFB_RETURN_IF_ERROR(Lock(marker.get(), path));
  TFB_ASSIGN_OR_RETURN(const std::string text, ReadWhole(path));
  TFB_RETURN_IF_ERROR(CheckMarker(folder, text));
  if (text.size() < MarkerText().size() && absl::StartsWith(MarkerText(), text)) {
    if (lseek(marker.get(), 0, SEEK_SET) != 0) return FileError(path, "write", errno);
    TFB_RETURN_IF_ERROR(WriteAll(marker.get(), path, MarkerText()));
    if (fsync(marker.get()) != 0) return FileError(path, "write", errno);
    TFB_RETURN_IF_ERROR(SyncFolder(folder));
  }
  return HistoryStore(folder);
}

absl::StatusOr<Additions> HistoryStore::Add(const std::vector<HistoryRun>& runs) const {
  const std::string path = MarkerPath(folder_);
  const Descriptor marker(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (marker.get() < 0) return FileError(path, "open", errno);
  TFB_RETURN_IF_ERROR(Lock(marker.get(), path));
  RemoveLeftovers(folder_);
  std::error_code error;
  fs::create_directories(RunsPath(folder_), error);  // version control keeps no empty folder
  if (error) return FileError(RunsPath(folder_), "make the folder", error.value());

  PendingFiles files(folder_);
  Additions additions;
  std::map<std::string, std::string> packed;  // by name, those of the store and those to come
  for (const HistoryRun& run : runs) {
    const std::string name = RunName(run), path = RunPath(folder_, name), bytes = PackRun(run);
    if (packed.count(name) == 0) {
      absl::StatusOr<std::string> there = ReadWhole(path);
      if (!there.ok() && !absl::IsNotFound(there.status())) return there.status();
      if (there.ok()) {
        TFB_ASSIGN_OR_RETURN(const HistoryRun known, UnpackRun(*there, path));
        packed[name] = PackRun(known);  // another version of zlib may compress in another way
      }
    }
    const auto [entry, is_new] = packed.emplace(name, bytes);
    if (entry->second != bytes) {
      return absl::AlreadyExistsError(
          absl::StrCat(path,
                       ": the store has this run with other contents, and runs are never changed: "
                       "add a sweep when it has ended"));
    }
    (is_new ? additions.added : additions.known).push_back(name);
    if (is_new) TFB_RETURN_IF_ERROR(files.Write(name, bytes));
  }
  TFB_RETURN_IF_ERROR(files.Publish());
  return additions;
}

absl::StatusOr<StoredRuns> HistoryStore::Read(Damage damage) const {
  std::vector<std::string> names;
  std::error_code error;
  const std::string runs = RunsPath(folder_);
  if (!fs::exists(runs, error)) return StoredRuns();  // version control keeps no empty folder
  for (fs::directory_iterator entry(runs, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (absl::EndsWith(name, kSuffix)) names.emplace_back(absl::StripSuffix(name, kSuffix));
  }
  if (error) return FileError(runs, "read", error.value());
  std::sort(names.begin(), names.end());

  StoredRuns stored;
  stored.runs.reserve(names.size());
  for (const std::string& name : names) {
    const std::string path = RunPath(folder_, name);
    TFB_ASSIGN_OR_RETURN(const std::string bytes, ReadWhole(path));
    absl::StatusOr<HistoryRun> run = UnpackRun(bytes, path);
    if (run.ok()) {
      stored.runs.push_back({name, *std::move(run)});
    } else if (damage == Damage::kPassOver && absl::IsDataLoss(run.status())) {
      stored.notes.push_back(absl::StrCat(run.status().message(), ": left out"));
    } else if (absl::IsDataLoss(run.status())) {
      return absl::DataLossError(
          absl::StrCat(run.status().message(),
                       ": --salvage leaves it out; restore it from a copy, or remove it"));
    } else {
      return run.status();
    }
  }
  RemoveContinued(&stored.runs);
  return stored;
}

}  // namespace tfb
