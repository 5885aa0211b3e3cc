#include "results/benchmark_json.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"
#include "results/describe.h"
#include "results/reader.h"
#include "results/table.h"

namespace tfb {
namespace {

using Json = nlohmann::ordered_json;

// Returns "near:window=256/cpu/f32/1x8x512x64/causal/gaussian/seed:1/threads:2", with the options
// that differ from their defaults.
std::string BenchmarkName(const Case& result) {
  const Case::Key& key = result.key();
  const ProblemSize& problem = key.problem();
  const std::string technique =
      absl::StrReplaceAll(Printable(DisplayName(result)), {{" ", ":"}, {"/", "|"}});
  std::string size = absl::StrCat(problem.batch(), "x", problem.query_heads());
  if (problem.kv_heads() != problem.query_heads()) absl::StrAppend(&size, "on", problem.kv_heads());
  absl::StrAppend(&size, "x", problem.query_tokens());
  if (problem.kv_tokens() != problem.query_tokens())
    absl::StrAppend(&size, "on", problem.kv_tokens());
  absl::StrAppend(&size, "x", problem.head_dim());
  if (problem.value_dim() != problem.head_dim()) absl::StrAppend(&size, "v", problem.value_dim());
  std::vector<std::string> parts = {technique, std::string(Name(key.device())),
                                    std::string(Name(key.dtype())), size};
  if (problem.causal()) parts.push_back("causal");
  parts.push_back(absl::StrReplaceAll(DescribeInput(key.input()), {{"/", "|"}}));
  parts.push_back(absl::StrCat("seed:", key.seed()));
  if (key.threads() > 0) parts.push_back(absl::StrCat("threads:", key.threads()));
  if (key.purpose() == Case::PURPOSE_ACCURACY) parts.push_back("accuracy");
  if (key.pass() != Case::PASS_FORWARD) parts.emplace_back(Name(key.pass()));
  return absl::StrJoin(parts, "/");
}

Json Context(const Analysis& analysis) {
  Json context;
  context["json_schema_version"] = 1;
  const auto& machines = analysis.machines();
  if (machines.empty()) return context;
  const Environment& environment = *machines.front();
  context["date"] = absl::FormatTime(
      absl::RFC3339_sec, absl::FromUnixNanos(environment.start_unix_ns()), absl::UTCTimeZone());
  context["host_name"] = environment.host();
  context["executable"] = environment.command_line().empty() ? "" : environment.command_line(0);
  context["num_cpus"] = environment.logical_cores();
  context["mhz_per_cpu"] = 0;  // not measured, but the format requires a number
  context["cpu_scaling_enabled"] = false;
  context["caches"] = Json::array();
  for (const Cache& cache : environment.caches()) {
    std::string kind = cache.kind();
    if (!kind.empty() && kind[0] >= 'a' && kind[0] <= 'z') kind[0] += 'A' - 'a';
    context["caches"].push_back({{"type", kind},
                                 {"level", cache.level()},
                                 {"size", cache.bytes()},
                                 {"num_sharing", cache.shared_by_logical_cores()}});
  }
  context["load_avg"] = Json::array();
  context["library_build_type"] = environment.compilation_mode() == "dbg" ? "debug" : "release";
  return context;
}

// Returns names that are equal in two files for cases with equal keys, and unique within a file:
// cases with equal keys, as of two machines, are numbered.
class Names {
 public:
  std::string Of(const Case& result) {
    const std::string name = BenchmarkName(result);
    const int before = seen_[name]++;
    return before == 0 ? name : absl::StrCat(name, "#", before + 1);
  }

 private:
  std::map<std::string, int> seen_;
};

struct Family {
  const Case* result;
  std::string name;
  int index;
  std::vector<double> samples;
};

Json Entry(const Family& family, const std::string& suffix, const char* run_type) {
  Json entry;
  entry["name"] = family.name + suffix;
  entry["family_index"] = family.index;
  entry["per_family_instance_index"] = 0;
  entry["run_name"] = family.name;
  entry["run_type"] = run_type;
  entry["repetitions"] = std::max<size_t>(1, family.samples.size());
  return entry;
}

void AddTime(double value, const char* unit, Json* entry) {
  (*entry)["real_time"] = value;
  (*entry)["cpu_time"] = value;
  (*entry)["time_unit"] = unit;
}

void AddIterations(const Family& family, Json* benchmarks) {
  const Outcome& outcome = family.result->outcome();
  for (size_t i = 0; i < family.samples.size(); ++i) {
    Json entry = Entry(family, "", "iteration");
    if (i == 0) entry["label"] = CanonicalOptions(family.result->key());
    entry["repetition_index"] = i;
    entry["threads"] = std::max(1, family.result->key().threads());
    entry["iterations"] = std::max<int64_t>(1, outcome.timing().calls_per_sample());
    AddTime(family.samples[i], "ns", &entry);
    const double per_second = 1e9 / family.samples[i];
    if (outcome.has_flops() && std::isfinite(per_second)) {
      entry["FLOP/s"] = outcome.flops() * per_second;
    }
    benchmarks->push_back(std::move(entry));
  }
}

void AddAggregates(const Family& family, Json* benchmarks) {
  const auto& samples = family.samples;
  const double count = static_cast<double>(samples.size());
  if (samples.size() < 2) return;
  const double mean = std::accumulate(samples.begin(), samples.end(), 0.0) / count;
  double squares = 0;
  for (const double sample : samples) squares += (sample - mean) * (sample - mean);
  const double deviation = std::sqrt(squares / (count - 1));
  const struct {
    const char* name;
    double value;
    bool is_share;
  } aggregates[] = {{"mean", mean, false},
                    {"median", MedianOf(samples)->median, false},
                    {"stddev", deviation, false},
                    {"cv", mean > 0 ? deviation / mean : 0, true}};
  for (const auto& aggregate : aggregates) {
    Json entry = Entry(family, absl::StrCat("_", aggregate.name), "aggregate");
    entry["threads"] = std::max(1, family.result->key().threads());
    entry["aggregate_name"] = aggregate.name;
    entry["aggregate_unit"] = aggregate.is_share ? "percentage" : "time";
    entry["iterations"] = samples.size();
    AddTime(aggregate.value, "ns", &entry);
    benchmarks->push_back(std::move(entry));
  }
}

}  // namespace

std::string RenderBenchmarkJson(const Analysis& analysis) {
  Json document;
  document["context"] = Context(analysis);
  Json benchmarks = Json::array();
  Names names;
  int index = 0, without_time = 0;
  for (const Case* result : analysis.cases()) {
    Family family{result, names.Of(*result), 0, {}};
    if (RunTime(*result).has_value()) {
      for (const double sample : result->outcome().timing().run_ns()) {
        if (std::isfinite(sample)) family.samples.push_back(sample);
      }
    }
    if (family.samples.empty()) {
      ++without_time;
      continue;
    }
    family.index = index++;
    AddIterations(family, &benchmarks);
    AddAggregates(family, &benchmarks);
  }
  document["context"]["cases_without_time"] = without_time;
  document["benchmarks"] = std::move(benchmarks);
  // A text that is cut within a UTF-8 character is repaired, since dump would throw an exception.
  return document.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace tfb
