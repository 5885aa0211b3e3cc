#include "results/history/bisect_case.h"

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "results/reader.h"
#include "results/synthetic.h"

namespace tfb {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

constexpr double kLeastChange = 1.05;

BisectCase Parsed(absl::string_view text) {
  const absl::StatusOr<BisectCase> wanted = ParseBisectCase(text);
  EXPECT_TRUE(wanted.ok()) << wanted.status();
  return wanted.ok() ? *wanted : BisectCase();
}

std::string ParseError(absl::string_view text) {
  return std::string(ParseBisectCase(text).status().message());
}

// "plain" and "near" in one process, near's time being `time` and its probe 10 us.
ResultSet MakeRun(double time, double dense = 1e6, const std::string& window = "256") {
  ResultSet results;
  *results.add_environments() = synthetic::MakeEnvironment();
  synthetic::CaseSpec plain;
  plain.median_ns = dense;
  synthetic::CaseSpec near;
  near.technique = "near";
  near.option_name = "window";
  near.option_value = window;
  near.median_ns = time;
  for (const synthetic::CaseSpec& spec : {plain, near}) {
    Case* result = results.add_cases();
    *result = synthetic::MakeCase(spec);
    result->mutable_outcome()->mutable_timing()->clear_setup_ns();
    for (const double ns : synthetic::Samples(1e4)) {
      result->mutable_outcome()->mutable_timing()->add_probe_ns(ns);
    }
  }
  return results;
}

Outcome* NearOutcome(ResultSet* results) { return results->mutable_cases(1)->mutable_outcome(); }

PairReading Read(const ResultSet& base, const ResultSet& now, BisectMetric metric) {
  const auto pair = ReadPair({base}, {now}, Parsed("near"), metric, kLeastChange, "");
  EXPECT_TRUE(pair.ok()) << pair.status();
  return pair.ok() ? *pair : PairReading();
}

std::string ReadError(const ResultSet& base, const ResultSet& now, BisectMetric metric) {
  return std::string(
      ReadPair({base}, {now}, Parsed("near"), metric, kLeastChange, "").status().message());
}

TEST(BisectCase, ATechniqueAloneHasDefaultsForTheRest) {
  const BisectCase wanted = Parsed("longformer");
  EXPECT_EQ(wanted.technique, "longformer");
  EXPECT_EQ(wanted.spec, "longformer");
  EXPECT_THAT(wanted.fields, IsEmpty());
  EXPECT_THAT(SweepFlags(wanted),
              UnorderedElementsAre("--techniques=longformer", "--accuracy=false", "--devices=cpu",
                                   "--input=gaussian", "--lengths=1024"));
}

TEST(BisectCase, FieldsBecomeFlags) {
  const BisectCase wanted = Parsed(
      " multi_head:inner=longformer[window=64,dilation=2],bias=true tokens=4096 causal=true "
      "threads=1 dtype=bf16 batch=2 query_heads=4 kv_heads=2 head_dim=32 seed=7 input=peaked ");
  EXPECT_EQ(wanted.technique, "multi_head");
  EXPECT_THAT(SweepFlags(wanted),
              UnorderedElementsAre(
                  "--techniques=multi_head:inner=longformer[window=64,dilation=2],bias=true",
                  "--accuracy=false", "--devices=cpu", "--lengths=4096", "--causal=true",
                  "--threads=1", "--dtypes=bf16", "--batches=2", "--heads=4", "--kv_heads=2",
                  "--head_dims=32", "--seed=7", "--input=peaked"));
}

TEST(BisectCase, APassIsAFieldThatAKeyOfTheForwardPassLeavesOut) {
  synthetic::CaseSpec spec;
  ResultSet results;
  for (const Case::Pass pass : {Case::PASS_FORWARD, Case::PASS_TRAINING}) {
    spec.pass = pass;
    *results.add_cases() = synthetic::MakeCase(spec);
    const BisectCase wanted = Parsed(absl::StrCat("plain pass=", Name(pass)));
    EXPECT_THAT(SweepFlags(wanted), Contains(absl::StrCat("--pass=", Name(pass))));
    const auto found = FindCase(results, wanted);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ((*found)->key().pass(), pass);
  }
  const BisectCase training = Parsed(CaseKey(results.cases(1)));
  EXPECT_THAT(SweepFlags(training), Contains("--pass=training"));
  EXPECT_EQ((*FindCase(results, training))->key().pass(), Case::PASS_TRAINING);
}

TEST(BisectCase, AWholeKeyIsTheSameCase) {
  synthetic::CaseSpec spec;
  spec.technique = "near";
  spec.option_name = "inner";
  spec.option_value = "far[a=1,b=2]";
  spec.tokens = 512;
  const Case result = synthetic::MakeCase(spec);
  const BisectCase wanted = Parsed(CaseKey(result));
  EXPECT_EQ(wanted.technique, "near");
  EXPECT_EQ(wanted.spec, "near:inner=far[a=1,b=2]");
  ResultSet results;
  *results.add_cases() = result;
  spec.tokens = 1024;
  *results.add_cases() = synthetic::MakeCase(spec);
  const auto found = FindCase(results, wanted);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(CaseKey(**found), CaseKey(result));
  EXPECT_THAT(SweepFlags(wanted),
              UnorderedElementsAre("--techniques=near:inner=far[a=1,b=2]", "--accuracy=false",
                                   "--devices=cpu", "--dtypes=f32", "--batches=1", "--heads=8",
                                   "--kv_heads=8", "--head_dims=64", "--lengths=512",
                                   "--causal=true", "--input=gaussian", "--seed=1", "--threads=2"));
}

TEST(BisectCase, AccuracyIsOnCapturedTensorsOfTheirOwnLengths) {
  EXPECT_THAT(SweepFlags(Parsed("near purpose=accuracy")),
              UnorderedElementsAre("--techniques=near", "--accuracy=true", "--devices=cpu",
                                   "--input=real"));
}

TEST(BisectCase, ACaseOnAGpuHasNoThreadsAndAFileIsNamedByTheCaller) {
  EXPECT_THAT(SweepFlags(Parsed("near device=cuda threads=0 input=file file=a.safetensors")),
              UnorderedElementsAre("--techniques=near", "--accuracy=false", "--devices=cuda"));
}

TEST(BisectCase, WhatIsNoCaseIsAnErrorThatSaysWhy) {
  EXPECT_THAT(ParseError(""), HasSubstr("--case: it begins with a technique"));
  EXPECT_THAT(ParseError("tokens=5"), HasSubstr("--case: it begins with a technique"));
  EXPECT_THAT(ParseError("long*"), HasSubstr("is a glob; name one technique"));
  EXPECT_THAT(ParseError("technique=* options="), HasSubstr("is a glob"));
  EXPECT_THAT(ParseError("near,far"), HasSubstr("\"far\" is a second technique"));
  EXPECT_THAT(ParseError("near:window=2,far:window=3"), HasSubstr("\"far:window=3\" is a second"));
  EXPECT_THAT(ParseError("near length=3"),
              AllOf(HasSubstr("\"length\" is no field of a case; there are tokens, device, "),
                    HasSubstr(", purpose")));
  EXPECT_THAT(ParseError("near tokens=many"), HasSubstr("query_tokens=\"many\" is no number"));
  EXPECT_THAT(ParseError("near causal=auto"), HasSubstr("causal=\"auto\"; allowed are 0 and 1"));
}

TEST(BisectCase, MetricsHaveNames) {
  for (const char* name :
       {"time", "absolute", "setup", "instructions", "memory", "error", "status"}) {
    const auto metric = ParseBisectMetric(name);
    ASSERT_TRUE(metric.ok());
    EXPECT_EQ(Name(*metric), name);
  }
  EXPECT_EQ(ParseBisectMetric("speed").status().message(),
            "\"speed\" is none of time, absolute, setup, instructions, memory, error, status");
}

TEST(BisectCase, OfSeveralCasesTheOptionsDecideAndElseItIsAnError) {
  ResultSet results = MakeRun(5e5);
  results.MergeFrom(MakeRun(5e5, 1e6, "512"));
  const auto found = FindCase(results, Parsed("near:window=512"));
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ((*found)->key().options().at("window"), "512");
  EXPECT_THAT(std::string(FindCase(results, Parsed("near")).status().message()),
              HasSubstr("several cases of near were measured; add fields that only one of them "
                        "has: technique=near options=window%3D256 "));
  EXPECT_THAT(std::string(FindCase(results, Parsed("near tokens=99")).status().message()),
              HasSubstr("no case of near was measured; there are: technique=near "));
}

TEST(ReadPair, ATimeIsOverThatOfDenseInTheSameRun) {
  // The whole second run is 1.5 times as slow, and near another 1.3 times.
  ResultSet slow = MakeRun(5e5 * 1.3 * 1.5, 1.5e6);
  for (Case& result : *slow.mutable_cases()) {
    for (double& ns : *result.mutable_outcome()->mutable_timing()->mutable_probe_ns()) ns *= 1.5;
  }
  const PairReading pair = Read(MakeRun(5e5), slow, BisectMetric::kTime);
  EXPECT_EQ(pair.what, "run time over dense");
  EXPECT_EQ(pair.verdict, Verdict::kRegressed);
  EXPECT_NEAR(pair.reading.ratio, 1.3, 1e-9);
  EXPECT_LT(pair.reading.low, 1.3);
  EXPECT_GT(pair.reading.high, 1.3);
  EXPECT_NEAR(Read(MakeRun(5e5), slow, BisectMetric::kAbsoluteTime).reading.ratio, 1.95, 1e-9);
  EXPECT_EQ(Read(MakeRun(5e5), MakeRun(5e5), BisectMetric::kTime).verdict, Verdict::kSame);
}

TEST(ReadPair, SamplesOfSeveralMeasurementsArePooled) {
  const auto pair = ReadPair({MakeRun(5e5), MakeRun(5.5e5)}, {MakeRun(6.5e5), MakeRun(7.15e5)},
                             Parsed("near"), BisectMetric::kAbsoluteTime, kLeastChange, "");
  ASSERT_TRUE(pair.ok()) << pair.status();
  // Between the two measurements' medians, which are 1.1 apart.
  EXPECT_NEAR(pair->reading.ratio, 1.3, 0.01);
  const auto one = ReadPair({MakeRun(5e5)}, {MakeRun(6.5e5)}, Parsed("near"),
                            BisectMetric::kAbsoluteTime, kLeastChange, "");
  EXPECT_GT(pair->reading.high - pair->reading.low, one->reading.high - one->reading.low);
}

TEST(ReadPair, AnotherCompilerAndAnotherOptionHideNothing) {
  ResultSet now = MakeRun(6.5e5, 1e6, "512");
  now.mutable_environments(0)->set_compiler("g++ 13.1.0");
  now.mutable_environments(0)->set_compile_flags("-O0");
  const PairReading pair = Read(MakeRun(5e5), now, BisectMetric::kTime);
  EXPECT_EQ(pair.verdict, Verdict::kRegressed);
  EXPECT_THAT(pair.build_differences,
              ElementsAre("compiler: g++ 12.2.0 / g++ 13.1.0", "compiler flags: -O2 / -O0",
                          "options: window=256 / window=512"));
}

TEST(ReadPair, SetupCountsWhereItIsAShareOfTheRun) {
  ResultSet base = MakeRun(5e5), now = MakeRun(5e5);
  EXPECT_EQ(Read(base, now, BisectMetric::kSetup).verdict, Verdict::kSame);
  for (const double ns : synthetic::Samples(2e5)) {
    NearOutcome(&base)->mutable_timing()->add_setup_ns(ns);
    NearOutcome(&now)->mutable_timing()->add_setup_ns(2 * ns);
  }
  const PairReading pair = Read(base, now, BisectMetric::kSetup);
  EXPECT_EQ(pair.what, "setup time over dense");
  EXPECT_EQ(pair.verdict, Verdict::kRegressed);
  EXPECT_NEAR(pair.reading.ratio, 2, 1e-9);
}

TEST(ReadPair, InstructionsAreThoseThatTheKernelCounted) {
  ResultSet base = MakeRun(5e5), now = MakeRun(5e5);
  EXPECT_THAT(ReadError(base, now, BisectMetric::kInstructions),
              HasSubstr("the base has no number for --metric=instructions of the case, which is "
                        "ok"));
  for (int i = 0; i < 5; ++i) {
    NearOutcome(&base)->mutable_timing()->add_run_instructions(1000);
    NearOutcome(&now)->mutable_timing()->add_run_instructions(1100);
  }
  EXPECT_NEAR(Read(base, now, BisectMetric::kInstructions).reading.ratio, 1.1, 1e-9);
}

TEST(ReadPair, OfTwoErrorsTheOneThatChangedCounts) {
  ResultSet base = MakeRun(5e5), now = MakeRun(5e5);
  for (ResultSet* set : {&base, &now}) {
    NearOutcome(set)->mutable_against_definition()->set_relative_frobenius(1e-6);
    NearOutcome(set)->mutable_against_dense()->set_relative_frobenius(0.1);
  }
  EXPECT_EQ(Read(base, now, BisectMetric::kError).what, "error against its definition");
  EXPECT_EQ(Read(base, now, BisectMetric::kError).verdict, Verdict::kSame);
  NearOutcome(&now)->mutable_against_dense()->set_relative_frobenius(0.2);
  const PairReading pair = Read(base, now, BisectMetric::kError);
  EXPECT_EQ(pair.what, "error against dense");
  EXPECT_EQ(pair.reading.ratio, 2);
  EXPECT_EQ(pair.reading.low, pair.reading.high);
  // A commit in between is judged by the same error.
  const auto same = ReadPair({base}, {base}, Parsed("near"), BisectMetric::kError, kLeastChange,
                             "error against dense");
  EXPECT_EQ(same->what, "error against dense");
  NearOutcome(&now)->mutable_against_dense()->set_relative_frobenius(std::nan(""));
  EXPECT_EQ(Read(base, now, BisectMetric::kError).verdict, Verdict::kRegressed);
}

TEST(ReadPair, AStatusIsBetterWorseOrTheSame) {
  ResultSet ok = MakeRun(5e5), failed = MakeRun(5e5);
  NearOutcome(&failed)->set_status(Outcome::STATUS_FAILED);
  NearOutcome(&failed)->set_reason("NaN in out");
  const PairReading worse = Read(ok, failed, BisectMetric::kStatus);
  EXPECT_EQ(worse.verdict, Verdict::kRegressed);
  EXPECT_EQ(worse.reading.ratio, HUGE_VAL);
  EXPECT_EQ(worse.base + worse.now + worse.reason, "okfailedNaN in out");
  const PairReading better = Read(failed, ok, BisectMetric::kStatus);
  EXPECT_EQ(better.verdict, Verdict::kImproved);
  EXPECT_EQ(better.reading.ratio, 0);
  EXPECT_EQ(Read(failed, failed, BisectMetric::kStatus).verdict, Verdict::kSame);
}

TEST(ReadPair, ACaseThatWasNotMeasuredIsAnErrorWithItsReason) {
  ResultSet now = MakeRun(5e5);
  *NearOutcome(&now) = Outcome();
  NearOutcome(&now)->set_status(Outcome::STATUS_UNSUPPORTED);
  NearOutcome(&now)->set_reason("causal only");
  EXPECT_THAT(ReadError(MakeRun(5e5), now, BisectMetric::kTime),
              HasSubstr("the commit has no number for --metric=time of the case, which is "
                        "unsupported: causal only"));
  EXPECT_THAT(ReadError(now, MakeRun(5e5), BisectMetric::kMemory), HasSubstr("the base has no"));
  ResultSet few = MakeRun(5e5);
  NearOutcome(&few)->mutable_timing()->mutable_run_ns()->Truncate(2);
  EXPECT_THAT(ReadError(MakeRun(5e5), few, BisectMetric::kTime), HasSubstr("fewer than 3 samples"));
  ResultSet without;
  EXPECT_THAT(ReadError(MakeRun(5e5), without, BisectMetric::kTime),
              HasSubstr("no case of near was measured"));
}

}  // namespace
}  // namespace tfb
