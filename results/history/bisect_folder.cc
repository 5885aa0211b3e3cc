#include "results/history/bisect_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "core/file_error.h"
#include "core/output_file.h"
#include "core/status.h"
#include "results/appender.h"
#include "results/history/command.h"
#include "results/reader.h"
#include "results/table.h"

namespace tfb {
namespace {

namespace fs = std::filesystem;

constexpr char kWorktree[] = "tfb_bisect_worktree";
constexpr char kState[] = "bisect.json", kLock[] = "lock", kKeep[] = "keep";
constexpr char kRunfiles[] = ".runfiles", kRunfilesManifest[] = ".runfiles_manifest";
constexpr int kShortHash = 12;

// Tells whether a sweep left results: it ended with 0, or with 1 where a case failed.
bool HasResults(int exit_status) { return exit_status == 0 || exit_status == 1; }

class Stopwatch {
 public:
  double Seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

std::string Short(const std::string& hash) { return hash.substr(0, kShortHash); }

// Returns the same text for the same question on every platform (FNV-1a).
std::string HashOf(const std::map<std::string, std::string>& question) {
  uint32_t hash = 2166136261u;
  const auto add = [&hash](const std::string& text) {
    for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
    hash *= 16777619u;
  };
  for (const auto& [name, value] : question) {
    add(name);
    add(value);
  }
  return absl::StrFormat("%08x", hash);
}

absl::Status FolderError(const fs::path& path, const std::error_code& error) {
  return absl::Status(
      FileError(path.string(), "write", error.value()).code(),
      absl::StrCat("--folder: ", FileError(path.string(), "write", error.value()).message()));
}

bool IsWithin(const fs::path& path, const fs::path& folder) {
  const auto end = std::mismatch(folder.begin(), folder.end(), path.begin(), path.end());
  return end.first == folder.end();
}

// Tells whether a folder is neither empty nor that of a bisection, whose first file is the lock and
// whose second one is the state.
bool HasOtherFiles(const fs::path& folder) {
  std::error_code error;
  if (fs::exists(folder / kState, error)) return false;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().filename() != kLock) return true;
  }
  return false;
}

// Copies the program and its data into a folder of their own, with the files that links lead to in
// their places. The folder is there when all of it is.
absl::Status CopyProgram(const fs::path& from, const fs::path& to) {
  const fs::path folder = to.parent_path(), part = folder.string() + ".part";
  std::error_code error;
  if (fs::exists(folder, error)) return absl::OkStatus();
  fs::remove_all(part, error);
  if (!error) fs::create_directories(part, error);
  if (!error) fs::copy_file(from, part / to.filename(), error);
  const std::string data = from.string() + kRunfiles;
  if (!error && fs::is_directory(data)) {
    fs::copy(data, part / (to.filename().string() + kRunfiles), fs::copy_options::recursive, error);
  }
  if (!error) fs::rename(part, folder, error);
  return error ? FolderError(to, error) : absl::OkStatus();
}

// Returns the files of a program, sorted: itself, and its data.
std::vector<std::string> FilesOf(const std::string& program) {
  std::vector<std::string> files = {program};
  std::error_code error;
  for (fs::recursive_directory_iterator
           entry(program + kRunfiles, fs::directory_options::follow_directory_symlink, error),
       end;
       !error && entry != end; entry.increment(error)) {
    std::error_code ignored;
    // Bazel's list of the data names the folder that the program was built in.
    const bool is_list = entry->path().filename() == "MANIFEST" && entry.depth() == 0;
    if (entry->is_regular_file(ignored) && !is_list) files.push_back(entry->path().string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

// Returns a link among a program's data whose file is not there, or an empty text.
std::string LinkToNothing(const std::string& program) {
  std::error_code error;
  for (fs::recursive_directory_iterator entry(program + kRunfiles, error), end;
       !error && entry != end; entry.increment(error)) {
    std::error_code ignored;
    if (entry->is_symlink(ignored) && !fs::exists(entry->path(), ignored)) {
      return entry->path().string();
    }
  }
  return "";
}

// Returns the last line of a log that is not empty, cut to a line of text.
std::string LastLine(const std::string& log) {
  constexpr size_t kMost = 200;
  std::ifstream file(log, std::ios::binary);
  std::string last, line;
  while (std::getline(file, line)) {
    if (!absl::StripAsciiWhitespace(line).empty()) last = line;
  }
  return Printable(absl::StripAsciiWhitespace(last).substr(0, kMost));
}

// Names the commit in the records of a sweep that could not know it.
absl::Status NameCommit(const std::string& path, const std::string& hash) {
  TFB_ASSIGN_OR_RETURN(ResultFile file, ReadResultFile(path));
  for (Environment& environment : *file.results.mutable_environments()) {
    environment.set_git_commit(hash);
    environment.set_git_dirty(false);
  }
  return WriteResultFile(path, file.results);
}

}  // namespace

// --- The folder

absl::StatusOr<std::unique_ptr<BisectFolder>> BisectFolder::Open(
    const BisectOptions& options, const Repository& repository,
    const std::map<std::string, std::string>& question, const BisectProgress& progress) {
  std::unique_ptr<BisectFolder> folder(new BisectFolder(options, repository, progress));
  TFB_RETURN_IF_ERROR(folder->MakeFolder(question));
  TFB_RETURN_IF_ERROR(folder->TakeLock());
  TFB_RETURN_IF_ERROR(folder->TakeState(question));
  folder->is_open_ = true;
  TFB_RETURN_IF_ERROR(folder->RemoveLeftovers());
  return folder;
}

absl::Status BisectFolder::MakeFolder(const std::map<std::string, std::string>& question) {
  const std::string name = absl::StrCat(Short(question.at("good")), "-", Short(question.at("bad")),
                                        "-", HashOf(question));
  const fs::path wanted = options_.folder.empty() ? fs::path(repository_.top() + "-bisect") / name
                                                  : fs::path(options_.folder);
  std::error_code error;
  const fs::path folder = fs::weakly_canonical(wanted, error);
  if (error) return FolderError(wanted, error);
  if (IsWithin(folder, fs::weakly_canonical(repository_.top(), error))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--folder: ", folder.string(), " is within the checkout; name a folder outside of it"));
  }
  fs::create_directories(folder, error);
  if (error) return FolderError(folder, error);
  if (HasOtherFiles(folder)) {
    return absl::FailedPreconditionError(
        absl::StrCat("--folder: ", folder.string(),
                     " has files, and not those of a bisection; name a new or an empty folder"));
  }
  path_ = folder.string();
  return absl::OkStatus();
}

absl::Status BisectFolder::TakeLock() {
  const std::string path = absl::StrCat(path_, "/", kLock);
  lock_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (lock_ < 0) {
    const std::error_code error(errno, std::generic_category());
    return FolderError(path, error);
  }
  if (flock(lock_, LOCK_EX | LOCK_NB) == 0) return absl::OkStatus();
  close(lock_);
  lock_ = -1;
  return absl::UnavailableError(
      absl::StrCat("--folder: ", path_, ": another process bisects here; wait for its end"));
}

absl::Status BisectFolder::TakeState(const std::map<std::string, std::string>& question) {
  std::error_code error;
  if (options_.restart) {
    for (const char* name : {"results", "logs", "programs", kState}) {
      fs::remove_all(fs::path(path_) / name, error);
      if (error) return FolderError(fs::path(path_) / name, error);
    }
  }
  TFB_ASSIGN_OR_RETURN(state_, ReadBisectState(absl::StrCat(path_, "/", kState)));
  std::vector<std::string> differences;
  for (const auto& [name, value] : question) {
    const auto found = state_.question.find(name);
    if (found == state_.question.end() || found->second != value) differences.push_back(name);
  }
  if (!state_.question.empty() && !differences.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--folder: ", path_, " has a bisection with another ", absl::StrJoin(differences, ", "),
        "; --restart forgets it, or name another folder"));
  }
  if (!state_.builds.empty()) {
    progress_(absl::StrCat("going on with ", state_.builds.size(), " builds and ",
                           state_.measurements.size(), " measurements in ", path_));
  }
  state_.question = question;
  TFB_RETURN_IF_ERROR(WriteState());
  for (const char* name : {"results", "logs", "programs"}) {
    fs::create_directories(fs::path(path_) / name, error);
    if (error) return FolderError(fs::path(path_) / name, error);
  }
  const fs::path kept = fs::path(path_) / kKeep;
  fs::remove(kept, error);
  return options_.keep ? WriteFile(kept.string(), "") : absl::OkStatus();
}

absl::Status BisectFolder::WriteState() const {
  return WriteBisectState(absl::StrCat(path_, "/", kState), state_);
}

// A worktree of that name belongs to a bisection that was killed, where nobody has the lock beside
// it and nobody wants it kept. One whose folder is gone is only a record of git's.
absl::Status BisectFolder::RemoveLeftovers() {
  TFB_ASSIGN_OR_RETURN(const std::vector<std::string> worktrees, repository_.Worktrees());
  for (const std::string& worktree : worktrees) {
    const fs::path path(worktree);
    if (path.filename() != kWorktree || worktree == Worktree()) continue;
    std::error_code ignored;
    if (fs::exists(path.parent_path() / kKeep, ignored)) continue;
    const int lock = open((path.parent_path() / kLock).c_str(), O_RDWR | O_CLOEXEC);
    const bool is_free = lock < 0 ? errno == ENOENT : flock(lock, LOCK_EX | LOCK_NB) == 0;
    if (is_free) {
      progress_(absl::StrCat("removing ", worktree, ", which a bisection that was killed left"));
      RemoveWorktree(worktree);
    }
    if (lock >= 0) close(lock);
  }
  return absl::OkStatus();
}

BisectFolder::~BisectFolder() {
  if (is_open_ && !options_.keep) {
    RemoveWorktree(Worktree());
    std::error_code ignored;
    fs::remove_all(fs::path(path_) / "programs", ignored);
  }
  if (lock_ >= 0) close(lock_);
}

void BisectFolder::RemoveWorktree(const std::string& worktree) {
  std::error_code ignored;
  if (fs::exists(worktree, ignored) && !options_.clean.empty()) {
    // It is awaited even after a signal, since nothing else would remove what builds left.
    const auto cleaned = RunLogged(options_.clean, worktree, Log("clean"), [] { return false; });
    if (!cleaned.ok() || *cleaned != 0) {
      progress_(absl::StrCat("--clean failed; its log is ", Log("clean")));
    }
  }
  const absl::Status removed = repository_.RemoveWorktree(worktree);
  if (removed.ok() || !fs::exists(worktree, ignored)) return;
  // Git does not know it, as where it was killed while it made it.
  fs::remove_all(worktree, ignored);
  if (fs::exists(worktree, ignored)) {
    progress_(absl::StrCat("cannot remove ", worktree, ": ", removed.message()));
  }
}

std::string BisectFolder::Worktree() const { return absl::StrCat(path_, "/", kWorktree); }
std::string BisectFolder::Log(const std::string& name) const {
  return absl::StrCat(path_, "/logs/", name, ".log");
}
std::string BisectFolder::ProgramPath(const std::string& program) const {
  return absl::StrCat(path_, "/programs/", Short(program), "/",
                      fs::path(options_.program).filename().string());
}

// --- Builds

absl::Status BisectFolder::CheckOut(const Commit& commit) {
  std::error_code error;
  absl::Status status = absl::NotFoundError("no worktree");
  if (fs::exists(fs::path(Worktree()) / ".git", error)) {
    status = repository_.CheckOut(Worktree(), commit.hash);
  }
  if (!status.ok()) {
    repository_.RemoveWorktree(Worktree()).IgnoreError();  // a record without a folder
    fs::remove_all(Worktree(), error);
    TFB_RETURN_IF_ERROR(repository_.AddWorktree(Worktree(), commit.hash));
  }
  for (const std::string& name : options_.carried) {
    const fs::path from = fs::path(repository_.top()) / name, to = fs::path(Worktree()) / name;
    if (fs::exists(from, error) && !fs::exists(to, error)) fs::copy_file(from, to, error);
  }
  return absl::OkStatus();
}

absl::StatusOr<BuildRecord> BisectFolder::Build(const Commit& commit) {
  const auto found = state_.builds.find(commit.hash);
  if (found != state_.builds.end()) return found->second;
  TFB_ASSIGN_OR_RETURN(const BuildRecord build, BuildHere(commit));
  if (build.failure.empty()) TFB_RETURN_IF_ERROR(Remember(commit, build));
  return build;
}

absl::Status BisectFolder::Remember(const Commit& commit, const BuildRecord& build) {
  state_.builds[commit.hash] = build;
  return WriteState();
}

absl::StatusOr<BuildRecord> BisectFolder::BuildHere(const Commit& commit) {
  BuildRecord build;
  build.log = Log(absl::StrCat("build-", commit.short_hash));
  progress_(absl::StrCat("building ", commit.short_hash, " \"", Printable(commit.subject), "\""));
  const Stopwatch watch;
  TFB_RETURN_IF_ERROR(CheckOut(commit));
  const fs::path built = fs::path(Worktree()) / options_.program;
  TFB_ASSIGN_OR_RETURN(build.failure, MakeProgram(built.string(), build.log));
  // Bazel takes over data that it finds in an --output_base, although the checkout that their links
  // lead to may be gone. The second build makes them anew.
  if (build.failure.empty() && !LinkToNothing(built.string()).empty()) {
    TFB_ASSIGN_OR_RETURN(build.failure, MakeProgram(built.string(), build.log));
  }
  build.seconds = watch.Seconds();
  if (!build.failure.empty()) return build;
  if (const std::string link = LinkToNothing(built.string()); !link.empty()) {
    build.failure = absl::StrCat("of its program's data ", link, " is a link to nothing");
    return build;
  }
  TFB_ASSIGN_OR_RETURN(build.program, KeepProgram(built.string()));
  return build;
}

// Runs the build, and returns why there is no program, or an empty text.
absl::StatusOr<std::string> BisectFolder::MakeProgram(const std::string& built,
                                                      const std::string& log) {
  // Nothing that an earlier build left is taken for that of this commit.
  std::error_code error;
  fs::remove(built, error);
  fs::remove_all(built + kRunfiles, error);
  fs::remove(built + kRunfilesManifest, error);
  TFB_ASSIGN_OR_RETURN(const int exit_status,
                       RunLogged(options_.build, Worktree(), log, options_.stopped));
  if (exit_status != 0) return absl::StrCat("its build ends with exit status ", exit_status);
  if (fs::is_regular_file(built, error)) return "";
  return absl::StrCat("its build makes no ", options_.program);
}

// Copies the program to its place, and returns the hash of the files' names and hashes.
absl::StatusOr<std::string> BisectFolder::KeepProgram(const std::string& built) {
  const std::vector<std::string> files = FilesOf(built);
  TFB_ASSIGN_OR_RETURN(const std::vector<std::string> hashes, repository_.HashFiles(files));
  std::string list;
  for (size_t i = 0; i < files.size(); ++i) {
    absl::StrAppend(&list, hashes[i], " ", files[i].substr(built.size()), "\n");
  }
  const std::string list_path = absl::StrCat(path_, "/programs/files");
  TFB_RETURN_IF_ERROR(WriteFile(list_path, list));
  TFB_ASSIGN_OR_RETURN(const std::vector<std::string> hash, repository_.HashFiles({list_path}));
  TFB_RETURN_IF_ERROR(CopyProgram(built, ProgramPath(hash[0])));
  return hash[0];
}

// --- Measurements

// Returns the path of the commit's program, which is built again where a bisection that was stopped
// has removed it.
absl::StatusOr<std::string> BisectFolder::ProgramOf(const Commit& commit) {
  const std::string path = ProgramPath(state_.builds[commit.hash].program);
  std::error_code error;
  if (fs::exists(path, error)) return path;
  TFB_ASSIGN_OR_RETURN(const BuildRecord build, BuildHere(commit));
  if (!build.failure.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(commit.short_hash,
                                                      " was built before, and now ", build.failure,
                                                      "; its log is ", build.log));
  }
  if (build.program != state_.builds[commit.hash].program) {
    // The build is not the same each time. What was measured stands for the commit all the same.
    TFB_RETURN_IF_ERROR(CopyProgram(ProgramPath(build.program), path));
  }
  return path;
}

absl::StatusOr<MeasurementRecord> BisectFolder::Measure(const Commit& base, const Commit& commit,
                                                        int look,
                                                        const std::vector<std::string>& flags) {
  const auto found = state_.measurements.find(
      {state_.builds[base.hash].program, state_.builds[commit.hash].program, look});
  if (found != state_.measurements.end()) return found->second;
  if (options_.stopped()) return absl::CancelledError("stopped");
  TFB_ASSIGN_OR_RETURN(const std::string base_program, ProgramOf(base));
  TFB_ASSIGN_OR_RETURN(const std::string program, ProgramOf(commit));
  const std::string name = absl::StrCat(base.short_hash, "-", commit.short_hash, "-", look + 1);
  MeasurementRecord measured;
  measured.log = Log(absl::StrCat("sweep-", name));
  measured.new_file = absl::StrCat(path_, "/results/", name, ".pb");
  measured.base_file = absl::StrCat(path_, "/results/", name, "-base.pb");
  std::error_code error;
  for (const std::string& file : {measured.new_file, measured.base_file}) fs::remove(file, error);
  std::string command = absl::StrCat("exec ", ShellQuoted(program));
  for (const std::string& flag : flags) absl::StrAppend(&command, " ", ShellQuoted(flag));
  absl::StrAppend(&command, " ", options_.sweep_flags, " ",
                  ShellQuoted(absl::StrCat("--interleave_with=", base_program)), " ",
                  ShellQuoted(absl::StrCat("--output=", measured.new_file)));
  const Stopwatch watch;
  TFB_ASSIGN_OR_RETURN(const int exit_status,
                       RunLogged(command, options_.sweep_folder, measured.log, options_.stopped));
  measured.seconds = watch.Seconds();
  if (!HasResults(exit_status)) {
    measured.failure = absl::StrCat("its sweep ends with exit status ", exit_status, " (",
                                    LastLine(measured.log), ")");
    return measured;
  }
  absl::Status named = NameCommit(measured.new_file, commit.hash);
  named.Update(NameCommit(measured.base_file, base.hash));
  if (!named.ok()) {
    measured.failure = absl::StrCat("its sweep left no results: ", named.message());
    return measured;
  }
  TFB_RETURN_IF_ERROR(Remember(base, commit, look, measured));
  return measured;
}

absl::Status BisectFolder::Remember(const Commit& base, const Commit& commit, int look,
                                    const MeasurementRecord& measurement) {
  state_
      .measurements[{state_.builds[base.hash].program, state_.builds[commit.hash].program, look}] =
      measurement;
  return WriteState();
}

}  // namespace tfb
