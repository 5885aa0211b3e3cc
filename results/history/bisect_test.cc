#include "results/history/bisect.h"

#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "results/history/bisect_report.h"
#include "results/history/bisect_testing.h"
#include "results/reader.h"

namespace tfb {
namespace {

namespace fs = std::filesystem;

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using Verdict = BisectResult::Verdict;

constexpr int kCommits = 20;

std::string TestName() { return ::testing::UnitTest::GetInstance()->current_test_info()->name(); }

class BisectTest : public ::testing::Test {
 protected:
  BisectTest() : repository_(absl::StrCat("bisect_", TestName())) {
    options_.repository = repository_.checkout();
    options_.good = "c0";
    options_.bad = "HEAD";
    options_.wanted = "near:window=256 tokens=2048";
    options_.build = "sh ./build.sh";
    options_.program = "out/sweep";
    options_.folder = absl::StrCat(repository_.folder(), "/bisection");
  }

  // Makes c0 to c19, those from `commit` on with another behaviour.
  void PlantAt(int commit, const std::string& behaviour = "time=1.3") {
    repository_.CommitLine(kCommits, [&](int i) { return i < commit ? "" : behaviour; });
  }

  absl::StatusOr<BisectResult> Run() {
    return Bisect(options_, [this](absl::string_view line) { lines_.emplace_back(line); });
  }

  BisectResult Found() {
    const std::string before = repository_.Untouched();
    const absl::StatusOr<BisectResult> result = Run();
    EXPECT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(repository_.Untouched(), before);
    return result.ok() ? *result : BisectResult();
  }

  std::string Error() {
    const absl::StatusOr<BisectResult> result = Run();
    EXPECT_FALSE(result.ok());
    return std::string(result.status().message());
  }

  std::string Progress() const { return absl::StrJoin(lines_, "\n"); }
  fs::path Folder() const { return options_.folder; }

  FakeRepository repository_;
  BisectOptions options_;
  std::vector<std::string> lines_;
};

class BisectAtTest : public BisectTest, public ::testing::WithParamInterface<int> {};

TEST_P(BisectAtTest, FindsTheSlowCommit) {
  const int commit = GetParam();
  PlantAt(commit);
  const BisectResult result = Found();
  EXPECT_EQ(result.verdict, Verdict::kFound) << RenderBisect(result);
  EXPECT_EQ(result.commit.subject, absl::StrCat("c", commit)) << RenderBisect(result);
  EXPECT_EQ(result.before.subject, absl::StrCat("c", commit - 1));
  EXPECT_EQ(result.own.what, "run time over dense");
  EXPECT_GT(result.own.reading.ratio, 1.25);
  EXPECT_LT(result.own.reading.ratio, 1.35);
  EXPECT_LT(result.own.reading.low, result.own.reading.ratio);
  EXPECT_LE(result.tried.size(), 5u);
}

INSTANTIATE_TEST_SUITE_P(EveryCommit, BisectAtTest, ::testing::Range(1, kCommits));

TEST_F(BisectTest, FindsACommitThatMadeItFaster) {
  PlantAt(7, "time=0.8");
  const BisectResult result = Found();
  EXPECT_EQ(result.verdict, Verdict::kFound) << RenderBisect(result);
  EXPECT_EQ(result.commit.subject, "c7");
  EXPECT_NEAR(result.own.reading.ratio, 0.8, 0.03);
}

TEST_F(BisectTest, TheAnswerNamesCommitAuthorDateChangeAndWhatWasMeasured) {
  PlantAt(13, "time=1.3 compiler=g++_13");
  const BisectResult result = Found();
  const std::string text = RenderBisect(result);
  EXPECT_EQ(text.substr(0, text.find('\n')), repository_.Hash("c13"));
  EXPECT_THAT(text, HasSubstr("Author: An Author <author@example.com>\n"
                              "Date:   2023-11-14T23:27:20+01:00\n\n    c13\n\nchanged near "));
  EXPECT_THAT(text, HasSubstr("2048 tokens"));
  EXPECT_THAT(text, HasSubstr(absl::StrCat(FormatChange(result.own), ", ", result.own.base, " -> ",
                                           result.own.now, " over the commit before it, ",
                                           repository_.Hash("c12").substr(0, 7),
                                           " (95% interval)\n  compiler: g++ 12.2.0 / g++_13\n")));
  EXPECT_THAT(text, HasSubstr("\"c9\": "));
  EXPECT_THAT(text, HasSubstr("\"c19\", bad: run time over dense 1.3"));
  EXPECT_THAT(text, Not(HasSubstr("changed as well")));
  EXPECT_THAT(Progress(), HasSubstr("\"c19\", 19 commits later on the first-parent line: about 5 "
                                    "steps\n"));
}

TEST_F(BisectTest, MeasurementsStayWithTheirCommitsAndTheRestGoes) {
  PlantAt(4);
  const BisectResult result = Found();
  EXPECT_EQ(result.verdict, Verdict::kFound);
  EXPECT_FALSE(fs::exists(Folder() / "tfb_bisect_worktree"));
  EXPECT_FALSE(fs::exists(Folder() / "programs"));
  const std::string name = absl::StrCat(result.good.short_hash, "-", result.bad.short_hash, "-1");
  const auto now = ReadResultFile((Folder() / "results" / (name + ".pb")).string());
  const auto base = ReadResultFile((Folder() / "results" / (name + "-base.pb")).string());
  ASSERT_TRUE(now.ok() && base.ok());
  EXPECT_EQ(now->results.environments(0).git_commit(), result.bad.hash);
  EXPECT_EQ(base->results.environments(0).git_commit(), result.good.hash);
  EXPECT_FALSE(now->results.environments(0).git_dirty());
}

TEST_F(BisectTest, KeepLeavesTheWorktreeAndTheNextCallUsesIt) {
  PlantAt(4);
  options_.keep = true;
  ASSERT_TRUE(Run().ok());
  EXPECT_TRUE(fs::exists(Folder() / "tfb_bisect_worktree" / "build.sh"));
  // Another bisection leaves what is kept alone.
  options_.folder = absl::StrCat(repository_.folder(), "/other");
  options_.keep = false;
  ASSERT_TRUE(Run().ok());
  EXPECT_TRUE(fs::exists(fs::path(repository_.folder()) / "bisection/tfb_bisect_worktree/build.sh"));
  options_.folder = absl::StrCat(repository_.folder(), "/bisection");
  ASSERT_TRUE(Run().ok());
  EXPECT_FALSE(fs::exists(Folder() / "tfb_bisect_worktree"));
}

TEST_F(BisectTest, CommitsWithTheSameProgramAreNotMeasuredAgain) {
  std::vector<FakeCommit> commits(kCommits);
  for (int i = 0; i < kCommits; ++i) {
    commits[static_cast<size_t>(i)].name = absl::StrCat("c", i);
    commits[static_cast<size_t>(i)].same_program = i != 0 && i != 6 && i != 12;
    commits[static_cast<size_t>(i)].behaviour = i == 12 ? "time=1.3" : "";
  }
  repository_.Commit(commits);
  const BisectResult result = Found();
  EXPECT_EQ(result.verdict, Verdict::kFound) << RenderBisect(result);
  EXPECT_EQ(result.commit.subject, "c12");
  // Three programs: bad and the one of c6 against good, and bad's against that of c6.
  EXPECT_THAT(repository_.Measurements(), SizeIs(3));
}

TEST_F(BisectTest, TheSameProgramAtBothEndsIsNoDifferenceWithoutMeasuring) {
  std::vector<FakeCommit> commits(3);
  for (size_t i = 0; i < commits.size(); ++i) {
    commits[i].name = absl::StrCat("c", i);
    commits[i].same_program = i > 0;
  }
  repository_.Commit(commits);
  const BisectResult result = Found();
  EXPECT_EQ(result.verdict, Verdict::kNoDifference);
  EXPECT_THAT(RenderBisect(result), HasSubstr("the same program"));
  EXPECT_THAT(RenderBisect(result), HasSubstr(", bad: program 1.00x\n"));
  EXPECT_THAT(repository_.Measurements(), IsEmpty());
}

TEST_F(BisectTest, NoDifferenceIsSaidWithAdviceAndWithoutASearch) {
  PlantAt(5, "time=1.002");
  const BisectResult result = Found();
  EXPECT_EQ(result.verdict, Verdict::kNoDifference);
  EXPECT_THAT(result.why, HasSubstr("--least_change"));
  EXPECT_THAT(repository_.Builds(), SizeIs(2));
}

TEST_F(BisectTest, AChangeAtTheThresholdIsNotClearAfterDoubledSamples) {
  PlantAt(5, "time=1.051");
  const BisectResult result = Found();
  EXPECT_EQ(result.verdict, Verdict::kNoDifference);
  EXPECT_THAT(result.why, HasSubstr("--looks=6 goes on with more samples"));
  // 33, 33, 66 and 132 samples.
  const std::vector<std::string> measurements = repository_.Measurements();
  ASSERT_THAT(measurements, SizeIs(4));
  for (const auto& [i, count] : {std::pair(0, " 33"), {1, " 33"}, {2, " 66"}, {3, " 132"}}) {
    EXPECT_TRUE(absl::EndsWith(measurements[static_cast<size_t>(i)], count)) << measurements[i];
  }
}

TEST_F(BisectTest, MuchNoiseIsMetByMoreSamplesOfTheEndsAndOfTheSteps) {
  repository_.CommitLine(kCommits,
                         [](int i) { return absl::StrCat("noise=0.15 time=", i < 8 ? 1.0 : 1.3); });
  const BisectResult result = Found();
  EXPECT_EQ(result.verdict, Verdict::kFound) << RenderBisect(result);
  EXPECT_EQ(result.commit.subject, "c8");
  EXPECT_LT(result.whole.reading.high / result.whole.reading.low, std::sqrt(1.35));
  EXPECT_THAT(repository_.Measurements(),
              Contains(HasSubstr(
                  absl::StrCat(result.good.short_hash, "-", result.bad.short_hash, "-2.pb"))));
}

TEST_F(BisectTest, ACallWithMoreLooksGoesOnWithTheSamplesThereAre) {
  PlantAt(5, "noise=0.5 time=1.3");
  options_.looks = 1;
  EXPECT_EQ(Found().verdict, Verdict::kNoDifference);
  EXPECT_THAT(repository_.Measurements(), SizeIs(1));
  options_.looks = 8;
  const BisectResult result = Found();
  EXPECT_EQ(result.verdict, Verdict::kFound) << RenderBisect(result);
  EXPECT_EQ(result.commit.subject, "c5");
  // The second measurement of the two ends is the second of all.
  EXPECT_THAT(repository_.Measurements()[1],
              HasSubstr(absl::StrCat(result.good.short_hash, "-", result.bad.short_hash, "-2.pb")));
}

TEST_F(BisectTest, CommitsThatDoNotBuildOrRunArePassedOverForTheirNeighbours) {
  std::vector<FakeCommit> commits(kCommits);
  for (int i = 0; i < kCommits; ++i) {
    FakeCommit& commit = commits[static_cast<size_t>(i)];
    commit.name = absl::StrCat("c", i);
    commit.behaviour = i == 8 || i == 10 ? "exit=2" : i >= 12 ? "time=1.3" : "";
    commit.builds = i != 9 && i != 14;
  }
  repository_.Commit(commits);
  const BisectResult result = Found();
  EXPECT_EQ(result.verdict, Verdict::kFound) << RenderBisect(result);
  EXPECT_EQ(result.commit.subject, "c12");
  const std::string text = RenderBisect(result);
  EXPECT_THAT(text, HasSubstr("its build ends with exit status 3; its log is "));
  EXPECT_THAT(text, HasSubstr("its sweep ends with exit status 2 (sweep: this build cannot)"));
  const std::string hash = repository_.Shell("git rev-parse --short c9");
  std::ifstream log(Folder() /
                    absl::StrCat("logs/build-", hash.substr(0, hash.size() - 1), ".log"));
  std::string line;
  ASSERT_TRUE(std::getline(log, line));
  EXPECT_EQ(line, "no such type");
}

TEST_F(BisectTest, ACommitWhoseBuildMakesNoProgramIsPassedOver) {
  PlantAt(12);
  // Without the script the earlier commit's program would still be there.
  options_.build = "sh ./build.sh && if grep -q 'c9$' notes; then rm out/sweep; fi";
  const BisectResult result = Found();
  EXPECT_EQ(result.commit.subject, "c12");
  EXPECT_THAT(RenderBisect(result), HasSubstr("\"c9\": its build makes no out/sweep; its log is"));
}

TEST_F(BisectTest, TheProgramIsCopiedWithItsDataWhoseLinksAreFollowed) {
  // Each commit's script reads its behaviour from its data, a link to a file that the next checkout
  // changes.
  std::vector<FakeCommit> commits(6);
  for (int i = 0; i < 6; ++i) {
    FakeCommit& commit = commits[static_cast<size_t>(i)];
    commit.name = absl::StrCat("c", i);
    commit.same_program = i > 0;
    commit.behaviour = i == 0 ? "$(cat \"$0.runfiles/folder/time\")" : "";
  }
  repository_.Commit(commits);
  options_.build =
      "sh ./build.sh && sed -i \"s/'/\\\"/g\" out/sweep && mkdir -p out/sweep.runfiles/folder && "
      "case $(cat notes) in c3) link=nowhere;; *) link=notes.time;; esac && "
      "case $(cat notes) in c4|c5) time=1.3;; *) time=1.0;; esac && echo time=$time > notes.time "
      "&& "
      "ln -s $PWD/$link out/sweep.runfiles/folder/time";
  const BisectResult result = Found();
  EXPECT_EQ(result.verdict, Verdict::kRange) << RenderBisect(result);
  EXPECT_EQ(result.before.subject, "c2");
  EXPECT_EQ(result.commit.subject, "c4");
  EXPECT_THAT(RenderBisect(result), HasSubstr("\"c3\": of its program's data "));
  // c1 and c2 have good's program and data, and c4 has bad's.
  EXPECT_THAT(repository_.Measurements(), SizeIs(1));
}

TEST_F(BisectTest, DataThatAnEarlierBuildLeftElsewhereAreMadeAnew) {
  PlantAt(3);
  // As with an --output_base of Bazel's: what is built stays outside of the checkout, and data are
  // made only where they are missing.
  options_.build = absl::StrCat(
      "mkdir -p ../base/sweep.runfiles && ln -sfn ../base out && cp sweep.sh ../base/sweep && "
      "{ test -L out/sweep.runfiles/notes || ln -s $PWD/notes out/sweep.runfiles/notes; }");
  options_.build =
      absl::StrReplaceAll(options_.build, {{"../base", repository_.folder() + "/base"}});
  repository_.Shell(
      "mkdir -p ../base/sweep.runfiles && ln -s /nowhere ../base/sweep.runfiles/notes");
  EXPECT_EQ(Found().commit.subject, "c3");
}

TEST_F(BisectTest, AChangeAmongCommitsThatDoNotBuildIsARange) {
  std::vector<FakeCommit> commits(kCommits);
  for (int i = 0; i < kCommits; ++i) {
    FakeCommit& commit = commits[static_cast<size_t>(i)];
    commit.name = absl::StrCat("c", i);
    commit.behaviour = i >= 12 ? "time=1.3" : "";
    commit.builds = i != 11 && i != 12 && i != 13;
  }
  repository_.Commit(commits);
  const BisectResult result = Found();
  EXPECT_EQ(result.verdict, Verdict::kRange);
  EXPECT_EQ(result.before.subject, "c10");
  EXPECT_EQ(result.commit.subject, "c14");
  EXPECT_EQ(result.left, 4);
  EXPECT_THAT(RenderBisect(result), HasSubstr("It is one of 4 commits"));
}

TEST_F(BisectTest, AMergeIsTheCommitThatBroughtASlowBranch) {
  repository_.Commit({{"c0", {}, ""},
                      {"c1", {"c0"}, "x=1"},
                      {"b1", {"c0"}, "x=2"},
                      {"b2", {"b1"}, "time=1.3"},
                      {"b3", {"b2"}, "time=1.3 x=3"},
                      {"c2", {"c1"}, "x=4"},
                      {"c3", {"c2", "b3"}, "time=1.3 x=5"},
                      {"c4", {"c3"}, "time=1.3 x=6"},
                      {"c5", {"c4"}, "time=1.3 x=7"}});
  BisectResult result = Found();
  EXPECT_EQ(result.verdict, Verdict::kFound) << RenderBisect(result);
  EXPECT_EQ(result.commit.subject, "c3");
  EXPECT_EQ(result.before.subject, "c2");
  EXPECT_THAT(Progress(), HasSubstr("5 commits later"));
  const std::string name = result.commit.short_hash;
  EXPECT_THAT(RenderBisect(result),
              HasSubstr(absl::StrCat("It is a merge. To search the merged branch: --good=$(git "
                                     "merge-base ",
                                     name, "^1 ", name, "^2) --bad=", name, "^2\n")));
  // As it says:
  options_.good = repository_.Shell(absl::StrCat("git merge-base ", name, "^1 ", name, "^2"));
  options_.good.pop_back();
  options_.bad = absl::StrCat(name, "^2");
  options_.folder = absl::StrCat(repository_.folder(), "/branch");
  result = Found();
  EXPECT_EQ(result.commit.subject, "b2");
}

TEST_F(BisectTest, AGoodCommitOnAMergedBranchIsFollowedByTheMerge) {
  repository_.Commit({{"c0", {}, ""},
                      {"c1", {"c0"}, "x=1"},
                      {"b1", {"c0"}, "x=2"},
                      {"c2", {"c1", "b1"}, "x=3"},
                      {"c3", {"c2"}, "x=4"},
                      {"c4", {"c3"}, "time=1.3"},
                      {"c5", {"c4"}, "time=1.3 x=5"}});
  options_.good = "b1";
  const BisectResult result = Found();
  EXPECT_EQ(result.commit.subject, "c4");
  EXPECT_THAT(Progress(), HasSubstr("\"c5\", 4 commits later"));
}

TEST_F(BisectTest, AGoodCommitThatIsNoAncestorIsReplacedByTheCommonOne) {
  repository_.Commit({{"c0", {}, ""},
                      {"c1", {"c0"}, "x=1"},
                      {"side", {"c1"}, "x=2"},
                      {"c2", {"c1"}, "time=1.3"},
                      {"c3", {"c2"}, "time=1.3 x=3"}});
  options_.good = "side";
  const BisectResult result = Found();
  EXPECT_EQ(result.good.subject, "c1");
  EXPECT_EQ(result.commit.subject, "c2");
  EXPECT_THAT(Progress(), HasSubstr("--good=side is no ancestor of --bad=HEAD; their last common "
                                    "ancestor is taken as good: "));
}

TEST_F(BisectTest, ADriftIsARangeAndNeverOneCommit) {
  repository_.CommitLine(
      kCommits, [](int i) { return absl::StrCat("time=", std::pow(1.3, i / (kCommits - 1.0))); });
  const BisectResult result = Found();
  EXPECT_EQ(result.verdict, Verdict::kUnclear) << RenderBisect(result);
  EXPECT_THAT(RenderBisect(result), HasSubstr("The largest change between two of them is 1."));
}

TEST_F(BisectTest, OfTwoChangesOneIsFoundAndTheOtherIsSaid) {
  repository_.CommitLine(kCommits, [](int i) {
    return i < 4 ? "" : i < 14 ? "time=1.2" : "time=1.44";
  });
  const BisectResult result = Found();
  EXPECT_EQ(result.verdict, Verdict::kFound) << RenderBisect(result);
  const bool is_first = result.commit.subject == "c4";
  EXPECT_TRUE(is_first || result.commit.subject == "c14") << RenderBisect(result);
  EXPECT_NEAR(result.own.reading.ratio, 1.2, 0.03);
  EXPECT_THAT(RenderBisect(result), HasSubstr(is_first ? "After it the case changed as well, 1.2"
                                                       : "Before it the case changed as well, 1."));
}

TEST_F(BisectTest, SlowerThenFasterThenSlowerGivesOneThatIsSlowerThanItsParent) {
  repository_.CommitLine(
      kCommits, [](int i) { return (i >= 3 && i < 7) || i >= 15 ? "time=1.3" : "time=1.0"; });
  const BisectResult result = Found();
  EXPECT_EQ(result.verdict, Verdict::kFound);
  EXPECT_EQ(result.commit.subject, "c15");
}

TEST_F(BisectTest, MemoryErrorsAndStatusAreDecidedByOneMeasurementOfThreeSamples) {
  const struct {
    BisectMetric metric;
    std::string behaviour, what;
  } kCases[] = {{BisectMetric::kMemory, "memory=2097152", "working memory 2.00x, 1 MiB -> 2 MiB"},
                {BisectMetric::kError, "error=0.02", "error against dense 2.00x, 0.010 -> 0.020"},
                {BisectMetric::kStatus, "status=failed", "status ok -> failed"},
                {BisectMetric::kStatus, "status=unsupported", "status ok -> unsupported"}};
  for (const auto& one : kCases) {
    repository_ = FakeRepository(absl::StrCat("bisect_", TestName()));
    PlantAt(11, one.behaviour);
    options_.metric = one.metric;
    const BisectResult result = Found();
    EXPECT_EQ(result.verdict, Verdict::kFound) << RenderBisect(result);
    EXPECT_EQ(result.commit.subject, "c11");
    EXPECT_THAT(RenderBisect(result), HasSubstr(one.what));
    for (const std::string& measurement : repository_.Measurements()) {
      EXPECT_TRUE(absl::EndsWith(measurement, "-1.pb 3")) << measurement;
    }
  }
}

TEST_F(BisectTest, AThirdStatusIsPassedOver) {
  repository_.CommitLine(kCommits, [](int i) {
    return i == 9 ? "status=unsupported" : i >= 11 ? "status=failed" : "";
  });
  options_.metric = BisectMetric::kStatus;
  const BisectResult result = Found();
  EXPECT_EQ(result.verdict, Verdict::kFound);
  EXPECT_EQ(result.commit.subject, "c11");
  EXPECT_THAT(RenderBisect(result),
              HasSubstr("\"c9\": its status is neither that of good nor that of bad: unsupported"));
}

TEST_F(BisectTest, AnOptionWhoseDefaultChangesHidesNothing) {
  PlantAt(6, "time=1.3 window=512");
  options_.wanted = "near";
  const BisectResult result = Found();
  EXPECT_EQ(result.verdict, Verdict::kFound) << RenderBisect(result);
  EXPECT_EQ(result.commit.subject, "c6");
  EXPECT_THAT(RenderBisect(result), HasSubstr("options: window=256 / window=512"));
}

// --- Killed and gone on with

TEST_F(BisectTest, AfterAKillItGoesOnWhereItWas) {
  PlantAt(14);
  const std::string before = repository_.Untouched();
  const pid_t child = fork();
  if (child == 0) {
    int lines = 0;
    (void)Bisect(options_, [&lines](absl::string_view line) {
      // In the third step, when the worktree and the programs are there.
      lines += absl::StrContains(line, " of good");
      if (lines == 3) kill(getpid(), SIGKILL);
    });
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_TRUE(fs::exists(Folder() / "tfb_bisect_worktree"));
  const size_t measured = repository_.Measurements().size(), built = repository_.Builds().size();
  EXPECT_EQ(measured, 4u);

  const absl::StatusOr<BisectResult> result = Run();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->verdict, Verdict::kFound);
  EXPECT_EQ(result->commit.subject, "c14");
  EXPECT_EQ(repository_.Untouched(), before);
  EXPECT_THAT(lines_, Contains(HasSubstr("going on with 5 builds and 4 measurements")));
  // Two more steps, and the confirmation.
  EXPECT_LE(repository_.Measurements().size(), measured + 3);
  EXPECT_LE(repository_.Builds().size(), built + 2);

  // A third call has everything, builds nothing, and says the same.
  const size_t all = repository_.Measurements().size(), builds = repository_.Builds().size();
  const absl::StatusOr<BisectResult> again = Run();
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(RenderBisect(*again), RenderBisect(*result));
  EXPECT_EQ(repository_.Measurements().size(), all);
  EXPECT_EQ(repository_.Builds().size(), builds);
  EXPECT_EQ(repository_.Untouched(), before);
}

TEST_F(BisectTest, StoppedBetweenItBuildsAgainWhatItRemovedAndGivesTheSameAnswer) {
  PlantAt(14);
  int asked = 0;
  options_.stopped = [&asked, this] {
    asked += repository_.Measurements().size() == 3;
    return asked > 0;
  };
  const std::string before = repository_.Untouched();
  EXPECT_EQ(Run().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(repository_.Untouched(), before);
  EXPECT_FALSE(fs::exists(Folder() / "programs"));
  options_.stopped = [] { return false; };
  EXPECT_EQ(Found().commit.subject, "c14");
}

TEST_F(BisectTest, AWorktreeOfAKilledBisectionElsewhereIsRemoved) {
  PlantAt(14);
  const std::string before = repository_.Untouched();
  const std::string left = absl::StrCat(repository_.folder(), "/killed/tfb_bisect_worktree");
  repository_.Shell(absl::StrCat("git worktree add --quiet --detach '", left, "' c3"));
  // One whose folder somebody has removed, and one that is in use.
  const std::string gone = absl::StrCat(repository_.folder(), "/gone/tfb_bisect_worktree");
  repository_.Shell(absl::StrCat("git worktree add --quiet --detach '", gone, "' c3"));
  fs::remove_all(fs::path(gone).parent_path());
  const std::string used = absl::StrCat(repository_.folder(), "/used/tfb_bisect_worktree");
  repository_.Shell(absl::StrCat("git worktree add --quiet --detach '", used, "' c3"));
  const int lock =
      open((fs::path(used).parent_path() / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  ASSERT_EQ(flock(lock, LOCK_EX), 0);
  ASSERT_TRUE(Run().ok());
  EXPECT_FALSE(fs::exists(left));
  EXPECT_TRUE(fs::exists(used));
  EXPECT_THAT(repository_.Shell("git worktree list"), Not(HasSubstr("/gone/")));
  close(lock);
  options_.restart = true;
  ASSERT_TRUE(Run().ok());
  EXPECT_FALSE(fs::exists(used));
  EXPECT_EQ(repository_.Untouched(), before);
}

TEST_F(BisectTest, TheCleanCommandRunsInTheWorktreeBeforeItGoes) {
  PlantAt(3);
  options_.clean = absl::StrCat("pwd > '", repository_.folder(), "/cleaned'");
  ASSERT_TRUE(Run().ok());
  std::ifstream file(absl::StrCat(repository_.folder(), "/cleaned"));
  std::string line;
  std::getline(file, line);
  EXPECT_TRUE(absl::EndsWith(line, "/bisection/tfb_bisect_worktree")) << line;
}

TEST_F(BisectTest, IgnoredFilesThatBuildsReadAreCarried) {
  PlantAt(3);
  repository_.Shell("echo .bazelrc.user > .git/info/exclude; echo mine > .bazelrc.user");
  options_.build = "grep -q mine .bazelrc.user && sh ./build.sh";
  EXPECT_EQ(Found().commit.subject, "c3");
}

TEST_F(BisectTest, ACheckoutWithChangesStaysAsItIs) {
  PlantAt(3);
  repository_.Shell(
      "git checkout --quiet -b mine; echo change >> notes; git add notes; echo more >> notes; "
      "echo new > untracked; mkdir out; echo mine > out/sweep");
  options_.bad = "c19";
  EXPECT_EQ(Found().commit.subject, "c3");
  EXPECT_EQ(repository_.Shell("cat out/sweep untracked"), "mine\nnew\n");
}

TEST_F(BisectTest, HooksOfTheRepositoryDoNotRun) {
  PlantAt(3);
  repository_.Shell(
      "mkdir -p .git/hooks && printf '#!/bin/sh\\ntouch \"'\"$PWD\"'/hooked\"\\n' > "
      ".git/hooks/post-checkout && chmod +x .git/hooks/post-checkout");
  EXPECT_EQ(Found().commit.subject, "c3");
}

TEST_F(BisectTest, VariablesOfAnotherRepositoryAreNotObeyed) {
  PlantAt(3);
  setenv("GIT_DIR", "/nowhere", 1);
  setenv("GIT_WORK_TREE", "/nowhere", 1);
  const absl::StatusOr<BisectResult> result = Run();
  unsetenv("GIT_DIR");
  unsetenv("GIT_WORK_TREE");
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->commit.subject, "c3");
}

TEST_F(BisectTest, TheDefaultFolderIsBesideTheCheckoutAndTheSameForTheSameQuestion) {
  PlantAt(3);
  options_.folder.clear();
  const BisectResult result = Found();
  EXPECT_THAT(result.folder,
              HasSubstr(absl::StrCat("/checkout-bisect/", result.good.hash.substr(0, 12), "-",
                                     result.bad.hash.substr(0, 12), "-")));
  const size_t measured = repository_.Measurements().size();
  EXPECT_EQ(Found().folder, result.folder);
  EXPECT_EQ(repository_.Measurements().size(), measured);
  options_.wanted = "near tokens=512";
  EXPECT_NE(Found().folder, result.folder);
}

TEST_F(BisectTest, FoldersMayHaveSpacesAndTheRepositoryNoCheckout) {
  PlantAt(3);
  repository_.Shell("git clone --quiet --bare . '../a bare.git'");
  options_.repository = absl::StrCat(repository_.folder(), "/a bare.git");
  options_.folder.clear();
  const absl::StatusOr<BisectResult> result = Run();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->commit.subject, "c3");
  EXPECT_THAT(result->folder, HasSubstr("/a bare.git-bisect/"));
}

// --- Questions that make no sense

TEST_F(BisectTest, BadQuestionsAreErrorsThatNameTheFlag) {
  PlantAt(3);

  repository_.Shell(
      "git checkout --quiet --orphan other && git commit --quiet -m other "
      "--author='A <a@example.com>' && git tag other-root && git checkout --quiet "
      "--detach c19");
  const struct {
    std::function<void(BisectOptions*)> change;
    std::string message;
  } kCases[] = {
      {[](auto* o) { o->good = ""; }, "--good: name a commit"},
      {[](auto* o) { o->good = "nothing"; }, "--good: \"nothing\" is no commit of "},
      {[](auto* o) { o->bad = "--help"; }, "--bad: \"--help\" is no commit of "},
      {[](auto* o) { o->good = "HEAD"; }, "--good and --bad are the same commit, "},
      {[](auto* o) { std::swap(o->good, o->bad); },
       "--good=HEAD is newer than --bad=c0, whose descendant it is; exchange the two"},
      {[](auto* o) { o->good = "other-root"; }, "--good=other-root is no ancestor of --bad=HEAD: "},
      {[](auto* o) { o->repository = "/"; }, "/: not a git repository: "},
      {[](auto* o) { o->repository = "/nowhere"; }, "/nowhere: not a git repository: "},
      {[](auto* o) { o->wanted = ""; }, "--case: it begins with a technique"},
      {[](auto* o) { o->wanted = "near speed=3"; }, "--case: \"speed\" is no field of a case"},
      {[](auto* o) { o->least_change = 1; }, "--least_change=1: a factor above 1 is wanted"},
      {[](auto* o) { o->repetitions = 2; }, "--repetitions=2: allowed are 3 to 10000"},
      {[](auto* o) { o->looks = 0; }, "--looks=0: allowed are 1 to 12"},
      {[](auto* o) { o->program = "/bin/sweep"; }, "--program=/bin/sweep: a path relative to"},
      {[](auto* o) { o->program = ""; }, "--program=: a path relative to the checkout"},
      {[](auto* o) { o->build = ""; }, "--build: name the command"},
      {[](auto* o) { o->folder = "/dev/null/x"; }, "--folder: /dev/null/x"},
      {[](auto* o) { o->folder = "/proc/x"; }, "--folder: /proc/x: cannot write: "},
      {[](auto* o) { o->folder = o->repository + "/build"; }, "is within the checkout"},
  };
  const BisectOptions plain = options_;
  for (const auto& one : kCases) {
    options_ = plain;
    one.change(&options_);
    EXPECT_THAT(Error(), HasSubstr(one.message));
  }
  EXPECT_THAT(repository_.Builds(), IsEmpty());
}

TEST_F(BisectTest, GoodOrBadThatDoesNotBuildIsAnErrorAndIsTriedAgain) {
  PlantAt(3);
  options_.build = "no-such-command";
  EXPECT_THAT(Error(), AllOf(HasSubstr("cannot be compared: its build ends with exit status 127; "
                                       "its log is "),
                             HasSubstr("/bisection/logs/build-")));
  EXPECT_FALSE(fs::exists(Folder() / "tfb_bisect_worktree"));
  options_.build = "test -e '" + repository_.folder() + "/ready' && sh ./build.sh";
  options_.restart = true;
  EXPECT_THAT(Error(), HasSubstr("its build ends with exit status 1"));
  std::ofstream(repository_.folder() + "/ready") << "";
  options_.restart = false;
  EXPECT_EQ(Found().commit.subject, "c3");
}

TEST_F(BisectTest, ASweepWithoutTheCaseIsAnErrorThatSaysWhatThereIs) {
  PlantAt(3);
  options_.wanted = "far";
  EXPECT_THAT(Error(), HasSubstr("no case of far was measured; there are: technique=near "));
}

TEST_F(BisectTest, AFolderOfAnotherQuestionIsRefusedUntilRestart) {
  PlantAt(3);
  ASSERT_TRUE(Run().ok());
  options_.wanted = "near";
  EXPECT_THAT(Error(), HasSubstr("has a bisection with another case; --restart forgets it"));
  options_.restart = true;
  EXPECT_EQ(Found().commit.subject, "c3");
}

TEST_F(BisectTest, AFolderWithOtherFilesIsRefusedAndStaysAsItIs) {
  PlantAt(3);
  fs::create_directories(Folder() / "results");
  std::ofstream(Folder() / "results" / "mine.pb") << "mine";
  for (const bool restart : {false, true}) {
    options_.restart = restart;
    EXPECT_THAT(Error(), HasSubstr("has files, and not those of a bisection"));
    EXPECT_TRUE(fs::exists(Folder() / "results" / "mine.pb"));
  }
}

TEST_F(BisectTest, WhatAnotherQuestionKeptIsNotRemovedWhereItIsRefused) {
  PlantAt(3);
  options_.keep = true;
  ASSERT_TRUE(Run().ok());
  options_.keep = false;
  options_.wanted = "near";
  EXPECT_THAT(Error(), HasSubstr("has a bisection with another case"));
  EXPECT_TRUE(fs::exists(Folder() / "tfb_bisect_worktree" / "build.sh"));
}

TEST_F(BisectTest, ADamagedStateIsAnErrorUntilRestart) {
  PlantAt(3);
  ASSERT_TRUE(Run().ok());
  const fs::path state = Folder() / "bisect.json";
  fs::resize_file(state, fs::file_size(state) / 2);
  EXPECT_THAT(Error(), HasSubstr("bisect.json: is not the state of a bisection; --restart"));
  std::ofstream(state) << "{\"format\": \"tfb.Bisect/1\", \"question\": 3}";
  EXPECT_THAT(Error(), HasSubstr("--restart begins anew"));
  options_.restart = true;
  EXPECT_EQ(Found().commit.subject, "c3");
}

TEST_F(BisectTest, ALostResultFileIsAnErrorThatNamesIt) {
  PlantAt(3);
  ASSERT_TRUE(Run().ok());
  fs::remove_all(Folder() / "results");
  EXPECT_THAT(Error(), HasSubstr("-base.pb: cannot open"));
}

TEST_F(BisectTest, TwoAtOnceInOneFolderAreRefused) {
  PlantAt(3);
  fs::create_directories(Folder());
  const int lock = open((Folder() / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  ASSERT_EQ(flock(lock, LOCK_EX), 0);
  EXPECT_THAT(Error(), HasSubstr("another process bisects here"));
  close(lock);
}

}  // namespace
}  // namespace tfb
