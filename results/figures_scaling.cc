// Draws times and memory over tokens.

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "results/describe.h"
#include "results/figure_parts.h"
#include "results/figures.h"
#include "results/reader.h"

namespace tfb {
namespace {

using figure::Panel;

// Returns the points of a series over its lengths, and each in words.
struct LengthPoints {
  std::vector<plot::Point> points;
  std::vector<std::string> words;
};
using PointsOf = LengthPoints (*)(const Series&);

LengthPoints TimePoints(const Series& series) {
  LengthPoints out;
  for (const auto& [tokens, time] : series.run_ns) {
    out.points.push_back({static_cast<double>(tokens), time.median, time.low, time.high});
    out.words.push_back(absl::StrCat(figure::TimeText(time.median), " at ", tokens));
  }
  return out;
}

std::optional<double> MemoryAt(const std::vector<const Case*>& cases) {
  std::optional<double> most;
  for (const Case* result : cases) {
    if (result->outcome().status() != Outcome::STATUS_OK) continue;
    const std::optional<double> bytes = WorkingMemoryBytes(result->outcome());
    if (bytes.has_value()) most = std::max(*bytes, most.value_or(0));
  }
  return most;
}

LengthPoints MemoryPoints(const Series& series) {
  LengthPoints out;
  for (const auto& [tokens, cases] : series.by_tokens) {
    const std::optional<double> bytes = MemoryAt(cases);
    if (!bytes.has_value()) continue;
    out.points.push_back({static_cast<double>(tokens), *bytes, std::nullopt, std::nullopt});
    out.words.push_back(absl::StrCat(FormatBytes(*bytes), " at ", tokens));
  }
  return out;
}

plot::Curve CurveOf(const Series& series, int style, PointsOf points_of, const std::string& unit) {
  plot::Curve curve;
  curve.name = figure::CurveName(series);
  curve.group = figure::FamilyOf(series);
  curve.key = figure::CurveKey(series);
  curve.style = style;
  curve.hollow = series.first().technique().has_contestant();
  LengthPoints points = points_of(series);
  curve.points = std::move(points.points);
  curve.description = absl::StrCat(curve.name, ": ", absl::StrJoin(points.words, ", "), " ", unit);
  return curve;
}

// Returns the series that `series` is compared with at the longest possible length, or null.
const Series* CounterpartOf(const Analysis& analysis, const Series& series) {
  for (auto at = series.by_tokens.rbegin(); at != series.by_tokens.rend(); ++at) {
    const Series* dense = analysis.DenseSeriesOf(series, at->first);
    if (dense != nullptr) return dense;
  }
  return nullptr;
}

// Interpolates the curve linearly between logarithms at `x`; returns nothing beyond its ends.
std::optional<double> HeightAt(const std::vector<plot::Point>& points, double x) {
  for (size_t i = 0; i + 1 < points.size(); ++i) {
    const plot::Point& a = points[i];
    const plot::Point& b = points[i + 1];
    if (x < a.x || x > b.x || !(a.y > 0) || !(b.y > 0)) continue;
    const double share = std::log(x / a.x) / std::log(b.x / a.x);
    return std::exp(std::log(a.y) * (1 - share) + std::log(b.y) * share);
  }
  return std::nullopt;
}

std::optional<plot::Mark> CrossoverMark(const Series& series, const plot::Curve& curve,
                                        const std::string& unit) {
  if (!series.crossover.has_value()) return std::nullopt;
  const Crossover& crossover = *series.crossover;
  if (!crossover.clear) return std::nullopt;
  const bool from = crossover.kind == Crossover::Kind::kAt;
  if (!from && crossover.kind != Crossover::Kind::kOnlyBelow) return std::nullopt;
  const std::optional<double> height = HeightAt(curve.points, crossover.tokens);
  if (!height.has_value()) return std::nullopt;
  plot::Mark mark;
  mark.point = {crossover.tokens, *height, std::nullopt, std::nullopt};
  mark.style = curve.style;
  mark.key = curve.key;
  mark.description = absl::StrFormat("%s: faster than dense %s %.0f %s", curve.name,
                                     from ? "from" : "only below", crossover.tokens, unit);
  return mark;
}

// Writes 1.5 as "n¹·⁵", 1 as "n".
std::string PowerOfN(double exponent) {
  if (exponent == 1) return "n";
  static constexpr const char* kRaised[] = {"⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"};
  std::string out = "n";
  for (const char digit : absl::StrFormat("%g", exponent)) {
    if (digit >= '0' && digit <= '9') {
      out += kRaised[digit - '0'];
    } else {
      out += digit == '-' ? "⁻" : "·";
    }
  }
  return out;
}

std::vector<plot::Plot::Slope> SlopesOf(const std::vector<plot::Curve>& curves,
                                        const std::vector<const Series*>& members) {
  std::set<double> exponents;
  for (const Series* series : members) {
    const TechniqueDescription& technique = series->first().technique();
    const double growth = technique.expected_growth();
    if (technique.has_expected_growth() && std::isfinite(growth) && growth > 0 && growth < 10) {
      exponents.insert(growth);
    }
  }
  std::vector<plot::Plot::Slope> slopes;
  const bool line = std::any_of(curves.begin(), curves.end(),
                                [](const plot::Curve& curve) { return curve.points.size() > 1; });
  if (!line) return slopes;
  for (const double exponent : exponents) slopes.push_back({exponent, PowerOfN(exponent)});
  return slopes;
}

struct LengthFigure {
  FigureKind kind;
  PointsOf points_of;
  plot::Axis y;
  std::string caption;
};

// Returns the common baselines of a group.
std::vector<const Series*> Baselines(const SeriesGroup& group) {
  std::vector<const Series*> baselines;
  for (const Series& series : group.series) {
    if (series.is_common_baseline) baselines.push_back(&series);
  }
  return baselines;
}

// Returns the common baselines that a member of the panel is compared with, which are none where
// all members have dense counterparts of their own. A panel with only baselines has them all.
std::vector<const Series*> ReferencesOf(const Analysis& analysis, const SeriesGroup& group,
                                        const Panel& panel) {
  std::vector<const Series*> references = Baselines(group);
  if (panel.members.empty()) return references;
  std::set<const Series*> used;
  for (const Series* member : panel.members) used.insert(CounterpartOf(analysis, *member));
  references.erase(
      std::remove_if(references.begin(), references.end(),
                     [&used](const Series* series) { return used.count(series) == 0; }),
      references.end());
  return references;
}

plot::Plot PanelPlot(const Analysis& analysis, const SeriesGroup& group, const Panel& panel,
                     const LengthFigure& figure) {
  plot::Plot plot;
  plot.title = panel.title;
  plot.subtitle = panel.subtitle;
  plot.x = figure::LengthAxis(group);
  plot.y = figure.y;
  const std::string unit = plot.x.title;
  const bool times = figure.kind == FigureKind::kScaling;
  std::set<const Series*> drawn;
  std::vector<const Series*> slopes = ReferencesOf(analysis, group, panel);
  for (const Series* series : slopes) {
    plot.curves.push_back(CurveOf(*series, plot::kReferenceStyle, figure.points_of, unit));
    drawn.insert(series);
  }
  for (size_t i = 0; i < panel.members.size(); ++i) {
    const Series& series = *panel.members[i];
    const int style = static_cast<int>(i);
    if (!drawn.insert(&series).second) continue;
    plot::Curve curve = CurveOf(series, style, figure.points_of, unit);
    if (curve.points.empty()) continue;
    curve.label = panel.labels[i];
    slopes.push_back(&series);
    if (times) {
      if (std::optional<plot::Mark> mark = CrossoverMark(series, curve, unit)) {
        plot.marks.push_back(*mark);
      }
    }
    const Series* counterpart = CounterpartOf(analysis, series);
    const bool own = counterpart != nullptr && !counterpart->is_common_baseline;
    if (own && drawn.insert(counterpart).second) {
      plot::Curve dotted = CurveOf(*counterpart, style, figure.points_of, unit);
      dotted.kind = plot::Curve::Kind::kCounterpart;
      dotted.key = curve.key;  // hidden and shown with its technique
      plot.curves.push_back(std::move(dotted));
    }
    plot.curves.push_back(std::move(curve));
  }
  if (times) plot.slopes = SlopesOf(plot.curves, slopes);
  if (std::any_of(plot.curves.begin(), plot.curves.end(),
                  [](const plot::Curve& curve) { return curve.hollow; })) {
    plot.keys.push_back({"NAME@FILE: somebody else's code", plot::kReferenceStyle,
                         plot::Curve::Kind::kLine, /*hollow=*/true, /*ring=*/false});
  }
  return plot;
}

Table DataTable(const SeriesGroup& group, const LengthFigure& figure) {
  Table table;
  table.columns.push_back({"technique"});
  for (const int64_t tokens : group.lengths) table.columns.push_back({absl::StrCat(tokens), true});
  for (const Series& series : group.series) {
    std::map<double, double> values;
    for (const plot::Point& point : figure.points_of(series).points) values[point.x] = point.y;
    if (values.empty()) continue;
    std::vector<TableCell> cells = {figure::CurveName(series)};
    for (const int64_t tokens : group.lengths) {
      const auto value = values.find(static_cast<double>(tokens));
      cells.emplace_back(value == values.end()                 ? "-"
                         : figure.kind == FigureKind::kScaling ? figure::TimeText(value->second)
                                                               : FormatBytes(value->second));
    }
    table.AddRow(std::move(cells), figure::FamilyOf(series));
  }
  return table;
}

std::vector<Figure> LengthFigures(const Analysis& analysis, const SeriesFilter& filter,
                                  LengthFigure (*kind_of)(Case::Pass)) {
  std::vector<Figure> figures;
  for (const SeriesGroup& group : analysis.groups()) {
    if (group.purpose == Case::PURPOSE_ACCURACY) continue;
    const LengthFigure kind = kind_of(group.first().key().pass());
    std::vector<const Series*> members = figure::Members(group, filter);
    members.erase(std::remove_if(members.begin(), members.end(),
                                 [&kind](const Series* series) {
                                   return kind.points_of(*series).points.empty();
                                 }),
                  members.end());
    std::vector<Panel> panels = figure::SplitPanels(members);
    if (panels.empty()) {  // a figure with only baselines is drawn, too
      const std::vector<const Series*> baselines = Baselines(group);
      if (std::none_of(baselines.begin(), baselines.end(), [&](const Series* series) {
            return (!filter || filter(*series)) && !kind.points_of(*series).points.empty();
          })) {
        continue;
      }
      panels.push_back({figure::FamilyOf(*baselines.front()), {}, {}, ""});
    }
    Figure figure;
    figure.kind = kind.kind;
    figure.title = GroupName(group);
    figure.caption = kind.caption;
    for (const Panel& panel : panels) {
      figure.panels.push_back(PanelPlot(analysis, group, panel, kind));
    }
    figure.data = DataTable(group, kind);
    figures.push_back(std::move(figure));
  }
  return figures;
}

LengthFigure ScalingFigure(Case::Pass pass) {
  const absl::string_view call = DescribePass(pass);
  return {FigureKind::kScaling, &TimePoints, figure::TimeAxis(absl::StrCat("time of a ", call)),
          absl::StrCat("Median time of a warm ", call,
                       ", setup apart; a whisker is the median's 95% interval. Bold: what "
                       "techniques are held against, black for all of a panel, or dotted in a "
                       "technique's colour for the dense counterpart of its own. Ring: where a "
                       "technique and its counterpart cross, where their intervals tell. Dashed "
                       "slopes: the growth that the techniques promise.")};
}

LengthFigure MemoryFigure(Case::Pass pass) {
  const bool keeps = pass != Case::PASS_FORWARD;
  return {
      FigureKind::kMemory, &MemoryPoints,
      figure::BytesAxis(keeps ? "workspace, parameters, kept" : "workspace and parameters"),
      absl::StrCat("Working memory: what a technique needs beyond its inputs and outputs",
                   keeps ? ", and what a run keeps for its backward pass, the output included" : "",
                   ". Bold: what techniques are held against, dotted in a technique's colour "
                   "for the dense counterpart of its own.")};
}

}  // namespace

std::vector<Figure> ScalingFigures(const Analysis& analysis, const SeriesFilter& filter) {
  return LengthFigures(analysis, filter, &ScalingFigure);
}

std::vector<Figure> MemoryFigures(const Analysis& analysis, const SeriesFilter& filter) {
  return LengthFigures(analysis, filter, &MemoryFigure);
}

}  // namespace tfb
