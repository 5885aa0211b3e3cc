#include "core/text_plot.h"

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> LinesOf(const TextPlot& plot) {
  return absl::StrSplit(ToText(plot), '\n');
}

TEST(TextPlot, MarksAreInTheNearestCellsAndAxesAtRoundNumbers) {
  TextPlot plot{"layers", "bits", {{'o', "fixed", {{1, 3}, {2, 2}, {3, 1}}}}, 21, 5};
  plot.series.push_back({'x', "learned", {{1.5, 1.5}}});
  EXPECT_THAT(LinesOf(plot),
              ElementsAre("bits",                              //
                          "      3.0 +o",                      //
                          "      2.5 +",                       //
                          "      2.0 +          o",            //
                          "      1.5 +     x",                 //
                          "      1.0 +                    o",  //
                          "          ++----+----+----+----+",  //
                          "           1.0 1.5  2.0  2.5  3.0  layers", "o fixed   x learned", ""));
}

TEST(TextPlot, ALaterSeriesIsDrawnOverAnEarlierOne) {
  const TextPlot plot{
      "x", "y", {{'o', "first", {{0, 0}, {1, 1}}}, {'x', "second", {{0, 0}}}}, 5, 2};
  const std::vector<std::string> lines = LinesOf(plot);
  EXPECT_EQ(lines[1].substr(10), "+    o");
  EXPECT_EQ(lines[2].substr(10), "+x");
}

TEST(TextPlot, OnePointHasItsOwnNumbersAsLabels) {
  const TextPlot plot{"x", "y", {{'o', "one", {{1234, -0.125}}}}, 9, 2};
  EXPECT_THAT(LinesOf(plot), ElementsAre("y",                     //
                                         "          |",           //
                                         "   -0.125 +o",          //
                                         "          ++--------",  //
                                         "           1234  x", "o one", ""));
}

TEST(TextPlot, WhatIsNotFiniteIsLeftOutAndNothingIsNoPlot) {
  const double nan = std::nan("");
  const TextPlot plot{"x", "y", {{'o', "one", {{0, 0}, {nan, 1}, {1, INFINITY}, {1, 1}}}}, 5, 3};
  const TextPlot finite{"x", "y", {{'o', "one", {{0, 0}, {1, 1}}}}, 5, 3};
  EXPECT_EQ(ToText(plot), ToText(finite));
  EXPECT_EQ(ToText({"x", "y", {{'o', "none", {{nan, nan}}}}}), "");
  EXPECT_EQ(ToText({"x", "y", {}}), "");
}

TEST(TextPlot, TicksOfSmallAndLargeRangesHaveThePlacesOfTheirStep) {
  const TextPlot plot{"x", "y", {{'o', "s", {{0, 1.60}, {90000, 1.66}}}}, 40, 7};
  EXPECT_THAT(LinesOf(plot),
              ElementsAre("y",                                                    //
                          "     1.66 +                                       o",  //
                          "          |",                                          //
                          "     1.64 +",                                          //
                          "          |",                                          //
                          "     1.62 +",                                          //
                          "          |",                                          //
                          "     1.60 +o",                                         //
                          "          ++--------+-------+--------+--------+----",  //
                          "           0      20000   40000    60000    80000  x", "o s", ""));
}

TEST(TextPlot, AxesHaveAtMostSixAndFiveGaps) {
  const TextPlot full{"x", "y", {{'o', "s", {{0, 0}, {6, 5}}}}, 25, 6};
  EXPECT_THAT(LinesOf(full),
              ElementsAre("y",                                     //
                          "        5 +                        o",  //
                          "        4 +",                           //
                          "        3 +",                           //
                          "        2 +",                           //
                          "        1 +",                           //
                          "        0 +o",                          //
                          "          ++---+---+---+---+---+---+",  //
                          "           0   1   2   3   4   5   6  x", "o s", ""));
  const TextPlot more{"x", "y", {{'o', "s", {{0, 0}, {7, 6}}}}, 29, 7};
  EXPECT_THAT(LinesOf(more),
              ElementsAre("y",                                         //
                          "        6 +                            o",  //
                          "          |",                               //
                          "        4 +",                               //
                          "          |",                               //
                          "        2 +",                               //
                          "          |",                               //
                          "        0 +o",                              //
                          "          ++-------+-------+-------+----",  //
                          "           0       2       4       6  x", "o s", ""));
}

TEST(TextPlot, ALabelWithoutRoomIsLeftOut) {
  const TextPlot plot{"x", "y", {{'o', "s", {{100, 0}, {107, 0}}}}, 14, 1};
  EXPECT_THAT(LinesOf(plot), ElementsAre("y",                          //
                                         "        0 +o            o",  //
                                         "          ++---+--+---+--",  //
                                         "           100   104 106  x", "o s", ""));
}

}  // namespace
}  // namespace tfb
