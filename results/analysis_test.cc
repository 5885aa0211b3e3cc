#include "results/analysis.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "results/synthetic.h"

namespace tfb {
namespace {

// Makes a case of a technique that is held against itself with as much memory as tokens.
Case MakeChain(int64_t memory, int64_t tokens) {
  synthetic::CaseSpec spec;
  spec.technique = "chain";
  spec.option_name = "memory";
  spec.option_value = absl::StrCat(memory);
  spec.tokens = tokens;
  Case result = synthetic::MakeCase(spec);
  TechniqueDescription* technique = result.mutable_technique();
  technique->set_options_are_default(memory != tokens);
  technique->set_dense_counterpart("chain");
  (*technique->mutable_dense_counterpart_options())["memory"] = absl::StrCat(tokens);
  return result;
}

// At 256 tokens a counterpart is shared by memories of 1 and 2, at 512 by those of 2 and 3: both
// counterparts are one row, whatever technique is first in the file.
TEST(Analysis, CounterpartsThatShareATechniqueAreOneRowInAnyOrderOfTheFile) {
  const std::vector<Case> cases = {MakeChain(1, 256), MakeChain(2, 256),   MakeChain(2, 512),
                                   MakeChain(3, 512), MakeChain(256, 256), MakeChain(512, 512)};
  std::vector<int> order(cases.size());
  std::iota(order.begin(), order.end(), 0);
  std::string key;
  do {
    ResultSet results;
    *results.add_environments() = synthetic::MakeEnvironment();
    for (const int i : order) *results.add_cases() = cases[i];
    const Analysis analysis(results);
    ASSERT_EQ(analysis.groups().size(), 1u);
    EXPECT_EQ(analysis.groups()[0].series.size(), 4u);
    for (const Case* result : analysis.cases()) {
      const Series* series = analysis.SeriesOf(*result);
      const bool is_counterpart = !result->technique().options_are_default();
      EXPECT_EQ(series->is_counterpart, is_counterpart);
      if (!is_counterpart) continue;
      if (key.empty()) key = series->row_key;
      EXPECT_EQ(series->row_key, key);
      EXPECT_EQ(series->name, "chain (dense counterpart)");
    }
  } while (std::next_permutation(order.begin(), order.begin() + 4));
  EXPECT_NE(key.find("options=memory%3D1 "), std::string::npos) << key;
}

// A forward and a training case of "plain" and of "near" at 256 and 512 tokens, whose training step
// gains less over dense than its run, and an error of the forward cases.
ResultSet MakePasses() {
  ResultSet results;
  *results.add_environments() = synthetic::MakeEnvironment();
  for (const Case::Pass pass : {Case::PASS_FORWARD, Case::PASS_TRAINING}) {
    for (const char* technique : {"plain", "near"}) {
      for (const int64_t tokens : {256, 512}) {
        synthetic::CaseSpec spec;
        spec.technique = technique;
        spec.tokens = tokens;
        spec.pass = pass;
        const double gain = technique[0] == 'p' ? 1 : pass == Case::PASS_FORWARD ? 4 : 2;
        spec.median_ns = 1e3 * static_cast<double>(tokens) / gain;
        *results.add_cases() = synthetic::MakeCase(spec);
      }
    }
  }
  return results;
}

TEST(Analysis, EachPassIsAGroupWithItsOwnDenseCasesTheForwardPassFirst) {
  ResultSet results = MakePasses();
  for (int i = 0; i < 4; ++i) results.mutable_cases()->SwapElements(i, i + 4);
  const Analysis analysis(results);
  EXPECT_EQ(analysis.groups().front().first().key().pass(), Case::PASS_FORWARD);
  EXPECT_EQ(analysis.passes(), (std::vector<Case::Pass>{Case::PASS_FORWARD, Case::PASS_TRAINING}));
  ASSERT_EQ(analysis.groups().size(), 2u);
  for (const SeriesGroup& group : analysis.groups()) {
    const Case::Pass pass = group.first().key().pass();
    ASSERT_EQ(group.series.size(), 2u);
    for (const Series& series : group.series) {
      for (const Case* result : series.cases) EXPECT_EQ(result->key().pass(), pass);
      const double gain = series.is_baseline ? 1 : pass == Case::PASS_FORWARD ? 4 : 2;
      EXPECT_NEAR(series.speed_ups.at(512).ratio, gain, 1e-9);
    }
  }
  // A row of a technique has one key, whatever the pass: its errors are found by it.
  EXPECT_EQ(analysis.groups()[0].series[1].row_key, analysis.groups()[1].series[1].row_key);
}

TEST(Analysis, ASpeedUpIsThatOfTheVisitsInCommon) {
  ResultSet results;
  *results.add_environments() = synthetic::MakeEnvironment();
  for (const char* technique : {"plain", "near"}) {
    synthetic::CaseSpec spec;
    spec.technique = technique;
    spec.median_ns = 0;
    *results.add_cases() = synthetic::MakeCase(spec);
  }
  Case *dense = results.mutable_cases(0), *near = results.mutable_cases(1);
  for (const int64_t start : {1, 2, 3}) {  // before the machine became twice as slow
    synthetic::AddVisit(start, synthetic::Samples(4e6), dense);
  }
  synthetic::AddVisit(4, synthetic::Samples(8e6), dense);
  synthetic::AddVisit(4, synthetic::Samples(2e6), near);
  const Analysis analysis(results);
  const Series& series = *analysis.SeriesOf(*near);
  EXPECT_NEAR(series.speed_ups.at(512).ratio, 4, 1e-9);
  EXPECT_NEAR(series.run_ns.at(512).median, 2e6, 1e-3);
  EXPECT_NEAR(analysis.SeriesOf(*dense)->run_ns.at(512).median, 4e6, 1e5);
}

TEST(Analysis, TheForwardCaseOfATrainingStepDiffersOnlyInThePass) {
  ResultSet results = MakePasses();
  results.mutable_cases(1)->mutable_key()->set_seed(2);  // forward, "plain" at 512 tokens
  const Analysis analysis(results);
  EXPECT_EQ(analysis.ForwardOf(results.cases(0)), &results.cases(0));
  EXPECT_EQ(analysis.ForwardOf(results.cases(4)), &results.cases(0));
  EXPECT_EQ(analysis.ForwardOf(results.cases(5)), nullptr);
  EXPECT_EQ(analysis.ForwardOf(results.cases(6)), &results.cases(2));
}

}  // namespace
}  // namespace tfb
