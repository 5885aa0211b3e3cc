// Whole texts of what is rendered, held against the files of results/goldens.
//
// A change that is meant to change them is accepted by
//   UPDATE_GOLDENS=1 bazel run //results:golden_test
// which writes the files anew: what git then shows has to be read, since no other test reads it.

#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "results/analysis.h"
#include "results/comparison.h"
#include "results/comparison_report.h"
#include "results/expect_golden.h"
#include "results/figures.h"
#include "results/page_assets.h"
#include "results/plot.h"
#include "results/plot_style.h"
#include "results/render.h"
#include "results/report.h"
#include "results/single_plot.h"
#include "results/synthetic.h"
#include "results/table.h"

namespace tfb {
namespace {

using ::tfb::synthetic::CaseSpec;
using ::tfb::synthetic::MakeCase;
using ::tfb::synthetic::MakeEnvironment;
using ::tfb::synthetic::MakeUnmeasured;
using ::tfb::synthetic::Samples;

void ExpectGolden(const std::string& name, const std::string& text) {
  ExpectGoldenFile(absl::StrCat("results/goldens/", name), text);
}

// A drawing or page line by line, without the parts that are the same in every one.
std::string InLines(const std::string& markup) {
  return absl::StrReplaceAll(markup, {{kPageStyle, "(page.css)\n"},
                                      {kPageScript, "(page.js)\n"},
                                      {plot::PaperStyleSheet(), "(style sheet)"},
                                      {"><", ">\n<"}});
}

// Leaves out what other files hold: the paths of drawings, and the rows of tables with a title.
std::string WithoutPathsAndTitledRows(const std::string& page) {
  std::string out;
  bool titled = false;
  for (const absl::string_view line : absl::StrSplit(page, '\n')) {
    if (absl::StrContains(line, "role=\"region\"")) {
      titled = absl::StrContains(line, "aria-labelledby");
    }
    const bool of_row = titled && (absl::StartsWith(line, "<td") || absl::StartsWith(line, "<tr") ||
                                   absl::StartsWith(line, "</tr"));
    if (!of_row) absl::StrAppend(&out, line.substr(0, line.find(" d=\"M")), "\n");
  }
  return out;
}

// Spreads the samples of a run to `share` on both sides of their median.
void Spread(double share, Case* result) {
  Timing* timing = result->mutable_outcome()->mutable_timing();
  const double median = timing->run_ns(timing->run_ns_size() / 2);
  for (double& ns : *timing->mutable_run_ns()) ns = median + (ns - median) * share / 0.01;
}

Environment MakeMachineWithGpu() {
  Environment environment;
  environment.set_id("gpu");
  environment.set_host("bench-2");
  environment.set_threads(1);
  environment.set_no_gpu_reason("");
  Gpu* gpu = environment.add_gpus();
  gpu->set_name("Imaginary GPU");
  gpu->set_compute_capability("9.0");
  gpu->set_memory_bytes(uint64_t{80} << 30);
  gpu->set_driver("550.1");
  gpu->set_toolkit("12.4");
  gpu->set_clock_mhz(1980);
  gpu->set_runtime_libraries("cublas 12.4.5");
  environment.add_gpus()->set_name("Another GPU");
  const struct {
    Peak::Kind kind;
    ElementType dtype;
    double value;
  } kPeaks[] = {{Peak::KIND_COMPUTE, ELEMENT_TYPE_F32, 50e12},
                {Peak::KIND_COMPUTE, ELEMENT_TYPE_BF16, 700e12},
                {Peak::KIND_COMPUTE, ELEMENT_TYPE_F32, 60e12},
                {Peak::KIND_COPY_BANDWIDTH, ELEMENT_TYPE_UNSPECIFIED, 2.5e12}};
  for (const auto& row : kPeaks) {
    Peak* peak = environment.add_peaks();
    peak->set_name("of the GPU");
    peak->set_kind(row.kind);
    peak->set_device(DEVICE_TYPE_CUDA);
    peak->set_dtype(row.dtype);
    peak->set_value(row.value);
    peak->set_unit(row.kind == Peak::KIND_COMPUTE ? "FLOP/s" : "B/s");
  }
  environment.add_command_line("sweep");
  environment.add_command_line("--devices=cuda");
  return environment;
}

// Collects cases, with shorthands for what many of them share.
class Showcase {
 public:
  Case* Add(const CaseSpec& spec, const std::string& family) {
    Case* result = results.add_cases();
    *result = MakeCase(spec);
    result->mutable_technique()->set_family(family);
    return result;
  }
  void AddUnmeasured(const std::string& technique, Outcome::Status status,
                     const std::string& reason) {
    CaseSpec spec;
    spec.technique = technique;
    *results.add_cases() = MakeUnmeasured(spec, status, reason);
  }
  ResultSet results;
};

CaseSpec SpecOf(const std::string& technique, const std::string& option = "",
                const std::string& value = "") {
  CaseSpec spec;
  spec.technique = technique;
  spec.option_name = option;
  spec.option_value = value;
  return spec;
}

// Scaling on the CPU, under both masks: curves that cross, ones that do not, and unsteady times.
void AddScaling(Showcase* showcase) {
  for (const bool causal : {true, false}) {
    for (const int64_t tokens : {256, 512, 1024, 2048}) {
      const double scale = static_cast<double>(tokens) / 256;
      const auto add = [&](CaseSpec spec, double growth, double median_ns) {
        spec.tokens = tokens;
        spec.expected_growth = growth;
        spec.median_ns = median_ns;
        Case* result = showcase->Add(spec, "attention");
        result->mutable_key()->mutable_problem()->set_causal(causal);
        return result;
      };
      add(SpecOf("plain"), 2, 0.5e6 * scale * scale);
      add(SpecOf("near", "window", "64"), 1, 0.7e6 * scale)
          ->mutable_technique()
          ->set_citation("Near et al. 2020");
      if (!causal) continue;
      add(SpecOf("near", "window", "256"), 1, 1.4e6 * scale)
          ->mutable_outcome()
          ->set_parameter_bytes(4096);
      CaseSpec sketch = SpecOf("sketch", "features", "128");
      sketch.exactness = TechniqueDescription::EXACTNESS_APPROXIMATE;
      Spread(0.2, add(sketch, 1, 0.9e6 * scale));
      // Faster up to 700 tokens only, and growing faster than it promises.
      add(SpecOf("steep"), 1, 0.18e6 * scale * scale * scale)
          ->mutable_technique()
          ->set_expected_growth_text("n log n");
      Case* few = add(SpecOf("few"), 2, 0.4e6 * scale * scale);
      few->mutable_outcome()->mutable_timing()->mutable_run_ns()->Truncate(3);
      few->mutable_outcome()->mutable_timing()->set_discarded_samples(2);
      if (tokens == 2048) few->mutable_outcome()->set_status(Outcome::STATUS_FAILED);
      if (tokens == 2048) few->mutable_outcome()->set_reason("error 3 > 2");
      if (tokens < 2048) add(SpecOf("short"), 2, 0.25e6 * scale * scale);
      MachineLoad* load = add(SpecOf("equal"), 2, 0.501e6 * scale * scale)
                              ->mutable_outcome()
                              ->mutable_machine_load();
      load->set_observed_seconds(2);
      load->set_cores(2);
      load->set_usable_cores(1);
      load->set_threads(2);
      load->set_other_core_seconds(0.3);
      load->set_stolen_core_seconds(0.1);
    }
  }
}

// "chain" and "loop" are held against themselves with a longer memory, and stream.
void AddMemory(Showcase* showcase) {
  for (const char* technique : {"chain", "loop"}) {
    for (const int64_t tokens : {256, 512, 1024}) {
      for (const bool whole : {false, true}) {
        CaseSpec spec = SpecOf(technique, "memory", whole ? absl::StrCat(tokens) : "128");
        spec.tokens = tokens;
        const double scale = static_cast<double>(tokens) / 256;
        spec.median_ns = (whole ? 2e6 * scale : 1e6) * scale;
        spec.expected_growth = whole ? 2 : 1.5;
        Case* result = showcase->Add(spec, "memory");
        TechniqueDescription* description = result->mutable_technique();
        description->set_options_are_default(!whole);
        description->set_dense_counterpart(technique);
        (*description->mutable_dense_counterpart_options())["memory"] = absl::StrCat(tokens);
        if (tokens < 1024 || whole) continue;
        // A segment's time is that of the tokens before it to the power of one half.
        for (int segment = 0; segment < 20; ++segment) {
          SegmentTiming* timing = result->mutable_outcome()->mutable_timing()->add_segments();
          timing->set_tokens_before(segment * 64);
          timing->set_tokens(64);
          const double ns = segment == 0 ? 1e5 : 1e5 * std::sqrt(segment);
          for (const double sample : Samples(ns, 7)) timing->add_append_ns(sample);
        }
      }
    }
  }
}

// Errors on layers of a file, in two precisions, under both masks, by seeds.
void AddAccuracy(Showcase* showcase) {
  for (const char* layer : {"layer1", "layer2", "final"}) {
    for (const char* technique : {"plain", "near", "sketch", "own"}) {
      CaseSpec spec = SpecOf(technique);
      if (absl::string_view(technique) == "near") spec = SpecOf("near", "window", "64");
      if (absl::string_view(technique) == "sketch") {
        spec = SpecOf("sketch", "features", "128");
        spec.exactness = TechniqueDescription::EXACTNESS_APPROXIMATE;
      }
      if (absl::string_view(technique) == "own") {
        if (absl::string_view(layer) == "final") continue;
        spec.exactness = TechniqueDescription::EXACTNESS_OWN;
      }
      spec.purpose = Case::PURPOSE_ACCURACY;
      spec.median_ns = 0;
      Case* result = showcase->Add(spec, "attention");
      InputProfile* input = result->mutable_key()->mutable_input();
      input->set_file("tensors.safetensors");
      input->set_model("a/model: BERT, 6 layers; from elsewhere");
      input->set_layer(layer);
      Outcome* outcome = result->mutable_outcome();
      if (absl::string_view(layer) == "layer2" && absl::string_view(technique) == "sketch") {
        outcome->mutable_against_definition()->set_relative_frobenius(3e-6);
        outcome->mutable_against_definition()->set_passed(false);
        outcome->set_status(Outcome::STATUS_FAILED);
        outcome->set_reason("error 3e-6 > 2e-6");
      }
      if (absl::string_view(layer) == "layer1" && absl::string_view(technique) == "near") {
        outcome->mutable_against_dense()->set_relative_frobenius(0.08);
        outcome->set_recall_k(16);
      }
      if (absl::string_view(technique) == "own") {
        outcome->mutable_against_definition()->clear_passed();
        outcome->mutable_against_definition()->clear_bound();
      }
    }
  }
  for (const char* technique : {"plain", "near"}) {
    for (const uint64_t seed : {1, 2}) {
      CaseSpec spec = SpecOf(technique);
      spec.purpose = Case::PURPOSE_ACCURACY;
      spec.dtype = ELEMENT_TYPE_BF16;
      spec.median_ns = 1e6;
      spec.seed = seed;
      Case* result = showcase->Add(spec, "attention");
      result->mutable_key()->mutable_problem()->set_causal(seed == 1);
      Outcome* outcome = result->mutable_outcome();
      BoundedNumber* ratio = outcome->mutable_ratio_to_dense_error();
      ratio->set_value(seed == 1 ? 1.25 : 1.5);
      ratio->set_bound(4);
      ratio->set_passed(true);
      outcome->mutable_log_sum_exp_error()->set_value(0.001 * static_cast<double>(seed));
      (*outcome->mutable_statistics())["extrapolation_change"] = 0.25;
    }
  }
}

// Decoding, where one query meets more and more keys, on a GPU; and what techniques report by name.
void AddDecoding(Showcase* showcase) {
  for (const char* technique : {"plain", "shared"}) {
    for (const int64_t tokens : {1024, 4096}) {
      CaseSpec spec = SpecOf(technique);
      spec.device = DEVICE_TYPE_CUDA;
      spec.tokens = tokens;
      spec.expected_growth = 1;
      spec.environment_id = "gpu";
      spec.median_ns = (spec.technique == "plain" ? 20.0 : 8.0) * static_cast<double>(tokens);
      Case* result = showcase->Add(spec, "attention");
      ProblemSize* problem = result->mutable_key()->mutable_problem();
      problem->set_batch(2);
      problem->set_query_tokens(1);
      problem->set_value_dim(32);
      problem->set_causal(false);
      if (spec.technique == "shared") problem->set_kv_heads(2);
      result->mutable_outcome()->set_flops(1e5 * static_cast<double>(tokens));
    }
  }
  for (int i = 0; i < 4; ++i) {
    CaseSpec spec = SpecOf("stack", "threshold", absl::StrCat("0.", i + 1));
    spec.dtype = ELEMENT_TYPE_F16;
    spec.median_ns = 1e6 * (i + 1);
    Case* result = showcase->Add(spec, "adaptive");
    result->mutable_technique()->clear_expected_growth();
    result->mutable_technique()->set_input_kind(TechniqueDescription::INPUT_KIND_TOKENS);
    Outcome* outcome = result->mutable_outcome();
    outcome->clear_bytes_moved();
    auto& statistics = *outcome->mutable_statistics();
    statistics["bits_per_byte"] = 2 - 0.1 * (i == 3 ? 1 : i);
    statistics["mean_layers"] = 2 + i;
    statistics["flops_saved"] = 0.75 - 0.25 * i;
    statistics["extrapolation_change"] = 0.5 + 0.1 * i;
    if (i > 1) statistics["extrapolation_reshape"] = 0.01 * i;
    Timing* timing = outcome->mutable_timing();
    for (const double ns : Samples(1.5e6, 3)) timing->add_cold_run_ns(ns);
    for (const double ns : Samples(1.7e6, 5)) timing->add_end_to_end_ns(ns);
  }
}

ResultSet MakeShowcase() {
  Showcase showcase;
  *showcase.results.add_environments() = MakeEnvironment();
  *showcase.results.add_environments() = MakeMachineWithGpu();
  AddScaling(&showcase);
  AddMemory(&showcase);
  AddAccuracy(&showcase);
  AddDecoding(&showcase);
  showcase.AddUnmeasured("one", Outcome::STATUS_SKIPPED, "no CUDA device");
  showcase.AddUnmeasured("two", Outcome::STATUS_SKIPPED, "no CUDA device");
  showcase.AddUnmeasured("three", Outcome::STATUS_UNSUPPORTED, "kv_heads is not query_heads");
  showcase.AddUnmeasured("four", Outcome::STATUS_TIMEOUT, "60 s");
  showcase.AddUnmeasured("five", Outcome::STATUS_OUT_OF_MEMORY, "");
  showcase.AddUnmeasured("six", Outcome::STATUS_UNSPECIFIED, "nobody said");
  // A repeated sweep of one case, and one that is not finished.
  Environment again = MakeEnvironment("again");
  again.set_start_unix_ns(1700000001000000000);
  *showcase.results.add_environments() = again;
  Case repeated = showcase.results.cases(0);
  repeated.set_environment_id("again");
  repeated.mutable_outcome()->set_unfinished(true);
  *showcase.results.add_cases() = repeated;
  return showcase.results;
}

RenderOptions OptionsOf(RenderFormat format, bool details, int width) {
  RenderOptions options;
  options.format = format;
  options.details = details;
  options.style.width = width;
  options.paths = {"runs/now.pb", "runs/_other_.pb"};
  options.notes = {"runs/now.pb: left out: 3 bytes of a torn last record"};
  return options;
}

TEST(Golden, TheShowcaseOnATerminal) {
  ExpectGolden("showcase_details.txt",
               Render(MakeShowcase(), OptionsOf(RenderFormat::kTerminal, true, 150)));
  RenderOptions narrow = OptionsOf(RenderFormat::kTerminal, false, 80);
  narrow.style.colour = true;
  narrow.style.unicode = false;
  ExpectGolden("showcase_narrow.txt",
               absl::StrReplaceAll(Render(MakeShowcase(), narrow), {{"\x1b", "ESC"}}));
}

TEST(Golden, TheShowcaseInMarkdown) {
  ExpectGolden("showcase.md", Render(MakeShowcase(), OptionsOf(RenderFormat::kMarkdown, true, 0)));
}

TEST(Golden, TheShowcaseAsAPage) {
  ExpectGolden("showcase.html", WithoutPathsAndTitledRows(InLines(Render(
                                    MakeShowcase(), OptionsOf(RenderFormat::kHtml, true, 0)))));
}

TEST(Golden, EachKindOfPlotInAFile) {
  for (const char* kind : {"scaling", "memory", "roofline", "frontier"}) {
    SinglePlotOptions options;
    options.kind = kind;
    const absl::StatusOr<std::string> svg = RenderSinglePlot(MakeShowcase(), options);
    ASSERT_TRUE(svg.ok()) << svg.status();
    ExpectGolden(absl::StrCat(kind, ".svg"), InLines(*svg));
  }
}

// Makes the case one of somebody else's code.
void MakeContestant(const std::string& version, Case* result) {
  TechniqueDescription::Contestant* contestant = result->mutable_technique()->mutable_contestant();
  contestant->set_file("/home/somebody/mine.py");
  contestant->set_definition("plain:window=64");
  contestant->set_definition_technique("plain");
  contestant->set_approximates(true);
  (*contestant->mutable_about())["torch"] = version;
  (*contestant->mutable_about())["torch threads"] = "2";
}

// Two cases with every field that an export has, and one that has next to none.
ResultSet MakeFullAndEmptyCases() {
  ResultSet results;
  Environment& environment = *results.add_environments() = MakeMachineWithGpu();
  environment.set_start_unix_ns(1700000000000000000);
  environment.set_memory_bytes(uint64_t{16} << 30);
  environment.set_git_dirty(false);
  environment.set_compilation_mode("dbg");
  environment.add_simd("AVX2");
  Cache* cache = environment.add_caches();
  cache->set_level(1);
  cache->set_kind("data");
  cache->set_bytes(32768);
  cache->set_shared_by_logical_cores(2);
  Gpu* gpu = environment.mutable_gpus(1);
  gpu->set_index(1);
  gpu->set_memory_clock_mhz(2619.5);
  gpu->set_multiprocessors(132);
  gpu->set_l2_cache_bytes(50 << 20);
  for (const char* technique : {"plain", "near"}) {
    CaseSpec spec = SpecOf(technique, "window", "64");
    spec.purpose = Case::PURPOSE_ACCURACY;
    spec.device = DEVICE_TYPE_CUDA;
    spec.environment_id = "gpu";
    spec.median_ns = spec.technique == "plain" ? 3e6 : 1.5e6;
    Case& result = *results.add_cases() = MakeCase(spec);
    ProblemSize* problem = result.mutable_key()->mutable_problem();
    problem->set_batch(3);
    problem->set_kv_heads(2);
    problem->set_kv_tokens(1024);
    problem->set_value_dim(48);
    InputProfile* input = result.mutable_key()->mutable_input();
    input->set_file("a, \"file\"");
    input->set_model("model");
    input->set_layer("layer3");
    (*input->mutable_details())["sharpness"] = "2";
    TechniqueDescription* description = result.mutable_technique();
    description->set_citation("Somebody 2020");
    description->set_weights(TechniqueDescription::WEIGHTS_FILE);
    description->set_weights_file("weights.safetensors");
    (*description->mutable_dense_counterpart_options())["window"] = "64";
    if (spec.technique == "near") MakeContestant("2.10", &result);
    Outcome* outcome = result.mutable_outcome();
    Timing* timing = outcome->mutable_timing();
    timing->mutable_run_ns()->Truncate(6);
    timing->add_cpus(0);
    timing->add_cpus(2);
    timing->set_discarded_samples(4);
    timing->set_throttled_samples(2);
    timing->add_cold_run_ns(5e6);
    timing->add_end_to_end_ns(6e6);
    for (int i = 0; i < 2; ++i) {
      SegmentTiming* segment = timing->add_segments();
      segment->set_tokens_before(i * 128);
      segment->set_tokens(128);
      segment->add_append_ns(1000.5 + i);
    }
    outcome->set_process_peak_bytes(1 << 30);
    outcome->set_device_peak_bytes(1 << 20);
    outcome->set_elapsed_seconds(1.5);
    outcome->mutable_log_sum_exp_error()->set_value(1e-6);
    outcome->mutable_log_sum_exp_error()->set_bound(1e-5);
    outcome->mutable_log_sum_exp_error()->set_passed(true);
    outcome->mutable_ratio_to_dense_error()->set_value(1.0 / 3);
    MachineLoad* load = outcome->mutable_machine_load();
    load->set_observed_seconds(2);
    load->set_other_core_seconds(0.25);
    load->set_stolen_core_seconds(0.125);
    DeviceState* state = outcome->mutable_device_state_before();
    state->set_clock_mhz(1980);
    state->set_temperature_celsius(40.5);
    *outcome->mutable_device_state_after() = *state;
    outcome->mutable_device_state_after()->set_memory_clock_mhz(2619);
    outcome->mutable_device_state_after()->set_power_watts(690);
    for (const char* reason : {"power cap", "thermal"}) {
      outcome->mutable_device_state_after()->add_throttle_reasons(reason);
    }
    (*outcome->mutable_statistics())["blocks"] = 12;
    (*outcome->mutable_statistics())["share"] = 0.1;
  }
  CaseSpec empty = SpecOf("absent");
  empty.environment_id = "nowhere";
  *results.add_cases() = MakeUnmeasured(empty, Outcome::STATUS_UNSUPPORTED, "not\nhere");
  return results;
}

TEST(Golden, EveryFieldOfAnExport) {
  const ResultSet results = MakeFullAndEmptyCases();
  ExpectGolden("full_and_empty.csv", Render(results, OptionsOf(RenderFormat::kCsv, true, 0)));
  ExpectGolden("full_and_empty.json", Render(results, OptionsOf(RenderFormat::kJson, true, 0)));
  ExpectGolden("full_and_empty.benchmark.json",
               Render(results, OptionsOf(RenderFormat::kBenchmarkJson, true, 0)));
}

// "plain" and "near" in all three passes with errors of the outputs and of gradients, and "sketch",
// which has no backward pass. In a training step near is faster than plain from twice as many tokens on.
ResultSet MakePasses() {
  ResultSet results = synthetic::MakeSweep();
  const std::vector<Case> forward(results.cases().begin(), results.cases().end());
  for (const Case::Pass pass : {Case::PASS_BACKWARD, Case::PASS_TRAINING}) {
    for (const Case& one : forward) {
      if (one.key().purpose() != Case::PURPOSE_SCALING) continue;
      Case* result = results.add_cases();
      *result = one;
      result->mutable_key()->set_pass(pass);
      Outcome* outcome = result->mutable_outcome();
      if (one.key().technique() == "sketch") {
        outcome->Clear();
        outcome->set_status(Outcome::STATUS_UNSUPPORTED);
        outcome->set_reason("the layer has no backward pass");
        continue;
      }
      const bool is_step = pass == Case::PASS_TRAINING;
      outcome->clear_against_definition();
      outcome->clear_against_dense();
      const int64_t tokens = one.key().problem().query_tokens();
      for (const char* name : {"q", "k", "parameters"}) {
        if (is_step || tokens == 256) continue;  // the sweep has no time for the shortest
        NamedError* error = outcome->add_gradient_errors();
        error->set_name(name);
        const bool is_worst =
            one.key().technique() == "near" && tokens == 1024 && error->name() == "q";
        error->mutable_error()->set_value(is_worst ? 5e-5 : error->name() == "k" ? 2e-7 : 1e-7);
        error->mutable_error()->set_bound(6e-5);
        error->mutable_error()->set_passed(true);
      }
      outcome->set_flops((is_step ? 3.5 : 2.5) * outcome->flops());
      outcome->set_kept_bytes(8 * one.key().problem().query_tokens() * 65 * 4);
      const double factor = (is_step ? 3.5 : 2.5) * (one.key().technique() == "near" ? 2 : 1);
      for (double& ns : *outcome->mutable_timing()->mutable_run_ns()) ns *= factor;
    }
  }
  return results;
}

TEST(Golden, EachPass) {
  const ResultSet results = MakePasses();
  ExpectGolden("passes.txt",
               Render(results, OptionsOf(RenderFormat::kTerminal, /*details=*/true, 120)));
  ExpectGolden(
      "passes.html",
      WithoutPathsAndTitledRows(InLines(Render(results, OptionsOf(RenderFormat::kHtml, true, 0)))));
}

// Somebody else's code has a mark in tables and plots, and a table that says what it is.
TEST(Golden, Contestants) {
  ResultSet results = synthetic::MakeSweep();
  for (Case& result : *results.mutable_cases()) {
    if (result.key().technique() != "near") continue;
    result.mutable_key()->set_technique("near@mine");
    result.mutable_technique()->set_display_name("near@mine");
    MakeContestant("2.9", &result);
  }
  ExpectGolden("contestants.txt",
               Render(results, OptionsOf(RenderFormat::kTerminal, /*details=*/true, 100)));
  SinglePlotOptions options;
  options.kind = "scaling";
  const absl::StatusOr<std::string> svg = RenderSinglePlot(results, options);
  ASSERT_TRUE(svg.ok()) << svg.status();
  ExpectGolden("contestants.svg", InLines(*svg));
}

// A contestant that is wrong is not the fastest, nor one that only approximates beside one that does
// not, and a cell without times says what became of theirs.
TEST(Golden, OursAndTheirsWhereSomeAreWrongOrHaveNoTimes) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  const auto add = [&](const std::string& technique, int64_t tokens, double median_ns,
                       Outcome::Status status) {
    CaseSpec spec = SpecOf(technique);
    spec.tokens = tokens;
    spec.median_ns = median_ns;
    Case* result = results.add_cases();
    *result = median_ns > 0 ? MakeCase(spec) : MakeUnmeasured(spec, status, "why");
    result->mutable_outcome()->set_status(status);
    if (technique == "plain") return;
    MakeContestant("2.9", result);
    result->mutable_technique()->mutable_contestant()->set_approximates(technique == "near@mine");
  };
  for (const int64_t tokens : {256, 512, 1024, 2048}) add("plain", tokens, 1e6, Outcome::STATUS_OK);
  add("right@mine", 256, 3e6, Outcome::STATUS_OK);
  add("wrong@mine", 256, 2e6, Outcome::STATUS_FAILED);
  add("near@mine", 256, 1e6, Outcome::STATUS_OK);
  add("right@mine", 512, 0, Outcome::STATUS_TIMEOUT);
  add("wrong@mine", 512, 2e6, Outcome::STATUS_FAILED);
  add("right@mine", 1024, 0, Outcome::STATUS_SKIPPED);
  add("right@mine", 2048, 0, Outcome::STATUS_UNSUPPORTED);
  add("near@mine", 2048, 4e6, Outcome::STATUS_OK);
  // In the visit to both, the machine was half as fast as in the one to ours alone.
  for (const char* technique : {"plain", "right@mine"}) {
    const bool is_ours = technique == std::string("plain");
    add(technique, 4096, 0, Outcome::STATUS_OK);
    Case* result = results.mutable_cases(results.cases_size() - 1);
    if (is_ours) synthetic::AddVisit(1, synthetic::Samples(1e6), result);
    synthetic::AddVisit(2, synthetic::Samples(is_ours ? 2e6 : 6e6), result);
  }
  const std::vector<Table> tables = report::DuelTables(Analysis(results));
  ASSERT_EQ(tables.size(), 1u);
  const std::vector<std::string> lines = absl::StrSplit(ToMarkdown(tables[0]), '\n');
  ASSERT_GT(lines.size(), 4u);
  EXPECT_EQ(
      lines[2],
      "| technique | fastest of theirs | 256 | 512 | 1024 | 2048 | 4096 | error of ours | error of "
      "theirs |");
  EXPECT_EQ(lines[4],
            "| plain | right@mine, near@mine | 3.0x 1000 : 3000 | FAILED, timeout | skipped | 4.0x "
            "1000 : 4000 | 3.0x 2000 : 6000 | - | - |");
}

// The sweep up to 1024 tokens.
ResultSet MakeShortSweep() {
  ResultSet sweep = synthetic::MakeSweep();
  sweep.mutable_cases()->DeleteSubrange(12, 6);
  return sweep;
}

// A later one in which something of every kind changed.
ResultSet MakeLaterSweep() {
  ResultSet results = MakeShortSweep();
  results.mutable_environments(0)->set_compiler("g++ \x1b[31m");
  for (Case& result : *results.mutable_cases()) {
    const std::string& technique = result.key().technique();
    const bool accuracy = result.key().purpose() == Case::PURPOSE_ACCURACY;
    const int64_t tokens = result.key().problem().query_tokens();
    Outcome* outcome = result.mutable_outcome();
    auto* run_ns = outcome->mutable_timing()->mutable_run_ns();
    double factor = 1;
    if (technique == "sketch") {
      factor = tokens == 256 ? 0.5 : tokens == 512 ? 0.99 : 0.6;
      outcome->mutable_against_dense()->set_relative_frobenius(0.9);
      outcome->set_peak_workspace_bytes(outcome->peak_workspace_bytes() / 2);
    } else if (technique == "near") {
      factor = tokens == 256 ? 1.5 : tokens == 512 ? 1.05 : 2;
      if (tokens == 1024) run_ns->Truncate(2);
      if (accuracy) outcome->mutable_against_definition()->set_passed(false);
      if (accuracy) outcome->set_status(Outcome::STATUS_FAILED);
      if (accuracy) outcome->set_reason("an error beyond its bound");
    }
    for (double& ns : *run_ns) ns *= factor;
  }
  CaseSpec added = SpecOf("added");
  *results.add_cases() = MakeUnmeasured(added, Outcome::STATUS_FAILED, "no such luck");
  added.technique = "also added";
  *results.add_cases() = MakeUnmeasured(added, Outcome::STATUS_SKIPPED, "no time");
  return results;
}

TEST(Golden, AComparisonWithEveryVerdict) {
  ResultSet base = MakeShortSweep();
  CaseSpec lost = SpecOf("lost");
  *base.add_cases() = MakeCase(lost);
  lost.technique = "skipped";
  *base.add_cases() = MakeUnmeasured(lost, Outcome::STATUS_SKIPPED, "no time");
  CompareOptions options;
  options.allow_different_environment = true;
  const absl::StatusOr<Comparison> comparison = Compare(base, MakeLaterSweep(), options);
  ASSERT_TRUE(comparison.ok()) << comparison.status();
  TextStyle style;
  ExpectGolden("comparison.txt",
               RenderComparison(*comparison, ComparisonFormat::kTerminal, false, style));
  style.width = 100;
  style.unicode = false;
  ExpectGolden("comparison_all.txt",
               RenderComparison(*comparison, ComparisonFormat::kTerminal, true, style));
  ExpectGolden("comparison_all.md",
               RenderComparison(*comparison, ComparisonFormat::kMarkdown, true, style));
  ExpectGolden("comparison_comment.md",
               RenderComparison(*comparison, ComparisonFormat::kComment, false, style));
  ExpectGolden("comparison.json",
               RenderComparison(*comparison, ComparisonFormat::kJson, false, style));
}

// Beside each run, or beside some of them, fixed arithmetic was timed, which is slower by a fifth
// now where runs are slower by a half. Instructions are twice as many at one length, and scatter
// more than they grow at the others.
TEST(Golden, AComparisonOverFixedArithmeticAndOneOfInstructions) {
  ResultSet base = MakeShortSweep();
  for (Case& result : *base.mutable_cases()) {
    if (result.key().purpose() == Case::PURPOSE_ACCURACY) continue;
    const int count = result.key().problem().query_tokens() == 256 ? 11 : 5;
    Timing* timing = result.mutable_outcome()->mutable_timing();
    for (const double ns : Samples(1e3, count)) timing->add_probe_ns(ns);
    for (const double share : {0.7, 1.3, 0.9, 1.1, 1.0, 1.2, 0.8}) {
      timing->add_run_instructions(share * 1e6);
    }
  }
  ResultSet now = base;
  for (Case& result : *now.mutable_cases()) {
    Timing* timing = result.mutable_outcome()->mutable_timing();
    const double more = result.key().problem().query_tokens() == 256 ? 2 : 1.1;
    for (double& ns : *timing->mutable_run_ns()) ns *= 1.5;
    for (double& ns : *timing->mutable_probe_ns()) ns *= 1.2;
    for (double& count : *timing->mutable_run_instructions()) count *= more;
  }
  CompareOptions options;
  for (const char* of : {"probes", "instructions"}) {
    const absl::StatusOr<Comparison> comparison = Compare(base, now, options);
    ASSERT_TRUE(comparison.ok()) << comparison.status();
    const bool all = options.metric == CompareOptions::Metric::kInstructions;
    ExpectGolden(absl::StrCat("comparison_of_", of, ".txt"),
                 RenderComparison(*comparison, ComparisonFormat::kTerminal, all, TextStyle()));
    options.metric = CompareOptions::Metric::kInstructions;
  }
}

// A plot with a part of every kind.
plot::Plot MakeEveryPart() {
  using plot::Curve;
  using plot::Guide;
  plot::Plot plot;
  plot.title = "Every part";
  plot.subtitle =
      "a subtitle of so many words that it takes a second line, since one is too short for it";
  plot.x.title = "tokens";
  plot.x.base = 2;
  plot.y.title = "time";
  const auto add = [&plot](const std::string& name, Curve::Kind kind, int style,
                           std::vector<plot::Point> points) {
    Curve curve;
    curve.name = name;
    curve.kind = kind;
    curve.style = style;
    curve.points = std::move(points);
    plot.curves.push_back(curve);
    return &plot.curves.back();
  };
  // Whiskers: wide, within the marker, of one end, beyond the axes, and without a place.
  add("first line", Curve::Kind::kLine, 0,
      {{256, 1, 0.5, 2},
       {512, 3, 2.99, 3.01},
       {1024, 9, 8, {}},
       {2048, 30, 1e-9, 1e9},
       {4096, 90, 0, 99}})
      ->key = "first";
  add("second", Curve::Kind::kLine, 1, {{256, 2, {}, {}}, {4096, 80, {}, {}}, {8192, -1, {}, {}}})
      ->hollow = true;
  add("its counterpart", Curve::Kind::kCounterpart, 1, {{256, 4, {}, {}}, {4096, 100, {}, {}}});
  add("dense", Curve::Kind::kLine, plot::kReferenceStyle, {{256, 0.5, {}, {}}, {4096, 95, {}, {}}})
      ->label = "dense, by its label, which is cut";
  add("without a place", Curve::Kind::kLine, 3, {{-1, 1, {}, {}}});
  for (int i = 0; i < 7; ++i) {
    Curve* curve =
        add(absl::StrCat("point ", i), Curve::Kind::kScatter, 2 + i, {{700, 0.7, {}, {}}});
    curve->name_needed = i == 6;
    curve->group = "crowd";
    curve->description = "one of a crowd";
  }
  plot.guides = {
      {Guide::Kind::kBound, "sloped", 0, {{256, 0.2, {}, {}}, {1024, 0.8, {}, {}}}},
      {Guide::Kind::kBound, "level", 0, {{1024, 0.8, {}, {}}, {4096, 0.8, {}, {}}}},
      {Guide::Kind::kTrail, "", 2, {{300, 40, {}, {}}, {400, 50, {}, {}}, {500, 0, {}, {}}}},
      {Guide::Kind::kFrontier, "", -1, {{2000, 2, {}, {}}, {4000, 1, {}, {}}}}};
  plot.marks = {{{1024, 9, {}, {}}, 0, "first", "they cross"},
                {{1024, 0, {}, {}}, 0, "", "nowhere"}};
  plot.keys = {{"a point", 2, Curve::Kind::kScatter, false, false},
               {"a hollow point", 3, Curve::Kind::kScatter, true, false},
               {"a dashed line", 1, Curve::Kind::kLine, false, false},
               {"a counterpart", 1, Curve::Kind::kCounterpart, false, false},
               {"a crossing", 0, Curve::Kind::kScatter, false, true}};
  plot.slopes = {{2, "n²"}, {1, "n"}, {1.5, "n·"}};
  plot.room = {{4096, 0.1, {}, {}}, {1, -1, {}, {}}};
  return plot;
}

// One without title, legend and names; with logarithmic axes where its points leave the lower right
// corner to the slopes.
plot::Plot MakePlain(bool high, double height) {
  plot::Plot plot;
  plot.x.title = "x";
  plot.y.title = "y";
  plot.x.logarithmic = high;
  plot.y.logarithmic = high;
  plot.width = 200;
  plot.height = height;
  plot::Curve curve;
  curve.kind = plot::Curve::Kind::kScatter;
  curve.points = high ? std::vector<plot::Point>{{1, 9, {}, {}}, {1.2, 8, {}, {}}, {9, 9, {}, {}}}
                      : std::vector<plot::Point>{{1, 1, {}, {}}, {5, 5, {}, {}}, {9, 9, {}, {}}};
  if (high) plot.room = {{9, 1, {}, {}}};
  plot.curves = {curve};
  plot.slopes = {{1, "n"}};
  return plot;
}

TEST(Golden, EveryPartOfAPlot) {
  ExpectGolden("every_part_page.svg", InLines(plot::DrawForPage(MakeEveryPart(), "an-id")));
  // Rows of two, the first as high as the higher of its two.
  ExpectGolden("every_part.svg",
               InLines(plot::DrawFile(
                   {MakeEveryPart(), MakePlain(true, 150), MakePlain(false, 120)}, 2, "<title>")));
  std::string swatches;
  for (int style = plot::kReferenceStyle; style < 9; ++style) {
    for (const auto kind : {plot::Curve::Kind::kLine, plot::Curve::Kind::kScatter}) {
      absl::StrAppend(&swatches, plot::DrawSwatch(style, kind), "\n");
    }
  }
  ExpectGolden("swatches.svg", swatches);
  ExpectGolden("paper.css", absl::StrReplaceAll(plot::PaperStyleSheet(), {{"}", "}\n"}}));
}

std::string SummaryOf(const plot::Plot& plot) {
  std::string out =
      absl::StrCat("panel \"", plot.title, "\" \"", plot.subtitle, "\" ", plot.x.title, " / ",
                   plot.y.title, ", ", plot.width, " x ", plot.height, "\n");
  const auto add_points = [&out](const std::vector<plot::Point>& points) {
    for (const plot::Point& point : points)
      absl::StrAppend(&out, " (", point.x, ", ", point.y, ")");
    out += "\n";
  };
  for (const plot::Curve& curve : plot.curves) {
    absl::StrAppend(&out, "  curve ", curve.shown_name(), ", key ",
                    curve.key.substr(0, curve.key.find(" device")), ", legend ", curve.legend,
                    ", style ", curve.style, curve.hollow ? ", hollow" : "",
                    curve.name_needed ? "" : ", name not needed", ":");
    add_points(curve.points);
    absl::StrAppend(&out, "    ", curve.description, "\n");
  }
  for (const plot::Guide& guide : plot.guides) {
    absl::StrAppend(&out, "  guide ", static_cast<int>(guide.kind), " of style ", guide.style,
                    " \"", guide.label, "\":");
    add_points(guide.points);
  }
  for (const plot::Mark& mark : plot.marks)
    absl::StrAppend(&out, "  mark ", mark.description, "\n");
  for (const plot::KeyEntry& key : plot.keys) {
    absl::StrAppend(&out, "  key ", key.text, key.hollow ? ", hollow" : "", "\n");
  }
  for (const plot::Point& point : plot.room)
    absl::StrAppend(&out, "  room at ", point.x, ", ", point.y, "\n");
  for (const plot::Plot::Slope& slope : plot.slopes)
    absl::StrAppend(&out, "  slope ", slope.label, "\n");
  return out;
}

// More techniques than a panel holds, of several families, kinds of input and promises of growth.
ResultSet MakeCrowd() {
  Showcase crowd;
  *crowd.results.add_environments() = MakeEnvironment();
  const auto add = [&crowd](CaseSpec spec, const std::string& family, double growth) {
    spec.expected_growth = growth;
    for (const int64_t tokens : {512, 1024}) {
      spec.tokens = tokens;
      crowd.Add(spec, family);
      spec.median_ns *= 3;
    }
    return crowd.results.mutable_cases(crowd.results.cases_size() - 1);
  };
  add(SpecOf("plain"), "attention", 2);
  for (int i = 0; i < 9; ++i) {
    CaseSpec spec = SpecOf(absl::StrCat("t", i));
    spec.median_ns = 1e6 + 1e5 * i;
    const int cases = crowd.results.cases_size();
    add(spec, "attention", i < 5 ? 2 : 0.5);
    for (int c = cases; c < cases + 2; ++c) {
      TechniqueDescription* technique = crowd.results.mutable_cases(c)->mutable_technique();
      if (i < 2) technique->set_input_kind(TechniqueDescription::INPUT_KIND_HIDDEN);
      if (i == 8) technique->clear_expected_growth();
    }
  }
  for (int i = 0; i < 9; ++i) add(SpecOf("opt", "size", absl::StrCat(i)), "", 1);
  CaseSpec other = SpecOf("one", "a", "1");
  other.seed = 1;
  Case* without_bytes = add(other, "adaptive", 1);
  without_bytes->mutable_outcome()->clear_bytes_moved();
  // The options of one technique stay together, though some would fit the panel before.
  for (int i = 0; i < 6; ++i) add(SpecOf(absl::StrCat("single_", i)), "grouped", 1);
  for (int i = 0; i < 4; ++i) add(SpecOf("together", "size", absl::StrCat(i)), "grouped", 1);
  // Times of three digits may round to a larger unit.
  for (const double ns : {999.4e3, 999.6e3}) {
    CaseSpec nearly = SpecOf(absl::StrCat("nearly_a_ms_", ns));
    nearly.median_ns = ns;
    add(nearly, "adaptive", 1);
  }
  // Of these no rate is a point.
  add(SpecOf("without_flops"), "adaptive", 1)->mutable_outcome()->set_flops(0);
  add(SpecOf("of_endless_flops"), "adaptive", 1)->mutable_outcome()->set_flops(HUGE_VAL);
  for (const int threads : {1, 3}) {
    CaseSpec spec = SpecOf("threaded");
    add(spec, "adaptive", 1)->mutable_key()->set_threads(threads);
  }
  return crowd.results;
}

// Errors of techniques that are held against three different counterparts.
ResultSet MakeManyErrors() {
  Showcase errors;
  *errors.results.add_environments() = MakeEnvironment();
  const auto add = [&errors](const std::string& technique, const std::string& value,
                             const std::string& counterpart, double ratio, double error) {
    CaseSpec spec = SpecOf(technique, value.empty() ? "" : "size", value);
    spec.purpose = Case::PURPOSE_ACCURACY;
    spec.median_ns = ratio * 1e6;
    Case* result = errors.Add(spec, "attention");
    result->mutable_outcome()->mutable_against_dense()->set_relative_frobenius(error);
    result->mutable_technique()->set_dense_counterpart(counterpart);
    return result;
  };
  add("plain", "", "plain", 1, 2e-7);
  for (int i = 1; i <= 9; ++i) {
    add(absl::StrCat("wide_", i), "", "plain", 0.1 * i, i == 4 ? 0.001 : 0.5 / i);
  }
  for (int i = 1; i <= 3; ++i) add("trail", absl::StrCat(i), "plain", 0.3 * i, 0.4 / i);
  add("failing", "", "plain", 0.01, 0.001)->mutable_outcome()->set_status(Outcome::STATUS_FAILED);
  add("infinite", "", "plain", 0.5, HUGE_VAL);
  add("undefined", "", "plain", 0.5, std::nan(""));
  // Settings of one technique that are held against another setting of it, which is on no trail.
  for (int i = 0; i <= 3; ++i) {
    Case* result = add("basis", absl::StrCat(i), "basis", 1 - 0.2 * i, i == 0 ? 2e-7 : 0.1 * i);
    (*result->mutable_technique()->mutable_dense_counterpart_options())["size"] = "0";
    result->mutable_technique()->set_options_are_default(false);
  }
  for (const char* counterpart : {"ring", "rare"}) {
    add(counterpart, "", counterpart, 2, 3e-7);
    const int members = absl::string_view(counterpart) == "ring" ? 3 : 2;
    for (int i = 1; i <= members; ++i) {
      add(absl::StrCat("of_", counterpart, "_", i), "", counterpart, 0.5 * i, 0.2 * i);
    }
  }
  // Without a time of its own: that of its scaling case counts.
  add("borrower", "", "plain", 0, 0.05);
  CaseSpec scaling = SpecOf("plain");
  errors.Add(scaling, "attention");
  scaling.technique = "borrower";
  scaling.median_ns = 0.25e6;
  errors.Add(scaling, "attention");
  return errors.results;
}

// Errors of rounding alone, one that is 0, and a technique that has none.
ResultSet MakeExactErrors() {
  Showcase errors;
  *errors.results.add_environments() = MakeEnvironment();
  const std::pair<const char*, double> rows[] = {
      {"plain", 2e-7}, {"near", 4e-7}, {"far", 9e-5}, {"same", 0}, {"unknown", -1}};
  for (const auto& [technique, error] : rows) {
    CaseSpec spec = SpecOf(technique);
    spec.purpose = Case::PURPOSE_ACCURACY;
    Outcome* outcome = errors.Add(spec, "attention")->mutable_outcome();
    outcome->mutable_against_dense()->set_relative_frobenius(error);
    if (error < 0) outcome->clear_against_dense();
  }
  return errors.results;
}

// The titles, captions, panels and tables of all figures of a file.
std::string TextOfFigures(const ResultSet& results) {
  const Analysis analysis(results);
  std::string text;
  for (const FigureKind kind :
       {FigureKind::kScaling, FigureKind::kMemory, FigureKind::kRoofline, FigureKind::kFrontier}) {
    for (const Figure& figure : FiguresOf(kind, analysis, nullptr)) {
      absl::StrAppend(&text, Name(figure.kind), ": ", figure.title, "\n", figure.caption, "\n");
      if (kind == FigureKind::kMemory) continue;  // in the same panels as times
      for (const plot::Plot& panel : figure.panels) text += SummaryOf(panel);
      text += ToMarkdown(figure.data);
    }
  }
  return text;
}

TEST(Golden, FiguresOfManyTechniques) {
  ExpectGolden("crowd.txt", TextOfFigures(MakeCrowd()));
  ExpectGolden("many_errors.txt", TextOfFigures(MakeManyErrors()));
  ExpectGolden("exact_errors.txt", TextOfFigures(MakeExactErrors()));
}

// Techniques of equal times, errors and memory, in two sets of equal size that are held against
// different counterparts, and one in each set that all others of it beat.
ResultSet MakeTies() {
  Showcase ties;
  Environment* environment = ties.results.add_environments();
  *environment = MakeEnvironment();
  for (const double value : {0.0, 3e9, 3e9}) {
    Peak* peak = environment->add_peaks();
    *peak = environment->peaks(0);
    peak->set_dtype(value == 0 ? ELEMENT_TYPE_BF16 : ELEMENT_TYPE_F16);
    peak->set_value(value);
    peak->set_threads(2);
  }
  const std::pair<ElementType, bool> groups[] = {
      {ELEMENT_TYPE_F32, true}, {ELEMENT_TYPE_F32, false}, {ELEMENT_TYPE_BF16, true}};
  for (const auto& [dtype, causal] : groups) {
    for (const char* name : {"zeta", "slow", "plain", "other", "beta"}) {
      for (const char* counterpart : {"plain", "other"}) {
        const bool is_counterpart = absl::string_view(name) == counterpart;
        const bool is_of_other = absl::StrContains("plain other", name) && !is_counterpart;
        if (is_of_other) continue;
        CaseSpec spec = SpecOf(is_counterpart ? name : absl::StrCat(name, "_", counterpart));
        spec.dtype = dtype;
        for (const int64_t tokens : {512, 1024}) {
          spec.purpose = Case::PURPOSE_SCALING;
          spec.tokens = tokens;
          spec.median_ns = absl::string_view(name) == "slow" ? 2e6 : 1e6;
          const auto add = [&, causal = causal] {
            Case* result = ties.Add(spec, "attention");
            result->mutable_key()->mutable_problem()->set_causal(causal);
            result->mutable_technique()->set_dense_counterpart(counterpart);
          };
          add();
          if (tokens != 512) continue;
          spec.purpose = Case::PURPOSE_ACCURACY;
          spec.median_ns = 0;
          add();
        }
      }
    }
  }
  // Further seeds: of another workspace, and of an equal share of another bound.
  for (const char* name : {"beta_other", "zeta_other"}) {
    CaseSpec spec = SpecOf(name);
    spec.seed = 2;
    spec.tokens = 1024;
    const bool is_scaling = spec.technique == "beta_other";
    if (!is_scaling) spec.purpose = Case::PURPOSE_ACCURACY;
    if (!is_scaling) spec.tokens = 512;
    spec.median_ns = is_scaling ? 1e6 : 0;
    Case* result = ties.Add(spec, "attention");
    result->mutable_technique()->set_dense_counterpart("other");
    Outcome* outcome = result->mutable_outcome();
    outcome->set_peak_workspace_bytes(outcome->peak_workspace_bytes() * 2);
    ErrorMeasure* error = outcome->mutable_against_definition();
    error->set_relative_frobenius(2 * error->relative_frobenius());
    error->set_bound(2 * error->bound());
    // It alone was appended to, a segment after the other.
    for (int segment = 0; !is_scaling && segment < 20; ++segment) {
      SegmentTiming* timing = outcome->mutable_timing()->add_segments();
      timing->set_tokens_before(segment * 64);
      timing->set_tokens(64);
      for (const double sample : Samples(1e5 * (segment + 1), 7)) timing->add_append_ns(sample);
    }
  }
  // A second device, on which one number of threads needs no name.
  CaseSpec on_gpu = SpecOf("plain");
  on_gpu.purpose = Case::PURPOSE_ACCURACY;
  on_gpu.device = DEVICE_TYPE_CUDA;
  on_gpu.median_ns = 0;
  ties.Add(on_gpu, "attention")->mutable_technique()->set_dense_counterpart("plain");
  return ties.results;
}

TEST(Golden, EqualTechniquesKeepTheOrderOfTheFile) {
  const ResultSet ties = MakeTies();
  ResultSet slower = ties;
  for (Case& result : *slower.mutable_cases()) {
    for (double& ns : *result.mutable_outcome()->mutable_timing()->mutable_run_ns()) ns *= 2;
  }
  const absl::StatusOr<Comparison> comparison = Compare(ties, slower, CompareOptions());
  ASSERT_TRUE(comparison.ok()) << comparison.status();
  ExpectGolden(
      "ties.txt",
      absl::StrCat(Render(ties, OptionsOf(RenderFormat::kTerminal, false, 150)),
                   TextOfFigures(ties),
                   RenderComparison(*comparison, ComparisonFormat::kTerminal, false, TextStyle())));
}

// A technique that is held against "plain", which has an error of 2e-7.
struct Rival {
  std::string name;
  double speed_up;
  double error;
  int samples = 11;
};

// Makes the cases of a mask at 1024 tokens, where "plain" takes 1 ms and has as many samples as the
// first rival.
void AddRivals(const std::vector<Rival>& rivals, bool causal, Showcase* showcase) {
  std::vector<Rival> all = rivals;
  all.insert(all.begin(), {"plain", 1, 2e-7, rivals.front().samples});
  for (const Rival& rival : all) {
    for (const Case::Purpose purpose : {Case::PURPOSE_SCALING, Case::PURPOSE_ACCURACY}) {
      CaseSpec spec = SpecOf(rival.name);
      spec.purpose = purpose;
      spec.tokens = 1024;
      spec.median_ns = purpose == Case::PURPOSE_ACCURACY ? 0 : 1e6 / rival.speed_up;
      Case* result = showcase->Add(spec, "attention");
      result->mutable_key()->mutable_problem()->set_causal(causal);
      Outcome* outcome = result->mutable_outcome();
      outcome->set_parameter_bytes(rival.name == "plain" ? 0 : 1 << 20);
      if (purpose == Case::PURPOSE_ACCURACY) {
        outcome->mutable_against_dense()->set_relative_frobenius(rival.error);
      } else {
        outcome->mutable_timing()->mutable_run_ns()->Truncate(rival.samples);
      }
    }
  }
}

TEST(Golden, WhatTheHeadlineRecommends) {
  const struct {
    const char* what;
    std::vector<Rival> full, causal;
  } kScenes[] = {
      {"a half faster", {{"near", 1.5, 0.05}}, {}},
      {"at the first limit", {{"near", 1.5, 0.1}}, {}},
      {"at the second limit", {{"near", 1.5, 0.3}}, {}},
      {"at the third limit", {{"near", 1.5, 0.5}}, {}},
      {"beyond all limits", {{"near", 1.5, 0.51}}, {}},
      {"an error that is no number", {{"near", 1.5, std::nan("")}}, {}},
      {"slower", {{"near", 0.5, 0.05}}, {}},
      {"not told apart", {{"near", 1.001, 0.05}}, {}},
      {"the fastest within the limit",
       {{"near", 2, 0.05}, {"far", 3, 0.07}, {"rough", 4, 0.2}},
       {}},
      {"equally fast", {{"near", 2, 0.05}, {"far", 2, 0.05}}, {}},
      {"of both masks", {{"near", 2, 0.05}}, {{"near", 1.5, 0.05}, {"far", 1.7, 0.05}}},
      {"of the second mask alone", {{"near", 0.5, 0.05}}, {{"near", 1.5, 0.05}}},
      {"sure, and of few samples", {{"near", 2, 0.05}}, {{"near", 1.5, 0.05, 3}}},
      {"sure, and beyond the limit", {{"near", 2, 0.05}}, {{"far", 3, 0.2}, {"near", 0.5, 0.05}}},
      {"of few samples", {{"near", 2, 0.05, 3}}, {}},
      {"of few samples, at the third limit", {{"near", 2, 0.5, 3}}, {}}};
  std::string text;
  for (const auto& scene : kScenes) {
    Showcase showcase;
    *showcase.results.add_environments() = MakeEnvironment();
    AddRivals(scene.full, false, &showcase);
    if (!scene.causal.empty()) AddRivals(scene.causal, true, &showcase);
    const Analysis analysis(showcase.results);
    absl::StrAppend(&text, scene.what, "\n");
    for (const std::string& sentence : report::HeadlineSentences(analysis)) {
      absl::StrAppend(&text, "  ", sentence, "\n");
    }
  }
  ExpectGolden("headlines.txt", text);
}

TEST(Golden, WhatElseTheMachineDid) {
  struct Load {
    const char* what;
    double seconds;
    int cores, usable_cores, threads;
    double others, stolen;  // core seconds; below 0: not known
  };
  const Load kLoads[] = {{"nothing was observed", 0, 2, 2, 2, 5, 5},
                         {"half a second", 0.5, 1, 1, 1, 0.25, 0.05},
                         {"of no number of cores", 1, 0, 0, 2, 0.5, 0.25},
                         {"below what is worth a word", 100, 2, 2, 2, 4.9, 1.9},
                         {"just worth a word", 100, 2, 2, 2, 5.1, 2.1},
                         {"others alone", 10, 4, 4, 4, 20, -1},
                         {"stolen alone", 10, 4, 4, 4, -1, 20},
                         {"as many threads as cores", 10, 4, 2, 2, 0, 0},
                         {"more threads than cores", 10, 4, 2, 3, 0, 0}};
  std::string text;
  for (const Load& row : kLoads) {
    Showcase showcase;
    *showcase.results.add_environments() = MakeEnvironment();
    for (const int64_t tokens : {512, 1024}) {
      CaseSpec spec = SpecOf("plain");
      spec.tokens = tokens;
      MachineLoad* load =
          showcase.Add(spec, "attention")->mutable_outcome()->mutable_machine_load();
      load->set_observed_seconds(row.seconds);
      load->set_cores(row.cores);
      load->set_usable_cores(row.usable_cores);
      load->set_threads(row.threads);
      if (row.others >= 0) load->set_other_core_seconds(row.others);
      if (row.stolen >= 0) load->set_stolen_core_seconds(row.stolen);
    }
    const std::string table =
        Render(showcase.results, OptionsOf(RenderFormat::kTerminal, false, 300));
    const size_t begin = std::min(table.find("other load: "), table.size());
    absl::StrAppend(&text, row.what, ": ", table.substr(begin, table.find('\n', begin) - begin),
                    "\n");
  }
  ExpectGolden("loads.txt", text);
}

// Times of tokens^1.5, every other one of them longer: the more the wider is the fit's error, up to
// where growth of 1 is no longer ruled out.
TEST(Golden, GrowthAboveWhatIsExpectedByItsError) {
  std::string text;
  for (int percent = 0; percent <= 40; percent += 5) {
    Showcase showcase;
    *showcase.results.add_environments() = MakeEnvironment();
    for (int n = 0; n < 6; ++n) {
      CaseSpec spec = SpecOf("wavy");
      spec.tokens = 128 << n;
      spec.expected_growth = 1;
      const double wave = n % 2 == 0 ? 1 : 1 + 0.01 * percent;
      spec.median_ns = 1e3 * std::pow(static_cast<double>(spec.tokens), 1.5) * wave;
      showcase.Add(spec, "attention");
    }
    const std::string table =
        Render(showcase.results, OptionsOf(RenderFormat::kTerminal, false, 200));
    const size_t begin = std::min(table.find("\nwavy") + 1, table.size());
    absl::StrAppend(&text, percent, " %: ", table.substr(begin, table.find('\n', begin) - begin),
                    "\n");
  }
  ExpectGolden("growths.txt", text);
}

}  // namespace
}  // namespace tfb
