#include "results/figure_parts.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "results/describe.h"
#include "results/reader.h"

namespace tfb {
namespace figure {
namespace {

constexpr size_t kMostCurves = plot::kStyles;

// The properties by which techniques are split into panels, coarsest first.
std::string KindText(const Series& series) {
  switch (series.first().technique().input_kind()) {
    case TechniqueDescription::INPUT_KIND_HIDDEN:
      return "on hidden states";
    case TechniqueDescription::INPUT_KIND_TOKENS:
      return "on tokens";
    default:
      return "";
  }
}
std::string GrowthText(const Series& series) {
  const TechniqueDescription& technique = series.first().technique();
  if (!technique.has_expected_growth()) return "growth not stated";
  return technique.expected_growth() > 1 ? "more than linear growth" : "linear growth";
}

using Splitter = std::string (*)(const Series&);

// Returns the parts in the order of first appearance.
std::vector<Panel> SplitBy(const Panel& panel, Splitter splitter) {
  std::vector<Panel> parts;
  std::map<std::string, size_t> places;
  for (const Series* series : panel.members) {
    const std::string part = splitter(*series);
    const auto [place, added] = places.emplace(part, parts.size());
    if (added) {
      parts.push_back({panel.title, {}, {}, ""});
      if (!part.empty())
        absl::StrAppend(&parts.back().title, panel.title.empty() ? "" : ", ", part);
    }
    parts[place->second].members.push_back(series);
  }
  return parts;
}

// Fills panels with as many techniques as fit, with a technique's options together if possible.
std::vector<Panel> Fill(const Panel& panel) {
  std::vector<Panel> parts;
  for (const Panel& technique :
       SplitBy(panel, [](const Series& series) { return series.first().key().technique(); })) {
    const bool fits =
        !parts.empty() && parts.back().members.size() + technique.members.size() <= kMostCurves;
    if (!fits) parts.push_back({panel.title, {}, {}, ""});
    for (const Series* series : technique.members) {
      if (parts.back().members.size() == kMostCurves) parts.push_back({panel.title, {}, {}, ""});
      parts.back().members.push_back(series);
    }
  }
  return parts;
}

// Moves the words that the names of all options of one technique share to the subtitle.
void ShortenNames(Panel* panel) {
  std::vector<std::vector<std::string>> names;
  for (const Series* series : panel->members) {
    names.push_back(absl::StrSplit(CurveName(*series), ' '));
  }
  std::vector<std::string> shared = names.front();
  for (const std::vector<std::string>& words : names) {
    shared.erase(std::remove_if(shared.begin(), shared.end(),
                                [&words](const std::string& word) {
                                  return std::find(words.begin(), words.end(), word) == words.end();
                                }),
                 shared.end());
  }
  const bool one_technique = !shared.empty() && shared.front() == names.front().front();
  for (size_t i = 0; i < names.size(); ++i) {
    panel->labels.push_back(CurveName(*panel->members[i]));
    if (!one_technique || names.size() < 2) continue;
    std::vector<std::string> rest;
    for (const std::string& word : names[i]) {
      if (std::find(shared.begin(), shared.end(), word) == shared.end()) rest.push_back(word);
    }
    if (!rest.empty()) panel->labels.back() = absl::StrJoin(rest, " ");
  }
  if (one_technique && names.size() > 1) panel->subtitle = absl::StrJoin(shared, " ");
}

void NumberEqualTitles(std::vector<Panel>* panels) {
  std::map<std::string, int> totals, counts;
  for (const Panel& panel : *panels) ++totals[panel.title];
  for (Panel& panel : *panels) {
    const int total = totals[panel.title];
    if (total < 2) continue;
    const int number = ++counts[panel.title];
    absl::StrAppend(&panel.title, " (", number, " of ", total, ")");
  }
}

}  // namespace

std::vector<Panel> SplitPanels(const std::vector<const Series*>& members) {
  std::vector<Panel> panels = SplitBy({"", members, {}, ""}, &FamilyOf);
  for (const Splitter splitter : {&KindText, &GrowthText}) {
    std::vector<Panel> split;
    for (const Panel& panel : panels) {
      if (panel.members.size() <= kMostCurves) {
        split.push_back(panel);
        continue;
      }
      for (Panel& part : SplitBy(panel, splitter)) split.push_back(std::move(part));
    }
    panels = std::move(split);
  }
  std::vector<Panel> filled;
  for (const Panel& panel : panels) {
    for (Panel& part : Fill(panel)) {
      ShortenNames(&part);
      filled.push_back(std::move(part));
    }
  }
  NumberEqualTitles(&filled);
  return filled;
}

std::vector<const Series*> Members(const SeriesGroup& group, const SeriesFilter& filter) {
  std::vector<const Series*> members;
  for (const Series& series : group.series) {
    if (series.is_common_baseline || series.is_counterpart) continue;
    if (!filter || filter(series)) members.push_back(&series);
  }
  return members;
}

std::string LengthWord(const SeriesGroup& group) {
  const ProblemSize& problem = group.first().key().problem();
  if (problem.query_tokens() == problem.kv_tokens()) return "tokens";
  return problem.query_tokens() < problem.kv_tokens() ? "keys" : "queries";
}

plot::Axis LengthAxis(const SeriesGroup& group) {
  plot::Axis axis;
  axis.title = LengthWord(group);
  axis.base = 2;
  axis.format = [](double value) { return absl::StrFormat("%.0f", value); };
  return axis;
}

std::string TimeText(double ns) {
  const std::pair<double, const char*> units[] = {{1e9, "s"}, {1e6, "ms"}, {1e3, "µs"}};
  for (const auto& [scale, unit] : units) {
    // Rounded to three digits 999.9 µs is 1 ms.
    if (ns >= scale * 0.9995) return absl::StrFormat("%.3g %s", ns / scale, unit);
  }
  return absl::StrFormat("%.3g ns", ns);
}

plot::Axis TimeAxis(std::string title) {
  plot::Axis axis;
  axis.title = std::move(title);
  axis.format = TimeText;
  return axis;
}

plot::Axis BytesAxis(std::string title) {
  plot::Axis axis;
  axis.title = std::move(title);
  axis.base = 2;
  axis.format = [](double value) { return FormatBytes(value); };
  return axis;
}

std::string CurveName(const Series& series) {
  const bool failed = std::any_of(series.cases.begin(), series.cases.end(), [](const Case* result) {
    return result->outcome().status() == Outcome::STATUS_FAILED;
  });
  return absl::StrCat(Printable(series.name), failed ? " (failed)" : "");
}

std::string CurveKey(const Series& series) { return series.row_key; }

std::string FamilyOf(const Series& series) {
  const std::string family = Printable(series.first().technique().family());
  return family.empty() ? "no family" : family;
}

namespace {

std::optional<double> HighestPeak(const Environment& environment, const Case& result,
                                  Peak::Kind kind) {
  std::optional<double> highest;
  for (const Peak& peak : environment.peaks()) {
    if (peak.kind() != kind || peak.device() != result.key().device()) continue;
    if (kind == Peak::KIND_COMPUTE && peak.dtype() != result.key().dtype()) continue;
    if (peak.device() == DEVICE_TYPE_CPU && peak.threads() != result.key().threads()) continue;
    if (peak.value() > highest.value_or(0)) highest = peak.value();
  }
  return highest;
}

}  // namespace

std::optional<double> ComputePeak(const Environment& environment, const Case& result) {
  return HighestPeak(environment, result, Peak::KIND_COMPUTE);
}

std::optional<Bandwidth> BandwidthPeak(const Environment& environment, const Case& result) {
  const std::optional<double> read = HighestPeak(environment, result, Peak::KIND_READ_BANDWIDTH);
  if (read.has_value()) return Bandwidth{*read, "read"};
  const std::optional<double> copy = HighestPeak(environment, result, Peak::KIND_COPY_BANDWIDTH);
  if (copy.has_value()) return Bandwidth{*copy, "copy"};
  return std::nullopt;
}

}  // namespace figure

absl::StatusOr<FigureKind> ParseFigureKind(absl::string_view name) {
  for (const FigureKind kind :
       {FigureKind::kScaling, FigureKind::kFrontier, FigureKind::kMemory, FigureKind::kRoofline}) {
    if (name == Name(kind)) return kind;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", name, "\" is none of scaling, frontier, memory, roofline"));
}

absl::string_view Name(FigureKind kind) {
  switch (kind) {
    case FigureKind::kScaling:
      return "scaling";
    case FigureKind::kFrontier:
      return "frontier";
    case FigureKind::kMemory:
      return "memory";
    case FigureKind::kRoofline:
      return "roofline";
  }
  return "";
}

std::vector<Figure> FiguresOf(FigureKind kind, const Analysis& analysis,
                              const SeriesFilter& filter) {
  switch (kind) {
    case FigureKind::kScaling:
      return ScalingFigures(analysis, filter);
    case FigureKind::kFrontier:
      return FrontierFigures(analysis, filter);
    case FigureKind::kMemory:
      return MemoryFigures(analysis, filter);
    case FigureKind::kRoofline:
      return RooflineFigures(analysis, filter);
  }
  return {};
}

std::string GroupName(const SeriesGroup& group) {
  const Case::Key& key = group.first().key();
  std::string name =
      absl::StrCat(Name(key.device()), " ", Name(key.dtype()), ", ", DescribeProblem(key, false));
  const std::string input = DescribeInput(key.input());
  if (!input.empty()) absl::StrAppend(&name, ", input ", input);
  if (!group.place.empty()) absl::StrAppend(&name, ", ", group.place);
  return name;
}

}  // namespace tfb
