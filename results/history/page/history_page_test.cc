// Tests the text of the page without a browser, in which history_page_browser_test opens it.
//
// A change that is meant to change the golden page is accepted by
//   UPDATE_GOLDENS=1 bazel run //results/history/page:history_page_test
// What git then shows has to be read.

#include "results/history/page/history_page.h"

#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "results/expect_golden.h"
#include "results/history/page/history_data.h"
#include "results/history/page/history_page_assets.h"
#include "results/history/page/ranking.h"
#include "results/history/page/synthetic_history.h"
#include "results/page_assets.h"
#include "results/well_formed.h"

namespace tfb {
namespace {

using ::absl::StrContains;
using ::tfb::synthetic::AddChange;
using ::tfb::synthetic::AddSeries;
using ::tfb::synthetic::HistoryWithChanges;
using ::tfb::synthetic::MakeLargeHistory;
using ::tfb::synthetic::MakeMachine;
using ::tfb::synthetic::MakeSmallHistory;
using Json = nlohmann::json;

constexpr char kCommitUrl[] = "https://example.com/commit/%s";

std::string PageOf(const HistoryWithChanges& made, const std::string& commit_url = "") {
  return RenderHistoryPage(made.history, made.changes, {"", commit_url, {}});
}

// Returns the JSON within a page.
Json DataOf(const std::string& page) {
  const size_t begin = page.find('>', page.find("<script type=\"application/json\"")) + 1;
  return Json::parse(page.substr(begin, page.find("</script>", begin) - begin));
}

TEST(HistoryPage, IsTheGoldenOne) {
  HistoryWithChanges small = MakeSmallHistory();
  const std::string page = RenderHistoryPage(
      small.history, small.changes, {"Attention: history", kCommitUrl, {"run-0007 is torn."}});
  ExpectGoldenFile("results/history/page/goldens/small.html.txt",
                   absl::StrReplaceAll(page, {{kPageStyle, "(page.css)\n"},
                                              {kHistoryPageStyle, "(history_page.css)\n"},
                                              {kHistoryPageScript, "(script)\n"},
                                              {"><", ">\n<"},
                                              {"],[", "],\n["}}));
}

TEST(HistoryPage, SaysInASentenceWhatMatters) {
  const std::string page = PageOf(MakeSmallHistory());
  EXPECT_TRUE(StrContains(page,
                          "<p class=\"message\"><span class=\"bad\">3 unacknowledged "
                          "regressions</span> on 1 machine over 24 runs of 8 cases."))
      << page.substr(0, page.find("<main>"));
  HistoryWithChanges calm = MakeSmallHistory();
  calm.changes.clear();
  EXPECT_TRUE(StrContains(PageOf(calm),
                          "<span class=\"count\">No unacknowledged regressions</span> on 1 "));
  EXPECT_TRUE(StrContains(PageOf(calm), "No level of any series changed"));
}

TEST(HistoryPage, ListsRegressionsByTheirSizeBeforeOtherChanges) {
  const std::string page = PageOf(MakeSmallHistory());
  size_t at = page.find("id=\"changes\"");
  for (const char* name :
       {"Regressions that nobody has acknowledged: 3", ">inexact<", ">stuck<", ">slower<",
        "Acknowledged regressions: 1", ">known<", "Recovered: 1", ">back<", "Improvements: 2",
        ">faster<", ">back<", "Worse, but no regressions: 1", ">blamed<"}) {
    at = page.find(name, at);
    ASSERT_NE(at, std::string::npos) << name;
  }
  EXPECT_LT(at, page.find("<script"));
}

TEST(HistoryPage, SaysBetweenWhichCommitsAChangeLies) {
  HistoryWithChanges made = MakeSmallHistory();
  const auto& runs = made.history.machines[0].runs;
  const auto link = [&runs](int run) {
    return absl::StrCat("href=\"https://example.com/commit/", runs[run].commit, "\" title=\"",
                        runs[run].commit_subject, "\">", runs[run].commit.substr(0, 8), "</a>");
  };
  const std::string page = PageOf(made, kCommitUrl);
  // "slower" changed at the 17th run, "stuck" at the 18th value, before which it lacks one.
  EXPECT_TRUE(StrContains(page, link(15) + " → <a class=\"commit\" rel=\"noreferrer\" " + link(16)))
      << page;
  EXPECT_TRUE(StrContains(page, "the build changed, too: compiler: GCC 12.2 / GCC 13.1"));
  EXPECT_TRUE(StrContains(page, "acknowledged: the mask is exact now"));
  EXPECT_TRUE(StrContains(page, "no regression: dense changed"));
  EXPECT_TRUE(StrContains(page, "recovered with "));

  const std::vector<double> gap = {1, 1, 1, std::nan(""), std::nan(""), 2, 2, 2};
  HistoryWithChanges gaps;
  gaps.history.machines.push_back(MakeMachine("A", 8));
  AddSeries(0, HISTORY_METRIC_TIME, "gap", gap, &gaps.history);
  AddChange(0, 3, 6, &gaps);
  EXPECT_TRUE(StrContains(PageOf(gaps), "with 2 runs between them that have no value"));
  gaps.history.machines[0].runs[5].commit = gaps.history.machines[0].runs[2].commit;
  EXPECT_TRUE(StrContains(PageOf(gaps), "</span> in both runs"));
}

TEST(HistoryPage, LinksCommitsOnlyToAddressesOfTheWeb) {
  EXPECT_TRUE(IsCommitUrl("https://example.com/%s"));
  EXPECT_TRUE(IsCommitUrl("http://localhost/%s.html"));
  for (const char* url : {"", "https://example.com/", "javascript:alert(%s)", "file:///%s"}) {
    EXPECT_FALSE(IsCommitUrl(url)) << url;
    EXPECT_FALSE(StrContains(PageOf(MakeSmallHistory(), url), "class=\"commit\" rel=")) << url;
  }
}

TEST(HistoryPage, LoadsNothing) {
  const std::string page = PageOf(MakeSmallHistory());
  EXPECT_EQ(MarkupProblem(page, true), "");
  EXPECT_TRUE(StrContains(page, "default-src 'none'"));
  for (const char* outside : {"https:", " src=", "@import", "url(", "<link", "<iframe"}) {
    EXPECT_FALSE(StrContains(page, outside)) << outside;
  }
}

TEST(HistoryPage, HasEverySeriesAndEveryChange) {
  const HistoryWithChanges made = MakeLargeHistory(3, 60, 100);
  const Json data = DataOf(PageOf(made));
  std::map<std::string, const HistorySeries*> series;
  for (const HistorySeries& one : made.history.series) {
    ASSERT_TRUE(series.emplace(SeriesId(made.history, one), &one).second) << one.name;
  }
  size_t changes = 0, panels = 0;
  for (const Json& one : data["cases"]) {
    for (const Json& panel : one[7]) {
      ++panels;
      changes += panel[6].size();
      const std::string metric = data["metrics"][panel[0].get<int>()][0];
      const auto found = series.find(absl::StrCat(one[0].get<std::string>(), ".", metric));
      ASSERT_NE(found, series.end()) << one[0] << metric;
      EXPECT_EQ(data["strings"][one[3].get<int>()], found->second->name);
      EXPECT_EQ(one[1], found->second->machine);
      for (const Json& change : panel[6]) {
        EXPECT_EQ(change[0], found->second->runs[change[2].get<int>()]);
      }
    }
  }
  EXPECT_EQ(panels, made.history.series.size());
  EXPECT_EQ(changes, made.changes.size());
  ASSERT_GT(changes, 100u);
}

TEST(HistoryPage, PutsCasesWithRegressionsFirstThenThoseWithNoise) {
  HistoryWithChanges made;
  made.history.machines.push_back(MakeMachine("A", 6));
  const auto add = [&](const std::string& name, const std::vector<double>& values) {
    AddSeries(0, HISTORY_METRIC_TIME, name, values, &made.history);
  };
  add("constant", {1, 1, 1, 1, 1, 1});
  add("noisy", {1, 1.3, 1, 1.3, 1, 1.3});
  add("better", {4, 4, 4, 1, 1, 1});
  AddChange(0, 3, 6, &made);
  add("less noisy", {1, 1.1, 1, 1.1, 1, 1.1});
  add("worse", {1, 1, 1, 1.1, 1.1, 1.1});
  AddChange(0, 3, 6, &made);
  add("acknowledged", {1, 1, 1, 9, 9, 9});
  AddChange(0, 3, 6, &made)->acknowledged = "so be it";
  add("much worse", {1, 1, 1, 2, 2, 2});
  AddChange(0, 3, 6, &made);
  const Json data = DataOf(PageOf(made));
  std::vector<std::string> names;
  for (const Json& one : data["cases"]) names.push_back(data["strings"][one[3].get<int>()]);
  EXPECT_EQ(names, (std::vector<std::string>{"much worse", "worse", "acknowledged", "better",
                                             "noisy", "less noisy", "constant"}));
}

TEST(HistoryPage, OldChangesThatAreOverMatterLessThanNewOnes) {
  const auto weight = [](int at) {
    HistoryWithChanges made;
    made.history.machines.push_back(MakeMachine("A", 200));
    std::vector<double> values(200, 2);
    std::fill(values.begin() + at, values.end(), 1);
    AddSeries(0, HISTORY_METRIC_TIME, "better", values, &made.history);
    const Change* change = AddChange(0, at, 200, &made);
    return RankOf(made.history, made.history.series[0], {change}).weight;
  };
  EXPECT_NEAR(weight(149) * 2, weight(199), 1e-12);
  EXPECT_NEAR(weight(199), std::log(2.0), 1e-12);
}

TEST(HistoryPage, WritesSizesAsPercentAndFactors) {
  HistoryWithChanges made;
  made.history.machines.push_back(MakeMachine("A", 4));
  AddSeries(0, HISTORY_METRIC_TIME, "a", {1, 1, 1, 1}, &made.history);
  Change change;
  const auto text = [&](double ratio) {
    change.before = 1;
    change.after = ratio;
    change.ratio = ratio;
    change.low = 0.9 * ratio;
    change.high = 1.1 * ratio;
    return SizeText(made.history, change) + " " + SizeInterval(made.history, change);
  };
  EXPECT_EQ(text(1.312), "+31.2% [+18.1%, +44.3%]");
  EXPECT_EQ(text(0.75), "-25.0% [-32.5%, -17.5%]");
  EXPECT_EQ(text(2.5), "2.50x [2.25x, 2.75x]");
  EXPECT_EQ(text(0.1), "0.100x [0.090x, 0.110x]");
  change.before = 0;
  EXPECT_EQ(SizeInterval(made.history, change), "");
  EXPECT_TRUE(std::isinf(SizeOf(made.history, change)));
  change.before = std::nan("");
  EXPECT_EQ(SizeInterval(made.history, change), "");
}

TEST(HistoryPage, ShowsMarkupInNamesAsText) {
  const std::string evil =
      "</script><script>window.hacked=1</script>\"'><img src=x onerror=alert(1)>&<!--\xe2\x80\xa8"
      "\xff\n";
  HistoryWithChanges made = MakeSmallHistory();
  for (Machine& machine : made.history.machines) {
    machine.signature = evil;
    for (RunInfo& run : machine.runs) {
      run.name = run.file = run.commit = run.commit_subject = evil;
      run.build = {evil};
    }
  }
  for (HistorySeries& series : made.history.series) {
    series.key += evil;
    series.name += evil;
    series.problem = series.family = series.technique = series.reason = evil;
  }
  for (Change& change : made.changes) {
    change.reason = change.acknowledged = evil;
    change.build_differences = {evil};
  }
  const std::string page =
      RenderHistoryPage(made.history, made.changes, {evil, kCommitUrl, {evil}});
  EXPECT_EQ(MarkupProblem(page, true), "");
  EXPECT_FALSE(StrContains(page, "<img"));
  EXPECT_FALSE(StrContains(page, "<script>window"));
  EXPECT_FALSE(StrContains(page, "<!--"));
  EXPECT_FALSE(StrContains(page, "\xe2\x80\xa8"));
  EXPECT_FALSE(StrContains(page, "\xff"));
  EXPECT_EQ(DataOf(page)["cases"].size(), 8u);
}

TEST(HistoryPage, IsWholeForHistoriesThatHoldLittleOrNonsense) {
  HistoryWithChanges empty;
  EXPECT_EQ(MarkupProblem(PageOf(empty), true), "");
  EXPECT_TRUE(StrContains(PageOf(empty), "No runs: the store is empty."));
  EXPECT_TRUE(StrContains(RenderHistoryPage(empty.history, {}, {"", "", {"a.pb.gz is torn"}}),
                          "a.pb.gz is torn"));

  HistoryWithChanges single;  // one run, one series, no commit
  single.history.machines.push_back(MakeMachine("", 1));
  single.history.machines[0].runs[0].commit = "";
  single.history.machines[0].runs[0].commit_subject = "";
  single.history.machines[0].runs[0].commit_unix_s.reset();
  EXPECT_EQ(MarkupProblem(PageOf(single), true), "");  // no series
  AddSeries(0, HISTORY_METRIC_TIME, "alone", {5e5}, &single.history);
  EXPECT_EQ(MarkupProblem(PageOf(single), true), "");
  EXPECT_TRUE(StrContains(PageOf(single), "on 1 machine over 1 run of 1 case."));
  EXPECT_TRUE(StrContains(PageOf(single, kCommitUrl), "of <span class=\"commit\">run run-0001"));

  HistoryWithChanges nonsense;
  nonsense.history.machines.push_back(MakeMachine("A", 8));
  HistorySeries* series =
      AddSeries(0, HISTORY_METRIC_MEMORY, "odd", std::vector<double>(8, 1), &nonsense.history);
  constexpr double kInf = std::numeric_limits<double>::infinity();
  series->values = {std::nan(""), kInf, -kInf, 0, -1, 5e-324, 1.7e308, -0.0};
  series->bound = kInf;
  AddSeries(0, HISTORY_METRIC_ERROR, "none", std::vector<double>(8, std::nan("")),
            &nonsense.history);
  Change change;
  change.at = 1;
  change.end = 8;
  change.before = std::nan("");
  change.after = kInf;
  change.ratio = change.low = change.high = std::nan("");
  change.worse = change.is_regression = true;
  nonsense.changes.push_back(change);
  EXPECT_EQ(MarkupProblem(PageOf(nonsense), true), "");
  EXPECT_EQ(DataOf(PageOf(nonsense))["cases"].size(), 2u);
}

TEST(HistoryPage, AThousandRunsOfEightHundredCasesTakeUnderFiveMegabytes) {
  const HistoryWithChanges made = MakeLargeHistory(1, 1000, 800);
  ASSERT_EQ(made.history.series.size(), 4800u);
  ASSERT_GT(made.changes.size(), 400u);
  EXPECT_LT(PageOf(made, kCommitUrl).size(), 5000000u);
}

TEST(HistoryPage, KeepsLessOfEachSeriesWhereThereAreMore) {
  const HistoryWithChanges made = MakeLargeHistory(1, 1000, 20);
  const SeriesTexts all = MakeSeriesTexts(made.history, made.changes, 1000000);
  const SeriesTexts some = MakeSeriesTexts(made.history, made.changes, 20000);
  const auto size = [](const SeriesTexts& texts) {
    size_t bytes = 0;
    for (const std::string& text : texts.texts) bytes += text.size();
    return bytes;
  };
  EXPECT_LT(size(some), 20000u);
  EXPECT_GT(size(all), 20000u);
  EXPECT_LT(some.detail.latest, all.detail.latest);
  EXPECT_LT(some.detail.around, all.detail.around);
  const Detail least = MakeSeriesTexts(made.history, made.changes, 0).detail;
  EXPECT_EQ(least.groups, 10);
  // Each limit is halved as often as the groups, down to a least number.
  int halvings = 0;
  for (int groups = all.detail.groups; groups > 10; groups = std::max(groups / 2, 10)) ++halvings;
  EXPECT_EQ(least.latest, std::max(all.detail.latest >> halvings, 20));
  EXPECT_EQ(least.around, std::max(all.detail.around >> halvings, 3));
  EXPECT_EQ(least.odd, all.detail.odd >> halvings);
}

// Makes a history in which each of `count` cases takes `before` first and `after` + its number later.
HistoryWithChanges MakeChanges(int count, double before, double after) {
  HistoryWithChanges made;
  made.history.machines.push_back(MakeMachine("A", 4));
  for (int i = 0; i < count; ++i) {
    AddSeries(0, HISTORY_METRIC_TIME, absl::StrCat("case_", i),
              {before, before, after + i, after + i}, &made.history);
    AddChange(0, 2, 4, &made);
  }
  return made;
}

TEST(HistoryPage, ATableOfThousandsOfChangesNamesTheGreatest) {
  const std::string page = PageOf(MakeChanges(1000, 1, 2));
  EXPECT_TRUE(StrContains(page, "The panels mark 800 smaller ones."));
  EXPECT_TRUE(StrContains(page, ">case_800</a>"));
  EXPECT_FALSE(StrContains(page, ">case_799</a>"));
}

TEST(HistoryPage, ATableOfMoreThanFifteenRowsScrollsAndOneOfMoreThanTenImprovementsIsFolded) {
  constexpr char kTall[] = "<div class=\"table tall\"", kOpen[] = "<details open>";
  EXPECT_FALSE(StrContains(PageOf(MakeChanges(15, 1, 2)), kTall));
  EXPECT_TRUE(StrContains(PageOf(MakeChanges(16, 1, 2)), kTall));
  EXPECT_TRUE(StrContains(PageOf(MakeChanges(10, 1000, 2)), kOpen));
  EXPECT_FALSE(StrContains(PageOf(MakeChanges(11, 1000, 2)), kOpen));
}

}  // namespace
}  // namespace tfb
