#include "results/history/page/history_data.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "nlohmann/json.hpp"
#include "results/history/page/ranking.h"
#include "results/reader.h"
#include "results/table.h"

namespace tfb {
namespace {

using Json = nlohmann::json;

using ChangesBySeries = std::vector<std::vector<const Change*>>;

ChangesBySeries BySeries(const History& history, const std::vector<Change>& changes) {
  ChangesBySeries by_series(history.series.size());
  for (const Change& change : changes) by_series[change.series].push_back(&change);
  for (std::vector<const Change*>& own : by_series) {
    std::sort(own.begin(), own.end(),
              [](const Change* a, const Change* b) { return a->at < b->at; });
  }
  return by_series;
}

// Returns the number with six digits.
Json Number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return std::strtod(absl::StrFormat("%.6g", value).c_str(), nullptr);
}

double Median(std::vector<double> values) {
  values.erase(std::remove_if(values.begin(), values.end(),
                              [](double value) { return !std::isfinite(value); }),
               values.end());
  if (values.empty()) return std::nan("");
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// FNV-1a with 64 bits (draft-eastlake-fnv-17), of which 48 are shown.
std::string Hash(absl::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  return absl::StrFormat("%012x", hash >> 16);
}

std::string CaseId(const History& history, const HistorySeries& series) {
  return Hash(absl::StrCat(history.machines[series.machine].signature, "\n", series.key));
}

// Gives each text a place.
class Strings {
 public:
  int Place(const std::string& text) {
    const auto [found, is_new] = places_.emplace(text, static_cast<int>(places_.size()));
    if (is_new) all_.push_back(Printable(text));
    return found->second;
  }
  const Json& all() const { return all_; }

 private:
  std::map<std::string, int> places_;
  Json all_ = Json::array();
};

Json MachineJson(const Machine& machine) {
  std::map<std::vector<std::string>, int> places;
  Json builds = Json::array(), runs = Json::array();
  for (const RunInfo& run : machine.runs) {
    const auto [build, is_new] = places.emplace(run.build, static_cast<int>(places.size()));
    if (is_new) {
      builds.push_back(Json::array());
      for (const std::string& property : run.build) builds.back().push_back(Printable(property));
    }
    runs.push_back({Printable(run.name), run.start_unix_s, Printable(run.commit), run.dirty ? 1 : 0,
                    run.commit_unix_s ? Json(*run.commit_unix_s) : Json(),
                    Printable(run.commit_subject), build->second});
  }
  return {Printable(machine.signature), std::move(builds), std::move(runs)};
}

Json ChangeJson(const History& history, const Change& change) {
  Json differences = Json::array();
  for (const std::string& difference : change.build_differences) {
    differences.push_back(Printable(difference));
  }
  const std::string& remark = change.acknowledged.empty() ? change.reason : change.acknowledged;
  return {history.series[change.series].runs[change.at],
          change.begin,
          change.at,
          change.end,
          Number(change.before),
          Number(change.after),
          static_cast<int>(KindOf(change)),
          SizeText(history, change),
          SizeInterval(history, change),
          Printable(remark),
          std::move(differences)};
}

Json SeriesJson(const History& history, const HistorySeries& series, const std::string& text,
                const std::vector<const Change*>& changes, double noise, int place) {
  Json change_list = Json::array();
  for (const Change* change : changes) change_list.push_back(ChangeJson(history, *change));
  const Json level = changes.empty() ? Number(Median(series.values)) : Json();
  return {series.metric,
          text,
          std::strtod(absl::StrFormat("%.2g", noise).c_str(), nullptr),
          level,
          series.bound ? Number(*series.bound) : Json(),
          Printable(series.reason),
          std::move(change_list),
          place};
}

// Returns the place of each series in the order of what matters.
std::vector<int> Places(const std::vector<SeriesRank>& ranks) {
  std::vector<int> order(ranks.size()), places(ranks.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&ranks](int a, int b) { return MattersMore(ranks[a], ranks[b]); });
  for (size_t place = 0; place < order.size(); ++place) {
    places[order[place]] = static_cast<int>(place);
  }
  return places;
}

// The series of a case of one machine, by place in the history.
struct CasePanels {
  std::vector<int> series;
  int place = 0;  // of its series that matters most
};

// Returns the cases, that which matters most first.
std::vector<CasePanels> RankedCases(const History& history, const std::vector<int>& places) {
  std::map<std::pair<int, std::string>, size_t> found_cases;
  std::vector<CasePanels> cases;
  for (size_t s = 0; s < history.series.size(); ++s) {
    const HistorySeries& series = history.series[s];
    const auto [found, is_new] =
        found_cases.emplace(std::make_pair(series.machine, series.key), cases.size());
    if (is_new) cases.push_back({{}, places[s]});
    CasePanels& panels = cases[found->second];
    panels.series.push_back(static_cast<int>(s));
    panels.place = std::min(panels.place, places[s]);
  }
  std::sort(cases.begin(), cases.end(),
            [](const CasePanels& a, const CasePanels& b) { return a.place < b.place; });
  return cases;
}

}  // namespace

SeriesTexts MakeSeriesTexts(const History& history, const std::vector<Change>& changes,
                            size_t most_bytes) {
  const ChangesBySeries by_series = BySeries(history, changes);
  SeriesTexts out;
  while (true) {
    out.texts.clear();
    size_t bytes = 0;
    for (size_t s = 0; s < history.series.size(); ++s) {
      const HistorySeries& series = history.series[s];
      std::vector<int> cuts;
      for (const Change* change : by_series[s]) {
        cuts.insert(cuts.end(), {change->begin, change->at, change->end});
      }
      out.texts.push_back(SeriesText(series.runs, series.values, cuts, out.detail,
                                     series.metric == HISTORY_METRIC_STATUS));
      bytes += out.texts.back().size();
    }
    if (bytes <= most_bytes || out.detail.groups <= 10) return out;
    out.detail.latest = std::max(out.detail.latest / 2, 20);
    out.detail.groups = std::max(out.detail.groups / 2, 10);
    out.detail.around = std::max(out.detail.around / 2, 3);
    out.detail.odd /= 2;
  }
}

std::string SeriesId(const History& history, const HistorySeries& series) {
  return absl::StrCat(CaseId(history, series), ".", MetricName(series.metric));
}

std::string HistoryJson(const History& history, const std::vector<Change>& changes,
                        const SeriesTexts& texts) {
  const ChangesBySeries by_series = BySeries(history, changes);
  std::vector<SeriesRank> ranks;
  for (size_t s = 0; s < history.series.size(); ++s) {
    ranks.push_back(RankOf(history, history.series[s], by_series[s]));
  }
  const std::vector<int> places = Places(ranks);
  Json json;
  json["metrics"] = Json::array({Json()});  // 0 is none
  for (int metric = 1; metric <= HISTORY_METRIC_STATUS; ++metric) {
    const auto known = static_cast<HistoryMetric>(metric);
    json["metrics"].push_back({std::string(MetricName(known)), std::string(MetricTitle(known))});
  }
  for (int status = Outcome::STATUS_OK; status <= Outcome::Status_MAX; ++status) {
    json["statuses"].push_back(FormatValue(HISTORY_METRIC_STATUS, status - Outcome::STATUS_OK));
  }
  json["machines"] = Json::array();
  for (const Machine& machine : history.machines) {
    json["machines"].push_back(MachineJson(machine));
  }
  Strings strings;
  json["cases"] = Json::array();
  for (const CasePanels& panels : RankedCases(history, places)) {
    const HistorySeries& first = history.series[panels.series.front()];
    Json own = Json::array();
    for (const int s : panels.series) {
      own.push_back(SeriesJson(history, history.series[s], texts.texts[s], by_series[s],
                               ranks[s].noise, places[s]));
    }
    json["cases"].push_back({CaseId(history, first), first.machine, panels.series.front(),
                             strings.Place(first.name), strings.Place(first.problem),
                             strings.Place(first.family),
                             strings.Place(std::string(Name(first.device))), std::move(own)});
  }
  json["strings"] = strings.all();
  return absl::StrReplaceAll(json.dump(-1, ' ', true, Json::error_handler_t::replace),
                             {{"<", "\\u003c"}, {">", "\\u003e"}, {"&", "\\u0026"}});
}

}  // namespace tfb
