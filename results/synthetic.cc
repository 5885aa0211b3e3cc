#include "results/synthetic.h"

#include "absl/strings/str_cat.h"

namespace tfb {
namespace synthetic {
namespace {

void AddPeak(absl::string_view name, double value, absl::string_view unit, int threads,
             Peak::Kind kind, ElementType dtype, Environment* environment) {
  Peak* peak = environment->add_peaks();
  peak->set_name(std::string(name));
  peak->set_value(value);
  peak->set_unit(std::string(unit));
  peak->set_threads(threads);
  peak->set_kind(kind);
  peak->set_device(DEVICE_TYPE_CPU);
  peak->set_dtype(dtype);
}

void SetErrors(double definition, double dense, Outcome* outcome) {
  ErrorMeasure* against_definition = outcome->mutable_against_definition();
  against_definition->set_relative_frobenius(definition);
  against_definition->set_max_abs(definition * 3);
  against_definition->set_max_abs_over_max_value(definition * 2);
  against_definition->set_mean_cosine(1);
  against_definition->set_bounded_metric(ErrorMeasure::METRIC_RELATIVE_FROBENIUS);
  against_definition->set_bound(2e-6);
  against_definition->set_rows_checked(64);
  against_definition->set_rows(4096);
  against_definition->set_passed(definition <= 2e-6);
  ErrorMeasure* against_dense = outcome->mutable_against_dense();
  against_dense->set_relative_frobenius(dense);
  against_dense->set_max_abs(dense * 3);
  against_dense->set_rows_checked(64);
  against_dense->set_rows(4096);
}

}  // namespace

Environment MakeEnvironment(absl::string_view id) {
  Environment environment;
  environment.set_id(std::string(id));
  environment.set_host("bench-1");
  environment.set_os("Linux 6.1");
  environment.set_cpu_model("Imaginary CPU 9000");
  environment.set_physical_cores(2);
  environment.set_logical_cores(2);
  environment.set_threads(2);
  Cache* cache = environment.add_caches();
  cache->set_level(2);
  cache->set_kind("unified");
  cache->set_bytes(2 << 20);
  environment.add_simd("AVX-512");
  environment.set_memory_bytes(uint64_t{16} << 30);
  environment.set_no_gpu_reason("no driver");
  environment.set_compiler("g++ 12.2.0");
  environment.set_compile_flags("-O2");
  environment.set_compilation_mode("opt");
  environment.set_git_commit("0123456789abcdef0123456789abcdef01234567");
  environment.set_git_dirty(true);
  AddPeak("f32 fma, 1 thread", 200e9, "FLOP/s", 1, Peak::KIND_COMPUTE, ELEMENT_TYPE_F32,
          &environment);
  AddPeak("f32 fma, 2 threads", 400e9, "FLOP/s", 2, Peak::KIND_COMPUTE, ELEMENT_TYPE_F32,
          &environment);
  AddPeak("read, 2 threads", 20e9, "B/s", 2, Peak::KIND_READ_BANDWIDTH, ELEMENT_TYPE_UNSPECIFIED,
          &environment);
  environment.set_start_unix_ns(1700000000000000000);
  environment.add_command_line("sweep");
  return environment;
}

std::vector<double> Samples(double median_ns, int count) {
  std::vector<double> samples;
  for (int i = 0; i < count; ++i) {
    const double position = count == 1 ? 0 : 2.0 * i / (count - 1) - 1;  // -1 to 1
    samples.push_back(median_ns * (1 + 0.01 * position));
  }
  return samples;
}

Case MakeCase(const CaseSpec& spec) {
  Case result = MakeUnmeasured(spec, Outcome::STATUS_OK, "");
  Outcome* outcome = result.mutable_outcome();
  if (spec.median_ns > 0) {
    Timing* timing = outcome->mutable_timing();
    timing->set_clock(Timing::CLOCK_WALL);
    timing->set_calls_per_sample(1);
    for (const double sample : Samples(spec.median_ns)) timing->add_run_ns(sample);
    for (const double sample : Samples(spec.median_ns / 10)) timing->add_setup_ns(sample);
  }
  const double tokens = static_cast<double>(spec.tokens);
  outcome->set_flops(spec.expected_growth == 2 ? 2 * 8 * tokens * tokens * 128
                                               : 2 * 8 * tokens * 256 * 128);
  outcome->set_bytes_moved(4 * 8 * tokens * 64 * 4);
  outcome->set_peak_workspace_bytes(spec.tokens * 1024);
  outcome->set_parameter_bytes(0);
  outcome->set_input_bytes(3 * 8 * spec.tokens * 64 * 4);
  outcome->set_output_bytes(8 * spec.tokens * 64 * 4);
  if (spec.pass != Case::PASS_FORWARD) outcome->set_kept_bytes(8 * spec.tokens * 65 * 4);
  if (spec.purpose == Case::PURPOSE_ACCURACY) {
    const bool exact = spec.exactness == TechniqueDescription::EXACTNESS_EXACT;
    SetErrors(2e-7, spec.technique == "plain" ? 2e-7 : exact ? 0.18 : 0.61, outcome);
    if (exact) {
      outcome->set_kept_mass(spec.technique == "plain" ? 1 : 0.87);
      outcome->set_kl_divergence(spec.technique == "plain" ? 0 : 0.14);
      outcome->set_recall_top_k(spec.technique == "plain" ? 1 : 0.78);
      outcome->set_recall_k(32);
    }
  }
  return result;
}

Case MakeUnmeasured(const CaseSpec& spec, Outcome::Status status, absl::string_view reason) {
  Case result;
  result.set_environment_id(spec.environment_id);
  Case::Key* key = result.mutable_key();
  key->set_technique(spec.technique);
  if (!spec.option_name.empty()) {
    (*key->mutable_options())[spec.option_name] = spec.option_value;
    key->set_options_text(absl::StrCat(spec.option_name, "=", spec.option_value));
  }
  key->set_device(spec.device);
  key->set_dtype(spec.dtype);
  ProblemSize* problem = key->mutable_problem();
  problem->set_batch(1);
  problem->set_query_heads(8);
  problem->set_kv_heads(8);
  problem->set_query_tokens(spec.tokens);
  problem->set_kv_tokens(spec.tokens);
  problem->set_head_dim(64);
  problem->set_value_dim(64);
  problem->set_causal(true);
  key->mutable_input()->set_name(spec.purpose == Case::PURPOSE_ACCURACY ? "real" : "gaussian");
  key->set_seed(spec.seed);
  key->set_threads(spec.device == DEVICE_TYPE_CPU ? 2 : 0);
  key->set_purpose(spec.purpose);
  key->set_pass(spec.pass);

  TechniqueDescription* technique = result.mutable_technique();
  technique->set_display_name(
      spec.option_name.empty()
          ? spec.technique
          : absl::StrCat(spec.technique, " ", spec.option_name, "=", spec.option_value));
  technique->set_title(absl::StrCat("The ", spec.technique, " technique"));
  technique->set_family("synthetic");
  technique->set_exactness(spec.exactness);
  technique->set_input_kind(TechniqueDescription::INPUT_KIND_QKV);
  technique->set_weights(TechniqueDescription::WEIGHTS_NONE);
  technique->set_dense_counterpart("plain");
  technique->set_options_are_default(true);
  technique->set_expected_growth(spec.expected_growth);

  result.mutable_outcome()->set_status(status);
  result.mutable_outcome()->set_reason(std::string(reason));
  return result;
}

void AddVisit(int64_t start_unix_ns, const std::vector<double>& run_ns, Case* result) {
  Timing* timing = result->mutable_outcome()->mutable_timing();
  for (const double ns : run_ns) timing->add_run_ns(ns);
  Timing::Visit* visit = timing->add_visits();
  visit->set_start_unix_ns(start_unix_ns);
  visit->set_run_samples(static_cast<int>(run_ns.size()));
}

ResultSet MakeSweep() {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  CaseSpec plain;
  CaseSpec near;
  near.technique = "near";
  near.option_name = "window";
  near.option_value = "256";
  near.expected_growth = 1;
  CaseSpec sketch;
  sketch.technique = "sketch";
  sketch.option_name = "features";
  sketch.option_value = "128";
  sketch.expected_growth = 1;
  sketch.exactness = TechniqueDescription::EXACTNESS_APPROXIMATE;
  for (CaseSpec spec : {plain, near, sketch}) {
    spec.purpose = Case::PURPOSE_ACCURACY;
    spec.median_ns = 0;
    *results.add_cases() = MakeCase(spec);
  }
  for (const int64_t tokens : {256, 512, 1024, 2048, 4096}) {
    const double scale = static_cast<double>(tokens) / 256;
    plain.tokens = near.tokens = sketch.tokens = tokens;
    // Equal where s^2 = 2.7621 s: at 256 * 2.7621 = 707 tokens.
    plain.median_ns = 0.5e6 * scale * scale;
    near.median_ns = 0.5e6 * 2.7621 * scale;
    sketch.median_ns = 0.5e6 * 20 * scale;  // 256 * 20 = 5120 tokens are not measured
    *results.add_cases() = MakeCase(plain);
    *results.add_cases() = MakeCase(near);
    *results.add_cases() = MakeCase(sketch);
  }
  return results;
}

}  // namespace synthetic
}  // namespace tfb
