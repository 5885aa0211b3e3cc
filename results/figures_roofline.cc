// Draws rates under the measured limits of the machine.

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "results/figure_parts.h"
#include "results/figures.h"
#include "results/reader.h"

namespace tfb {
namespace {

// Returns a technique's longest run as a point.
struct Rate {
  const Series* series = nullptr;
  const Case* result = nullptr;
  double flops_per_second = 0;
  std::optional<double> flops_per_byte;
};

bool IsUseful(double value) { return std::isfinite(value) && value > 0; }

std::optional<Rate> RateOf(const Series& series) {
  const Case* result = series.longest();
  if (result == nullptr) return std::nullopt;
  const std::optional<double> gigaflops = GigaflopsPerSecond(*result);
  if (!gigaflops.has_value() || !IsUseful(*gigaflops)) return std::nullopt;
  Rate rate{&series, result, *gigaflops * 1e9, std::nullopt};
  const Outcome& outcome = result->outcome();
  if (outcome.has_bytes_moved()) {
    const double intensity = outcome.flops() / outcome.bytes_moved();
    if (IsUseful(intensity)) rate.flops_per_byte = intensity;
  }
  return rate;
}

plot::Axis RateAxis() {
  plot::Axis axis;
  axis.title = "achieved rate, FLOP/s";
  axis.format = [](double value) { return FormatScaled(value, ""); };
  return axis;
}

// The two limits for one number of threads: bandwidth times intensity, and peak FLOP/s.
struct Roof {
  int threads = 0;
  std::optional<double> compute;
  std::optional<figure::Bandwidth> bandwidth;
  // FLOPs a byte where the two meet; absent where one is not known.
  std::optional<double> ridge() const {
    if (!compute.has_value() || !bandwidth.has_value()) return std::nullopt;
    return *compute / bandwidth->bytes_per_second;
  }
};

std::vector<Roof> RoofsOf(const Analysis& analysis, const std::vector<Rate>& rates) {
  std::map<int, Roof> roofs;
  for (const Rate& rate : rates) {
    const int threads = rate.result->key().threads();
    const Environment& environment = analysis.EnvironmentOf(*rate.result);
    roofs[threads] = {threads, figure::ComputePeak(environment, *rate.result),
                      figure::BandwidthPeak(environment, *rate.result)};
  }
  std::vector<Roof> known;
  for (const auto& [threads, roof] : roofs) {
    if (roof.compute.has_value() || roof.bandwidth.has_value()) known.push_back(roof);
  }
  return known;
}

plot::Guide Bound(std::string label, double low, double low_y, double high, double high_y) {
  plot::Guide guide;
  guide.label = std::move(label);
  guide.points = {{low, low_y, std::nullopt, std::nullopt},
                  {high, high_y, std::nullopt, std::nullopt}};
  return guide;
}

// Adds the part of the roof from `low` to `high` FLOPs per byte: the slope of the bandwidth, the
// level of peak FLOP/s, or both with the ridge point between them.
void AddRoof(const Roof& roof, bool name_threads, double low, double high, plot::Plot* plot) {
  const std::string threads =
      name_threads && roof.threads > 0
          ? absl::StrCat(", ", roof.threads, roof.threads == 1 ? " thread" : " threads")
          : "";
  const double otherwise = roof.bandwidth.has_value() ? high : low;
  const double ridge = std::clamp(roof.ridge().value_or(otherwise), low, high);
  if (ridge > low) {
    const double slope = roof.bandwidth->bytes_per_second;
    plot->guides.push_back(Bound(
        absl::StrCat("measured ", roof.bandwidth->what, " ", FormatScaled(slope, "B/s"), threads),
        low, low * slope, ridge, ridge * slope));
  }
  if (high > ridge) {
    plot->guides.push_back(
        Bound(absl::StrCat("measured peak ", FormatScaled(*roof.compute, "FLOP/s"), threads), ridge,
              *roof.compute, high, *roof.compute));
  }
}

void AddRoofs(const Analysis& analysis, const std::vector<Rate>& rates, plot::Plot* plot) {
  double low = 0, high = 0;
  for (const Rate& rate : rates) {
    if (!rate.flops_per_byte.has_value()) continue;
    low = low == 0 ? *rate.flops_per_byte : std::min(low, *rate.flops_per_byte);
    high = std::max(high, *rate.flops_per_byte);
  }
  if (high == 0) return;
  const std::vector<Roof> roofs = RoofsOf(analysis, rates);
  for (const Roof& roof : roofs) {
    // The range has room for the corner where it is not far from the points.
    const double ridge = roof.ridge().value_or(low);
    const double from = ridge > low / 30 ? std::min(low, ridge / 2) : low;
    const double to = ridge < high * 30 ? std::max(high, ridge * 2) : high;
    AddRoof(roof, roofs.size() > 1, from, to, plot);
  }
}

std::string ShareText(std::optional<double> share) {
  return share.has_value() ? FormatPercent(share) : "-";
}

plot::Curve PointOf(const Analysis& analysis, const Rate& rate, int style,
                    const std::string& length_word) {
  plot::Curve curve;
  curve.kind = plot::Curve::Kind::kScatter;
  curve.name = figure::CurveName(*rate.series);
  curve.group = figure::FamilyOf(*rate.series);
  curve.key = curve.legend = rate.series->is_common_baseline ? curve.name : curve.group;
  curve.style = style;
  curve.hollow = rate.series->is_counterpart;
  curve.name_needed = !rate.series->is_counterpart;
  curve.points.push_back({*rate.flops_per_byte, rate.flops_per_second, std::nullopt, std::nullopt});
  const Environment& environment = analysis.EnvironmentOf(*rate.result);
  curve.description = absl::StrCat(
      curve.name, " at ", LengthOf(rate.result->key().problem()), " ", length_word, ": ",
      FormatScaled(rate.flops_per_second, "FLOP/s"), ", ",
      ShareText(ShareOfComputePeak(*rate.result, environment)), " of the measured peak; ",
      FormatSignificant(rate.flops_per_byte), " FLOPs a byte, ",
      ShareText(ShareOfBandwidthPeak(*rate.result, environment)), " of the measured bandwidth");
  return curve;
}

Table DataTable(const Analysis& analysis, const std::vector<Rate>& rates,
                const std::string& length_word) {
  Table table;
  table.columns = {{"technique"},  {length_word, true}, {"FLOPs a byte", true},
                   {"rate", true}, {"of peak", true},   {"of bandwidth", true}};
  for (const Rate& rate : rates) {
    const Environment& environment = analysis.EnvironmentOf(*rate.result);
    table.AddRow(
        {figure::CurveName(*rate.series), absl::StrCat(LengthOf(rate.result->key().problem())),
         FormatSignificant(rate.flops_per_byte), FormatScaled(rate.flops_per_second, "FLOP/s"),
         ShareText(ShareOfComputePeak(*rate.result, environment)),
         ShareText(ShareOfBandwidthPeak(*rate.result, environment))},
        figure::FamilyOf(*rate.series));
  }
  return table;
}

// Families by colour and marker: with a style for each technique the styles would repeat.
void AddPoints(const Analysis& analysis, const std::vector<Rate>& rates,
               const std::string& length_word, plot::Plot* plot) {
  std::map<std::string, int> styles;
  for (const Rate& rate : rates) {
    const std::string family = figure::FamilyOf(*rate.series);
    int style = plot::kReferenceStyle;
    if (!rate.series->is_common_baseline) {
      const auto [place, added] = styles.emplace(family, static_cast<int>(styles.size()));
      style = place->second;
      if (added) {
        plot->keys.push_back({family, style, plot::Curve::Kind::kScatter, false, false});
      }
    }
    if (rate.flops_per_byte.has_value())
      plot->curves.push_back(PointOf(analysis, rate, style, length_word));
  }
  const auto is_hollow = [](const plot::Curve& curve) { return curve.hollow; };
  if (std::any_of(plot->curves.begin(), plot->curves.end(), is_hollow)) {
    plot->keys.push_back({"a technique's own dense counterpart", plot::kReferenceStyle,
                          plot::Curve::Kind::kScatter, true, false});
  }
}

}  // namespace

std::vector<Figure> RooflineFigures(const Analysis& analysis, const SeriesFilter& filter) {
  std::vector<Figure> figures;
  for (const SeriesGroup& group : analysis.groups()) {
    if (group.purpose == Case::PURPOSE_ACCURACY) continue;
    std::vector<Rate> rates;
    std::vector<std::string> without_bytes;
    bool any = false;  // that was asked for, beside the baselines
    for (const Series& series : group.series) {
      const bool shown = series.is_common_baseline || !filter || filter(series);
      const std::optional<Rate> rate = shown ? RateOf(series) : std::nullopt;
      if (!rate.has_value()) continue;
      rates.push_back(*rate);
      any = any || !filter || filter(series);
      if (!rate->flops_per_byte.has_value()) without_bytes.push_back(figure::CurveName(series));
    }
    if (!any) continue;
    plot::Plot plot;
    plot.width = 1060;
    plot.height = 520;
    plot.title = "Roofline";
    plot.x.title = "FLOPs a byte moved";
    plot.y = RateAxis();
    AddRoofs(analysis, rates, &plot);
    const std::string length_word = figure::LengthWord(group);
    AddPoints(analysis, rates, length_word, &plot);
    Figure figure;
    figure.kind = FigureKind::kRoofline;
    figure.title = GroupName(group);
    figure.caption =
        "Each technique's longest run: its FLOPs over its time and over the bytes that it moves, "
        "both "
        "from the formulas beside its code, under the peaks measured in the same process. Above "
        "the "
        "slope: what it reads comes from caches.";
    if (plot.guides.empty())
      figure.caption += " The file has no measured peaks that fit these cases.";
    if (!without_bytes.empty()) {
      absl::StrAppend(&figure.caption, " Not drawn, since the bytes are not known: ",
                      absl::StrJoin(without_bytes, ", "), ".");
    }
    if (!plot.curves.empty()) figure.panels.push_back(std::move(plot));
    figure.data = DataTable(analysis, rates, length_word);
    figures.push_back(std::move(figure));
  }
  return figures;
}

}  // namespace tfb
