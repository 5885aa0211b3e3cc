// Draws error, or quality, over time and computation.

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "results/figure_parts.h"
#include "results/figure_profiles.h"
#include "results/figures.h"
#include "results/reader.h"

namespace tfb {
namespace {

using figure::Entry;
using figure::Middle;

// A point of a Pareto frontier; less is better in both coordinates.
struct Spot {
  const Entry* entry;
  double x, y;
  bool best = false;
};

bool Beats(const Spot& a, const Spot& b) {
  return a.x <= b.x && a.y <= b.y && (a.x < b.x || a.y < b.y);
}

void MarkBest(std::vector<Spot>* spots) {
  for (Spot& spot : *spots) {
    spot.best = !spot.entry->failed &&
                std::none_of(spots->begin(), spots->end(), [&spot](const Spot& other) {
                  return !other.entry->failed && Beats(other, spot);
                });
  }
}

struct FrontierAxes {
  plot::Axis x, y;
  std::function<std::string(const Spot&)> words;
  bool joined = true;
};

plot::Curve CurveOf(const Spot& spot, const FrontierAxes& axes, int style) {
  const Series& series = *spot.entry->series;
  plot::Curve curve;
  curve.kind = plot::Curve::Kind::kScatter;
  curve.name = figure::CurveName(series);
  curve.group = figure::FamilyOf(series);
  curve.key = curve.legend = series.first().key().technique();
  curve.style = style;
  curve.hollow = axes.joined && !spot.best;
  curve.name_needed = spot.best || series.is_common_baseline;
  curve.description = absl::StrCat(curve.name, ": ", axes.words(spot),
                                   spot.best ? "; no other is better in both" : "");
  curve.points.push_back({spot.x, spot.y, std::nullopt, std::nullopt});
  return curve;
}

// Returns a line through `spots` from left to right.
plot::Guide LineThrough(plot::Guide::Kind kind, int style, std::vector<plot::Point> points) {
  std::sort(points.begin(), points.end(), [](const plot::Point& a, const plot::Point& b) {
    return std::tie(a.x, a.y) < std::tie(b.x, b.y);
  });
  return {kind, "", style, std::move(points)};
}

// Assigns styles by technique, so that the options of one look alike; a trail joins them.
plot::Plot FrontierPlot(std::vector<Spot> spots, const FrontierAxes& axes, std::string title) {
  constexpr size_t kFewestInTrail = 3;
  constexpr size_t kFewSpots = 12;  // up to this number each has its name
  plot::Plot plot;
  plot.title = std::move(title);
  plot.x = axes.x;
  plot.y = axes.y;
  plot.height = 400;
  if (axes.joined) MarkBest(&spots);
  std::map<std::string, int> styles;
  std::map<int, std::vector<plot::Point>> trails;  // by style
  std::vector<plot::Point> frontier;
  for (const Spot& spot : spots) {
    const Series& series = *spot.entry->series;
    const int style =
        series.is_common_baseline
            ? plot::kReferenceStyle
            : styles.emplace(series.first().key().technique(), static_cast<int>(styles.size()))
                  .first->second;
    plot.curves.push_back(CurveOf(spot, axes, style));
    plot.curves.back().name_needed |= spots.size() <= kFewSpots;
    const plot::Point& point = plot.curves.back().points.front();
    if (!series.is_counterpart && !series.is_common_baseline) trails[style].push_back(point);
    if (spot.best) frontier.push_back(point);
  }
  for (auto& [style, points] : trails) {
    if (points.size() < kFewestInTrail) continue;
    plot.guides.push_back(LineThrough(plot::Guide::Kind::kTrail, style, std::move(points)));
  }
  if (frontier.size() > 1) {
    plot.guides.push_back(
        LineThrough(plot::Guide::Kind::kFrontier, plot::kReferenceStyle, std::move(frontier)));
  }
  if (axes.joined) {
    plot.keys = {{"not beaten in both by any other", plot::kReferenceStyle,
                  plot::Curve::Kind::kScatter, false, false},
                 {"beaten", plot::kReferenceStyle, plot::Curve::Kind::kScatter, true, false}};
  }
  return plot;
}

std::string RatioText(double ratio) { return absl::StrFormat("%.3gx", ratio); }

plot::Axis RatioAxis() {
  plot::Axis axis;
  axis.title = "time relative to dense (left is faster)";
  axis.format = [](double value) { return absl::StrFormat("%gx", value); };
  return axis;
}

plot::Axis ErrorAxis() {
  plot::Axis axis;
  axis.title = "relative error against dense";
  axis.format = [](double value) { return FormatBound(value); };
  return axis;
}

plot::Axis LinearAxis(std::string title) {
  plot::Axis axis;
  axis.logarithmic = false;
  axis.title = std::move(title);
  return axis;
}

// Exact techniques have rounding errors, decades below those of approximations. Where there are
// both, the former are drawn on a line of their own, at `level`.
struct Rounding {
  double below = 0;  // errors under it are drawn at the level
  double level = 0;
};

Rounding FindRounding(const std::vector<Entry>& entries) {
  constexpr double kWorthComparing = 1e-4;
  constexpr double kGap = 10;  // between the two kinds, so that the level lies there
  double lowest = std::numeric_limits<double>::infinity(), highest_below = 0;
  for (const Entry& entry : entries) {
    const double error = Middle(entry.errors).value_or(0);
    if (error >= kWorthComparing) {
      lowest = std::min(lowest, error);
    } else if (error > 0) {
      highest_below = std::max(highest_below, error);
    }
  }
  if (std::isfinite(lowest) && highest_below * kGap < lowest) {
    return {kWorthComparing, lowest / 4};
  }
  // Draws all errors to scale, except 0, which has no logarithm.
  for (const Entry& entry : entries) {
    const double error = Middle(entry.errors).value_or(0);
    if (error > 0) lowest = std::min(lowest, error);
  }
  const double least = std::isfinite(lowest) ? lowest : 1e-8;
  return {least, least};
}

// Returns the techniques that a plot of errors can show; adds the others' names to `left_out`.
std::vector<Spot> ErrorSpots(const std::vector<Entry>& entries, const Rounding& rounding,
                             std::vector<std::string>* left_out) {
  std::vector<Spot> spots;
  for (const Entry& entry : entries) {
    const std::optional<double> error = Middle(entry.errors), ratio = Middle(entry.ratios);
    if (!error.has_value() || !ratio.has_value()) continue;
    if (!std::isfinite(*error) || !std::isfinite(*ratio) || *ratio <= 0) {
      left_out->push_back(absl::StrCat(figure::CurveName(*entry.series), " (error ",
                                       FormatError(error), ", time ", RatioText(*ratio), ")"));
      continue;
    }
    spots.push_back({&entry, *ratio, *error < rounding.below ? rounding.level : *error});
  }
  return spots;
}

// Labels the level of rounding errors, below everything that is to scale.
void AddRoundingLine(const std::vector<Spot>& spots, const Rounding& rounding, plot::Plot* plot) {
  double low = std::numeric_limits<double>::infinity(), high = 0;
  bool any = false;
  for (const Spot& spot : spots) {
    low = std::min(low, spot.x);
    high = std::max(high, spot.x);
    any = any || spot.y == rounding.level;
  }
  if (!any || rounding.level <= rounding.below) return;
  plot::Guide line;
  line.label = "errors of rounding, below 1e-4";
  for (const double x : {low, high}) {
    line.points.push_back({x, rounding.level, std::nullopt, std::nullopt});
  }
  plot->guides.push_back(std::move(line));
  plot->room.push_back({low, rounding.level / 2, std::nullopt, std::nullopt});  // for names
}

FrontierAxes ErrorAxes() {
  FrontierAxes axes;
  axes.x = RatioAxis();
  axes.y = ErrorAxis();
  axes.words = [](const Spot& spot) {
    return absl::StrCat("error ", FormatError(Middle(spot.entry->errors)), " at ",
                        RatioText(spot.x), " of dense's time");
  };
  return axes;
}

// Makes a panel for each counterpart that enough techniques are compared with, since only their
// errors and times are comparable; and one for the others, without a frontier.
std::vector<plot::Plot> ErrorPanels(const std::vector<Spot>& spots, const Rounding& rounding) {
  std::vector<std::pair<std::string, std::vector<Spot>>> sets;
  for (const Spot& spot : spots) {
    const std::string dense = spot.entry->dense->row_key;
    auto set = std::find_if(sets.begin(), sets.end(),
                            [&dense](const auto& other) { return other.first == dense; });
    if (set == sets.end()) set = sets.insert(sets.end(), {dense, {}});
    set->second.push_back(spot);
  }
  std::stable_sort(sets.begin(), sets.end(),
                   [](const auto& a, const auto& b) { return a.second.size() > b.second.size(); });
  std::vector<plot::Plot> panels;
  std::vector<Spot> apart;
  for (const auto& [dense, members] : sets) {
    if (members.size() >= (panels.empty() ? 2 : 4)) {
      panels.push_back(FrontierPlot(
          members, ErrorAxes(),
          absl::StrCat("held against ", figure::CurveName(*members.front().entry->dense))));
      AddRoundingLine(members, rounding, &panels.back());
      continue;
    }
    for (const Spot& spot : members) {
      if (!spot.entry->series->is_counterpart) apart.push_back(spot);
    }
  }
  if (!apart.empty()) {
    FrontierAxes axes = ErrorAxes();
    axes.joined = false;
    panels.push_back(FrontierPlot(apart, axes, "each held against a counterpart of its own"));
    AddRoundingLine(apart, rounding, &panels.back());
  }
  return panels;
}

// Draws bits per byte over the FLOPs of each technique that reports them.
std::vector<plot::Plot> QualityPanels(const std::vector<Entry>& entries) {
  struct Cost {
    plot::Axis axis;
    std::function<std::optional<double>(const Entry&)> value;
    std::function<std::string(double)> words;
    const char* title;
  };
  const Cost costs[] = {{figure::TimeAxis("time of a run (left is faster)"),
                         [](const Entry& entry) { return Middle(entry.times_ns); },
                         &figure::TimeText, "quality against time"},
                        {LinearAxis("mean layers a token"),
                         [](const Entry& entry) { return Middle(entry, figure::kMeanLayers); },
                         [](double value) { return absl::StrFormat("%.3g layers a token", value); },
                         "quality against layers"},
                        {LinearAxis("share of the FLOPs of all layers that is computed"),
                         [](const Entry& entry) -> std::optional<double> {
                           const std::optional<double> saved = Middle(entry, figure::kFlopsSaved);
                           return saved.has_value() ? std::optional<double>(1 - *saved)
                                                    : std::nullopt;
                         },
                         [](double value) { return absl::StrFormat("%.3g of the FLOPs", value); },
                         "quality against computation"}};
  std::vector<plot::Plot> panels;
  for (const Cost& cost : costs) {
    std::vector<Spot> spots;
    for (const Entry& entry : entries) {
      const std::optional<double> bits = Middle(entry, figure::kBitsPerByte), x = cost.value(entry);
      if (bits.has_value() && x.has_value() && std::isfinite(*bits) && std::isfinite(*x)) {
        spots.push_back({&entry, *x, *bits});
      }
    }
    if (spots.size() < 2) continue;
    FrontierAxes axes;
    axes.x = cost.axis;
    axes.y = LinearAxis("bits per byte (below is better)");
    axes.words = [&cost](const Spot& spot) {
      return absl::StrFormat("%.4f bits per byte, %s", spot.y, cost.words(spot.x));
    };
    panels.push_back(FrontierPlot(spots, axes, cost.title));
  }
  return panels;
}

Table DataTable(const std::vector<Entry>& entries) {
  Table table;
  table.columns = {{"technique"},
                   {"error against dense", true},
                   {"time", true},
                   {"time relative to dense", true}};
  std::vector<const char*> statistics;
  for (const char* name : {figure::kBitsPerByte, figure::kMeanLayers, figure::kFlopsSaved}) {
    const bool any = std::any_of(entries.begin(), entries.end(), [name](const Entry& entry) {
      return entry.statistics.count(name) > 0;
    });
    if (any) statistics.push_back(name);
  }
  for (const char* name : statistics) {
    std::string header = name;
    std::replace(header.begin(), header.end(), '_', ' ');
    table.columns.push_back({header, true});
  }
  for (const Entry& entry : entries) {
    const std::optional<double> time = Middle(entry.times_ns), ratio = Middle(entry.ratios);
    std::vector<TableCell> cells = {figure::CurveName(*entry.series),
                                    FormatError(Middle(entry.errors)),
                                    time.has_value() ? figure::TimeText(*time) : "-",
                                    ratio.has_value() ? RatioText(*ratio) : "-"};
    for (const char* name : statistics) {
      cells.emplace_back(FormatSignificant(Middle(entry, name), 4));
    }
    table.AddRow(std::move(cells), figure::FamilyOf(*entry.series));
  }
  return table;
}

}  // namespace

std::vector<Figure> FrontierFigures(const Analysis& analysis, const SeriesFilter& filter) {
  std::vector<Figure> figures;
  for (figure::Profile& profile : figure::ProfilesOf(analysis, filter)) {
    int64_t tokens = 0;
    const std::vector<Entry>* entries = figure::FindLongest(analysis, &profile, &tokens);
    if (entries == nullptr) continue;
    Figure figure;
    figure.kind = FigureKind::kFrontier;
    figure.title = absl::StrCat(profile.title, ", ", tokens, " tokens");
    std::vector<std::string> left_out;
    figure.panels = QualityPanels(*entries);
    const Rounding rounding = FindRounding(*entries);
    const std::vector<Spot> spots = ErrorSpots(*entries, rounding, &left_out);
    for (plot::Plot& panel : ErrorPanels(spots, rounding))
      figure.panels.push_back(std::move(panel));
    figure.caption =
        "Medians over layers, masks and seeds. Filled and joined: techniques that no other of the "
        "panel beats in both directions. A thin line follows one technique through its options.";
    if (entries->front().series->first().key().pass() != Case::PASS_FORWARD) {
      figure.caption += " Errors are those of the forward pass.";
    }
    if (std::any_of(entries->begin(), entries->end(),
                    [](const Entry& entry) { return entry.borrowed_ratio; })) {
      figure.caption +=
          " These cases have no times: they are those of each technique's longest scaling case.";
    }
    if (!left_out.empty()) {
      absl::StrAppend(&figure.caption, " Not drawn: ", absl::StrJoin(left_out, ", "), ".");
    }
    figure.data = DataTable(*entries);
    if (!figure.panels.empty()) figures.push_back(std::move(figure));
  }
  return figures;
}

}  // namespace tfb
