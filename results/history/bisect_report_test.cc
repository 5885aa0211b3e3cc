#include "results/history/bisect_report.h"

#include <cmath>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Verdict = BisectResult::Verdict;

Commit CommitOf(const std::string& name) {
  return {name + "00000000",           name,         "An Author <a@b>",
          "2026-11-23T18:23:41+01:00", "On " + name, {"p"}};
}

PairReading Exactly(double ratio) {
  PairReading pair;
  pair.reading = {ratio, ratio, ratio};
  pair.what = "run time over dense";
  pair.subject = "near, 2048 tokens";
  return pair;
}

PairReading Between(double low, double ratio, double high) {
  PairReading pair = Exactly(ratio);
  pair.reading = {ratio, low, high};
  pair.base = "0.95";
  pair.now = "1.25";
  return pair;
}

BisectResult ResultOf(Verdict verdict) {
  BisectResult result;
  result.verdict = verdict;
  result.good = CommitOf("aaa");
  result.bad = CommitOf("fff");
  result.before = CommitOf("ccc");
  result.commit = CommitOf("ddd");
  result.whole = Between(1.28, 1.31, 1.34);
  result.least_change = 1.05;
  result.folder = "the/folder";
  result.why = "the reason, with advice";
  return result;
}

BisectResult Found() {
  BisectResult result = ResultOf(Verdict::kFound);
  result.own = Between(1.27, 1.3, 1.33);
  result.until_before = Exactly(1);
  result.until_commit = Exactly(1.31);
  return result;
}

TEST(BisectReport, WhatWasFoundIsTheCommitItsChangeAndAllThatWasMeasured) {
  BisectResult result = Found();
  result.own.reason = "one more sentence";
  result.own.build_differences = {"compiler: GCC 12 / GCC 13", "mode: opt / dbg"};
  result.tried = {{CommitOf("bbb"), Exactly(1.02), ""},
                  {CommitOf("ccc"), {}, "its build ends with exit status 3"},
                  {CommitOf("ddd"), Between(1.25, 1.3, 1.36), ""}};
  EXPECT_EQ(RenderBisect(result),
            "ddd00000000\n"
            "Author: An Author <a@b>\n"
            "Date:   2026-11-23T18:23:41+01:00\n"
            "\n"
            "    On ddd\n"
            "\n"
            "changed near, 2048 tokens:\n"
            "  run time over dense 1.30x [1.27, 1.33], 0.95 -> 1.25 over the commit before it, ccc "
            "(95% interval)\n"
            "  compiler: GCC 12 / GCC 13\n"
            "  mode: opt / dbg\n"
            "  one more sentence\n"
            "\n"
            "By turns with aaa \"On aaa\", good:\n"
            "  bbb \"On bbb\": 1.02x\n"
            "  ccc \"On ccc\": its build ends with exit status 3\n"
            "  ddd \"On ddd\": 1.30x [1.25, 1.36]\n"
            "  fff \"On fff\", bad: run time over dense 1.31x [1.28, 1.34], 0.95 -> 1.25\n"
            "\n"
            "Results and logs: the/folder\n");
}

TEST(BisectReport, AChangeWithoutNoiseOrAQuantityHasNoInterval) {
  BisectResult result = Found();
  result.own = Exactly(2);
  EXPECT_THAT(RenderBisect(result),
              HasSubstr("  run time over dense 2.00x over the commit before it, ccc\n"));
  result.own.what = "status";
  result.own.base = "ok";
  result.own.now = "failed";
  EXPECT_THAT(RenderBisect(result),
              HasSubstr("  status ok -> failed over the commit before it, ccc\n"));
  EXPECT_EQ(FormatChange(result.own), "failed");
}

TEST(BisectReport, AMergeAloneIsCalledOne) {
  BisectResult result = Found();
  EXPECT_THAT(RenderBisect(result), Not(HasSubstr("It is a merge")));
  result.commit.parents = {"p", "q"};
  EXPECT_THAT(RenderBisect(result),
              HasSubstr("It is a merge. To search the merged branch: --good=$(git merge-base ddd^1 "
                        "ddd^2) --bad=ddd^2\n"));
}

// The whole change is that until the commit before, that of the commit, and the rest.
TEST(BisectReport, WhatChangedBeforeAndAfterTheCommitIsSaidBeyondTheLeastChange) {
  const auto rest = [](double before, double until, double whole) {
    BisectResult result = Found();
    result.until_before = Exactly(before);
    result.until_commit = Exactly(until);
    result.whole = Exactly(whole);
    return RenderBisect(result);
  };
  const auto before = HasSubstr("Before it the case changed as well, ");
  const auto after = HasSubstr("After it the case changed as well, ");
  EXPECT_THAT(rest(1.04, 1.3, 1.36), testing::AllOf(Not(before), Not(after)));
  EXPECT_THAT(rest(1 / 1.04, 1.3, 1.25), testing::AllOf(Not(before), Not(after)));
  EXPECT_THAT(rest(1.2, 1.5, 1.5),
              testing::AllOf(HasSubstr("Before it the case changed as well, 1.20x: bisect again "
                                       "with --bad=ccc\n"),
                             Not(after)));
  EXPECT_THAT(rest(0.5, 1.5, 1.5),
              HasSubstr("Before it the case changed as well, 0.500x: bisect again with --bad=ccc"));
  EXPECT_THAT(rest(1, 1.3, 1.95),
              testing::AllOf(Not(before),
                             HasSubstr("After it the case changed as well, 1.50x: bisect again "
                                       "with --good=ddd\n")));
  EXPECT_THAT(rest(1, 1.3, 0.65), HasSubstr("After it the case changed as well, 0.500x"));
  // Ratios that have no logarithm have no parts.
  for (const double none : {0.0, -1.0, HUGE_VAL, std::nan("")}) {
    EXPECT_THAT(rest(1.2, 1.5, none), testing::AllOf(Not(before), Not(after))) << none;
    EXPECT_THAT(rest(1.2, none, 3), testing::AllOf(Not(before), Not(after))) << none;
    EXPECT_THAT(rest(none, 1.5, 3), testing::AllOf(Not(before), Not(after))) << none;
  }
}

TEST(BisectReport, OneCommitThatIsNotProvenAndSeveralAreTold) {
  BisectResult result = ResultOf(Verdict::kUnclear);
  result.left = 1;
  EXPECT_THAT(RenderBisect(result),
              testing::StartsWith("The steps lead to ddd \"On ddd\", but do not prove it:\n"
                                  "the reason, with advice\n\nBy turns with "));
  result.left = 2;
  EXPECT_THAT(
      RenderBisect(result),
      testing::StartsWith("It is one of 2 commits, or several of them, after ccc \"On ccc\" "
                          "up to ddd \"On ddd\":\nthe reason, with advice\n\nBy turns "));
  result.verdict = Verdict::kNoDifference;
  EXPECT_THAT(RenderBisect(result),
              testing::StartsWith("No clear difference between good and bad: the reason, with "
                                  "advice\n\nBy turns with "));
}

// Returns what is said of the largest step where bbb to eee have these ratios and bad the last.
std::string LargestStep(const std::vector<double>& ratios, Verdict verdict = Verdict::kUnclear) {
  BisectResult result = ResultOf(verdict);
  result.left = 4;
  const std::vector<std::string> names = {"bbb", "ccc", "ddd", "eee"};
  for (size_t i = 0; i + 1 < ratios.size(); ++i) {
    result.tried.push_back({CommitOf(names[i]), Exactly(ratios[i]), ""});
    result.tried.push_back({CommitOf("xxx"), Exactly(100), "it does not build"});
  }
  result.whole = Exactly(ratios.back());
  const std::string text = RenderBisect(result),
                    begin = "The largest change between two of them is ";
  const size_t place = text.find(begin);
  if (place == std::string::npos) return "";
  const size_t after = place + begin.size();
  return text.substr(after, text.find('\n', after) - after);
}

TEST(BisectReport, TheLargestStepUpOrDownBetweenMeasuredNeighboursIsNamed) {
  EXPECT_EQ(LargestStep({1.5, 1.6, 1.7}), "1.50x, after aaa up to bbb.");
  EXPECT_EQ(LargestStep({1.1, 2.2, 2.3}), "2.00x, after bbb up to ccc.");
  EXPECT_EQ(LargestStep({1.1, 1.2, 2.4}), "2.00x, after ccc up to fff.");
  EXPECT_EQ(LargestStep({2, 0.5, 1, 1.1}), "0.250x, after bbb up to ccc.");
  EXPECT_EQ(LargestStep({1.5}), "1.50x, after aaa up to fff.");
  EXPECT_EQ(LargestStep({1.1, 2.2}, Verdict::kRange), "");
}

TEST(BisectReport, OfEqualStepsTheFirstIsNamedAndOfNoneNothing) {
  // The logarithms of powers of two differ by the same number.
  EXPECT_EQ(LargestStep({2, 4, 8}), "2.00x, after aaa up to bbb.");
  EXPECT_EQ(LargestStep({1, 2, 1}), "2.00x, after bbb up to ccc.");
  EXPECT_EQ(LargestStep({1, 1, 1}), "");
  EXPECT_EQ(LargestStep({2, HUGE_VAL, 4}), "");
  EXPECT_EQ(LargestStep({0, 2, 4}), "");
}

TEST(BisectReport, CountsHaveTheirPlural) {
  EXPECT_EQ(CountOf(1, "commit"), "1 commit");
  EXPECT_EQ(CountOf(0, "commit"), "0 commits");
  EXPECT_EQ(CountOf(2, "commit"), "2 commits");
}

}  // namespace
}  // namespace tfb
