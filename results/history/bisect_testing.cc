#include "results/history/bisect_testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "core/runfiles.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

namespace fs = std::filesystem;

std::string Contents(const fs::path& path) {
  std::stringstream contents;
  contents << std::ifstream(path, std::ios::binary).rdbuf();
  return contents.str();
}

std::vector<std::string> LinesOf(const fs::path& path) {
  return absl::StrSplit(Contents(path), '\n', absl::SkipEmpty());
}

// Returns a file for git fast-import.
std::string Inline(const std::string& path, const std::string& text) {
  return absl::StrCat("M 100755 inline ", path, "\ndata ", text.size(), "\n", text, "\n");
}

std::string FilesOf(const FakeCommit& commit) {
  std::string files = Inline("notes", commit.name);
  const std::string build =
      commit.builds ? "mkdir -p out && cp sweep.sh out/sweep\n" : "echo 'no such type'\nexit 3\n";
  absl::StrAppend(&files,
                  Inline("build.sh", absl::StrCat("echo x >> \"$FAKE_BUILD_LOG\"\n", build)));
  if (commit.same_program) return files;
  absl::StrAppend(
      &files,
      Inline("sweep.sh", absl::StrCat("#!/bin/sh\n# ", commit.name, "\nFAKE_SWEEP_BEHAVIOUR='",
                                      commit.behaviour, "' exec \"$FAKE_SWEEP\" \"$@\"\n")));
  return files;
}

}  // namespace

FakeRepository::FakeRepository(const std::string& name)
    : folder_((fs::path(::testing::TempDir()) / name).string()),
      checkout_(absl::StrCat(folder_, "/checkout")) {
  fs::remove_all(folder_);
  fs::create_directories(checkout_);
  setenv("HOME", folder_.c_str(), 1);
  setenv("GIT_CONFIG_GLOBAL", "/dev/null", 1);
  setenv("GIT_CONFIG_NOSYSTEM", "1", 1);
  for (const char* who : {"AUTHOR", "COMMITTER"}) {
    setenv(absl::StrCat("GIT_", who, "_NAME").c_str(), "A Name", 1);
    setenv(absl::StrCat("GIT_", who, "_EMAIL").c_str(), "name@example.com", 1);
  }
  for (const char* variable : {"GIT_DIR", "GIT_WORK_TREE", "BUILD_WORKING_DIRECTORY",
                               "BUILD_WORKSPACE_DIRECTORY", "FAKE_SWEEP_SIGNAL"}) {
    unsetenv(variable);
  }
  const auto sweep = RunfilePath("results/history/fake_sweep");
  EXPECT_TRUE(sweep.ok()) << sweep.status();
  setenv("FAKE_SWEEP", fs::absolute(*sweep).c_str(), 1);
  setenv("FAKE_SWEEP_LOG", absl::StrCat(folder_, "/measurements").c_str(), 1);
  setenv("FAKE_BUILD_LOG", absl::StrCat(folder_, "/builds").c_str(), 1);
  Shell("git init --quiet --initial-branch=main .");
}

std::string FakeRepository::Shell(const std::string& command) const {
  const std::string whole = absl::StrCat("cd '", checkout_, "' && ", command);
  FILE* const pipe = popen(whole.c_str(), "r");
  if (pipe == nullptr) abort();
  std::string text;
  for (int c; (c = fgetc(pipe)) != EOF;) text += static_cast<char>(c);
  const int status = pclose(pipe);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    fprintf(stderr, "%s: status %d\n", whole.c_str(), status);
    abort();
  }
  return text;
}

void FakeRepository::Commit(const std::vector<FakeCommit>& commits) {
  const std::string path = absl::StrCat(folder_, "/import");
  std::ofstream stream(path, std::ios::binary);
  for (const FakeCommit& commit : commits) {
    const int last = mark_;
    marks_[commit.name] = ++mark_;
    stream << "commit refs/tags/" << commit.name << "\nmark :" << mark_
           << "\nauthor An Author <author@example.com> " << 1700000000 + 60 * mark_
           << " +0100\ncommitter A Committer <committer@example.com> " << 1700000000 + 60 * mark_
           << " +0100\ndata " << commit.name.size() << "\n"
           << commit.name << "\n";
    std::vector<int> parents;
    for (const std::string& parent : commit.parents) parents.push_back(marks_.at(parent));
    if (parents.empty() && last > 0) parents.push_back(last);
    for (size_t i = 0; i < parents.size(); ++i) {
      stream << (i == 0 ? "from :" : "merge :") << parents[i] << "\n";
    }
    stream << FilesOf(commit);
  }
  stream.close();
  Shell(absl::StrCat("git fast-import --quiet < '", path, "' && git reset --quiet --hard ",
                     commits.back().name));
}

void FakeRepository::CommitLine(int count, const std::function<std::string(int)>& behaviour) {
  std::vector<FakeCommit> commits;
  for (int i = 0; i < count; ++i) {
    FakeCommit commit;
    commit.name = absl::StrCat("c", i);
    commit.behaviour = behaviour(i);
    commits.push_back(std::move(commit));
  }
  Commit(commits);
}

std::string FakeRepository::Untouched() const {
  return Shell(
      "git status --porcelain --ignored; git worktree list; git for-each-ref; cat .git/HEAD; "
      "git stash list");
}

std::string FakeRepository::Hash(const std::string& name) const {
  return std::string(
      absl::StripSuffix(Shell(absl::StrCat("git rev-parse ", name, "^{commit}")), "\n"));
}

std::vector<std::string> FakeRepository::Measurements() const {
  return LinesOf(absl::StrCat(folder_, "/measurements"));
}
std::vector<std::string> FakeRepository::Builds() const {
  return LinesOf(absl::StrCat(folder_, "/builds"));
}

}  // namespace tfb
