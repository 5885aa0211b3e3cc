#include "results/plot.h"

#include <stdio.h>

#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "results/markup.h"
#include "results/plot_axis.h"
#include "results/plot_labels.h"
#include "results/plot_style.h"
#include "results/well_formed.h"

namespace tfb {
namespace plot {
namespace {

using ::testing::ElementsAre;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<std::string> Labels(const std::vector<Tick>& ticks) {
  std::vector<std::string> labels;
  for (const Tick& tick : ticks) {
    if (!tick.label.empty()) labels.push_back(tick.label);
  }
  return labels;
}

Axis Linear() {
  Axis axis;
  axis.logarithmic = false;
  return axis;
}
Axis Binary() {
  Axis axis;
  axis.base = 2;
  return axis;
}

Curve CurveThrough(std::vector<Point> points, Curve::Kind kind = Curve::Kind::kLine) {
  Curve curve;
  curve.name = curve.description = "near";
  curve.key = "k";
  curve.kind = kind;
  curve.points = std::move(points);
  return curve;
}

Plot PlotOf(std::vector<Curve> curves) {
  Plot plot;
  plot.title = "title";
  plot.x.title = "tokens";
  plot.y.title = "time";
  plot.curves = std::move(curves);
  return plot;
}

// Returns the corners of the first drawn line.
std::vector<std::pair<double, double>> LineOf(const std::string& svg) {
  const std::string begin = "<path class=\"line\" d=\"M";
  const size_t at = svg.find(begin);
  std::vector<std::pair<double, double>> corners;
  if (at == std::string::npos) return corners;
  const size_t from = at + begin.size();
  const std::string path = svg.substr(from, svg.find('"', from) - from);
  for (const absl::string_view corner : absl::StrSplit(path, 'L')) {
    const std::vector<std::string> xy = absl::StrSplit(corner, ' ');
    double x = kNan, y = kNan;
    EXPECT_TRUE(absl::SimpleAtod(xy[0], &x) && absl::SimpleAtod(xy[1], &y)) << corner;
    corners.emplace_back(x, y);
  }
  return corners;
}

TEST(Markup, EscapesWhatMarkupMeansAndReplacesWhatXmlForbids) {
  EXPECT_EQ(EscapeMarkup("<script>&\"'</script>"), "&lt;script&gt;&amp;&quot;&#39;&lt;/script&gt;");
  EXPECT_EQ(EscapeMarkup("µs · n²"), "µs · n²");
  const std::string replaced = "\xef\xbf\xbd";
  EXPECT_EQ(EscapeMarkup(absl::string_view("a\0\x1b\x7f", 4)),
            absl::StrCat("a", replaced, replaced, "\x7f"));
  EXPECT_EQ(EscapeMarkup("\xff"), replaced);
  EXPECT_EQ(EscapeMarkup("\xc3"), replaced);                                // cut
  EXPECT_EQ(EscapeMarkup("\xc0\xaf"), replaced + replaced);                 // overlong
  EXPECT_EQ(EscapeMarkup("\xef\xbf\xbe"), replaced + replaced + replaced);  // U+FFFE
  EXPECT_EQ(EscapeMarkup("\xed\xa0\x80"), replaced + replaced + replaced);  // a surrogate
  EXPECT_EQ(EscapeMarkup("\xc2\x85"), replaced + replaced);                 // a control character
}

TEST(Markup, CoordinatesHaveNoExponentAndNoZerosAtTheEnd) {
  EXPECT_EQ(Coordinate(1.5), "1.5");
  EXPECT_EQ(Coordinate(100), "100");
  EXPECT_EQ(Coordinate(-0.001), "0");
  EXPECT_EQ(Coordinate(1e-9), "0");
  EXPECT_EQ(Coordinate(kNan), "0");
  EXPECT_EQ(Coordinate(kInfinity), "0");
}

TEST(Scale, MapsLogarithmicallyBetweenItsEnds) {
  const Scale scale(Axis(), {1, 100}, 0, 200);
  EXPECT_DOUBLE_EQ(scale.Pixel(1), 0);
  EXPECT_DOUBLE_EQ(scale.Pixel(10), 100);
  EXPECT_DOUBLE_EQ(scale.Pixel(100), 200);
  const Scale upwards(Linear(), {0, 4}, 100, 0);
  EXPECT_DOUBLE_EQ(upwards.Pixel(1), 75);
}

TEST(Scale, LabelsPowersOfTenAndBetweenThemWhereThereIsRoom) {
  EXPECT_THAT(Labels(Scale(Axis(), {0.9, 1100}, 0, 240).Ticks(60)),
              ElementsAre("1", "10", "100", "1000"));
  EXPECT_THAT(Labels(Scale(Axis(), {0.9, 110}, 0, 600).Ticks(60)),
              ElementsAre("1", "2", "5", "10", "20", "50", "100"));
  // Every fourth power of 24, with nothing between.
  const std::vector<Tick> wide = Scale(Axis(), {1e-12, 1e12}, 0, 360).Ticks(60);
  EXPECT_THAT(Labels(wide),
              ElementsAre("1e-12", "1e-08", "0.0001", "1", "10000", "1e+08", "1e+12"));
}

TEST(Scale, LabelsPowersOfTwo) {
  EXPECT_THAT(Labels(Scale(Binary(), {200, 5000}, 0, 500).Ticks(60)),
              ElementsAre("256", "512", "1024", "2048", "4096"));
  EXPECT_THAT(Labels(Scale(Binary(), {200, 5000}, 0, 150).Ticks(60)), ElementsAre("512", "4096"));
}

TEST(Scale, LabelsRoundNumbersOnLinearAndOnShortAxes) {
  EXPECT_THAT(Labels(Scale(Linear(), {-0.05, 1.05}, 0, 360).Ticks(60)),
              ElementsAre("0", "0.2", "0.4", "0.6", "0.8", "1"));
  // Less than a factor of five: between two powers of ten there would be one label or none.
  EXPECT_THAT(Labels(Scale(Axis(), {2.4, 3.3}, 0, 300).Ticks(60)),
              ElementsAre("2.4", "2.6", "2.8", "3", "3.2"));
  for (const double high : {11.0, 19.0, 45.0, 70.0, 95.0, 150.0}) {
    EXPECT_GE(Labels(Scale(Axis(), {9.9, high}, 0, 120).Ticks(60)).size(), 2u) << high;
  }
}

TEST(Range, LeavesAirAroundValuesAndIsNeverEmpty) {
  const Range range = RangeOf(Axis(), {1, 100});
  EXPECT_NEAR(range.low, std::pow(100, -0.05), 1e-12);
  EXPECT_NEAR(range.high, std::pow(100, 1.05), 1e-9);
  for (const Axis& axis : {Axis(), Binary(), Linear()}) {
    for (const std::vector<double>& values : {std::vector<double>{},
                                              {0},
                                              {512},
                                              {512, 512},
                                              {kNan, kInfinity, -kInfinity},
                                              {-1, 0},
                                              {1e-320, 1e308},
                                              {5e-324},
                                              {1.7e308},
                                              {-1.7e308, 1.7e308},
                                              {1e-100, 1e100},
                                              {-1e100, 1e100}}) {
      const Range degenerate = RangeOf(axis, values);
      EXPECT_LT(degenerate.low, degenerate.high);
      EXPECT_TRUE(std::isfinite(degenerate.low) && std::isfinite(degenerate.high));
      const Scale scale(axis, degenerate, 0, 300);
      EXPECT_LT(scale.Ticks(60).size(), 1000u);
      for (const Tick& tick : scale.Ticks(60)) EXPECT_TRUE(std::isfinite(scale.Pixel(tick.value)));
    }
  }
}

TEST(Spread, KeepsLabelsApartWithinTheirColumn) {
  EXPECT_THAT(Spread({10, 50, 90}, 12, 0, 100), ElementsAre(10, 50, 90));
  EXPECT_THAT(Spread({50, 50}, 12, 0, 100), ElementsAre(44, 56));
  EXPECT_THAT(Spread({0, 1}, 12, 0, 100), ElementsAre(0, 12));
  EXPECT_THAT(Spread({99, 100}, 12, 0, 100), ElementsAre(88, 100));
  EXPECT_THAT(Spread({90, 10}, 12, 0, 100), ElementsAre(90, 10));  // in the order given
  EXPECT_THAT(Spread({}, 12, 0, 100), ElementsAre());
  const std::vector<double> crowded = Spread(std::vector<double>(11, 50), 12, 0, 100);
  EXPECT_DOUBLE_EQ(crowded.front(), 0);
  EXPECT_DOUBLE_EQ(crowded.back(), 100);
  EXPECT_DOUBLE_EQ(crowded[1] - crowded[0], 10);
}

TEST(PlaceLabels, LeavesNoLabelOnAnotherOrOnAPoint) {
  std::vector<PointLabel> labels;
  std::vector<Box> obstacles;
  for (int i = 0; i < 30; ++i) {
    const double x = 100 + 7 * (i % 6), y = 100 + 7 * (i / 6);
    labels.push_back({x, y, absl::StrCat("technique_", i), i < 5});
    obstacles.push_back({x - 4, y - 4, 8, 8});
  }
  const Box area{0, 0, 400, 300};
  Obstacles all;
  all.points = obstacles;
  all.lines = {{0, 90, 400, 90}, {150, 0, 150, 300}};
  const std::vector<Line> lines = all.lines;
  const auto places = PlaceLabels(labels, area, 10, &all);
  std::vector<Box> taken = obstacles;
  int placed = 0;
  for (const auto& place : places) {
    if (!place.has_value()) continue;
    ++placed;
    EXPECT_TRUE(area.Contains(place->box));
    for (const Box& box : taken) EXPECT_FALSE(place->box.Overlaps(box));
    for (const Line& line : lines) EXPECT_FALSE(line.Crosses(place->box));
    taken.push_back(place->box);
  }
  EXPECT_GE(placed, 5);
  EXPECT_LT(placed, 30);  // there is no room for all labels around the crowd
  // No leader crosses another label.
  for (size_t i = 0; i < places.size(); ++i) {
    if (!places[i].has_value() || !places[i]->with_leader) continue;
    const Line leader = LeaderOf(labels[i], places[i]->box);
    for (size_t j = 0; j < places.size(); ++j) {
      if (j == i || !places[j].has_value()) continue;
      EXPECT_FALSE(leader.Crosses(places[j]->box));
    }
  }
}

TEST(PlaceLabels, ALabelStandsToTheRightOfItsPointThenToTheLeftAboveAndBelow) {
  // Two columns of 0.6 of the size, and lines of 1.1 of it: 12 by 11, with 7 to the point.
  const std::vector<PointLabel> labels(4, {100, 50, "ab"});
  Obstacles none;
  const auto places = PlaceLabels(labels, {0, 0, 200, 100}, 10, &none);
  const Box expected[] = {
      {107, 44.5, 12, 11}, {81, 44.5, 12, 11}, {94, 32, 12, 11}, {94, 57, 12, 11}};
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(places[i].has_value()) << i;
    EXPECT_FALSE(places[i]->with_leader) << i;
    EXPECT_NEAR(places[i]->box.x, expected[i].x, 1e-9) << i;
    EXPECT_NEAR(places[i]->box.y, expected[i].y, 1e-9) << i;
    EXPECT_NEAR(places[i]->box.width, expected[i].width, 1e-9) << i;
    EXPECT_NEAR(places[i]->box.height, expected[i].height, 1e-9) << i;
  }
}

// The middle of a label is a label's half further from the point than its nearest side, so that it
// lies on an ellipse around the point.
TEST(PlaceLabels, InEveryDirectionTheNearestSideHasTheDistanceOfItsStep) {
  const PointLabel label{200, 150, "0.18", false, /*short_text=*/true};
  Obstacles before;  // places that are taken, which lines to labels may cross
  std::set<double> distances;
  for (int i = 0; i < 40; ++i) {
    Obstacles obstacles = before;
    const auto place = PlaceLabels({label}, {0, 0, 400, 300}, 10, &obstacles)[0];
    ASSERT_TRUE(place.has_value()) << i;
    before.points.push_back(place->box);
    const Box& box = place->box;
    const double x = box.x + box.width / 2 - label.x, y = box.y + box.height / 2 - label.y;
    double nearest = kInfinity, distance = 0;
    for (double d = 7; d < 7 + 24 * 6; d += 6) {
      const double off =
          std::abs(std::hypot(x / (d + box.width / 2), y / (d + box.height / 2)) - 1);
      if (off >= nearest) continue;
      nearest = off;
      distance = d;
    }
    EXPECT_NEAR(nearest, 0, 1e-12) << box.x << ", " << box.y;
    EXPECT_EQ(place->with_leader, distance > 7);
    distances.insert(distance);
  }
  EXPECT_GE(distances.size(), 3u);
  EXPECT_EQ(distances.count(7), 1u);
}

TEST(Line, CrossesBoxesThatItEntersAndNoOthers) {
  const Box box{10, 10, 20, 10};
  EXPECT_TRUE((Line{0, 0, 40, 30}.Crosses(box)));
  EXPECT_TRUE((Line{15, 12, 16, 13}.Crosses(box)));  // within it
  EXPECT_TRUE((Line{20, 0, 20, 50}.Crosses(box)));
  EXPECT_FALSE((Line{0, 0, 5, 5}.Crosses(box)));  // ends before it
  EXPECT_FALSE((Line{0, 25, 40, 25}.Crosses(box)));
  EXPECT_FALSE((Line{0, 20, 40, 20}.Crosses(box)));  // along its edge
}

TEST(Plot, AFileNamesEveryPointBesideItOrInAListBelow) {
  Plot plot;
  for (int i = 0; i < 40; ++i) {
    Curve curve;
    curve.kind = Curve::Kind::kScatter;
    curve.name = absl::StrCat("technique_", i, "_of_many");
    curve.name_needed = false;
    curve.points = {{1 + 0.01 * (i % 7), 1 + 0.01 * (i / 7), {}, {}}};
    plot.curves.push_back(curve);
  }
  plot.curves.push_back(plot.curves.back());
  plot.curves.back().points = {{2, 2, {}, {}}};
  const std::string svg = DrawFile({plot}, 1, "crowd");
  EXPECT_EQ(MarkupProblem(svg, false), "");
  for (int i = 0; i < 40; ++i) {
    EXPECT_TRUE(absl::StrContains(svg, absl::StrCat("technique_", i, "_of_many"))) << i;
  }
  EXPECT_TRUE(absl::StrContains(svg, ">1</text>")) << svg;
}

TEST(Plot, DrawsAPowerLawAsAStraightLineOfItsSlope) {
  const std::string svg = DrawForPage(
      PlotOf({CurveThrough({{256, 1, {}, {}}, {1024, 16, {}, {}}, {4096, 256, {}, {}}})}), "p");
  const auto line = LineOf(svg);
  ASSERT_EQ(line.size(), 3u);
  EXPECT_NEAR(line[1].first, (line[0].first + line[2].first) / 2, 0.1);
  EXPECT_NEAR(line[1].second, (line[0].second + line[2].second) / 2, 0.1);
  EXPECT_LT(line[2].second, line[0].second);  // upwards
}

TEST(Plot, LeavesOutPointsWithoutAPlace) {
  const std::string svg = DrawForPage(PlotOf({CurveThrough({{256, 1, {}, {}},
                                                            {512, kNan, {}, {}},
                                                            {1024, 0, {}, {}},
                                                            {2048, kInfinity, {}, {}},
                                                            {-1, 3, {}, {}},
                                                            {4096, 256, {}, {}}})}),
                                      "p");
  EXPECT_EQ(LineOf(svg).size(), 2u);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
}

TEST(Plot, IsWellFormedWhateverItHolds) {
  const std::vector<std::vector<Point>> degenerate = {
      {},
      {{512, 1, {}, {}}},
      {{512, 1, {}, {}}, {512, 2, {}, {}}},
      {{512, 0, {}, {}}},
      {{kNan, kNan, {}, {}}},
      {{1e-300, 1e300, 0, kInfinity}, {1e300, 1e-300, kNan, 1}}};
  for (const auto& points : degenerate) {
    for (const Curve::Kind kind :
         {Curve::Kind::kLine, Curve::Kind::kCounterpart, Curve::Kind::kScatter}) {
      Plot plot = PlotOf({CurveThrough(points, kind)});
      plot.curves[0].name = plot.curves[0].description = "</svg><script>alert(\"1\")</script>&";
      plot.curves[0].key = plot.curves[0].group = "\"'><";
      plot.title = plot.subtitle = "<b>";
      plot.slopes = {{2, "n²"}, {1, "n"}};
      plot.guides.resize(1);
      plot.guides[0].label = "<i>";
      plot.guides[0].points = {{1, 1, {}, {}}, {10, 10, {}, {}}};
      plot.marks.push_back({{512, 1, {}, {}}, 0, "\"", "<"});
      plot.keys = {{"<k>", 0, Curve::Kind::kLine, false, true}};
      for (const std::string& svg :
           {DrawForPage(plot, "p"), DrawFile({plot, plot, plot}, 2, "<t>")}) {
        EXPECT_EQ(MarkupProblem(svg, false), "") << svg;
        EXPECT_FALSE(absl::StrContains(svg, "<script"));
        EXPECT_FALSE(absl::StrContains(svg, "<i>"));
        for (const char* number : {"\"nan", " nan", "Mnan", "inf ", "-inf", "1e+"}) {
          EXPECT_FALSE(absl::StrContains(svg, number)) << number << " in " << svg;
        }
      }
    }
  }
}

TEST(Plot, TellsCurvesApartWithoutColour) {
  std::vector<Curve> curves;
  for (int style = 0; style < kStyles; ++style) {
    curves.push_back(CurveThrough({{1, 1.0 + style, {}, {}}, {2, 2.0 + style, {}, {}}}));
    curves.back().style = style;
    curves.back().name = absl::StrCat("curve ", style);
  }
  const std::string svg = DrawForPage(PlotOf(curves), "p");
  for (int style = 0; style < kStyles; ++style) {
    EXPECT_TRUE(absl::StrContains(svg, absl::StrCat(">curve ", style, "</text>")));
  }
  std::set<std::string> swatches;
  for (int style = kReferenceStyle; style < 7 * kStyles; ++style) {
    swatches.insert(DrawSwatch(style, Curve::Kind::kScatter));
  }
  EXPECT_EQ(swatches.size(), 7u * kStyles + 1);
}

TEST(Plot, AGuideHasItsLabelWhereBothEndsOfTheLastPieceHaveAPlace) {
  const auto has_label = [](const Point& a, const Point& b) {
    Plot plot = PlotOf({CurveThrough({{1, 1, {}, {}}, {100, 100, {}, {}}})});
    plot.guides.resize(1);
    plot.guides[0].label = "the bound";
    plot.guides[0].points = {a, b};
    return absl::StrContains(DrawForPage(plot, "p"), "the bound");
  };
  EXPECT_TRUE(has_label({2, 3, {}, {}}, {50, 60, {}, {}}));
  EXPECT_FALSE(has_label({2, kNan, {}, {}}, {50, 60, {}, {}}));
  EXPECT_FALSE(has_label({2, 3, {}, {}}, {50, -1, {}, {}}));
}

TEST(Plot, ALegendFillsItsLinesFromTheSameHeightOn) {
  for (double width = 40; width < 600; width += 7) {
    Plot plot = PlotOf({});
    plot.width = width;
    double end = 0, last_y = 0;  // of the entry before
    for (int i = 0; i < 6; ++i) {
      plot.keys.push_back({absl::StrCat(std::string(3 + 7 * i % 20, 'n'), " ", i), 0,
                           Curve::Kind::kLine, false, false});
    }
    const std::string svg = DrawForPage(plot, "p");
    for (size_t i = 0; i < plot.keys.size(); ++i) {
      const size_t at = svg.rfind("<text", svg.find(absl::StrCat(">", plot.keys[i].text, "<")));
      double x = 0, y = 0;
      ASSERT_EQ(sscanf(svg.c_str() + at, "<text x=\"%lf\" y=\"%lf\"", &x, &y), 2);
      const double length = 40 + TextWidth(plot.keys[i].text, 10.5);
      const bool is_first = i == 0 || y != last_y;
      EXPECT_NEAR(x - 26, is_first ? 8 : end, 0.01) << width;
      if (i == 0) {
        EXPECT_NEAR(y, 31, 0.01) << width;
      } else if (is_first) {
        EXPECT_NEAR(y, last_y + 15, 0.01) << width;
        EXPECT_GT(end + length, width - 8) << width;
      } else {
        EXPECT_LE(end + length, width - 8) << width;
      }
      end = (is_first ? 8 : end) + length;
      last_y = y;
    }
  }
}

// Coordinates are rounded to tenths of a pixel.
TEST(Plot, AWhiskerIsDrawnWhereItReachesBeyondTheMarker) {
  const auto whisker = [](double half) {
    Plot plot = PlotOf(
        {CurveThrough({{0, 0, {}, {}}, {50, 50, 50 - half, 50 + half}, {100, 100, {}, {}}})});
    plot.x = plot.y = Linear();
    const std::string svg = DrawForPage(plot, "p");
    const size_t at = svg.find("<path class=\"whisker\" d=\"M");
    double x = 0, low = 0, high = 0;
    if (at != std::string::npos) {
      EXPECT_EQ(sscanf(svg.c_str() + at, "<path class=\"whisker\" d=\"M%lf %lfL%lf %lf", &x, &low,
                       &x, &high),
                4);
    }
    return low - high;
  };
  const double unit = whisker(20) / 40;
  EXPECT_GT(unit, 0);
  for (const double pixels : {0.5, 2.9, 3.1, 5.9}) EXPECT_EQ(whisker(pixels / 2 / unit), 0);
  for (const double pixels : {6.1, 9.0}) EXPECT_NEAR(whisker(pixels / 2 / unit), pixels, 0.11);
}

TEST(Plot, AGuideThatIsShorterThanItsLabelHasItBesideItOrNotAtAll) {
  const auto label_of = [](Point from, Point to, std::vector<Point> points = {},
                           double width = 600) {
    points.push_back({1, 1, {}, {}});
    points.push_back({1e6, 1e6, {}, {}});
    Plot plot = PlotOf({});
    plot.width = width;
    for (const Point& point : points) {
      plot.curves.push_back(CurveThrough({point}, Curve::Kind::kScatter));
    }
    plot.guides.resize(1);
    plot.guides[0].label = "measured read 21.1 GB/s";
    plot.guides[0].points = {from, to};
    const std::string svg = DrawFile({plot}, 1, "a plot");
    const size_t end = svg.find(">measured read 21.1 GB/s<");
    if (end == std::string::npos) return std::string();
    const size_t begin = svg.rfind('<', end);
    return svg.substr(begin, end - begin);
  };
  const auto is_level = [](const std::string& label, const std::string& anchor) {
    return absl::StrContains(label, absl::StrCat("text-anchor=\"", anchor, "\"")) &&
           absl::StrContains(label, "rotate(0)");
  };
  // Along a long slope, and beside a short one: on its left or, at the left end, on its right.
  EXPECT_TRUE(
      absl::StrContains(label_of({1, 1, {}, {}}, {1e6, 1e6, {}, {}}), "text-anchor=\"middle\""));
  EXPECT_TRUE(is_level(label_of({5e5, 1e5, {}, {}}, {1e6, 2e5, {}, {}}), "end"));
  EXPECT_TRUE(is_level(label_of({10, 1e5, {}, {}}, {20, 2e5, {}, {}}), "start"));
  // Nowhere where it would cover a point or leave the frame.
  EXPECT_EQ(label_of({10, 1e5, {}, {}}, {20, 2e5, {}, {}}, {{40, 1.5e5, {}, {}}}), "");
  EXPECT_EQ(label_of({10, 2, {}, {}}, {20, 3, {}, {}}, {}, 150), "");
}

TEST(Plot, LabelsOfEqualLevelsDoNotCoverEachOther) {
  Plot plot = PlotOf({CurveThrough({{1, 1, {}, {}}, {100, 100, {}, {}}}, Curve::Kind::kScatter)});
  plot.guides.resize(3);
  for (Guide& guide : plot.guides) {
    guide.label = "the peak";
    guide.points = {{2, 50, {}, {}}, {90, 50, {}, {}}};
  }
  const std::string svg = DrawFile({plot}, 1, "a plot");
  // One stands above, one below, and a third has no room.
  const std::vector<std::string> parts = absl::StrSplit(svg, ">the peak<");
  EXPECT_EQ(parts.size(), 3u);
}

TEST(Plot, AGuideWhoseEndIsNotShownKeepsNoRoomForItsLabel) {
  const auto drawn = [](const std::string& label, std::vector<Point> guide) {
    Plot plot = PlotOf({});
    for (int i = 0; i < 3; ++i) {
      plot.curves.push_back(CurveThrough({{90.0 + i, 95, {}, {}}}, Curve::Kind::kScatter));
      plot.curves.back().name = absl::StrCat("point ", i);
    }
    plot.curves.push_back(CurveThrough({{1, 1, {}, {}}}, Curve::Kind::kScatter));
    plot.guides.resize(1);
    plot.guides[0].label = label;
    plot.guides[0].points = std::move(guide);
    return DrawForPage(plot, "p");
  };
  const Point a{2, 95, {}, {}}, b{90, 95, {}, {}}, nowhere{90, -1, {}, {}};
  EXPECT_NE(drawn("a label", {a, b}), drawn("", {a, b}));
  EXPECT_EQ(drawn("a label", {b, nowhere}), drawn("", {b, nowhere}));
  EXPECT_EQ(drawn("a label", {}), drawn("", {}));
}

TEST(Plot, EveryKeyHasTheSignOfItsCurve) {
  // Drawn without the curves, whose signs are the same.
  const auto counts = [](const KeyEntry& key) {
    Plot plot = PlotOf({});
    plot.keys = {key};
    const std::string svg = DrawForPage(plot, "p");
    std::vector<int> found;
    for (const char* part :
         {"class=\"ring\"", "class=\"line\"", "class=\"marker\"", " hollow\">"}) {
      int count = 0;
      for (size_t at = 0; (at = svg.find(part, at)) != std::string::npos; ++at) ++count;
      found.push_back(count);
    }
    return found;
  };
  EXPECT_EQ(counts({"of points"}), (std::vector<int>{0, 0, 1, 0}));
  EXPECT_EQ(counts({"of lines", 0, Curve::Kind::kLine}), (std::vector<int>{0, 1, 1, 0}));
  EXPECT_EQ(counts({"dense", 0, Curve::Kind::kCounterpart}), (std::vector<int>{0, 1, 0, 0}));
  EXPECT_EQ(counts({"open", 0, Curve::Kind::kScatter, true}), (std::vector<int>{0, 0, 1, 1}));
  EXPECT_EQ(counts({"best", 0, Curve::Kind::kScatter, false, true}),
            (std::vector<int>{1, 0, 0, 0}));
}

TEST(Plot, FilesHaveTheSizeOfPaperAndTheirColours) {
  Plot plot = PlotOf({CurveThrough({{1, 1, {}, {}}, {2, 2, {}, {}}})});
  plot.width = 90 * 96 / 25.4;
  plot.height = 60 * 96 / 25.4;
  const std::string svg = DrawFile({plot, plot, plot}, 2, "t");
  EXPECT_TRUE(absl::StrContains(svg, "width=\"180mm\" height=\"120mm\"")) << svg.substr(0, 300);
  EXPECT_TRUE(absl::StrContains(svg, "fill=\"#fff\""));
  EXPECT_FALSE(absl::StrContains(svg, "var("));
  EXPECT_FALSE(absl::StrContains(svg, "tabindex"));
  EXPECT_EQ(DrawFile({}, 2, "t"), "");
}

TEST(Plot, SlopesAreAsSteepAsTheAxesMakeThem) {
  Plot plot = PlotOf({CurveThrough({{256, 1, {}, {}}, {4096, 256, {}, {}}})});
  plot.slopes = {{2, "n²"}};
  const std::string svg = DrawForPage(plot, "p");
  const auto line = LineOf(svg);
  const size_t at = svg.find("stroke-dasharray=\"3 2\" d=\"M");
  ASSERT_NE(at, std::string::npos);
  double x1, y1, x2, y2;
  ASSERT_EQ(
      sscanf(svg.c_str() + at, "stroke-dasharray=\"3 2\" d=\"M%lf %lfL%lf %lf", &x1, &y1, &x2, &y2),
      4);
  EXPECT_NEAR((y2 - y1) / (x2 - x1),
              (line[1].second - line[0].second) / (line[1].first - line[0].first), 0.01);
}

// Returns the markup of the fan of slopes.
std::string FanOf(const std::string& svg) {
  const size_t at = svg.find("<g class=\"slope\"");
  return at == std::string::npos ? "" : svg.substr(at, svg.find("</g>", at) - at);
}

TEST(Plot, EachSlopeHasItsLabelBesideItsEnd) {
  Plot plot = PlotOf({CurveThrough({{256, 1, {}, {}}, {4096, 256, {}, {}}})});
  plot.slopes = {{1, "n"}, {1.5, "n√n"}, {2, "n²"}};
  const std::string fan = FanOf(DrawForPage(plot, "p"));
  double last_y = kInfinity;
  size_t line_at = 0, text_at = 0;
  for (const Plot::Slope& slope : plot.slopes) {
    line_at = fan.find("<path", line_at + 1);
    text_at = fan.find("<text", text_at + 1);
    ASSERT_NE(text_at, std::string::npos) << fan;
    EXPECT_EQ(fan.find(absl::StrCat(">", slope.label, "</text>"), text_at), fan.find('>', text_at));
    double x1, y1, x2, y2, x, y;
    ASSERT_EQ(
        sscanf(fan.c_str() + fan.find(" d=", line_at), " d=\"M%lf %lfL%lf %lf", &x1, &y1, &x2, &y2),
        4);
    ASSERT_EQ(sscanf(fan.c_str() + fan.find(" x=", text_at), " x=\"%lf\" y=\"%lf", &x, &y), 2)
        << fan;
    EXPECT_GT(x, x2);
    EXPECT_LT(x, x2 + 10);
    EXPECT_NEAR(y, y2, 10) << slope.label;
    EXPECT_LT(y, last_y);  // steeper ones end higher
    last_y = y;
  }
  EXPECT_EQ(fan.find("<path", line_at + 1), std::string::npos);
  EXPECT_EQ(fan.find("<text", text_at + 1), std::string::npos) << fan;
}

// The fan stands above at the left, unless the corner below at the right has fewer places of curves.
// A piece of a curve counts by eight places along it, and so does a curve's last point.
TEST(Plot, SlopesStandInTheEmptierCorner) {
  const auto at = [](double u, double v) {  // shares of the range of the axes
    return Point{std::pow(10, 4 * u), std::pow(10, 4 * v), {}, {}};
  };
  const auto is_above = [&](const std::vector<std::vector<Point>>& curves) {
    Plot plot = PlotOf({});
    for (const auto& points : curves) plot.curves.push_back(CurveThrough(points));
    plot.slopes = {{1, "n"}};
    plot.room = {at(0, 0), at(1, 1)};
    double x = kNan;
    const std::string fan = FanOf(DrawForPage(plot, "p"));
    EXPECT_EQ(sscanf(fan.c_str() + fan.find(" d="), " d=\"M%lf", &x), 1);
    return x < plot.width / 2;
  };
  // Each lies so near the middle that an eighth of the way to the other corner leads out of its own.
  const Point above = at(0.25, 0.8), below = at(0.76, 0.19), middle = at(0.5, 0.5);
  const auto visits = [](const Point& point, const Point& from, int count) {
    std::vector<Point> points;
    for (int i = 0; i < count; ++i) points.insert(points.end(), {point, from});
    return points;
  };
  const auto visits_below = [&](int count) { return visits(below, at(0, 0.5), count); };
  const auto visits_above = [&](int count) { return visits(above, at(1, 0.5), count); };
  EXPECT_TRUE(is_above({}));
  EXPECT_TRUE(is_above({{middle}}));
  EXPECT_TRUE(is_above({{below}}));
  EXPECT_FALSE(is_above({{above}}));
  EXPECT_TRUE(is_above({{above}, {below}}));
  // A line counts where it passes between its points, and from its first point on.
  EXPECT_FALSE(is_above({{at(0, 0.6), at(0.45, 1)}}));
  EXPECT_FALSE(is_above({visits_above(1)}));
  EXPECT_TRUE(is_above({{above, {2, kNan, {}, {}}, middle}}));
  // A point at which a curve ends weighs as much as eight others.
  EXPECT_FALSE(is_above({{above}, visits_below(7)}));
  EXPECT_TRUE(is_above({{above}, visits_below(8)}));
  EXPECT_TRUE(is_above({{below}, visits_above(8)}));
  EXPECT_FALSE(is_above({{below}, visits_above(9)}));
}

TEST(WellFormed, FindsWhatIsWrongAndWhere) {
  const struct {
    bool html;
    std::string markup, problem;
  } kRows[] = {{false, "", ""},
               {false, "<a b=\"1\"><c/>x &amp; y</a>", ""},
               {false, "<a b=\"&lt;&gt;&quot;\"  c-d:e_f=\"&#39;\"/>", ""},
               {false, "<?xml a=\"&\"?><a/>", ""},
               {false, "<?xml a=\"&\"?>&", "stray & at 13: &"},
               {true, "<!DOCTYPE html><br><input checked><meta a=\"b\">", ""},
               {true, "<script>a & b < c</script><style>a & b</style>", ""},
               {false, "<!DOCTYPE html>", "stray < at 1: !DOCTYPE html>"},
               {false, "<br>", "br is not closed at 4: "},
               {false, "<a><b>", "b is not closed at 6: "},
               {false, "<a></b>", "end of b at 6: >"},
               {false, "</a>", "end of a at 3: >"},
               {false, "<a></a", "end tag at 6: "},
               {false, "<a b=1></a>", "attribute without quotes at 5: 1></a>"},
               {false, "<a b=\"1\" b=\"2\"/>", "b twice at 10: =\"2\"/>"},
               {false, "<a b/>", "b without a value at 4: />"},
               {false, "<a b=\"<\"/>", "< in an attribute at 6: <\"/>"},
               {false, "<a b=\"&\"/>", "stray & at 6: &\"/>"},
               {false, "<a?>", "tag at 2: ?>"},
               {false, "<>", "stray < at 1: >"},
               {false, "a & b", "stray & at 2: & b"},
               {false, "&amp", "stray & at 0: &amp"},
               {false, "&nbsp;", "unknown reference at 0: &nbsp;"},
               {false, "&1234567;", "unknown reference at 0: &1234567;"},
               {false, "&12345678;", "stray & at 0: &12345678;"},
               {true, "<script></style>", "no end at 8: </style>"},
               {false, "<" + std::string(70, '.'), "stray < at 1: " + std::string(60, '.')}};
  for (const auto& row : kRows) {
    EXPECT_EQ(MarkupProblem(row.markup, row.html), row.problem) << row.markup;
  }
}

// Returns the corners of a path of straight lines.
std::vector<std::pair<double, double>> CornersOf(const std::string& path) {
  std::vector<std::pair<double, double>> corners;
  for (const absl::string_view corner :
       absl::StrSplit(path, absl::ByAnyChar("MLZ"), absl::SkipEmpty())) {
    const std::pair<std::string, std::string> point = absl::StrSplit(corner, ' ');
    corners.emplace_back();
    EXPECT_TRUE(absl::SimpleAtod(point.first, &corners.back().first)) << path;
    EXPECT_TRUE(absl::SimpleAtod(point.second, &corners.back().second)) << path;
  }
  return corners;
}

TEST(MarkerPath, IsSymmetricAndScalesWithItsRadiusAboutItsPoint) {
  std::set<std::string> shapes;
  for (int style = -1; style < 7; ++style) {
    const std::string path = MarkerPath(style, 100, 200, 10);
    EXPECT_TRUE(shapes.insert(path).second) << path << " is the marker of two styles";
    if (path.find('a') != std::string::npos) continue;  // a disc
    const auto small = CornersOf(path), large = CornersOf(MarkerPath(style, 30, 50, 40));
    ASSERT_EQ(small.size(), large.size());
    ASSERT_GE(small.size(), 3u);
    std::set<std::pair<double, double>> corners, mirrored;
    double area = 0;
    for (size_t n = 0; n < small.size(); ++n) {
      const double x = small[n].first - 100, y = small[n].second - 200;
      const auto& [next_x, next_y] = small[(n + 1) % small.size()];
      EXPECT_NEAR(large[n].first - 30, 4 * x, 0.1) << path;
      EXPECT_NEAR(large[n].second - 50, 4 * y, 0.1) << path;
      EXPECT_LT(std::hypot(x, y), 1.6 * 10) << path;
      corners.insert({std::round(10 * x), std::round(10 * y)});
      mirrored.insert({std::round(-10 * x), std::round(10 * y)});
      area += (x * (next_y - 200) - (next_x - 100) * y) / 2;
    }
    EXPECT_EQ(corners, mirrored) << path;
    EXPECT_NEAR(std::fabs(area), 3 * 10 * 10, 100) << path << ": markers are about equally large";
  }
}

// Labelled ticks by their labels, and small ones by their values in brackets.
std::string TicksOf(const Axis& axis, const Range& range, double pixels, double spacing) {
  std::string text;
  double last = -kInfinity;
  for (const Tick& tick : Scale(axis, range, 0, pixels).Ticks(spacing)) {
    EXPECT_GT(tick.value, last);
    EXPECT_GE(tick.value, range.low * (1 - 1e-9) - 1e-12);
    EXPECT_LE(tick.value, range.high * (1 + 1e-9));
    last = tick.value;
    const std::string value = absl::StrCat(tick.value);
    EXPECT_TRUE(tick.label.empty() || tick.label == value) << tick.label;
    absl::StrAppend(&text, text.empty() ? "" : " ",
                    tick.label.empty() ? absl::StrCat("(", value, ")") : tick.label);
  }
  return text;
}

TEST(Scale, HasSmallTicksBetweenTheLabelledOnes) {
  const struct {
    Axis axis;
    Range range;
    double pixels, spacing;
    const char* ticks;
  } kRows[] = {
      // Powers of two: every one, then every second and third as there is less room.
      {Binary(), {1, 16}, 300, 60, "1 2 4 8 16"},
      {Binary(), {1, 16}, 240, 60, "1 (2) 4 (8) 16"},
      {Binary(), {1, 16}, 120, 60, "1 (2) (4) 8 (16)"},
      {Binary(), {0.25, 4}, 120, 60, "(0.25) (0.5) 1 (2) (4)"},
      {Binary(), {3, 5}, 300, 60, "3 3.5 4 4.5 5"},  // one power of two is no axis
      {Binary(), {3, 9}, 300, 60, "4 8"},
      // Powers of ten with all digits between; 1, 2 and 5 where three a decade have room.
      {Axis(),
       {1, 100},
       300,
       60,
       "1 (2) (3) (4) (5) (6) (7) (8) (9) 10 (20) (30) (40) (50) (60) (70) (80) (90) 100"},
      {Axis(),
       {1, 100},
       360,
       60,
       "1 2 (3) (4) 5 (6) (7) (8) (9) 10 20 (30) (40) 50 (60) (70) (80) (90) 100"},
      // One power of ten within: digits are labelled whatever the room.
      {Axis(), {2, 30}, 120, 60, "2 (3) (4) 5 (6) (7) (8) (9) 10 20 (30)"},
      // Less than a factor of five is divided evenly.
      {Axis(), {1, 5}, 300, 60, "1 2 3 4 5"},
      {Axis(), {1, 5.1}, 300, 60, "1 2 (3) (4) 5"},
      {Axis(), {1, 4}, 6000, 60, "1 1.5 2 2.5 3 3.5 4"},
      // Every second and third of many decades, without digits.
      {Axis(), {1e-2, 1e4}, 180, 60, "0.01 (0.1) 1 (10) 100 (1000) 10000"},
      {Axis(), {1, 1e7}, 150, 60, "1 (10) (100) (1000) 10000 (100000) (1e+06) (1e+07)"},
      {Linear(), {0, 10}, 300, 60, "0 2 4 6 8 10"},
      {Linear(), {0, 10}, 600, 60, "0 1 2 3 4 5 6 7 8 9 10"},
      {Linear(), {0, 10}, 120, 60, "0 5 10"},
      {Linear(), {0, 10}, 60, 60, "0 5 10"},  // two at least
      {Linear(), {-3, 3}, 180, 60, "-2 0 2"},
      {Linear(), {0.1, 0.7}, 180, 60, "0.2 0.4 0.6"},
      {Linear(), {0, 60}, 60 * 6, 60, "0 10 20 30 40 50 60"},
      {Linear(), {0, 61}, 60 * 6, 60, "0 20 40 60"},
  };
  for (const auto& row : kRows) {
    EXPECT_EQ(TicksOf(row.axis, row.range, row.pixels, row.spacing), row.ticks)
        << row.range.low << " to " << row.range.high << " on " << row.pixels;
  }
}

TEST(Range, HasATwentiethOfAirOnBothSides) {
  const struct {
    Axis axis;
    std::vector<double> values;
    double low, high;
  } kRows[] = {
      {Linear(), {2, 4, 12}, 1.5, 12.5},
      {Linear(), {-10, 10}, -11, 11},
      {Linear(), {8}, 4, 12},
      {Linear(), {-8, -8}, -12, -4},
      {Linear(), {0}, -0.5, 0.5},
      {Linear(), {1e-100}, -0.5, 0.5},  // as good as 0
      {Linear(), {1.5e-100}, 0.75e-100, 2.25e-100},
      {Linear(), {-4e-50}, -6e-50, -2e-50},
      {Linear(), {}, 0, 1},
      {Linear(), {kNan, 2e100, 3}, 1.5, 4.5},
      {Linear(), {1e9, 1e9 + 0.9}, 5e8, 1.5e9 + 0.9},
      {Axis(), {8}, 4, 16},
      {Axis(), {}, 1, 10},
      {Axis(), {0, -1, kInfinity, 3}, 1.5, 6},
      {Axis(), {1, 1 + 1e-10}, 0.5, 2 + 2e-10},
      {Axis(), {1e-100, 1e100}, 1e-110, 1e110},
  };
  for (const auto& row : kRows) {
    const Range range = RangeOf(row.axis, row.values);
    EXPECT_NEAR(range.low, row.low, 1e-9 * std::abs(row.low)) << row.low;
    EXPECT_NEAR(range.high, row.high, 1e-9 * std::abs(row.high)) << row.high;
  }
  for (const double value : {1e-100, 1.0, 1e100}) EXPECT_TRUE(CanShow(Axis(), value)) << value;
  for (const double value : {0.9e-100, 0.0, -1.0, 1.1e100, kNan, kInfinity}) {
    EXPECT_FALSE(CanShow(Axis(), value)) << value;
  }
  for (const double value : {-1e100, 0.0, 1e-300, 1e100}) EXPECT_TRUE(CanShow(Linear(), value));
  for (const double value : {-1.1e100, 1.1e100, kNan}) EXPECT_FALSE(CanShow(Linear(), value));
}

TEST(Box, OverlapsWhereItSharesMoreThanAnEdge) {
  const Box box{10, 20, 30, 40};
  const struct {
    Box other;
    bool overlaps, contains;
  } kRows[] = {{{10, 20, 30, 40}, true, true},   {{11, 21, 1, 1}, true, true},
               {{40, 30, 5, 5}, false, false},   {{39, 30, 5, 5}, true, false},
               {{5, 30, 5, 5}, false, false},    {{6, 30, 5, 5}, true, false},
               {{20, 60, 5, 5}, false, false},   {{20, 59, 5, 5}, true, false},
               {{20, 15, 5, 5}, false, false},   {{20, 16, 5, 5}, true, false},
               {{10, 20, 31, 40}, true, false},  {{10, 20, 30, 41}, true, false},
               {{9, 20, 31, 40}, true, false},   {{10, 19, 30, 41}, true, false},
               {{100, 30, 5, 5}, false, false},  {{20, 100, 5, 5}, false, false},
               {{-100, 30, 5, 5}, false, false}, {{20, -100, 5, 5}, false, false}};
  for (const auto& row : kRows) {
    const Box& other = row.other;
    EXPECT_EQ(box.Overlaps(other), row.overlaps) << other.x << ", " << other.y;
    EXPECT_EQ(other.Overlaps(box), row.overlaps) << other.x << ", " << other.y;
    EXPECT_EQ(box.Contains(other), row.contains) << other.x << ", " << other.y;
  }
}

TEST(PlaceLabels, ALabelStandsAsFarAwayAsItsKindMay) {
  // Everything up to `reach` pixels around the point is taken.
  const auto distance = [](double reach, bool needed, bool short_text) {
    Obstacles obstacles;
    obstacles.points = {{500 - reach, 500 - reach, 2 * reach, 2 * reach}};
    const auto place =
        PlaceLabels({{500, 500, "ab", needed, short_text}}, {0, 0, 1000, 1000}, 10, &obstacles)[0];
    EXPECT_EQ(obstacles.texts.size(), place.has_value() ? 1u : 0u);
    EXPECT_EQ(obstacles.lines.size(), place.has_value() && place->with_leader ? 1u : 0u);
    return place.has_value() ? place->box.x - 500 : -1;  // to the right of the point
  };
  EXPECT_NEAR(distance(7, false, false), 7, 1e-9);
  EXPECT_NEAR(distance(7.5, false, false), 13, 1e-9);
  EXPECT_NEAR(distance(13, false, false), 13, 1e-9);
  EXPECT_EQ(distance(13.5, false, false), -1);
  EXPECT_NEAR(distance(49, true, false), 49, 1e-9);
  EXPECT_EQ(distance(49.5, true, false), -1);
  EXPECT_NEAR(distance(145, false, true), 145, 1e-9);
  EXPECT_EQ(distance(145.5, false, true), -1);
}

TEST(MarkerPath, ColoursComeAgainWithOtherMarkers) {
  EXPECT_EQ(StyleClass(-1), "ref");
  for (int style = 0; style < 3 * kStyles; ++style) {
    EXPECT_EQ(StyleClass(style), absl::StrCat("s", style % kStyles));
    EXPECT_EQ(Dashes(style), Dashes(style % kStyles));
    // Each round of colours begins one marker later.
    EXPECT_EQ(MarkerPath(style, 10, 20, 3),
              MarkerPath((style + style / kStyles) % kStyles, 10, 20, 3));
  }
  EXPECT_EQ(StyleClass(-2), "s5");
  EXPECT_EQ(Dashes(-1), "");
}

}  // namespace
}  // namespace plot
}  // namespace tfb
