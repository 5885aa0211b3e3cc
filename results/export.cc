#include "results/export.h"

#include <cmath>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "nlohmann/json.hpp"
#include "results/reader.h"

namespace tfb {
namespace {

using Json = nlohmann::ordered_json;

template <typename Number>
std::optional<double> Known(bool has, Number value) {
  return has ? std::optional<double>(static_cast<double>(value)) : std::nullopt;
}

// Returns the shortest text that parses to the same double.
std::string ExactText(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  for (const int digits : {6, 15, 16}) {
    const std::string text = absl::StrFormat("%.*g", digits, value);
    if (std::strtod(text.c_str(), nullptr) == value) return text;
  }
  return absl::StrFormat("%.17g", value);
}

// A named value of a case: text, number, Boolean, or absent.
struct Value {
  enum class Kind { kAbsent, kText, kNumber, kTruth };
  Kind kind = Kind::kAbsent;
  std::string text;
  double number = 0;
  bool truth = false;

  static Value Text(absl::string_view text) { return {Kind::kText, std::string(text), 0, false}; }
  static Value Truth(bool truth) { return {Kind::kTruth, "", 0, truth}; }
  static Value Number(std::optional<double> number) {
    if (!number.has_value()) return {};
    return {Kind::kNumber, "", *number, false};
  }
};
using Fields = std::vector<std::pair<std::string, Value>>;

absl::string_view NameOf(Crossover::Kind kind) {
  switch (kind) {
    case Crossover::Kind::kAt:
      return "at";
    case Crossover::Kind::kAlways:
      return "always";
    case Crossover::Kind::kNever:
      return "never";
    case Crossover::Kind::kOnlyBelow:
      return "only_below";
  }
  return "";
}

// Tells whether the file has another pass than the forward one.
bool HasPasses(const Analysis& analysis) {
  return !analysis.passes().empty() && analysis.passes().back() != Case::PASS_FORWARD;
}

// Tells whether the file has runs that were launched as CUDA graphs.
bool HasGraphRuns(const Analysis& analysis) {
  return std::any_of(analysis.cases().begin(), analysis.cases().end(), [](const Case* result) {
    return result->outcome().timing().graph_run_ns_size() > 0;
  });
}

Fields KeyFields(const Analysis& analysis, const Case& result) {
  const Case::Key& key = result.key();
  const ProblemSize& problem = key.problem();
  const InputProfile& input = key.input();
  Fields fields = {{"technique", Value::Text(key.technique())},
                   {"options", Value::Text(CanonicalOptions(key))},
                   {"device", Value::Text(Name(key.device()))},
                   {"dtype", Value::Text(Name(key.dtype()))}};
  const std::pair<const char*, int64_t> sizes[] = {
      {"batch", problem.batch()},         {"query_heads", problem.query_heads()},
      {"kv_heads", problem.kv_heads()},   {"query_tokens", problem.query_tokens()},
      {"kv_tokens", problem.kv_tokens()}, {"head_dim", problem.head_dim()},
      {"value_dim", problem.value_dim()}};
  for (const auto& [name, size] : sizes) {
    fields.emplace_back(name, Value::Number(static_cast<double>(size)));
  }
  fields.emplace_back("causal", Value::Truth(problem.causal()));
  fields.emplace_back("input", Value::Text(input.name()));
  fields.emplace_back("input_file", Value::Text(input.file()));
  fields.emplace_back("input_model", Value::Text(input.model()));
  fields.emplace_back("input_layer", Value::Text(input.layer()));
  fields.emplace_back(
      "input_details",
      Value::Text(CanonicalOptions({input.details().begin(), input.details().end()})));
  fields.emplace_back("seed", Value::Text(absl::StrCat(key.seed())));
  fields.emplace_back("threads", Value::Number(key.threads()));
  fields.emplace_back("purpose", Value::Text(Name(key.purpose())));
  if (HasPasses(analysis)) fields.emplace_back("pass", Value::Text(Name(key.pass())));
  return fields;
}

void AddTimes(const std::string& name, std::optional<MedianInterval> interval, Fields* fields) {
  const auto number = [&](double MedianInterval::*member) {
    return Value::Number(interval.has_value() ? std::optional<double>((*interval).*member)
                                              : std::nullopt);
  };
  fields->emplace_back(name + "_median_ns", number(&MedianInterval::median));
  fields->emplace_back(name + "_low_ns", number(&MedianInterval::low));
  fields->emplace_back(name + "_high_ns", number(&MedianInterval::high));
  fields->emplace_back(name + "_interval_coverage", number(&MedianInterval::coverage));
  fields->emplace_back(name + "_samples",
                       Value::Number(interval.has_value() ? std::optional<double>(interval->samples)
                                                          : std::nullopt));
}

void AddError(const std::string& name, bool has, const ErrorMeasure& error, Fields* fields) {
  fields->emplace_back(
      name + "_relative_frobenius",
      Value::Number(Known(error.has_relative_frobenius(), error.relative_frobenius())));
  fields->emplace_back(name + "_max_abs",
                       Value::Number(Known(error.has_max_abs(), error.max_abs())));
  fields->emplace_back(
      name + "_max_abs_over_max_value",
      Value::Number(Known(error.has_max_abs_over_max_value(), error.max_abs_over_max_value())));
  fields->emplace_back(name + "_mean_cosine",
                       Value::Number(Known(error.has_mean_cosine(), error.mean_cosine())));
  const bool bounded = error.bounded_metric() != ErrorMeasure::METRIC_UNSPECIFIED;
  fields->emplace_back(name + "_bounded_metric",
                       bounded ? Value::Text(Name(error.bounded_metric())) : Value());
  fields->emplace_back(name + "_bound", Value::Number(Known(error.has_bound(), error.bound())));
  fields->emplace_back(name + "_passed",
                       error.has_passed() ? Value::Truth(error.passed()) : Value());
  fields->emplace_back(name + "_rows_checked", Value::Number(Known(has, error.rows_checked())));
  fields->emplace_back(name + "_rows", Value::Number(Known(has, error.rows())));
}

void AddBounded(const std::string& name, const BoundedNumber& number, Fields* fields) {
  fields->emplace_back(name, Value::Number(Known(number.has_value(), number.value())));
  fields->emplace_back(name + "_bound", Value::Number(Known(number.has_bound(), number.bound())));
  fields->emplace_back(name + "_passed",
                       number.has_passed() ? Value::Truth(number.passed()) : Value());
}

Fields TechniqueFields(const Case& result) {
  const TechniqueDescription& technique = result.technique();
  return {
      {"display_name", Value::Text(DisplayName(result))},
      {"title", Value::Text(technique.title())},
      {"citation", Value::Text(technique.citation())},
      {"family", Value::Text(technique.family())},
      {"exactness", Value::Text(Name(technique.exactness()))},
      {"input_kind", Value::Text(Name(technique.input_kind()))},
      {"weights", Value::Text(Name(technique.weights()))},
      {"weights_file", Value::Text(technique.weights_file())},
      {"dense_counterpart", Value::Text(technique.dense_counterpart())},
      {"dense_counterpart_options",
       Value::Text(CanonicalOptions({technique.dense_counterpart_options().begin(),
                                     technique.dense_counterpart_options().end()}))},
      {"contestant_file", Value::Text(technique.contestant().file())},
      {"contestant_definition", Value::Text(technique.contestant().definition())},
      {"contestant_about", Value::Text(CanonicalOptions({technique.contestant().about().begin(),
                                                         technique.contestant().about().end()}))}};
}

Fields TimeFields(const Analysis& analysis, const Case& result) {
  const Timing& timing = result.outcome().timing();
  Fields fields;
  AddTimes("run", RunTime(result), &fields);
  AddTimes("cold_run", Median(timing.cold_run_ns()), &fields);
  if (HasGraphRuns(analysis)) AddTimes("graph_run", Median(timing.graph_run_ns()), &fields);
  AddTimes("setup", Median(timing.setup_ns()), &fields);
  AddTimes("end_to_end", Median(timing.end_to_end_ns()), &fields);
  fields.emplace_back("segments",
                      Value::Number(Known(timing.segments_size() > 0, timing.segments_size())));
  std::optional<double> last_segment;
  if (timing.segments_size() > 0) {
    const auto interval = Median(timing.segments(timing.segments_size() - 1).append_ns());
    if (interval.has_value()) last_segment = interval->median;
  }
  fields.emplace_back("last_segment_median_ns", Value::Number(last_segment));
  fields.emplace_back("discarded_samples", Value::Number(Known(result.outcome().has_timing(),
                                                               timing.discarded_samples())));
  fields.emplace_back("throttled_samples", Value::Number(Known(result.outcome().has_timing(),
                                                               timing.throttled_samples())));
  fields.emplace_back("cpus", Value::Text(absl::StrJoin(timing.cpus(), " ")));
  fields.emplace_back("speed_up_over_dense",
                      Value::Number(SpeedUp(result, analysis.DenseOf(result))));
  return fields;
}

Fields CostFields(const Analysis& analysis, const Case& result) {
  const Outcome& outcome = result.outcome();
  const MachineLoad& load = outcome.machine_load();
  const Environment& environment = analysis.EnvironmentOf(result);
  const std::pair<const char*, std::optional<double>> numbers[] = {
      {"flops", Known(outcome.has_flops(), outcome.flops())},
      {"bytes_moved", Known(outcome.has_bytes_moved(), outcome.bytes_moved())},
      {"gigaflops_per_second", GigaflopsPerSecond(result)},
      {"gigabytes_per_second", GigabytesPerSecond(result)},
      {"share_of_compute_peak", ShareOfComputePeak(result, environment)},
      {"share_of_bandwidth_peak", ShareOfBandwidthPeak(result, environment)},
      {"peak_workspace_bytes",
       Known(outcome.has_peak_workspace_bytes(), outcome.peak_workspace_bytes())},
      {"parameter_bytes", Known(outcome.has_parameter_bytes(), outcome.parameter_bytes())},
      {"input_bytes", Known(outcome.has_input_bytes(), outcome.input_bytes())},
      {"output_bytes", Known(outcome.has_output_bytes(), outcome.output_bytes())},
      {"process_peak_bytes", Known(outcome.has_process_peak_bytes(), outcome.process_peak_bytes())},
      {"device_peak_bytes", Known(outcome.has_device_peak_bytes(), outcome.device_peak_bytes())},
      {"other_core_seconds", Known(load.has_other_core_seconds(), load.other_core_seconds())},
      {"stolen_core_seconds", Known(load.has_stolen_core_seconds(), load.stolen_core_seconds())},
      {"load_observed_seconds", Known(load.observed_seconds() > 0, load.observed_seconds())}};
  Fields fields;
  for (const auto& [name, number] : numbers) fields.emplace_back(name, Value::Number(number));
  if (HasPasses(analysis)) {
    fields.emplace_back("kept_bytes",
                        Value::Number(Known(outcome.has_kept_bytes(), outcome.kept_bytes())));
  }
  return fields;
}

void AddDeviceState(const std::string& name, const DeviceState& state, Fields* fields) {
  const std::pair<const char*, std::optional<double>> numbers[] = {
      {"clock_mhz", Known(state.has_clock_mhz(), state.clock_mhz())},
      {"memory_clock_mhz", Known(state.has_memory_clock_mhz(), state.memory_clock_mhz())},
      {"temperature_celsius", Known(state.has_temperature_celsius(), state.temperature_celsius())},
      {"power_watts", Known(state.has_power_watts(), state.power_watts())}};
  for (const auto& [what, number] : numbers) {
    fields->emplace_back(absl::StrCat(name, "_", what), Value::Number(number));
  }
  fields->emplace_back(name + "_throttle_reasons",
                       Value::Text(absl::StrJoin(state.throttle_reasons(), "; ")));
}

Fields DeviceFields(const Case& result) {
  Fields fields;
  AddDeviceState("before", result.outcome().device_state_before(), &fields);
  AddDeviceState("after", result.outcome().device_state_after(), &fields);
  return fields;
}

Fields CurveFields(const Analysis& analysis, const Case& result) {
  const Series* series = analysis.SeriesOf(result);
  const TechniqueDescription& technique = result.technique();
  Fields fields;
  const bool fitted = series != nullptr && series->growth.has_value();
  fields.emplace_back("growth", fitted ? Value::Number(series->growth->exponent) : Value());
  fields.emplace_back("growth_standard_error",
                      fitted ? Value::Number(series->growth->standard_error) : Value());
  fields.emplace_back("growth_from_tokens",
                      fitted ? Value::Number(series->growth->from_tokens) : Value());
  fields.emplace_back("expected_growth", Value::Number(Known(technique.has_expected_growth(),
                                                             technique.expected_growth())));
  const bool crossed = series != nullptr && series->crossover.has_value();
  fields.emplace_back("crossover",
                      crossed ? Value::Text(NameOf(series->crossover->kind)) : Value());
  fields.emplace_back("crossover_tokens",
                      crossed ? Value::Number(series->crossover->tokens) : Value());
  fields.emplace_back("crossover_low_tokens",
                      crossed ? Value::Number(series->crossover->low_tokens) : Value());
  fields.emplace_back("crossover_high_tokens",
                      crossed ? Value::Number(series->crossover->high_tokens) : Value());
  fields.emplace_back("crossover_clear",
                      crossed ? Value::Number(series->crossover->clear ? 1.0 : 0.0) : Value());
  const SpeedUpInterval* speed_up = nullptr;
  if (series != nullptr) {
    const auto found = series->speed_ups.find(LengthOf(result.key().problem()));
    if (found != series->speed_ups.end()) speed_up = &found->second;
  }
  fields.emplace_back("speed_up_low", speed_up != nullptr ? Value::Number(speed_up->low) : Value());
  fields.emplace_back("speed_up_high",
                      speed_up != nullptr ? Value::Number(speed_up->high) : Value());
  fields.emplace_back("speed_up_distinct", speed_up != nullptr
                                               ? Value::Number(speed_up->distinct ? 1.0 : 0.0)
                                               : Value());
  return fields;
}

Fields ErrorFields(const Analysis& analysis, const Case& result) {
  const Outcome& outcome = result.outcome();
  Fields fields;
  AddError("definition", outcome.has_against_definition(), outcome.against_definition(), &fields);
  AddError("dense", outcome.has_against_dense(), outcome.against_dense(), &fields);
  AddBounded("ratio_to_dense_error", outcome.ratio_to_dense_error(), &fields);
  AddBounded("log_sum_exp_error", outcome.log_sum_exp_error(), &fields);
  fields.emplace_back("kept_mass",
                      Value::Number(Known(outcome.has_kept_mass(), outcome.kept_mass())));
  fields.emplace_back("kl_divergence",
                      Value::Number(Known(outcome.has_kl_divergence(), outcome.kl_divergence())));
  fields.emplace_back("recall_top_k",
                      Value::Number(Known(outcome.has_recall_top_k(), outcome.recall_top_k())));
  fields.emplace_back("recall_k",
                      Value::Number(Known(outcome.has_recall_top_k(), outcome.recall_k())));
  if (HasPasses(analysis)) {
    const NamedError* worst = WorstGradientError(outcome);
    AddBounded("gradient_error", worst == nullptr ? BoundedNumber() : worst->error(), &fields);
    fields.emplace_back("gradient_error_of",
                        worst == nullptr ? Value() : Value::Text(worst->name()));
  }
  return fields;
}

Fields StatusFields(const Case& result) {
  return {{"status", Value::Text(Name(result.outcome().status()))},
          {"reason", Value::Text(result.outcome().reason())},
          {"unfinished", Value::Truth(result.outcome().unfinished())},
          {"elapsed_seconds", Value::Number(result.outcome().elapsed_seconds())}};
}

std::map<std::string, double> Statistics(const Case& result) {
  return {result.outcome().statistics().begin(), result.outcome().statistics().end()};
}

std::string CsvText(const Value& value) {
  std::string text;
  switch (value.kind) {
    case Value::Kind::kAbsent:
      return "";
    case Value::Kind::kTruth:
      return value.truth ? "true" : "false";
    case Value::Kind::kNumber:
      return ExactText(value.number);
    case Value::Kind::kText:
      text = value.text;
      break;
  }
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  return absl::StrCat("\"", absl::StrReplaceAll(text, {{"\"", "\"\""}}), "\"");
}

Fields CsvFields(const Analysis& analysis, const Case& result) {
  const Environment& environment = analysis.EnvironmentOf(result);
  Fields fields = {{"environment", Value::Text(result.environment_id())},
                   {"host", Value::Text(environment.host())},
                   {"cpu_model", Value::Text(environment.cpu_model())},
                   {"git_commit", Value::Text(environment.git_commit())}};
  for (const Fields& part :
       {KeyFields(analysis, result), TechniqueFields(result), StatusFields(result),
        TimeFields(analysis, result), CostFields(analysis, result), CurveFields(analysis, result),
        ErrorFields(analysis, result)}) {
    fields.insert(fields.end(), part.begin(), part.end());
  }
  std::vector<std::string> statistics;
  for (const auto& [name, value] : Statistics(result)) {
    statistics.push_back(absl::StrCat(name, "=", ExactText(value)));
  }
  fields.emplace_back("statistics", Value::Text(absl::StrJoin(statistics, ";")));
  fields.emplace_back("key", Value::Text(CaseKey(result)));
  return fields;
}

Json JsonNumber(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  // Whole numbers are written as 512, not 512.0.
  if (value == std::floor(value) && std::fabs(value) < 9007199254740992.0) {
    return static_cast<int64_t>(value);
  }
  return value;
}

Json JsonObject(const Fields& fields) {
  Json object = Json::object();
  for (const auto& [name, value] : fields) {
    switch (value.kind) {
      case Value::Kind::kAbsent:
        break;
      case Value::Kind::kTruth:
        object[name] = value.truth;
        break;
      case Value::Kind::kNumber:
        object[name] = JsonNumber(value.number);
        break;
      case Value::Kind::kText:
        object[name] = value.text;
        break;
    }
  }
  return object;
}

template <typename Range>
Json JsonNumbers(const Range& values) {
  Json array = Json::array();
  for (const double value : values) array.push_back(JsonNumber(value));
  return array;
}

Json JsonSamples(const Timing& timing) {
  Json samples = Json::object();
  if (timing.setup_ns_size() > 0) samples["setup_ns"] = JsonNumbers(timing.setup_ns());
  if (timing.cold_run_ns_size() > 0) samples["cold_run_ns"] = JsonNumbers(timing.cold_run_ns());
  if (timing.run_ns_size() > 0) samples["run_ns"] = JsonNumbers(timing.run_ns());
  for (const Timing::Visit& visit : timing.visits()) {
    samples["visits"].push_back(
        {{"start_unix_ns", visit.start_unix_ns()}, {"run_samples", visit.run_samples()}});
  }
  if (timing.graph_run_ns_size() > 0) samples["graph_run_ns"] = JsonNumbers(timing.graph_run_ns());
  if (timing.end_to_end_ns_size() > 0) {
    samples["end_to_end_ns"] = JsonNumbers(timing.end_to_end_ns());
  }
  for (const SegmentTiming& segment : timing.segments()) {
    samples["segments"].push_back({{"tokens_before", segment.tokens_before()},
                                   {"tokens", segment.tokens()},
                                   {"append_ns", JsonNumbers(segment.append_ns())}});
  }
  return samples;
}

Json JsonEnvironment(const Environment& environment) {
  Json json = {{"id", environment.id()},
               {"host", environment.host()},
               {"os", environment.os()},
               {"cpu_model", environment.cpu_model()},
               {"physical_cores", environment.physical_cores()},
               {"logical_cores", environment.logical_cores()},
               {"threads", environment.threads()},
               {"simd", Json::array()},
               {"caches", Json::array()},
               {"gpus", Json::array()},
               {"no_gpu_reason", environment.no_gpu_reason()},
               {"compiler", environment.compiler()},
               {"cuda_compiler", environment.cuda_compiler()},
               {"compile_flags", environment.compile_flags()},
               {"compilation_mode", environment.compilation_mode()},
               {"git_commit", environment.git_commit()},
               {"peaks", Json::array()},
               {"start_unix_ns", environment.start_unix_ns()},
               {"command_line", Json::array()}};
  if (environment.has_git_dirty()) json["git_dirty"] = environment.git_dirty();
  if (environment.has_memory_bytes()) json["memory_bytes"] = environment.memory_bytes();
  for (const std::string& simd : environment.simd()) json["simd"].push_back(simd);
  for (const std::string& word : environment.command_line()) json["command_line"].push_back(word);
  for (const Cache& cache : environment.caches()) {
    json["caches"].push_back(
        {{"level", cache.level()}, {"kind", cache.kind()}, {"bytes", cache.bytes()}});
  }
  for (const Gpu& gpu : environment.gpus()) {
    Json one = {{"index", gpu.index()},
                {"name", gpu.name()},
                {"compute_capability", gpu.compute_capability()},
                {"multiprocessors", gpu.multiprocessors()},
                {"driver", gpu.driver()},
                {"toolkit", gpu.toolkit()}};
    if (gpu.has_clock_mhz()) one["clock_mhz"] = JsonNumber(gpu.clock_mhz());
    if (gpu.has_memory_clock_mhz()) one["memory_clock_mhz"] = JsonNumber(gpu.memory_clock_mhz());
    if (gpu.has_memory_bytes()) one["memory_bytes"] = gpu.memory_bytes();
    if (gpu.has_l2_cache_bytes()) one["l2_cache_bytes"] = gpu.l2_cache_bytes();
    if (!gpu.runtime_libraries().empty()) one["runtime_libraries"] = gpu.runtime_libraries();
    json["gpus"].push_back(one);
  }
  for (const Peak& peak : environment.peaks()) {
    json["peaks"].push_back({{"name", peak.name()},
                             {"value", JsonNumber(peak.value())},
                             {"unit", peak.unit()},
                             {"threads", peak.threads()},
                             {"device", std::string(Name(peak.device()))},
                             {"dtype", std::string(Name(peak.dtype()))}});
  }
  return json;
}

Json JsonCase(const Analysis& analysis, const Case& result) {
  Json json;
  json["environment"] = result.environment_id();
  json["key"] = JsonObject(KeyFields(analysis, result));
  // Options are an object, so that readers need not parse a text.
  json["key"]["options"] = std::map<std::string, std::string>(result.key().options().begin(),
                                                              result.key().options().end());
  json["technique"] = JsonObject(TechniqueFields(result));
  json["outcome"] = JsonObject(StatusFields(result));
  json["times"] = JsonObject(TimeFields(analysis, result));
  json["costs"] = JsonObject(CostFields(analysis, result));
  if (result.outcome().has_device_state_before()) {
    json["device_state"] = JsonObject(DeviceFields(result));
  }
  json["curve"] = JsonObject(CurveFields(analysis, result));
  json["errors"] = JsonObject(ErrorFields(analysis, result));
  json["statistics"] = Json::object();
  for (const auto& [name, value] : Statistics(result)) {
    json["statistics"][name] = JsonNumber(value);
  }
  json["samples"] = JsonSamples(result.outcome().timing());
  return json;
}

}  // namespace

std::string RenderCsv(const Analysis& analysis) {
  const auto line = [](const Fields& fields, bool names) {
    return absl::StrCat(absl::StrJoin(fields, ",",
                                      [names](std::string* out, const auto& field) {
                                        *out += names ? field.first : CsvText(field.second);
                                      }),
                        "\r\n");
  };
  std::string csv = line(CsvFields(analysis, Case()), true);
  for (const Case* result : analysis.cases()) csv += line(CsvFields(analysis, *result), false);
  return csv;
}

std::string RenderJson(const Analysis& analysis) {
  Json json = {{"format", "tfb.results/1"},
               {"environments", Json::array()},
               {"cases", Json::array()},
               {"superseded_cases", analysis.superseded_cases()}};
  for (const Environment& environment : analysis.results().environments()) {
    json["environments"].push_back(JsonEnvironment(environment));
  }
  for (const Case* result : analysis.cases()) {
    json["cases"].push_back(JsonCase(analysis, *result));
  }
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace tfb
