// Opens the report in a headless Chromium and checks the page: curves for every technique, tables
// that sort and filter, nothing loaded, nothing logged.
//
// The test fails without Chromium (Debian: chromium, which tools/setup installs).

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "results/analysis.h"
#include "results/in_chromium.h"
#include "results/page.h"
#include "results/synthetic.h"
#include "results/table.h"

namespace tfb {
namespace {

using Json = nlohmann::json;
using ::tfb::synthetic::CaseSpec;
using ::tfb::synthetic::MakeCase;
using ::tfb::synthetic::MakeEnvironment;
using ::tfb::synthetic::MakeUnmeasured;

constexpr int kTechniques = 45;
constexpr char kEvil[] = "evil<script>window.hacked=1</script>";

std::string TechniqueName(int i) { return i == 7 ? kEvil : absl::StrCat("technique_", i); }
std::string FamilyName(int i) {
  static const char* const kFamilies[] = {"attention", "positional", "memory", "adaptive"};
  return i < 0 ? "attention" : kFamilies[i % 4];
}

// Makes the results of a default sweep: five lengths, a missing GPU, errors on real inputs.
ResultSet DefaultSweep() {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  for (int i = -1; i < kTechniques; ++i) {
    CaseSpec spec;
    if (i >= 0) spec.technique = TechniqueName(i);
    const auto add = [&](Case result) {
      result.mutable_technique()->set_family(FamilyName(i));
      *results.add_cases() = std::move(result);
    };
    spec.purpose = Case::PURPOSE_ACCURACY;
    spec.median_ns = 1e6 * (i + 2);
    Case accuracy = MakeCase(spec);
    accuracy.mutable_outcome()->mutable_against_dense()->set_relative_frobenius(0.9 - 0.01 * i);
    (*accuracy.mutable_outcome()->mutable_statistics())["mean_span"] = i;
    add(accuracy);
    spec.purpose = Case::PURPOSE_SCALING;
    for (const int64_t tokens : {256, 512, 1024, 2048, 4096}) {
      spec.tokens = tokens;
      spec.expected_growth = i % 3 == 0 ? 1 : 2;
      spec.median_ns = 1e4 * static_cast<double>(tokens) * (i + 2);
      add(MakeCase(spec));
      spec.device = DEVICE_TYPE_CUDA;
      add(MakeUnmeasured(spec, Outcome::STATUS_SKIPPED, "no CUDA device"));
      spec.device = DEVICE_TYPE_CPU;
    }
  }
  return results;
}

// Runs after the page's script, and writes its findings to the document.
constexpr char kProbe[] = R"(<pre id="probe"></pre><script>
(() => {
  const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));
  const shown = (element) => element.getClientRects().length > 0;
  const found = {};
  found.hacked = window.hacked === 1;
  found.curves = all('[data-plot=scaling] .curve:not(.faint)').filter(shown).map((curve) => ({
    name: curve.getAttribute('aria-label').split(': ')[0],
    points: curve.querySelector('.line').getAttribute('d').split('L').length,
    length: curve.querySelector('.line').getTotalLength(),
    label: curve.querySelector('.label').textContent,
    focusable: curve.hasAttribute('tabindex'),
  }));
  found.plots = all('[data-plot]').map((panels) => panels.dataset.plot);
  found.overflow = document.documentElement.scrollWidth > document.documentElement.clientWidth;

  // The scaling table by its first length, up and down.
  const table = all('table').find((table) => table.tHead.textContent.includes('growth'));
  const column = () => Array.from(table.tBodies[0].rows).filter(shown).map((row) => row.cells[1].firstChild.textContent.trim());
  const header = () => table.tHead.rows[0].cells[1];
  header().querySelector('button').click();
  found.ascending = [header().getAttribute('aria-sort'), ...column()];
  header().querySelector('button').click();
  found.descending = [header().getAttribute('aria-sort'), ...column()];
  found.address = location.hash;

  // Filters, by text and by family.
  const form = document.querySelector('.controls form');
  const set = (name, value) => {
    form.elements[name].value = value;
    form.dispatchEvent(new Event('input', {bubbles: true}));
  };
  const names = () => Array.from(table.tBodies[0].rows).filter(shown).map((row) => row.cells[0].textContent);
  const curves = () => all('[data-plot=scaling] .curve:not(.ref):not(.faint)').filter(shown).length;
  found.all = [names().length, curves()];
  set('text', 'technique_1');
  found.by_text = names();
  found.curves_by_text = curves();
  set('text', '');
  set('family', 'memory');
  found.by_family = [names().length, curves()];
  found.legend = all('figure').filter(shown).every((figure) => all('.legend button', figure).filter(shown)
      .every((button) => all('.curve', figure).some((curve) => shown(curve) && curve.dataset.key === button.dataset.key)));
  set('text', 'no technique');
  const empty = (part) => !all('figure, tbody tr, summary, p:not([class])', part).some(shown);
  found.empty = all('section').filter((part) => shown(part) && empty(part)).map((part) => part.textContent.slice(0, 80));
  found.links = [all('nav a').length, all('nav a').filter(shown).length];
  found.dead_links = all('nav a').filter((link) => shown(link) && !shown(document.querySelector(link.hash))).length;
  form.dispatchEvent(new Event('reset', {cancelable: true}));
  found.reset = [names().length, curves()];

  // A point hidden by its button; what is focused is told in words and stands out.
  const scatter = document.querySelector('[data-plot=frontier] figure');
  const button = all('.legend button', scatter)[1];
  button.click();
  const hidden = all('.curve', scatter).filter((curve) => curve.dataset.key === button.dataset.key);
  found.toggled = [button.getAttribute('aria-pressed'), hidden.length, hidden.some(shown)];
  button.click();
  found.toggled_back = [button.getAttribute('aria-pressed'), hidden.every(shown)];
  const figure = document.querySelector('[data-plot=scaling] figure');
  const named = all('.curve', figure)[1];
  named.focus();
  found.stops = all('figure').filter((figure) => all('.curve', figure).filter((curve) => curve.tabIndex === 0).length !== 1).length;
  const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true}));
  press('ArrowRight');
  found.arrow = document.activeElement !== named && document.activeElement.classList.contains('curve');
  press('ArrowLeft');
  found.readout = [figure.querySelector('.readout').textContent, named.getAttribute('aria-label')];
  found.labelled = all('[data-plot=scaling] .legend, [data-plot=memory] .legend').length;

  found.resources = performance.getEntriesByType('resource').map((entry) => entry.name);
  found.problems = problems;
  document.getElementById('probe').textContent = JSON.stringify(found);
})();
</script>)";

using PageInBrowser = InChromium;

TEST_F(PageInBrowser, DrawsEveryTechniqueSortsFiltersAndLoadsNothing) {
  const ResultSet results = DefaultSweep();
  const Json found = Probed(Open(RenderPage(Analysis(results), {}), kProbe, ""));
  ASSERT_TRUE(found.is_object()) << "the probe did not run to its end: " << log();
  EXPECT_FALSE(found["hacked"].get<bool>());
  EXPECT_EQ(found["problems"], Json::array());
  EXPECT_EQ(found["resources"], Json::array());
  EXPECT_FALSE(found["overflow"].get<bool>());
  for (const char* plot : {"scaling", "memory", "roofline", "frontier"}) {
    EXPECT_TRUE(absl::StrContains(found["plots"].dump(), plot)) << plot;
  }

  std::map<std::string, int> drawn;
  for (const Json& curve : found["curves"]) {
    ++drawn[curve["name"]];
    EXPECT_EQ(curve["points"], 5) << curve;
    EXPECT_GT(curve["length"], 100) << curve;
    EXPECT_NE(curve["label"], "") << curve;
    EXPECT_TRUE(curve["focusable"]) << curve;
  }
  EXPECT_GT(drawn["plain"], 4);  // in every panel
  for (int i = 0; i < kTechniques; ++i) EXPECT_EQ(drawn[TechniqueName(i)], 1) << TechniqueName(i);

  std::vector<std::string> sorted = {"ascending"};
  for (int i = -1; i < kTechniques; ++i) {
    sorted.push_back(FormatSignificant(256e4 * (i + 2) / 1e6));
  }
  EXPECT_EQ(found["ascending"], Json(sorted));
  std::reverse(sorted.begin() + 1, sorted.end());
  sorted[0] = "descending";
  EXPECT_EQ(found["descending"], Json(sorted));
  EXPECT_TRUE(absl::StrContains(found["address"].get<std::string>(), "descending"));

  EXPECT_EQ(found["all"], Json({kTechniques + 1, kTechniques}));
  EXPECT_EQ(found["reset"], found["all"]);
  EXPECT_EQ(found["by_text"].size(), 11u);  // technique_1 and technique_10 to 19
  EXPECT_EQ(found["curves_by_text"], 11);
  EXPECT_EQ(found["by_family"], Json({11, 11}));  // 2, 6, ..., 42
  EXPECT_TRUE(found["legend"].get<bool>()) << "a button for a curve that the filter hides";
  EXPECT_EQ(found["empty"], Json::array());
  EXPECT_GT(found["links"][0], found["links"][1]);
  EXPECT_EQ(found["dead_links"], 0);

  EXPECT_EQ(found["toggled"], Json({"false", 1, false}));
  EXPECT_EQ(found["toggled_back"], Json({"true", true}));
  EXPECT_EQ(found["labelled"], 0) << "a legend where names stand at the curves' ends";
  EXPECT_EQ(found["stops"], 0);  // figures without exactly one stop for the Tab key
  EXPECT_TRUE(found["arrow"].get<bool>());
  EXPECT_EQ(found["readout"][0], found["readout"][1]);
  EXPECT_TRUE(absl::StrContains(found["readout"][0].get<std::string>(), " ms at 4096")) << found;
}

TEST_F(PageInBrowser, AnAddressKeepsFilterAndOrder) {
  const ResultSet results = DefaultSweep();
  const std::string page = RenderPage(Analysis(results), {});
  const size_t header = page.find(">growth<br>");
  ASSERT_NE(header, std::string::npos);
  const size_t id = page.rfind("<table id=\"", header) + 11;
  const std::string table = page.substr(id, page.find('"', id) - id);
  const std::string probe = absl::StrReplaceAll(R"(<pre id="probe"></pre><script>
    const rows = Array.from(document.getElementById('TABLE').tBodies[0].rows)
        .filter((row) => row.getClientRects().length > 0).map((row) => row.cells[0].textContent);
    document.getElementById('probe').textContent = JSON.stringify(rows);
  </script>)",
                                                {{"TABLE", table}});
  const Json rows =
      Probed(Open(page, probe, absl::StrCat("#family=adaptive&sort=", table, ":1:descending")));
  ASSERT_EQ(rows.size(), 11u) << rows;
  EXPECT_EQ(rows.front(), "technique_43");
  EXPECT_EQ(rows.back(), "technique_3");
}

// A table wider than a narrow window scrolls within it, and a shadow marks the edge with hidden
// parts.
TEST_F(PageInBrowser, NarrowTablesShowThatTheyScroll) {
  constexpr char kScroll[] = R"(<pre id="probe"></pre><script>
    const tables = Array.from(document.querySelectorAll('.table')).filter((table) => table.getClientRects().length > 0);
    const wide = tables.filter((table) => table.scrollWidth > table.clientWidth);
    document.getElementById('probe').textContent = JSON.stringify({
      width: window.innerWidth,
      page: document.documentElement.scrollWidth > document.documentElement.clientWidth,
      wide: wide.length,
      shadows: wide.filter((table) => {
        const style = getComputedStyle(table);
        return (style.backgroundImage.match(/linear-gradient/g) || []).length === 4 &&
            style.backgroundAttachment === 'local, local, scroll, scroll';
      }).length,
      reachable: wide.filter((table) => table.tabIndex === 0).length,
      covered: wide.filter((table) => getComputedStyle(table.querySelector('td')).backgroundColor !== 'rgba(0, 0, 0, 0)').length,
    });
  </script>)";
  const ResultSet results = DefaultSweep();
  const Json found =
      Probed(Open(RenderPage(Analysis(results), {}), kScroll, "", "--window-size=500,1000"));
  ASSERT_TRUE(found.is_object());
  EXPECT_LE(found["width"], 500);
  EXPECT_FALSE(found["page"].get<bool>());
  EXPECT_GT(found["wide"], 0);
  EXPECT_EQ(found["shadows"], found["wide"]);
  EXPECT_EQ(found["reachable"], found["wide"]);
  EXPECT_EQ(found["covered"], 0) << "cells that hide the shadow behind them";
}

// Text that is written in a curve's colour can be read in light and in dark.
TEST_F(PageInBrowser, ColoursHaveContrast) {
  constexpr char kContrast[] = R"(<pre id="probe"></pre><script>
    const channel = (value) => { const c = value / 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
    const luminance = (colour) => {
      const [r, g, b] = colour.match(/[\d.]+/g).map(Number);
      return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    };
    const contrast = (a, b) => {
      const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
      return (high + 0.05) / (low + 0.05);
    };
    const panel = getComputedStyle(document.querySelector('figure')).backgroundColor;
    const page = getComputedStyle(document.body).backgroundColor;
    const found = {dark: luminance(page) < 0.2};
    found.labels = Array.from(document.querySelectorAll('.plot .label')).map((label) => contrast(getComputedStyle(label).fill, panel));
    found.texts = Array.from(document.querySelectorAll('p, th, td, h2, summary, a, .legend button'))
        .map((text) => contrast(getComputedStyle(text).color, page));
    found.ticks = Array.from(document.querySelectorAll('.tick')).map((text) => contrast(getComputedStyle(text).fill, panel));
    document.getElementById('probe').textContent = JSON.stringify(
        {dark: found.dark, least: Math.min(...found.labels, ...found.texts, ...found.ticks)});
  </script>)";
  const ResultSet results = DefaultSweep();
  const std::string page = RenderPage(Analysis(results), {});
  for (const bool dark : {false, true}) {
    const Json found = Probed(Open(page, kContrast, "",
                                   dark ? "--blink-settings=preferredColorScheme=0"
                                        : "--blink-settings=preferredColorScheme=1"));
    ASSERT_TRUE(found.is_object());
    EXPECT_EQ(found["dark"], dark);
    EXPECT_GE(found["least"], 4.5) << found;  // WCAG 2.1, AA
  }
}

}  // namespace
}  // namespace tfb
