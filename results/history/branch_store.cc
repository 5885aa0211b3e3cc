#include "results/history/branch_store.h"

#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/file_error.h"
#include "core/status.h"
#include "results/history/command.h"

namespace tfb {
namespace {

namespace fs = std::filesystem;

constexpr int kMostAttempts = 20;
// The object that stands for "no such reference" in git update-ref.
constexpr char kNoObject[] = "0000000000000000000000000000000000000000";

// A folder that is removed at the end.
class TemporaryFolder {
 public:
  static absl::StatusOr<TemporaryFolder> Make() {
    std::error_code error;
    fs::path base = fs::temp_directory_path(error);
    if (error) return FileError("the folder of temporary files", "find", error.value());
    std::string path = (base / "tfb-history-XXXXXX").string();
    if (mkdtemp(path.data()) == nullptr) return FileError(path, "make", errno);
    return TemporaryFolder(path);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }
  TemporaryFolder(TemporaryFolder&& other) noexcept : path_(std::exchange(other.path_, "")) {}
  TemporaryFolder& operator=(TemporaryFolder&&) = delete;
  std::string Within(absl::string_view name) const {
    return (fs::path(path_) / std::string(name)).string();
  }

 private:
  explicit TemporaryFolder(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

// Runs git in the repository and returns what it printed, without spaces at the ends.
absl::StatusOr<std::string> Git(const std::string& repository, std::vector<std::string> words,
                                const std::vector<std::string>& variables = {}) {
  std::vector<std::string> command = {"env"};
  command.insert(command.end(), variables.begin(), variables.end());
  for (const char* word : {"git", "-C"}) command.emplace_back(word);
  command.push_back(repository);
  command.insert(command.end(), words.begin(), words.end());
  TFB_ASSIGN_OR_RETURN(const CommandOutput output, OutputOf(command));
  if (output.exit_status != 0) {
    return absl::UnavailableError(absl::StrCat(repository, ": git ", words[0], ": ", output.err));
  }
  return std::string(absl::StripAsciiWhitespace(output.out));
}

// Returns the full name of the branch, and InvalidArgument where it cannot be one.
absl::StatusOr<std::string> ReferenceOf(const BranchStore& store) {
  TFB_RETURN_IF_ERROR(Git(store.repository, {"rev-parse", "--git-dir"}).status());
  const std::string name = absl::StrCat("refs/heads/", store.branch);
  if (!Git(store.repository, {"check-ref-format", name}).ok()) {
    return absl::InvalidArgumentError(absl::StrCat("git:", store.branch, ": no name of a branch"));
  }
  return name;
}

// Returns the branch's commit, or nothing where there is no such branch.
std::optional<std::string> CommitOf(const BranchStore& store, const std::string& reference) {
  absl::StatusOr<std::string> commit = Git(
      store.repository, {"rev-parse", "--verify", "--quiet", absl::StrCat(reference, "^{commit}")});
  if (!commit.ok()) return std::nullopt;
  return *std::move(commit);
}

absl::Status CheckNotCheckedOut(const BranchStore& store, const std::string& reference) {
  TFB_ASSIGN_OR_RETURN(const std::string list,
                       Git(store.repository, {"worktree", "list", "--porcelain"}));
  std::string folder;
  for (const absl::string_view line : absl::StrSplit(list, '\n')) {
    if (absl::StartsWith(line, "worktree ")) folder = std::string(line.substr(9));
    if (line == absl::StrCat("branch ", reference)) {
      return absl::FailedPreconditionError(
          absl::StrCat("git:", store.branch, ": the branch is checked out in ", folder,
                       ": name that folder as the store, and commit what is added"));
    }
  }
  return absl::OkStatus();
}

// Writes the files of a commit to `folder`.
absl::Status Export(const BranchStore& store, const std::string& commit,
                    const TemporaryFolder& folder) {
  std::error_code error;
  fs::create_directories(folder.Within("store"), error);
  if (error) return FileError(folder.Within("store"), "make the folder", error.value());
  TFB_RETURN_IF_ERROR(
      Git(store.repository, {"archive", "--format=tar",
                             absl::StrCat("--output=", folder.Within("store.tar")), commit})
          .status());
  TFB_ASSIGN_OR_RETURN(
      const CommandOutput tar,
      OutputOf({"tar", "-x", "-f", folder.Within("store.tar"), "-C", folder.Within("store")}));
  if (tar.exit_status != 0) return absl::UnavailableError(absl::StrCat("tar: ", tar.err));
  return absl::OkStatus();
}

std::string Message(const Additions& additions) {
  if (additions.added.size() == 1) return absl::StrCat("Add run ", additions.added[0]);
  return absl::StrCat("Add ", additions.added.size(), " runs");
}

// Commits the files in `folder` with `parent` as the only parent, and returns the commit.
absl::StatusOr<std::string> CommitFiles(const BranchStore& store,
                                        const std::optional<std::string>& parent,
                                        const TemporaryFolder& folder, const std::string& message) {
  const std::vector<std::string> variables = {
      absl::StrCat("GIT_INDEX_FILE=", folder.Within("index")),
      absl::StrCat("GIT_WORK_TREE=", folder.Within("store"))};
  TFB_ASSIGN_OR_RETURN(const std::string git_folder,
                       Git(store.repository, {"rev-parse", "--absolute-git-dir"}));
  const std::string files = folder.Within("store");
  const std::string git = absl::StrCat("--git-dir=", git_folder);
  // Files are taken as they are, whatever the user's rules for line ends and ignored files say.
  TFB_RETURN_IF_ERROR(
      Git(files, {git, "-c", "core.autocrlf=false", "add", "--all", "--force", "."}, variables)
          .status());
  TFB_ASSIGN_OR_RETURN(const std::string tree, Git(files, {git, "write-tree"}, variables));
  std::vector<std::string> words = {"commit-tree", tree, "-m", message};
  if (parent.has_value()) words.insert(words.end(), {"-p", *parent});
  return Git(store.repository, words);
}

}  // namespace

absl::StatusOr<Additions> AddToBranch(const BranchStore& store,
                                      const std::vector<HistoryRun>& runs) {
  TFB_ASSIGN_OR_RETURN(const std::string reference, ReferenceOf(store));
  TFB_RETURN_IF_ERROR(CheckNotCheckedOut(store, reference));
  absl::Status moved;
  for (int attempt = 0; attempt < kMostAttempts; ++attempt) {
    TFB_ASSIGN_OR_RETURN(const TemporaryFolder folder, TemporaryFolder::Make());
    const std::optional<std::string> parent = CommitOf(store, reference);
    if (parent.has_value()) TFB_RETURN_IF_ERROR(Export(store, *parent, folder));
    TFB_ASSIGN_OR_RETURN(const HistoryStore files,
                         HistoryStore::OpenOrCreate(folder.Within("store")));
    TFB_ASSIGN_OR_RETURN(Additions additions, files.Add(runs));
    if (additions.added.empty() && parent.has_value()) return additions;
    TFB_ASSIGN_OR_RETURN(const std::string commit,
                         CommitFiles(store, parent, folder, Message(additions)));
    moved = Git(store.repository, {"update-ref", "-m", Message(additions), reference, commit,
                                   parent.value_or(kNoObject)})
                .status();
    if (moved.ok()) return additions;
    // The branch moved meanwhile where it is not what it was: the runs are added to what it is now.
    if (CommitOf(store, reference) == parent) return moved;
  }
  return moved;
}

absl::StatusOr<StoredRuns> ReadBranch(const BranchStore& store, Damage damage) {
  TFB_ASSIGN_OR_RETURN(const std::string reference, ReferenceOf(store));
  const std::optional<std::string> commit = CommitOf(store, reference);
  if (!commit.has_value()) {
    return absl::NotFoundError(absl::StrCat(store.repository, ": no branch ", store.branch));
  }
  TFB_ASSIGN_OR_RETURN(const TemporaryFolder folder, TemporaryFolder::Make());
  TFB_RETURN_IF_ERROR(Export(store, *commit, folder));
  absl::StatusOr<HistoryStore> files = HistoryStore::Open(folder.Within("store"));
  if (absl::IsNotFound(files.status())) {
    return absl::NotFoundError(absl::StrCat("git:", store.branch, ": no store in the branch"));
  }
  if (!files.ok()) return files.status();
  return files->Read(damage);
}

void DescribeCommitOf(const std::string& folder, HistoryRun* run) {
  std::string commit;
  for (const Environment& environment : run->environments()) {
    if (commit.empty()) commit = environment.git_commit();
  }
  const bool is_hash =
      !commit.empty() && std::all_of(commit.begin(), commit.end(), absl::ascii_isxdigit);
  if (!is_hash) return;
  const absl::StatusOr<std::string> described =
      Git(folder, {"show", "--no-patch", "--format=%ct %s", commit, "--"});
  if (!described.ok()) return;
  const std::pair<std::string, std::string> parts =
      absl::StrSplit(*described, absl::MaxSplits(' ', 1));
  int64_t time = 0;
  if (!absl::SimpleAtoi(parts.first, &time)) return;
  run->set_commit_unix_s(time);
  run->set_commit_subject(parts.second);
}

}  // namespace tfb
