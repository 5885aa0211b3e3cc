#include "results/history/branch_store.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "results/history/command.h"
#include "results/history/testing.h"

namespace tfb {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class BranchStoreTest : public testing::Test {
 protected:
  BranchStoreTest() {
    std::string path = testing::TempDir() + "/branch-XXXXXX";
    EXPECT_NE(mkdtemp(path.data()), nullptr);
    folder_ = path;
    setenv("HOME", path.c_str(), 1);
    setenv("GIT_CONFIG_GLOBAL", "/dev/null", 1);
    setenv("GIT_CONFIG_NOSYSTEM", "1", 1);
    for (const char* who : {"AUTHOR", "COMMITTER"}) {
      setenv(absl::StrCat("GIT_", who, "_NAME").c_str(), "Tester", 1);
      setenv(absl::StrCat("GIT_", who, "_EMAIL").c_str(), "tester@example.org", 1);
      setenv(absl::StrCat("GIT_", who, "_DATE").c_str(), "2026-01-02T03:04:05Z", 1);
    }
    Git({"init", "--quiet", "--initial-branch=main"});
    std::ofstream(fs::path(folder_) / "code.cc") << "int main() {}\n";
    Git({"add", "code.cc"});
    Git({"commit", "--quiet", "-m", "Make it slower & <b>bold</b>"});
    head_ = Git({"rev-parse", "HEAD"});
    store_ = {folder_, "tfb-history"};
  }
  ~BranchStoreTest() override { fs::remove_all(folder_); }

  std::string Git(std::vector<std::string> words) {
    words.insert(words.begin(), {"git", "-C", folder_});
    const absl::StatusOr<CommandOutput> output = OutputOf(words);
    EXPECT_TRUE(output.ok() && output->exit_status == 0) << words[3];
    std::string text = output->out;
    while (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
  }

  static HistoryRun RunWithCase(int number) {
    HistoryRun run = MakeHistoryRun(number);
    AddHistoryCase(&run, "near");
    return run;
  }

  std::string folder_, head_;
  BranchStore store_;
};

TEST_F(BranchStoreTest, ARunIsACommitOfABranchThatSharesNothing) {
  ASSERT_TRUE(AddToBranch(store_, {RunWithCase(1)}).ok());
  const absl::StatusOr<Additions> second = AddToBranch(store_, {RunWithCase(1), RunWithCase(2)});
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->added.size(), 1);
  EXPECT_EQ(second->known.size(), 1);
  EXPECT_EQ(Git({"rev-list", "--count", "tfb-history"}), "2");
  EXPECT_THAT(Git({"log", "-1", "--format=%s", "tfb-history"}), HasSubstr(RunName(RunWithCase(2))));
  // Nothing new is no commit.
  ASSERT_TRUE(AddToBranch(store_, {RunWithCase(2)}).ok());
  EXPECT_EQ(Git({"rev-list", "--count", "tfb-history"}), "2");
  // The checkout and its branch are as they were.
  EXPECT_EQ(Git({"status", "--porcelain"}), "");
  EXPECT_EQ(Git({"rev-parse", "HEAD"}), head_);

  const absl::StatusOr<StoredRuns> stored = ReadBranch(store_);
  ASSERT_TRUE(stored.ok()) << stored.status();
  ASSERT_EQ(stored->runs.size(), 2);
  EXPECT_EQ(stored->runs[1].run.SerializeAsString(), RunWithCase(2).SerializeAsString());
}

TEST_F(BranchStoreTest, WritersAtOnceLoseNothing) {
  std::vector<pid_t> children;
  for (int writer = 0; writer < 3; ++writer) {
    const pid_t child = fork();
    if (child == 0) {
      for (int i = 0; i < 3; ++i) {
        if (!AddToBranch(store_, {RunWithCase(10 * writer + i)}).ok()) _exit(1);
      }
      _exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(ReadBranch(store_)->runs.size(), 9);
}

TEST_F(BranchStoreTest, ErrorsNameTheBranch) {
  EXPECT_EQ(ReadBranch(store_).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadBranch({folder_, "main"}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(AddToBranch({folder_, "a..b"}, {RunWithCase(1)}).status().code(),
            absl::StatusCode::kInvalidArgument);
  const absl::Status checked_out = AddToBranch({folder_, "main"}, {RunWithCase(1)}).status();
  EXPECT_EQ(checked_out.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(checked_out.message()), HasSubstr("is checked out in"));
  EXPECT_FALSE(AddToBranch({"/", "tfb-history"}, {RunWithCase(1)}).ok());
  // A branch of other files is no store.
  Git({"branch", "other"});
  EXPECT_EQ(AddToBranch({folder_, "other"}, {RunWithCase(1)}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Git({"rev-parse", "other"}), head_);
}

TEST_F(BranchStoreTest, ARunGetsTheDateAndTheSubjectOfItsCommit) {
  HistoryRun run = MakeHistoryRun(1);
  run.clear_commit_unix_s();
  run.clear_commit_subject();
  DescribeCommitOf(folder_, &run);  // of a commit that is not in the repository
  EXPECT_FALSE(run.has_commit_unix_s());
  run.mutable_environments(0)->set_git_commit(head_);
  DescribeCommitOf(folder_, &run);
  EXPECT_EQ(run.commit_unix_s(), 1767323045);
  EXPECT_EQ(run.commit_subject(), "Make it slower & <b>bold</b>");
}

}  // namespace
}  // namespace tfb
