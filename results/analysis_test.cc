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

}  // namespace
}  // namespace tfb
