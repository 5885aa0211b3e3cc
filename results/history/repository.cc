#include "results/history/repository.h"

#include <algorithm>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "core/status.h"
#include "results/history/command.h"

namespace tfb {
namespace {

absl::StatusOr<CommandOutput> Git(const std::string& folder,
                                  const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {"git", "--no-optional-locks",      "-C", folder,
                                    "-c",  "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false",
                                    "-c",  "log.showSignature=false"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return OutputOf(words);
}

// Returns what git prints, without the newline at the end, or its message as an error.
absl::StatusOr<std::string> GitText(const std::string& folder,
                                    const std::vector<std::string>& arguments) {
  TFB_ASSIGN_OR_RETURN(CommandOutput output, Git(folder, arguments));
  if (output.exit_status != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "git ", absl::StrJoin(arguments, " "), ": ",
        output.err.empty() ? absl::StrCat("exit status ", output.exit_status) : output.err));
  }
  return std::string(absl::StripSuffix(output.out, "\n"));
}

std::vector<std::string> Lines(absl::string_view text) {
  return absl::StrSplit(text, '\n', absl::SkipEmpty());
}

// Returns the commits that git log lists; at least one.
absl::StatusOr<std::vector<Commit>> Log(const std::string& folder,
                                        const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {"log", "--no-color",
                                    "--format=%H%x00%h%x00%an <%ae>%x00%aI%x00%s%x00%P"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  TFB_ASSIGN_OR_RETURN(const std::string text, GitText(folder, words));
  std::vector<Commit> commits;
  for (const std::string& line : Lines(text)) {
    const std::vector<std::string> fields = absl::StrSplit(line, '\0');
    if (fields.size() != 6) return absl::InternalError("git log prints another number of fields");
    commits.push_back({fields[0], fields[1], fields[2], fields[3], fields[4],
                       absl::StrSplit(fields[5], ' ', absl::SkipEmpty())});
  }
  if (commits.empty()) return absl::InternalError("git log prints no commit");
  return commits;
}

}  // namespace

absl::StatusOr<Repository> Repository::Open(const std::string& folder) {
  TFB_ASSIGN_OR_RETURN(const CommandOutput found, Git(folder, {"rev-parse", "--absolute-git-dir"}));
  if (found.exit_status != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(folder, ": not a git repository: ", absl::StripPrefix(found.err, "fatal: ")));
  }
  TFB_ASSIGN_OR_RETURN(const CommandOutput top, Git(folder, {"rev-parse", "--show-toplevel"}));
  const std::string& text = top.exit_status == 0 ? top.out : found.out;
  return Repository(std::string(absl::StripSuffix(text, "\n")));
}

absl::StatusOr<std::string> Repository::Resolve(const std::string& name) const {
  TFB_ASSIGN_OR_RETURN(const CommandOutput output,
                       Git(top_, {"rev-parse", "--verify", "--quiet", "--end-of-options",
                                  absl::StrCat(name, "^{commit}")}));
  if (output.exit_status == 0) return std::string(absl::StripSuffix(output.out, "\n"));
  return absl::NotFoundError(
      absl::StrCat("\"", name, "\" is no commit of ", top_,
                   output.err.empty() ? "" : absl::StrCat(" (", output.err, ")")));
}

absl::StatusOr<Commit> Repository::Describe(const std::string& hash) const {
  TFB_ASSIGN_OR_RETURN(const std::vector<Commit> commits, Log(top_, {"-1", hash}));
  return commits.front();
}

absl::StatusOr<bool> Repository::IsAncestor(const std::string& older,
                                            const std::string& newer) const {
  TFB_ASSIGN_OR_RETURN(const CommandOutput output,
                       Git(top_, {"merge-base", "--is-ancestor", older, newer}));
  if (output.exit_status > 1) return absl::FailedPreconditionError(output.err);
  return output.exit_status == 0;
}

absl::StatusOr<std::string> Repository::MergeBase(const std::string& a,
                                                  const std::string& b) const {
  TFB_ASSIGN_OR_RETURN(const CommandOutput output, Git(top_, {"merge-base", a, b}));
  if (output.exit_status == 1) {
    return absl::NotFoundError(absl::StrCat(a, " and ", b, " have no common ancestor"));
  }
  if (output.exit_status != 0) return absl::FailedPreconditionError(output.err);
  return std::string(absl::StripSuffix(output.out, "\n"));
}

absl::StatusOr<std::vector<Commit>> Repository::FirstParentLine(const std::string& good,
                                                                const std::string& bad) const {
  const std::string range = absl::StrCat(good, "..", bad);
  TFB_ASSIGN_OR_RETURN(const std::vector<Commit> newest_first,
                       Log(top_, {"--first-parent", range}));
  TFB_ASSIGN_OR_RETURN(const std::string between,
                       GitText(top_, {"rev-list", "--ancestry-path", range}));
  const std::vector<std::string> descendants = Lines(between);
  const std::set<std::string> descends(descendants.begin(), descendants.end());
  TFB_ASSIGN_OR_RETURN(Commit first, Describe(good));
  std::vector<Commit> commits = {std::move(first)};
  for (auto commit = newest_first.rbegin(); commit != newest_first.rend(); ++commit) {
    if (descends.count(commit->hash) > 0) commits.push_back(*commit);
  }
  return commits;
}

absl::StatusOr<std::vector<std::string>> Repository::Worktrees() const {
  TFB_ASSIGN_OR_RETURN(const std::string text, GitText(top_, {"worktree", "list", "--porcelain"}));
  std::vector<std::string> folders;
  for (const std::string& line : Lines(text)) {
    absl::string_view folder = line;
    if (absl::ConsumePrefix(&folder, "worktree ")) folders.emplace_back(folder);
  }
  return folders;
}

absl::Status Repository::AddWorktree(const std::string& folder, const std::string& hash) const {
  return GitText(top_, {"worktree", "add", "--quiet", "--force", "--detach", folder, hash})
      .status();
}

absl::Status Repository::RemoveWorktree(const std::string& folder) const {
  return GitText(top_, {"worktree", "remove", "--force", "--force", folder}).status();
}

absl::Status Repository::CheckOut(const std::string& folder, const std::string& hash) const {
  TFB_RETURN_IF_ERROR(
      GitText(folder, {"checkout", "--quiet", "--force", "--detach", hash}).status());
  return GitText(folder, {"clean", "--quiet", "--force", "--force", "-d"}).status();
}

absl::StatusOr<std::vector<std::string>> Repository::HashFiles(
    const std::vector<std::string>& paths) const {
  static constexpr size_t kAtOnce = 200;  // far below the longest command line
  std::vector<std::string> hashes;
  for (size_t begin = 0; begin < paths.size(); begin += kAtOnce) {
    std::vector<std::string> arguments = {"hash-object", "--no-filters", "--"};
    arguments.insert(arguments.end(), paths.begin() + static_cast<int64_t>(begin),
                     paths.begin() + static_cast<int64_t>(std::min(begin + kAtOnce, paths.size())));
    TFB_ASSIGN_OR_RETURN(const std::string text, GitText(top_, arguments));
    for (std::string& hash : Lines(text)) hashes.push_back(std::move(hash));
  }
  if (hashes.size() == paths.size()) return hashes;
  return absl::InternalError(absl::StrCat("git hash-object prints ", hashes.size(), " hashes of ",
                                          paths.size(), " files"));
}

}  // namespace tfb
