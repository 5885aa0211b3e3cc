// Tests the text and drawings of the page without a browser, in which page_browser_test opens it.

#include "results/page.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "results/analysis.h"
#include "results/figures.h"
#include "results/synthetic.h"
#include "results/well_formed.h"

namespace tfb {
namespace {

using ::absl::StrContains;
using ::tfb::synthetic::CaseSpec;
using ::tfb::synthetic::MakeCase;
using ::tfb::synthetic::MakeEnvironment;
using ::tfb::synthetic::MakeSweep;
using ::tfb::synthetic::MakeUnmeasured;

std::string PageOf(const ResultSet& results) { return RenderPage(Analysis(results), {}); }

const plot::Curve* FindCurve(const plot::Plot& plot, const std::string& name) {
  for (const plot::Curve& curve : plot.curves) {
    if (curve.name == name) return &curve;
  }
  return nullptr;
}

// Makes `count` techniques of one family, linear from 1 ms at 256 tokens, beside "plain".
ResultSet Family(int count) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  for (int i = -1; i < count; ++i) {
    for (const int64_t tokens : {256, 512, 1024}) {
      CaseSpec spec;
      if (i >= 0) spec.technique = absl::StrCat("technique_", i);
      spec.tokens = tokens;
      spec.expected_growth = i % 2 == 0 ? 1 : 2;
      spec.median_ns = 1e6 * static_cast<double>(tokens) / 256 * (i + 2);
      *results.add_cases() = MakeCase(spec);
    }
  }
  return results;
}

TEST(Page, HoldsEveryFigureAndNothingFromElsewhere) {
  const std::string page = PageOf(MakeSweep());
  EXPECT_EQ(MarkupProblem(page, true), "");
  for (const char* plot : {"scaling", "memory", "roofline", "frontier"}) {
    EXPECT_TRUE(StrContains(page, absl::StrCat("data-plot=\"", plot, "\""))) << plot;
  }
  for (const char* outside : {"http:", "https:", " src=", "@import", "url(", "<link", "<iframe"}) {
    EXPECT_FALSE(StrContains(page, outside)) << outside;
  }
  EXPECT_TRUE(StrContains(page, "default-src 'none'"));
}

TEST(Page, OpensWithTheMessageInThreeSentences) {
  ResultSet results = MakeSweep();
  CaseSpec spec;
  spec.device = DEVICE_TYPE_CUDA;
  for (const int64_t tokens : {256, 512}) {
    spec.tokens = tokens;
    *results.add_cases() = MakeUnmeasured(spec, Outcome::STATUS_SKIPPED, "no CUDA device");
  }
  spec.tokens = 1024;
  *results.add_cases() = MakeUnmeasured(spec, Outcome::STATUS_SKIPPED, "the budget was spent");
  const std::string page = PageOf(results);
  const std::vector<std::string> sentences = {
      "With an error of at most 0.3 against dense (with at most 0.1 none is surely faster than "
      "plain) the "
      "fastest technique is under the causal mask near window=256: 5.8x [5.7, 5.8] as fast as "
      "plain "
      "at 4096 tokens, error 0.18 (cpu, f32, errors on input real).",
      "near window=256 is faster than plain from 707 [701, 713] tokens on under the causal mask "
      "and "
      "takes 4 MiB of memory at 4096 tokens, where plain takes 4 MiB.",
      "Missing are 3 of 21 cases, which did not run: 2 (no CUDA device), 1 (the budget was spent); "
      "of those that ran, no error exceeds its bound."};
  size_t at = page.find("<main>");
  for (const std::string& sentence : sentences) {
    at = page.find(absl::StrCat("<p class=\"message\">", sentence, "</p>"), at);
    ASSERT_NE(at, std::string::npos) << sentence << "\n" << page;
  }
  EXPECT_LT(at, page.find("<table"));
}

TEST(Page, SaysThatNothingIsFasterRatherThanNameWhatScattersAroundDense) {
  ResultSet results = MakeSweep();
  for (Case& result : *results.mutable_cases()) {
    if (result.outcome().timing().run_ns_size() == 0) continue;
    Timing* timing = result.mutable_outcome()->mutable_timing();
    timing->clear_run_ns();
    for (const double ns : synthetic::Samples(1e6)) timing->add_run_ns(ns);
  }
  EXPECT_TRUE(StrContains(PageOf(results), "is measurably faster than plain at 4096 tokens"));
}

TEST(Page, DrawsAPanelOfSeveralPointsAndListsOneOfASingleOne) {
  // Two techniques that others, which did not run, are held against; at one length, or at two.
  for (const int techniques : {1, 2}) {
    for (const int lengths : {1, 2}) {
      ResultSet results;
      *results.add_environments() = MakeEnvironment();
      for (int i = 0; i < techniques; ++i) {
        for (int length = 0; length < lengths; ++length) {
          CaseSpec spec;
          spec.technique = absl::StrCat("dense_", i);
          spec.tokens = 256 << length;
          *results.add_cases() = MakeCase(spec);
          results.mutable_cases()->rbegin()->mutable_technique()->set_dense_counterpart(
              spec.technique);
          spec.technique = absl::StrCat("absent_", i);
          *results.add_cases() = MakeUnmeasured(spec, Outcome::STATUS_SKIPPED, "no time");
          results.mutable_cases()->rbegin()->mutable_technique()->set_dense_counterpart(
              absl::StrCat("dense_", i));
        }
      }
      const bool is_drawn = StrContains(PageOf(results), "data-plot=\"scaling\"");
      EXPECT_EQ(is_drawn, techniques * lengths > 1) << techniques << " x " << lengths;
    }
  }
}

TEST(Page, ShowsChoicesForEachMask) {
  ResultSet results = MakeSweep();
  const int cases = results.cases_size();
  for (int i = 0; i < cases; ++i) {
    Case full = results.cases(i);
    full.mutable_key()->mutable_problem()->set_causal(false);
    *results.add_cases() = full;
  }
  const std::string page = PageOf(results);
  const std::string summary = page.substr(0, page.find("section-2\">", page.find("<main>")));
  const size_t full = summary.find("Choices at 4096 tokens, cpu f32, 8 heads of 64, input");
  const size_t causal = summary.find("Choices at 4096 tokens, cpu f32, 8 heads of 64, causal");
  EXPECT_NE(full, std::string::npos) << summary;
  EXPECT_NE(causal, std::string::npos) << summary;
  EXPECT_TRUE(StrContains(summary, "under the full mask")) << summary;
}

TEST(Page, HasACardForEachTechnique) {
  ResultSet results = MakeSweep();
  for (Case& result : *results.mutable_cases()) {
    result.mutable_technique()->set_citation("Someone 2020, arXiv:2000.00001v1");
  }
  CaseSpec spec;
  spec.technique = "shy";
  *results.add_cases() = MakeUnmeasured(spec, Outcome::STATUS_SKIPPED, "too shy");
  const std::string page = PageOf(results);
  const size_t card = page.find("<section class=\"card\"><h3>near</h3>");
  ASSERT_NE(card, std::string::npos) << page;
  const std::string near = page.substr(card, page.find("</table>", card) - card);
  EXPECT_TRUE(StrContains(near, "The near technique")) << near;
  EXPECT_TRUE(StrContains(near, "Someone 2020, arXiv:2000.00001v1")) << near;
  EXPECT_TRUE(StrContains(near, ">5.8x <small class=\"faint\">[5.7, 5.8]</small>")) << near;
  EXPECT_TRUE(StrContains(near, ">0.18<")) << near;
  EXPECT_TRUE(StrContains(near, ">4 MiB <small class=\"faint\">1.0x</small>")) << near;
  EXPECT_TRUE(StrContains(near, ">held against plain<")) << near;
  EXPECT_TRUE(StrContains(page, "too shy"));
}

// Makes results as files were before techniques had citations and cases had the machine's load.
TEST(Page, DoesWithoutCitationsAndLoad) {
  ResultSet results = MakeSweep();
  for (Case& result : *results.mutable_cases()) {
    result.mutable_technique()->clear_title();
    result.mutable_technique()->clear_citation();
  }
  const std::string page = PageOf(results);
  EXPECT_EQ(MarkupProblem(page, true), "");
  EXPECT_TRUE(StrContains(page, "<section class=\"card\"><h3>near</h3>"));
  EXPECT_FALSE(StrContains(page, "other load"));
}

TEST(Page, HasNoLegendWhereCurvesAreNamedAtTheirEnds) {
  const std::string page = PageOf(MakeSweep());
  const auto figures = [&page](const std::string& kind) {
    const size_t begin = page.find(absl::StrCat("data-plot=\"", kind, "\""));
    return page.substr(begin, page.find("</section>", begin) - begin);
  };
  EXPECT_FALSE(StrContains(figures("scaling"), "class=\"legend\""));
  EXPECT_FALSE(StrContains(figures("memory"), "class=\"legend\""));
  EXPECT_TRUE(StrContains(figures("frontier"), "class=\"legend\""));
  EXPECT_TRUE(StrContains(figures("roofline"), "class=\"legend\""));
}

TEST(Page, LeavesOutColumnsThatHoldOnlyDashes) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  CaseSpec spec;
  spec.technique = "alone";  // without anything to compare it with
  *results.add_cases() = MakeCase(spec);
  const std::string page = PageOf(results);
  EXPECT_FALSE(StrContains(page, "speed-up<br>"));
  EXPECT_TRUE(StrContains(PageOf(MakeSweep()), "speed-up<br>"));
}

TEST(Page, APanelOfOnePointIsARowOfATable) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  for (const char* technique : {"plain", "near"}) {
    CaseSpec spec;
    spec.technique = technique;
    *results.add_cases() = MakeCase(spec);
  }
  const std::string page = PageOf(results);
  EXPECT_EQ(MarkupProblem(page, true), "");
  EXPECT_FALSE(StrContains(page, "data-plot=\"scaling\""));
  EXPECT_TRUE(StrContains(page, "<td>near</td><td>512</td><td>1 ms</td>")) << page;
}

TEST(Page, WritesLengthsInFull) {
  const std::string page = PageOf(MakeSweep());
  EXPECT_TRUE(StrContains(page, ">1024</text>"));
  EXPECT_FALSE(StrContains(page, ">1K</text>"));
}

TEST(Page, ShowsMarkupInAFileAsText) {
  ResultSet results = MakeSweep();
  const std::string evil = "<script>window.hacked=1</script>\"'><img src=x onerror=alert(1)>&";
  Environment* environment = results.mutable_environments(0);
  environment->set_host(evil);
  environment->set_cpu_model(evil);
  environment->add_command_line(evil);
  for (Case& result : *results.mutable_cases()) {
    if (result.key().technique() == "plain") continue;
    result.mutable_technique()->set_display_name(evil + result.key().technique());
    result.mutable_technique()->set_family(evil);
    result.mutable_key()->mutable_input()->set_name(evil);
    (*result.mutable_outcome()->mutable_statistics())[evil] = 1;
  }
  *results.add_cases() = MakeUnmeasured(CaseSpec(), Outcome::STATUS_SKIPPED, evil);
  const std::string page = RenderPage(Analysis(results), {{evil}, {evil}});
  EXPECT_EQ(MarkupProblem(page, true), "");
  EXPECT_FALSE(StrContains(page, "<script>window"));
  EXPECT_FALSE(StrContains(page, "<img"));
  EXPECT_TRUE(StrContains(page, "&lt;script&gt;window.hacked=1"));
}

TEST(Page, SaysWhatDidNotRunAndWhy) {
  ResultSet results = MakeSweep();
  CaseSpec spec;
  spec.technique = "sick";
  *results.add_cases() = MakeUnmeasured(spec, Outcome::STATUS_FAILED, "error 3 > 2");
  spec.technique = "shy";
  *results.add_cases() = MakeUnmeasured(spec, Outcome::STATUS_SKIPPED, "no CUDA device");
  const std::string page = PageOf(results);
  EXPECT_TRUE(StrContains(page, "error 3 &gt; 2"));
  EXPECT_TRUE(StrContains(page, "no CUDA device"));
  EXPECT_TRUE(StrContains(page, "1 failed, 1 skipped"));
  EXPECT_FALSE(StrContains(page, "Every case ran"));
  EXPECT_TRUE(StrContains(PageOf(MakeSweep()), "Every case ran"));
}

TEST(Page, IsWholeForResultsThatHoldLittleOrNonsense) {
  ResultSet empty;
  EXPECT_TRUE(StrContains(PageOf(empty), "No cases"));
  EXPECT_EQ(MarkupProblem(PageOf(empty), true), "");

  ResultSet single;  // one length, no environment
  *single.add_cases() = MakeCase(CaseSpec());
  EXPECT_EQ(MarkupProblem(PageOf(single), true), "");

  ResultSet nonsense = MakeSweep();
  const double values[] = {std::numeric_limits<double>::quiet_NaN(), 0,     -1,
                           std::numeric_limits<double>::infinity(),  1e308, 5e-324};
  int next = 0;
  for (Case& result : *nonsense.mutable_cases()) {
    Outcome* outcome = result.mutable_outcome();
    for (double& sample : *outcome->mutable_timing()->mutable_run_ns()) sample = values[next++ % 6];
    outcome->set_flops(values[next++ % 6]);
    outcome->set_bytes_moved(values[next++ % 6]);
    outcome->mutable_against_dense()->set_relative_frobenius(values[next++ % 6]);
    (*outcome->mutable_statistics())["bits_per_byte"] = values[next++ % 6];
    result.mutable_technique()->set_expected_growth(values[next++ % 6]);
    result.mutable_key()->mutable_problem()->set_kv_tokens(next % 3 == 0 ? -5 : 0);
  }
  EXPECT_EQ(MarkupProblem(PageOf(nonsense), true), "");
}

TEST(Page, TablesNameTheFamilyOfEachRow) {
  Table table;
  table.columns = {{"technique"}, {"ms\nat 256", true}};
  table.AddRow({"near", TableCell("1.5", Emphasis::kBad)}, "local");
  const std::string html = ToHtml(table, "t");
  EXPECT_EQ(MarkupProblem(html, true), "");
  EXPECT_TRUE(StrContains(html, "<tr data-family=\"local\">")) << html;
  EXPECT_TRUE(StrContains(html, "<td class=\"bad\">1.5</td>")) << html;
  EXPECT_TRUE(StrContains(html, "ms<br>at 256")) << html;
}

TEST(ScalingFigure, HasOneCurveForEachTechniqueWithDenseInEachPanel) {
  const ResultSet results = Family(20);
  const Analysis analysis(results);
  const std::vector<Figure> figures = ScalingFigures(analysis, nullptr);
  ASSERT_EQ(figures.size(), 1u);
  std::map<std::string, int> drawn;
  for (const plot::Plot& panel : figures[0].panels) {
    EXPECT_LE(panel.curves.size(), 1u + plot::kStyles);
    EXPECT_NE(FindCurve(panel, "plain"), nullptr);
    for (const plot::Curve& curve : panel.curves) ++drawn[curve.name];
  }
  EXPECT_EQ(drawn.size(), 21u);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(drawn[absl::StrCat("technique_", i)], 1) << i;
}

TEST(ScalingFigure, DrawsMediansWithTheirIntervalsAndRingsTheCrossover) {
  const ResultSet results = MakeSweep();
  const Analysis analysis(results);
  const std::vector<Figure> figures = ScalingFigures(analysis, nullptr);
  ASSERT_EQ(figures.size(), 1u);
  ASSERT_EQ(figures[0].panels.size(), 1u);
  const plot::Plot& panel = figures[0].panels[0];
  const plot::Curve* near = FindCurve(panel, "near window=256");
  ASSERT_NE(near, nullptr);
  ASSERT_EQ(near->points.size(), 5u);
  EXPECT_DOUBLE_EQ(near->points[0].x, 256);
  EXPECT_DOUBLE_EQ(near->points[0].y, 0.5e6 * 2.7621);
  EXPECT_LT(*near->points[0].low, near->points[0].y);
  EXPECT_EQ(FindCurve(panel, "plain")->style, plot::kReferenceStyle);
  ASSERT_EQ(panel.marks.size(), 1u);  // "sketch" does not cross
  EXPECT_NEAR(panel.marks[0].point.x, 707, 1);
  EXPECT_NEAR(panel.marks[0].point.y, 0.5e6 * 2.7621 * 707 / 256, 2e4);
  ASSERT_EQ(panel.slopes.size(), 2u);
  EXPECT_EQ(panel.slopes[0].label, "n");
  EXPECT_EQ(panel.slopes[1].label, "n²");
}

// "chain" and "loop" are compared with themselves with a longer memory, "near" with "plain".
TEST(ScalingFigure, DrawsThePanelsOwnBaselineBoldAndNoOther) {
  ResultSet results = MakeSweep();
  for (const char* technique : {"chain", "loop"}) {
    for (const int64_t tokens : {256, 512, 1024}) {
      for (const bool whole : {false, true}) {
        CaseSpec spec;
        spec.technique = technique;
        spec.option_name = "memory";
        spec.option_value = whole ? absl::StrCat(tokens) : "128";
        spec.tokens = tokens;
        Case result = MakeCase(spec);
        TechniqueDescription* description = result.mutable_technique();
        description->set_family("memory");
        description->set_options_are_default(!whole);
        description->set_dense_counterpart(technique);
        (*description->mutable_dense_counterpart_options())["memory"] = absl::StrCat(tokens);
        *results.add_cases() = result;
      }
    }
  }
  const Analysis analysis(results);
  const std::vector<Figure> figures = ScalingFigures(analysis, nullptr);
  ASSERT_EQ(figures[0].panels.size(), 2u);
  for (const plot::Plot& panel : figures[0].panels) {
    const bool hidden = panel.title == "memory";
    EXPECT_EQ(FindCurve(panel, "plain") == nullptr, hidden) << panel.title;
    const plot::Curve* own = FindCurve(panel, "chain (dense counterpart)");
    ASSERT_EQ(own != nullptr, hidden) << panel.title;
    if (!hidden) continue;
    EXPECT_EQ(own->kind, plot::Curve::Kind::kCounterpart);
  }
}

TEST(ScalingFigure, RingsNoCrossoverThatIntervalsDoNotTell) {
  ResultSet results = MakeSweep();
  for (Case& result : *results.mutable_cases()) {
    const Case::Key& key = result.key();
    if (key.technique() != "near" || key.problem().query_tokens() != 4096) continue;
    Timing* timing = result.mutable_outcome()->mutable_timing();
    timing->clear_run_ns();
    for (const double ns : synthetic::Samples(127.9e6)) timing->add_run_ns(ns);
  }
  const Analysis analysis(results);
  EXPECT_TRUE(ScalingFigures(analysis, nullptr)[0].panels[0].marks.empty());
}

TEST(ScalingFigure, NamesWhatFailed) {
  ResultSet results = MakeSweep();
  for (Case& result : *results.mutable_cases()) {
    if (result.key().technique() == "near" && result.key().problem().kv_tokens() == 512) {
      result.mutable_outcome()->set_status(Outcome::STATUS_FAILED);
    }
  }
  const Analysis analysis(results);
  EXPECT_NE(FindCurve(ScalingFigures(analysis, nullptr)[0].panels[0], "near window=256 (failed)"),
            nullptr);
}

TEST(ScalingFigure, TakesOnlyWhatTheFilterLeaves) {
  const ResultSet results = MakeSweep();
  const Analysis analysis(results);
  const auto only_near = [](const Series& series) {
    return series.first().key().technique() == "near";
  };
  const std::vector<Figure> figures = ScalingFigures(analysis, only_near);
  ASSERT_EQ(figures.size(), 1u);
  EXPECT_EQ(figures[0].panels[0].curves.size(), 2u);  // with "plain"
  for (const FigureKind kind :
       {FigureKind::kScaling, FigureKind::kMemory, FigureKind::kRoofline, FigureKind::kFrontier}) {
    EXPECT_TRUE(FiguresOf(kind, analysis, [](const Series&) { return false; }).empty());
  }
}

TEST(MemoryFigure, DrawsWorkspaceAndParameters) {
  const ResultSet results = MakeSweep();
  const Analysis analysis(results);
  const std::vector<Figure> figures = MemoryFigures(analysis, nullptr);
  ASSERT_EQ(figures.size(), 1u);
  const plot::Curve* near = FindCurve(figures[0].panels[0], "near window=256");
  ASSERT_NE(near, nullptr);
  EXPECT_DOUBLE_EQ(near->points.back().y, 4096 * 1024);
}

TEST(RooflineFigure, PlacesPointsUnderTheMeasuredPeaks) {
  const ResultSet results = MakeSweep();
  const Analysis analysis(results);
  const std::vector<Figure> figures = RooflineFigures(analysis, nullptr);
  ASSERT_EQ(figures.size(), 1u);
  const plot::Plot& plot = figures[0].panels[0];
  const plot::Curve* plain = FindCurve(plot, "plain");
  ASSERT_NE(plain, nullptr);
  // At 4096 tokens: 2 * 8 * 4096^2 * 128 FLOPs in 128 ms over 4 * 8 * 4096 * 64 * 4 bytes.
  EXPECT_NEAR(plain->points[0].y, 2 * 8 * 4096.0 * 4096 * 128 / 0.128, 1);
  EXPECT_NEAR(plain->points[0].x, 1024, 1e-6);
  // The ridge is at 400 GFLOP/s over 20 GB/s.
  ASSERT_EQ(plot.guides.size(), 2u);
  EXPECT_TRUE(StrContains(plot.guides[0].label, "20 GB/s"));
  EXPECT_DOUBLE_EQ(plot.guides[0].points.back().x, 20);
  EXPECT_TRUE(StrContains(plot.guides[1].label, "400 GFLOP/s"));
  EXPECT_DOUBLE_EQ(plot.guides[1].points.back().y, 400e9);
}

// The corner, which is at 20 FLOPs a byte, is drawn with as much again beyond it where it is within a
// factor of 30 of the points.
TEST(RooflineFigure, RoofsReachBeyondACornerThatIsNear) {
  const struct {
    double intensity, low, high;  // of the first points; others have four times as much
  } kRows[] = {{0.165, 0.165, 0.66}, {0.17, 0.17, 40}, {1, 1, 40},      {5, 5, 40},
               {15, 10, 60},         {590, 10, 2360},  {610, 610, 2440}};
  for (const auto& row : kRows) {
    ResultSet results = MakeSweep();
    for (Case& result : *results.mutable_cases()) {
      const double intensity = row.intensity * (result.key().technique() == "near" ? 4 : 1);
      result.mutable_outcome()->set_bytes_moved(result.outcome().flops() / intensity);
    }
    const Analysis analysis(results);
    const std::vector<Figure> figures = RooflineFigures(analysis, nullptr);
    const std::vector<plot::Guide>& roofs = figures[0].panels[0].guides;
    ASSERT_FALSE(roofs.empty()) << row.intensity;
    EXPECT_NEAR(roofs.front().points.front().x, row.low, 1e-9) << row.intensity;
    EXPECT_NEAR(roofs.back().points.back().x, row.high, 1e-9) << row.intensity;
  }
}

// Far to the right of the corner only the peak of arithmetic is drawn, and level.
TEST(RooflineFigure, RoofsNeverFall) {
  for (const double bytes : {1.0, 1e6, 1e15}) {
    ResultSet results = MakeSweep();
    for (Case& result : *results.mutable_cases()) result.mutable_outcome()->set_bytes_moved(bytes);
    const Analysis analysis(results);
    const std::vector<Figure> figures = RooflineFigures(analysis, nullptr);
    ASSERT_FALSE(figures[0].panels[0].guides.empty()) << bytes;
    for (const plot::Guide& guide : figures[0].panels[0].guides) {
      ASSERT_GE(guide.points.size(), 2u) << bytes;
      for (size_t i = 1; i < guide.points.size(); ++i) {
        EXPECT_GT(guide.points[i].x, guide.points[i - 1].x);
        EXPECT_GE(guide.points[i].y, guide.points[i - 1].y * (1 - 1e-12));
      }
    }
  }
}

TEST(RooflineFigure, SaysWhereBytesAreUnknown) {
  ResultSet results = MakeSweep();
  for (Case& result : *results.mutable_cases()) {
    if (result.key().technique() == "sketch") result.mutable_outcome()->clear_bytes_moved();
  }
  const Analysis analysis(results);
  const std::vector<Figure> figures = RooflineFigures(analysis, nullptr);
  EXPECT_EQ(FindCurve(figures[0].panels[0], "sketch features=128"), nullptr);
  EXPECT_TRUE(StrContains(figures[0].caption, "bytes are not known: sketch features=128"));
}

// A technique's time relative to dense, and its error.
struct FrontierSpec {
  const char* name;
  double ratio, error;
};

ResultSet MakeFrontier(const std::vector<FrontierSpec>& techniques) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  for (const FrontierSpec& technique : techniques) {
    CaseSpec spec;
    spec.technique = technique.name;
    spec.purpose = Case::PURPOSE_ACCURACY;
    spec.median_ns = 1e6 * technique.ratio;
    Case result = MakeCase(spec);
    result.mutable_outcome()->mutable_against_dense()->set_relative_frobenius(technique.error);
    *results.add_cases() = result;
  }
  return results;
}

TEST(Page, TheNumberOfCasesIsBadWhereOneFailed) {
  ResultSet results = MakeSweep();
  const auto set = [&](int n, Outcome::Status status) {
    Outcome* outcome = results.mutable_cases(n)->mutable_outcome();
    outcome->set_status(status);
    outcome->set_reason("a reason");
  };
  set(0, Outcome::STATUS_TIMEOUT);
  const std::string late = PageOf(results);
  EXPECT_TRUE(StrContains(late, "<p class=\"count\">")) << late;
  EXPECT_FALSE(StrContains(late, "<p class=\"bad\">")) << late;
  set(1, Outcome::STATUS_FAILED);
  const std::string failed = PageOf(results);
  EXPECT_TRUE(StrContains(failed, "<p class=\"bad\">")) << failed;
  EXPECT_FALSE(StrContains(failed, "<p class=\"count\">")) << failed;
}

TEST(FrontierFigure, JoinsThoseThatNoOtherBeats) {
  // "slow" is beaten by "good" in both.
  const ResultSet results = MakeFrontier(
      {{"plain", 1, 2e-7}, {"good", 0.5, 0.1}, {"fast", 0.25, 0.4}, {"slow", 0.8, 0.3}});
  const Analysis analysis(results);
  const std::vector<Figure> figures = FrontierFigures(analysis, nullptr);
  ASSERT_EQ(figures.size(), 1u);
  ASSERT_EQ(figures[0].panels.size(), 1u);
  const plot::Plot& plot = figures[0].panels[0];
  EXPECT_FALSE(FindCurve(plot, "good")->hollow);
  EXPECT_FALSE(FindCurve(plot, "plain")->hollow);
  EXPECT_TRUE(FindCurve(plot, "slow")->hollow);
  EXPECT_NEAR(FindCurve(plot, "fast")->points[0].x, 0.25, 1e-9);
  EXPECT_NEAR(FindCurve(plot, "fast")->points[0].y, 0.4, 1e-9);
  EXPECT_TRUE(StrContains(FindCurve(plot, "plain")->description, "2e-7"));
}

// "chain" is compared with a counterpart of its own, the others with "plain".
TEST(FrontierFigure, KeepsTheReferencesOfWhatTheFilterLeaves) {
  ResultSet results = MakeFrontier({{"plain", 1, 2e-7}, {"good", 0.5, 0.1}, {"fast", 0.25, 0.4}});
  for (const bool whole : {false, true}) {
    CaseSpec spec;
    spec.technique = "chain";
    spec.option_name = "memory";
    spec.option_value = whole ? absl::StrCat(spec.tokens) : "64";
    spec.purpose = Case::PURPOSE_ACCURACY;
    spec.median_ns = whole ? 2e6 : 1e6;
    Case result = MakeCase(spec);
    TechniqueDescription* technique = result.mutable_technique();
    technique->set_options_are_default(!whole);
    technique->set_dense_counterpart("chain");
    (*technique->mutable_dense_counterpart_options())["memory"] = absl::StrCat(spec.tokens);
    *results.add_cases() = result;
  }
  const Analysis analysis(results);
  const auto kept = [&](const std::vector<std::string>& techniques) {
    const std::vector<Figure> figures = FrontierFigures(analysis, [&](const Series& series) {
      const std::string& name = series.first().key().technique();
      return std::find(techniques.begin(), techniques.end(), name) != techniques.end() &&
             !series.is_counterpart;
    });
    std::set<std::string> names;
    for (const Figure& figure : figures) {
      for (const std::vector<TableCell>& row : figure.data.rows) names.insert(row[0].text);
    }
    return names;
  };
  const std::string chain = "chain memory=64", counterpart = "chain memory=512 (dense counterpart)";
  EXPECT_EQ(kept({"good"}), (std::set<std::string>{"plain", "good"}));
  EXPECT_EQ(kept({"chain"}), (std::set<std::string>{chain, counterpart}));
  EXPECT_EQ(kept({"fast", "chain"}), (std::set<std::string>{"plain", "fast", chain, counterpart}));
}

TEST(Figures, TitlesNameMachineAndBuildWhereTheFileHasSeveral) {
  const auto titles_of = [](FigureKind kind, bool several) {
    ResultSet results = MakeSweep();
    Environment other = MakeEnvironment("other");
    if (several) other.set_git_commit("fedcba98765432");
    *results.add_environments() = other;
    for (const int cases = results.cases_size(); results.cases_size() < 2 * cases;) {
      Case result = results.cases(results.cases_size() - cases);
      result.set_environment_id("other");
      *results.add_cases() = result;
    }
    const Analysis analysis(results);
    std::vector<std::string> titles;
    for (const Figure& figure : FiguresOf(kind, analysis, nullptr)) titles.push_back(figure.title);
    return titles;
  };
  for (const FigureKind kind :
       {FigureKind::kScaling, FigureKind::kFrontier, FigureKind::kMemory, FigureKind::kRoofline}) {
    const std::vector<std::string> titles = titles_of(kind, true);
    ASSERT_EQ(titles.size(), 2u) << Name(kind);
    EXPECT_TRUE(StrContains(titles[0], ", commit 0123456789 (dirty)")) << titles[0];
    EXPECT_TRUE(StrContains(titles[1], ", commit fedcba9876 (dirty)")) << titles[1];
    for (const std::string& title : titles_of(kind, false)) {
      EXPECT_FALSE(StrContains(title, "commit") || StrContains(title, ", on ")) << title;
    }
  }
}

TEST(FrontierFigure, ErrorsOfRoundingStandOnALineBelowTheOthersAndAreOtherwiseToScale) {
  // The errors of dense attention and of the best other technique, where the former is drawn, and
  // whether a line says that this is not to scale.
  const struct {
    double dense, other, drawn;
    bool has_line;
  } kRows[] = {
      {2e-7, 0.1, 0.1 / 4, true}, {0, 0.1, 0.1 / 4, true}, {9.9e-5, 0.001, 0.001 / 4, true},
      {5e-5, 4e-4, 5e-5, false},  // less than a factor of 10 apart
      {2e-7, 3e-6, 2e-7, false},  // both are rounding
      {0, 3e-6, 3e-6, false},     // 0 has no logarithm
      {0.01, 0.2, 0.01, false},
  };
  for (const auto& row : kRows) {
    const ResultSet results = MakeFrontier(
        {{"plain", 1, row.dense}, {"good", 0.5, row.other}, {"fast", 0.25, 2 * row.other}});
    const Analysis analysis(results);
    const std::vector<Figure> figures = FrontierFigures(analysis, nullptr);
    ASSERT_EQ(figures.size(), 1u);
    const plot::Plot& plot = figures[0].panels[0];
    EXPECT_DOUBLE_EQ(FindCurve(plot, "plain")->points[0].y, row.drawn);
    EXPECT_DOUBLE_EQ(FindCurve(plot, "good")->points[0].y, row.other);
    int lines = 0;
    for (const plot::Guide& guide : plot.guides) {
      if (!StrContains(guide.label, "rounding")) continue;
      ++lines;
      for (const plot::Point& point : guide.points) EXPECT_DOUBLE_EQ(point.y, row.drawn);
    }
    EXPECT_EQ(lines, row.has_line ? 1 : 0) << row.dense << ", " << row.other;
  }
}

TEST(FrontierFigure, ShowsBitsPerByteOverTimeAndComputation) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  for (int i = 0; i < 4; ++i) {
    CaseSpec spec;
    spec.technique = "stack";
    spec.option_name = "threshold";
    spec.option_value = absl::StrCat("0.", i + 1);
    spec.median_ns = 1e6 * (i + 1);
    Case result = MakeCase(spec);
    auto& statistics = *result.mutable_outcome()->mutable_statistics();
    statistics["bits_per_byte"] = 2 - 0.1 * i;
    statistics["mean_layers"] = 2 + i;
    statistics["flops_saved"] = 0.6 - 0.2 * i;
    *results.add_cases() = result;
  }
  const Analysis analysis(results);
  const std::vector<Figure> figures = FrontierFigures(analysis, nullptr);
  ASSERT_EQ(figures.size(), 1u);
  ASSERT_EQ(figures[0].panels.size(), 3u);
  const double x[] = {1e6, 2, 0.4};
  for (int panel = 0; panel < 3; ++panel) {
    const plot::Curve* first = FindCurve(figures[0].panels[panel], "stack threshold=0.1");
    ASSERT_NE(first, nullptr) << panel;
    EXPECT_NEAR(first->points[0].x, x[panel], 1e-6);
    EXPECT_NEAR(first->points[0].y, 2, 1e-9);
    EXPECT_FALSE(first->hollow);  // each spends more for fewer bits
  }
}

}  // namespace
}  // namespace tfb
