// Opens the page of a history in a headless Chromium: panels are drawn when they come into view,
// their texts read as what was written, and filter, order, jumps, keys and links work.
//
// The test fails without Chromium (Debian: chromium, which tools/setup installs).

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "results/history/page/history_data.h"
#include "results/history/page/history_page.h"
#include "results/history/page/series_text.h"
#include "results/history/page/synthetic_history.h"
#include "results/in_chromium.h"

namespace tfb {
namespace {

using ::tfb::synthetic::AddChange;
using ::tfb::synthetic::AddSeries;
using ::tfb::synthetic::HistoryWithChanges;
using ::tfb::synthetic::MakeLargeHistory;
using ::tfb::synthetic::MakeMachine;
using ::tfb::synthetic::MakeSmallHistory;
using ::tfb::synthetic::NextUniform;
using HistoryPageInBrowser = InChromium;
using Json = nlohmann::json;

constexpr char kCommitUrl[] = "https://example.com/commit/%s";

std::string PageOf(const HistoryWithChanges& made) {
  return RenderHistoryPage(made.history, made.changes, {"", kCommitUrl, {}});
}

// Returns a probe that runs `script`, which may await, with `found` for its findings and functions
// for what people do.
std::string Probe(const std::string& script) {
  return absl::StrCat(R"(<pre id="probe"></pre><script>
(async () => {
  const found = {};
  try {
  const shown = (element) => element.getClientRects().length > 0;
  // Messages take no virtual time, so that frames, which take real time, are waited for however long they take.
  const channel = new MessageChannel();
  const message = () => new Promise((resolve) => { channel.port1.onmessage = resolve; channel.port2.postMessage(0); });
  const until = async (condition) => { for (let i = 0; i < 5e6 && !condition(); ++i) await message(); };
  const frame = async () => {
    let drawn = false;
    requestAnimationFrame(() => requestAnimationFrame(() => { drawn = true; }));
    await until(() => drawn);
  };
  const set = (name, value) => {
    const field = form.elements[name];
    if (field.type === 'checkbox') field.checked = value; else field.value = value;
    field.dispatchEvent(new Event('input', {bubbles: true}));
    field.dispatchEvent(new Event('change', {bubbles: true}));
  };
  const names = () => all('.case').filter((one) => !one.hidden).map((one) => one.querySelector('h3').firstChild.textContent);
  const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true}));
  const hash = () => new URLSearchParams(location.hash.slice(1));
  await frame();
)",
                      script, R"(
  } catch (error) { problems.push(error.stack); }
  found.problems = problems;
  found.resources = performance.getEntriesByType('resource').map((entry) => entry.name);
  found.hacked = window.hacked === 1;
  document.getElementById('probe').textContent = JSON.stringify(found);
})();
</script>)");
}

void ExpectNoProblems(const Json& found) {
  ASSERT_TRUE(found.is_object()) << "the probe did not run to its end";
  ASSERT_EQ(found["problems"], Json::array());
  EXPECT_EQ(found["resources"], Json::array());
  EXPECT_FALSE(found["hacked"].get<bool>());
}

// --- What is written reads as what it was.

// Reads a number of a probe, where those that JSON does not have are texts.
double NumberOf(const Json& json) {
  return json.is_string() ? std::strtod(json.get<std::string>().c_str(), nullptr)
                          : json.get<double>();
}

// Expects that `read` is `value` within 0.1 %, or within the least number where that is less.
void ExpectKept(double read, double value, bool exact, const std::string& where) {
  if (std::isnan(value)) {
    EXPECT_TRUE(std::isnan(read)) << where;
    return;
  }
  if (exact || std::isinf(value) || value == 0) {
    EXPECT_EQ(read, value) << where;
    return;
  }
  EXPECT_NEAR(read, value, std::max(std::fabs(value) * 1.0000001e-3, 5e-324)) << where;
}

struct TextCase {
  std::vector<int> runs;
  std::vector<double> values;
  std::vector<int> cuts;
  bool exact = false;
};

// Makes series of all kinds of values, lengths and gaps.
std::vector<TextCase> TextCases() {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const double odd[] = {0,     -0.0,    std::nan(""), kInf,    -kInf,  5e-324,
                        1e308, -1e-300, 2.2e-308,     1.7e308, -3.5e7, 1};
  std::vector<TextCase> cases(1);  // the first has no values
  uint64_t state = 42;
  for (int i = 0; i < 200; ++i) {
    TextCase one;
    const int count = i < 20 ? i + 1 : static_cast<int>(1200 * NextUniform(&state));
    const double center = std::exp(1400 * (NextUniform(&state) - 0.5));
    const double noise = std::exp(-8 + 10 * NextUniform(&state));
    const double odd_share = i % 3 == 0 ? NextUniform(&state) : 0;
    const double gap_share = i % 2 == 0 ? 0.3 * NextUniform(&state) : 0;
    const int distinct = i % 5 == 4 ? 2 : 0;
    int run = i % 7 == 0 ? 100 : 0;
    for (int place = 0; place < count; ++place, ++run) {
      if (NextUniform(&state) < gap_share) run += static_cast<int>(20 * NextUniform(&state));
      const double step =
          distinct > 0 ? std::floor(distinct * NextUniform(&state)) : NextUniform(&state) - 0.5;
      double value = center * std::exp(noise * step);
      if (NextUniform(&state) < odd_share) {
        value = odd[static_cast<int>(12 * NextUniform(&state))];
      }
      one.runs.push_back(run);
      one.values.push_back(value);
    }
    for (int cut = 0; cut < i % 6; ++cut) {
      one.cuts.push_back(static_cast<int>(count * NextUniform(&state)));
    }
    one.exact = i % 11 == 0;
    cases.push_back(std::move(one));
  }
  return cases;
}

TEST_F(HistoryPageInBrowser, SeriesReadAsTheyWereWritten) {
  const std::vector<TextCase> cases = TextCases();
  Json texts = Json::array();
  for (const TextCase& one : cases) {
    texts.push_back(SeriesText(one.runs, one.values, one.cuts, {}, one.exact));
  }
  const Json found = Probed(Open(PageOf(MakeSmallHistory()),
                                 Probe(absl::StrCat("const texts = ", texts.dump(), R"(;
  const plain = (number) => (Number.isFinite(number) && !Object.is(number, -0) ? number : String(number));
  found.series = texts.map((text) => {
    const {runs, items, exact} = decodeSeries(text);
    return {runs, exact, items: items.map(({first, count, value, low, high, odd}) => [first, count, plain(value), plain(low), plain(high), odd])};
  });)")),
                                 ""));
  ASSERT_NO_FATAL_FAILURE(ExpectNoProblems(found));
  ASSERT_EQ(found["series"].size(), cases.size());
  int groups = 0;
  for (size_t i = 0; i < cases.size(); ++i) {
    const TextCase& one = cases[i];
    const Json& read = found["series"][i];
    ASSERT_EQ(read["runs"], Json(one.runs)) << i;
    EXPECT_TRUE(read["exact"].get<bool>() || !one.exact);
    const int count = static_cast<int>(one.values.size());
    int at = 0;
    for (const Json& item : read["items"]) {
      const std::string where = absl::StrCat("series ", i, ", value ", at);
      ASSERT_EQ(item[0], at) << where;
      const int size = item[1];
      ASSERT_LE(at + size, count) << where;
      std::vector<double> own(one.values.begin() + at, one.values.begin() + at + size);
      at += size;
      if (size == 1) {
        ExpectKept(NumberOf(item[2]), own[0], read["exact"], where);
        EXPECT_EQ(item[5], std::isfinite(own[0]) ? 0 : 1) << where;
        continue;
      }
      ++groups;
      EXPECT_LE(at, count - Detail().latest) << where;
      for (const int cut : one.cuts) {
        if (cut == 0) continue;
        EXPECT_TRUE(at <= cut - Detail().around || at - size >= cut + Detail().around) << where;
      }
      own.erase(std::remove_if(own.begin(), own.end(), [](double v) { return !std::isfinite(v); }),
                own.end());
      EXPECT_EQ(item[5], size - static_cast<int>(own.size())) << where;
      if (own.empty()) continue;
      std::sort(own.begin(), own.end());
      const double a = own[(own.size() - 1) / 2], b = own[own.size() / 2];
      ExpectKept(NumberOf(item[2]), a == b ? a : a / 2 + b / 2, false, where);
      ExpectKept(NumberOf(item[3]), own.front(), false, where);
      ExpectKept(NumberOf(item[4]), own.back(), false, where);
    }
    EXPECT_EQ(at, count) << i;
  }
  EXPECT_GT(groups, 1000);
}

// --- The page.

TEST_F(HistoryPageInBrowser, APageOfThousandsDecodesOnlyWhatIsInView) {
  HistoryWithChanges made = MakeLargeHistory(1, 1000, 800);
  const Json found = Probed(Open(PageOf(made), Probe(R"(
  found.cases = cases.length;
  found.at_load = decoded.size;
  cases[0].node.scrollIntoView({behavior: 'instant'});
  await until(() => cases[0].built);
  await frame();
  found.decoded = decoded.size;
  found.panels = all('.panel').length;
  found.overflow = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  // The last case of all is drawn once it is in view.
  const last = all('.case').pop();
  last.scrollIntoView({behavior: 'instant'});
  await until(() => last.case.built);
  found.last = all('.panel', last).length;
  found.after = decoded.size;
)"),
                                 ""));
  ASSERT_NO_FATAL_FAILURE(ExpectNoProblems(found));
  EXPECT_EQ(found["cases"], 800);
  EXPECT_LE(found["at_load"], 240) << "series decoded at load, of 4800";
  EXPECT_GE(found["decoded"], 6);
  EXPECT_LE(found["decoded"], 240);
  EXPECT_LE(found["panels"], 240);
  EXPECT_FALSE(found["overflow"].get<bool>());
  EXPECT_EQ(found["last"], 3);  // three noisy times
  EXPECT_LE(found["after"], 480);
}

TEST_F(HistoryPageInBrowser, DrawsEverySeriesAndEveryChange) {
  HistoryWithChanges made = MakeLargeHistory(3, 200, 20);
  const Json found = Probed(Open(PageOf(made), Probe(R"(
  cases.forEach(build);
  found.series = all('[id^="series-"]').filter(shown).map((one) => one.id.slice('series-'.length));
  found.changes = {};
  all('.panel').forEach((panel) => { found.changes[panel.id.slice('series-'.length)] = all('.plot .change', panel).length; });
  found.lines = all('.panel').filter((panel) => panel.querySelector('.values, .strip') === null).length;
  found.labelled = all('.plot').every((plot) => plot.getAttribute('aria-label') && plot.getAttribute('aria-valuetext'));
  found.levels = all('.panel').every((panel) => all('.level', panel).length > 0 || panel.querySelector('.strip'));
)"),
                                 ""));
  ASSERT_NO_FATAL_FAILURE(ExpectNoProblems(found));
  std::map<std::string, int> expected;
  for (const HistorySeries& series : made.history.series) {
    expected[SeriesId(made.history, series)] = 0;
  }
  EXPECT_EQ(found["series"].size(), expected.size());
  for (const Json& id : found["series"]) EXPECT_EQ(expected.count(id), 1u) << id;
  for (const Change& change : made.changes) {
    ++expected[SeriesId(made.history, made.history.series[change.series])];
  }
  int marked = 0;
  for (const auto& [id, count] : expected) {
    if (count == 0) continue;
    EXPECT_EQ(found["changes"].value(id, 0), count) << id;
    marked += count;
  }
  EXPECT_EQ(marked, static_cast<int>(made.changes.size()));
  EXPECT_EQ(found["lines"], 0) << "panels without values";
  EXPECT_TRUE(found["labelled"].get<bool>());
  EXPECT_TRUE(found["levels"].get<bool>());
}

TEST_F(HistoryPageInBrowser, FiltersSortsAndKeepsBothInTheAddress) {
  HistoryWithChanges made = MakeLargeHistory(3, 40, 30);
  const Json found = Probed(Open(PageOf(made), Probe(R"(
  found.all = names().length;
  set('text', 'TECHNIQUE_1 causal');
  found.by_text = names();
  found.output = output.textContent;
  found.text_address = hash().get('text');
  set('text', '');
  set('machine', '2');
  found.by_machine = cases.filter((one) => !one.node.hidden).map((one) => one.machine);
  set('family', 'memory');
  found.by_family = names();
  set('family', '');
  set('machine', '');
  set('changed', true);
  found.changed = cases.filter((one) => !one.node.hidden).every((one) => one.raw.some((raw) => raw[6].length > 0));
  found.changed_count = names().length;
  cases.filter((one) => !one.node.hidden).forEach(build);
  found.unchanged_panels = all('.panel, .constant').filter((panel) => shown(panel) && panel.querySelector('.change') === null).length;
  set('changed', false);
  set('metric', 'memory');
  cases.forEach(build);
  found.metrics = Array.from(new Set(all('.panel .metric, .constant .metric').filter(shown).map((metric) => metric.textContent)));
  set('metric', '');
  set('sort', 'case');
  found.by_case = all('.case').map((node) => node.case.order);
  set('sort', 'noise');
  found.by_noise = all('.case').map((node) => Math.max(...node.case.raw.map((raw) => raw[2])));
  found.sort_address = hash().get('sort');
  set('sort', 'latest');
  found.by_latest = all('.case').map((node) => Math.max(-1, ...node.case.raw.flatMap((raw) => raw[6].map(([run]) => run))));
  set('last', '30');
  cases.slice(0, 5).forEach(build);
  found.runs = all('.plot').map((plot) => plot.getAttribute('aria-valuemax'));
  set('text', 'no such case');
  found.none = [names().length, output.textContent];
  form.dispatchEvent(new Event('reset', {cancelable: true}));
  found.reset = [names().length, output.textContent, location.hash];
  found.order = all('.case').map((node) => node.case.rank);
)"),
                                 ""));
  ASSERT_NO_FATAL_FAILURE(ExpectNoProblems(found));
  EXPECT_EQ(found["all"], 90);
  EXPECT_EQ(found["by_text"].size(), 3u * 7);  // 10 to 19 but 12, 15 and 18
  for (const Json& name : found["by_text"]) {
    EXPECT_TRUE(absl::StartsWith(name.get<std::string>(), "technique_1")) << name;
  }
  EXPECT_EQ(found["output"], "21 of 90 cases, 126 series");
  EXPECT_EQ(found["text_address"], "TECHNIQUE_1 causal");
  EXPECT_EQ(found["by_machine"], Json(std::vector<int>(30, 1)));
  EXPECT_EQ(found["by_family"].size(), 10u);  // 20 to 29
  EXPECT_TRUE(found["changed"].get<bool>());
  EXPECT_GT(found["changed_count"], 0);
  EXPECT_LT(found["changed_count"], 90);
  EXPECT_EQ(found["unchanged_panels"], 0);
  EXPECT_EQ(found["metrics"].size(), 1u) << found["metrics"];
  EXPECT_TRUE(std::is_sorted(found["by_case"].begin(), found["by_case"].end()));
  EXPECT_TRUE(std::is_sorted(found["by_noise"].rbegin(), found["by_noise"].rend()));
  EXPECT_EQ(found["sort_address"], "noise");
  EXPECT_TRUE(std::is_sorted(found["by_latest"].rbegin(), found["by_latest"].rend()));
  ASSERT_FALSE(found["runs"].empty());
  for (const Json& runs : found["runs"]) EXPECT_LE(std::stoi(runs.get<std::string>()), 30);
  EXPECT_EQ(found["none"], Json({0, "0 of 90 cases, 0 series"}));
  EXPECT_EQ(found["reset"], Json({90, "", ""}));
  EXPECT_TRUE(std::is_sorted(found["order"].begin(), found["order"].end()));
}

TEST_F(HistoryPageInBrowser, AnAddressKeepsFilterOrderAndPanel) {
  HistoryWithChanges made = MakeLargeHistory(2, 40, 30);
  const std::string id = SeriesId(made.history, made.history.series.back());
  const Json found = Probed(Open(PageOf(made), Probe(R"(
  found.machines = Array.from(new Set(cases.filter((one) => !one.node.hidden).map((one) => one.machine)));
  found.sorted = all('.case').map((node) => node.case.order);
  found.fields = [form.elements.machine.value, form.elements.sort.value, form.elements.changed.checked];
  found.large = [dialog.open, dialog.querySelector('h2').textContent];
  found.target = all('.target').map((panel) => panel.id);
)"),
                                 absl::StrCat("#machine=2&sort=case&series=", id, "&large=", id)));
  ASSERT_NO_FATAL_FAILURE(ExpectNoProblems(found));
  EXPECT_EQ(found["machines"], Json({1}));
  EXPECT_TRUE(std::is_sorted(found["sorted"].begin(), found["sorted"].end()));
  EXPECT_EQ(found["fields"], Json({"2", "case", false}));
  EXPECT_EQ(found["large"], Json({true, "technique_2 window=256: status"}));
  EXPECT_EQ(found["target"], Json({"series-" + id}));
}

TEST_F(HistoryPageInBrowser, JumpsFromAChangeToItsPanelWhateverTheFilterHides) {
  const Json found = Probed(Open(PageOf(MakeLargeHistory(1, 60, 200)), Probe(R"(
  const link = all('#changes a[href^="#series="]').pop();
  const id = new URLSearchParams(link.hash.slice(1)).get('series');
  link.closest('details').open = true;
  set('text', 'nothing has this name');
  link.click();
  const panel = document.getElementById('series-' + id);
  const box = panel.getBoundingClientRect();
  found.visible = box.top >= 0 && box.bottom <= innerHeight;
  found.focused = panel.contains(document.activeElement) || panel === document.activeElement;
  found.address = hash().get('series') === id;
  found.text = [form.elements.text.value, hash().get('text')];
  found.targets = all('.target').length;
)"),
                                 ""));
  ASSERT_NO_FATAL_FAILURE(ExpectNoProblems(found));
  EXPECT_TRUE(found["visible"].get<bool>());
  EXPECT_TRUE(found["focused"].get<bool>());
  EXPECT_TRUE(found["address"].get<bool>());
  EXPECT_EQ(found["text"], Json({"", nullptr}));
  EXPECT_EQ(found["targets"], 1);
}

TEST_F(HistoryPageInBrowser, TellsARunByKeysAndPointerAndLinksItsCommit) {
  const HistoryWithChanges made = MakeSmallHistory();
  const Json found = Probed(Open(PageOf(made), Probe(R"(
  cases.forEach(build);
  const panel = all('.panel').find((one) => one.closest('.case').case.name === 'slower');
  const plot = panel.querySelector('svg');
  const told = () => [plot.getAttribute('aria-valuenow'), panel.querySelector('.readout').textContent];
  found.rest = told();
  plot.focus();
  press('Home');
  found.home = told();
  press('ArrowLeft');
  found.stays = told()[0];
  press('ArrowRight');
  found.right = told()[0];
  press('PageDown');
  found.change = told();
  const link = panel.querySelector('.readout a');
  found.link = [link.href, link.title, link.textContent];
  press('PageUp');
  found.back = told()[0];
  press('End');
  found.end = told()[0];
  const box = plot.getBoundingClientRect();
  plot.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left, clientY: box.top, bubbles: true}));
  found.pointer = told()[0];
  found.cursor = panel.querySelector('.cursor').getAttribute('visibility');

  // Enter opens the panel large, with its changes and values; Escape and the button close it.
  plot.focus();
  press('Enter');
  found.open = [dialog.open, dialog.querySelector('h2').textContent, hash().get('large') !== null];
  found.build = dialog.querySelector('.readout').lastChild.textContent;
  found.changes = all('.changes li', dialog).map((line) => line.textContent);
  found.large_links = all('.changes a', dialog).map((link) => link.href);
  found.focus_within = dialog.contains(document.activeElement);
  dialog.querySelector('details').open = true;
  await until(() => dialog.querySelector('tbody'));
  found.rows = all('tbody tr', dialog).length;
  all('.constant', dialog).find((button) => button.textContent === 'status').click();
  found.other = dialog.querySelector('h2').textContent;
  dialog.querySelector('.close').click();
  found.closed = [dialog.open, hash().get('large')];
  panel.querySelector('.open').click();
  found.again = dialog.open;
)"),
                                 ""));
  ASSERT_NO_FATAL_FAILURE(ExpectNoProblems(found));
  const std::vector<RunInfo>& runs = made.history.machines[0].runs;
  EXPECT_EQ(found["rest"][0], "24");
  EXPECT_EQ(found["home"][0], "1");
  const std::string home = found["home"][1];
  EXPECT_TRUE(absl::StrContains(home, "run 1 of 24 · 2025-01-01")) << home;
  EXPECT_TRUE(absl::StrContains(home, runs[0].commit_subject)) << home;
  EXPECT_TRUE(absl::StrContains(home, " of its level")) << home;
  EXPECT_EQ(found["stays"], "1");
  EXPECT_EQ(found["right"], "2");
  EXPECT_EQ(found["change"][0], "17");
  EXPECT_EQ(found["link"], Json({absl::StrCat("https://example.com/commit/", runs[16].commit),
                                 runs[16].commit_subject, runs[16].commit.substr(0, 8)}));
  EXPECT_EQ(found["back"], "17");
  EXPECT_EQ(found["end"], "24");
  EXPECT_EQ(found["pointer"], "1");
  EXPECT_EQ(found["cursor"], "visible");
  EXPECT_EQ(found["open"], Json({true, "slower: time over dense", true}));
  EXPECT_EQ(found["build"], "compiler: GCC 13.1 · mode: opt");
  ASSERT_EQ(found["changes"].size(), 1u);
  EXPECT_TRUE(absl::StrContains(found["changes"][0].get<std::string>(), "GCC 12.2 / GCC 13.1"));
  EXPECT_EQ(found["large_links"],
            Json({absl::StrCat("https://example.com/commit/", runs[15].commit),
                  absl::StrCat("https://example.com/commit/", runs[16].commit)}));
  EXPECT_TRUE(found["focus_within"].get<bool>());
  EXPECT_EQ(found["rows"], 24);
  EXPECT_EQ(found["other"], "slower: status");
  EXPECT_EQ(found["closed"], Json({false, nullptr}));
  EXPECT_TRUE(found["again"].get<bool>());
}

TEST_F(HistoryPageInBrowser, ShowsGapsAndValuesThatAreNotFinite) {
  HistoryWithChanges made;
  made.history.machines.push_back(MakeMachine("A", 12));
  constexpr double kInf = std::numeric_limits<double>::infinity();
  HistorySeries* series =
      AddSeries(0, HISTORY_METRIC_TIME, "odd",
                {1, 2, std::nan(""), std::nan(""), 1, 2, 1, 2, 1, 2, 1, 2}, &made.history);
  series->values[5] = kInf;
  series->values[7] = std::nan("");
  AddSeries(0, HISTORY_METRIC_MEMORY, "odd", std::vector<double>(12, 1), &made.history)->values =
      std::vector<double>(12, std::nan(""));
  const std::vector<double> extremes = {0,        -1, 5e-324, 1.7e308, kInf, -kInf,
                                        -1.7e308, 1,  1,      1,       1,    1};
  AddSeries(0, HISTORY_METRIC_ERROR, "extreme", extremes, &made.history);
  AddSeries(0, HISTORY_METRIC_TIME, "extreme", {5e-324, 1.7e308}, &made.history);
  const Json found = Probed(Open(PageOf(made), Probe(R"(
  cases.forEach(build);
  found.paths = all('.plot path').length;
  found.nonsense = all('.plot path').filter((one) => /NaN|Inf/.test(one.getAttribute('d'))).length;
  const plot = all('.panel svg').find((one) => one.closest('.case').case.name === 'odd');
  // Lines begin anew after a gap, and after each value that is not finite.
  found.lines = plot.querySelector('.values').getAttribute('d').split('M').length - 1;
  found.odd = plot.querySelector('.odd').getAttribute('d').split('M').length - 1;
  found.constants = all('.constant').map((one) => one.textContent);
  plot.focus();
  press('End'); press('ArrowLeft'); press('ArrowLeft');
  found.told = plot.closest('.panel').querySelector('.readout b').textContent;
)"),
                                 ""));
  ASSERT_NO_FATAL_FAILURE(ExpectNoProblems(found));
  EXPECT_GT(found["paths"], 10);
  EXPECT_EQ(found["nonsense"], 0);
  EXPECT_EQ(found["lines"], 4);
  EXPECT_EQ(found["odd"], 2);
  EXPECT_EQ(found["constants"].size(), 1u);
  EXPECT_TRUE(absl::StrContains(found["constants"][0].get<std::string>(), "nan")) << found;
  EXPECT_EQ(found["told"], "nan");
}

TEST_F(HistoryPageInBrowser, OneRunAndEvilNamesAreShownAsText) {
  const std::string evil = "</script><script>window.hacked=1</script>\"'><img src=x onerror=a()>&";
  HistoryWithChanges made;
  made.history.machines.push_back(MakeMachine(evil, 1));
  made.history.machines[0].runs[0].commit = evil;
  made.history.machines[0].runs[0].commit_subject = evil;
  AddSeries(0, HISTORY_METRIC_TIME, evil, {5e5}, &made.history)->family = evil;
  const Json found = Probed(Open(PageOf(made), Probe(R"(
  cases.forEach(build);
  found.names = names();
  found.constants = all('.constant').length;
  document.querySelector('.constant').click();
  found.link = dialog.querySelector('.readout a').href;
)"),
                                 ""));
  ASSERT_NO_FATAL_FAILURE(ExpectNoProblems(found));
  EXPECT_EQ(found["names"], Json({evil}));
  EXPECT_EQ(found["constants"], 1);
  EXPECT_TRUE(absl::StartsWith(found["link"].get<std::string>(),
                               "https://example.com/commit/%3C%2Fscript%3E"))
      << found["link"];
}

TEST_F(HistoryPageInBrowser, AnEmptyHistoryLogsNothing) {
  const std::string dom = Open(PageOf({}), "", "");
  EXPECT_TRUE(absl::StrContains(dom, "No runs: the store is empty."));
}

TEST_F(HistoryPageInBrowser, VerdictAndTablesNeedNoScript) {
  std::string page = PageOf(MakeSmallHistory());
  const size_t script = page.rfind("<script>");
  page.erase(script, page.rfind("</script>") + 9 - script);
  const Json found = Probed(Open(page, R"(<pre id="probe"></pre><script>
  const shown = (selector) => Array.from(document.querySelectorAll(selector)).filter((one) => one.getClientRects().length > 0).length;
  document.getElementById('probe').textContent = JSON.stringify([
    document.querySelector('.message .bad').textContent, shown('#changes tbody tr'), shown('#changes a.commit'), shown('form')]);
</script>)",
                                 ""));
  EXPECT_EQ(found, Json({"3 unacknowledged regressions", 8, 17, 0}));
}

TEST_F(HistoryPageInBrowser, ANarrowWindowNeedsNoScrollingSideways) {
  const Json found = Probed(Open(PageOf(MakeSmallHistory()), Probe(R"(
  cases.forEach(build);
  found.width = innerWidth;
  found.overflow = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  all('.panel .open').pop().click();
  found.dialog = dialog.getBoundingClientRect().width <= innerWidth && dialog.scrollWidth <= dialog.clientWidth;
)"),
                                 "", "--window-size=500,900"));
  ASSERT_NO_FATAL_FAILURE(ExpectNoProblems(found));
  EXPECT_LE(found["width"], 500);
  EXPECT_FALSE(found["overflow"].get<bool>());
  EXPECT_TRUE(found["dialog"].get<bool>());
}

// Text can be read in light and in dark.
TEST_F(HistoryPageInBrowser, ColoursHaveContrast) {
  const std::string page = PageOf(MakeSmallHistory());
  for (const bool dark : {false, true}) {
    const Json found = Probed(Open(page, Probe(R"(
  cases.forEach(build);
  const linear = (value) => { const c = value / 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const luminance = (colour) => {
    const [r, g, b] = colour.match(/[\d.]+/g).map(Number);
    return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  };
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const panel = getComputedStyle(document.querySelector('figure')).backgroundColor;
  const page = getComputedStyle(document.body).backgroundColor;
  found.dark = luminance(page) < 0.2;
  found.least = Math.min(
      ...all('.plot text').map((text) => contrast(getComputedStyle(text).fill, panel)),
      ...all('.panel span, .panel b, .panel a').map((text) => contrast(getComputedStyle(text).color, panel)),
      ...all('p, th, td, td small, h2, h3, h3 small, summary, li, .constant span').map((text) => contrast(getComputedStyle(text).color, page)));
)"),
                                   "",
                                   dark ? "--blink-settings=preferredColorScheme=0"
                                        : "--blink-settings=preferredColorScheme=1"));
    ASSERT_NO_FATAL_FAILURE(ExpectNoProblems(found));
    EXPECT_EQ(found["dark"], dark);
    EXPECT_GE(found["least"], 4.5) << found;  // WCAG 2.1, AA
  }
}

}  // namespace
}  // namespace tfb
