// Tests what texts of series take. history_page_browser_test reads them again.

#include "results/history/page/series_text.h"

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "results/history/page/synthetic_history.h"

namespace tfb {
namespace {

std::vector<int> AllRuns(int count) {
  std::vector<int> runs(count);
  std::iota(runs.begin(), runs.end(), 0);
  return runs;
}

// Values around 1 with a uniform noise of this size.
std::vector<double> Noisy(int count, double noise) {
  uint64_t state = 7;
  std::vector<double> values;
  for (int i = 0; i < count; ++i) {
    values.push_back(std::exp(noise * (synthetic::NextUniform(&state) - 0.5)));
  }
  return values;
}

TEST(SeriesText, AConstantTakesAFewBytes) {
  const std::vector<double> values(1000, 4 << 20);
  EXPECT_EQ(SeriesText(AllRuns(1000), values, {}, {}, false).size(),
            4u + 2u + std::string("4194304 ").size());
}

TEST(SeriesText, NeedsNoEscapeInJsonNorInHtml) {
  std::vector<double> values = Noisy(3000, 3);
  values[1000] = std::nan("");
  values[1001] = 0;
  values[1002] = -HUGE_VAL;
  for (const bool exact : {false, true}) {
    const std::string text = SeriesText(AllRuns(3000), values, {500}, {}, exact);
    EXPECT_EQ(text.find_first_of("\"&'<>\\"), std::string::npos);
    for (const char c : text) EXPECT_TRUE(c >= ' ' && c <= '~') << c;
  }
}

TEST(SeriesText, GrowsLittleWithTheNumberOfRuns) {
  const size_t thousand = SeriesText(AllRuns(1000), Noisy(1000, 0.1), {}, {}, false).size();
  const size_t million = SeriesText(AllRuns(1000000), Noisy(1000000, 0.1), {}, {}, false).size();
  EXPECT_LT(thousand, 600u);
  EXPECT_LT(million, thousand * 1.3);
}

TEST(SeriesText, TakesTheExactFormOnlyWhereItIsShorter) {
  std::vector<double> two(1000, 1 / 3.0);
  two[400] = 1 / 7.0;
  EXPECT_EQ(SeriesText(AllRuns(1000), two, {}, {}, false),
            SeriesText(AllRuns(1000), two, {}, {}, true));
  const std::vector<double> noisy = Noisy(1000, 0.1);
  EXPECT_LT(10 * SeriesText(AllRuns(1000), noisy, {}, {}, false).size(),
            SeriesText(AllRuns(1000), noisy, {}, {}, true).size());
}

TEST(SeriesText, ReducesOnlyWhatIsMoreThanThreeTimesTheGroups) {
  Detail detail;
  EXPECT_EQ(LargestGroup(0, detail), 1);
  EXPECT_EQ(LargestGroup(detail.latest + 3 * detail.groups, detail), 1);
  EXPECT_EQ(LargestGroup(detail.latest + 3 * detail.groups + 1, detail), 4);
  EXPECT_EQ(LargestGroup(detail.latest + 100 * detail.groups, detail), 100);
}

}  // namespace
}  // namespace tfb
