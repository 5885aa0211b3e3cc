#include "harness/conformance/interface.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <regex>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "core/status.h"
#include "core/thread_pool.h"
#include "gtest/gtest.h"
#include "harness/conformance/drawn.h"
#include "harness/judge/bound_layer.h"
#include "harness/judge/device_memory.h"

namespace tfb::conformance {
namespace {

// Returns problems in the forms, causal or not, that the technique has: sizes of which no two are
// equal; then what techniques of one form, of one number of heads or of one number of channels
// admit; 16 bits; and more tokens than workspaces have tiles of.
std::vector<Problem> ProblemsOf(const TechniqueInfo& info) {
  const Problem usual = Problem::SelfAttention(/*batch=*/3, /*heads=*/2, /*tokens=*/200, 16);
  std::vector<Problem> problems(6, usual);
  for (Problem* of_groups : {&problems[0], &problems[1]}) of_groups->query_heads = 6;
  for (int n = 0; n < 3; ++n) problems[n].value_dim = 24;
  problems[0].kv_tokens = 330;
  problems[1].causal = problems[3].causal = true;
  problems[4].dtype = DType::kBF16;
  problems[5] = Problem::SelfAttention(1, 4, 3000, 8, true);
  for (Problem& problem : problems) {
    problem.causal = problem.causal ? info.supports_causal : !info.supports_noncausal;
  }
  return problems;
}

const char* NameOf(Distribution distribution) {
  switch (distribution) {
    case Distribution::kNormal:
      return "normal";
    case Distribution::kUniform:
      return "uniform";
    case Distribution::kGumbel:
      return "Gumbel";
  }
  return "unknown";
}

std::string Join(const std::vector<std::string>& words) { return absl::StrJoin(words, ", "); }

std::string DescriptionOf(const TechniqueInfo& info) {
  std::vector<std::string> words = {info.family, std::string(Name(info.exactness)),
                                    absl::StrCat("reads ", Name(info.input_kind)),
                                    absl::StrCat("growth ", info.growth)};
  for (const Device device : info.devices) words.push_back(std::string(Name(device)));
  if (info.supports_causal) words.push_back("causal");
  if (info.supports_noncausal) words.push_back("not causal");
  if (info.self_attention) words.push_back("self-attention");
  if (!info.budget_option.empty()) words.push_back("budget " + info.budget_option);
  if (!info.selection.empty()) words.push_back("selection " + info.selection);
  std::string text = absl::StrCat(info.name, ": ", Join(words), "\n");
  for (const OptionSpec& option : info.options) {
    absl::StrAppend(&text, "  ", option.name, "=", option.default_value, ": ", option.type, ", ",
                    option.range);
    if (!option.sweep.empty()) absl::StrAppend(&text, ", sweeps ", Join(option.sweep));
    text += "\n";
  }
  return text;
}

std::string TensorText(const std::string& what, const TensorSpec& spec) {
  std::string text =
      absl::StrCat("  ", what, " ", spec.name, " ", Name(spec.dtype), " ", ShapeString(spec.shape));
  if (spec.optional) text += ", optional";
  if (spec.noise.has_value()) absl::StrAppend(&text, ", ", NameOf(*spec.noise), " noise");
  return text + "\n";
}

// Returns a line for each input and output.
std::vector<std::string> TensorLines(const Layer& layer) {
  std::vector<std::string> lines;
  for (const TensorSpec& spec : layer.inputs()) lines.push_back(TensorText("input", spec));
  for (const TensorSpec& spec : layer.outputs()) lines.push_back(TensorText("output", spec));
  return lines;
}

// The moments of parameters.
struct Moments {
  int64_t tensors = 0;
  double elements = 0, sum = 0, squares = 0;

  void Add(const ConstTensorView& view) {
    ++tensors;
    elements += static_cast<double>(view.num_elements());
    for (int64_t i = 0; i < view.num_elements(); ++i) {
      sum += view.Get(i);
      squares += view.Get(i) * view.Get(i);
    }
  }
  // Four digits are the same for any library of mathematics.
  std::string Text() const {
    const double count = std::max(elements, 1.0);
    return absl::StrFormat("mean %.4g, root mean square %.4g", sum / count,
                           std::sqrt(squares / count));
  }
};

// Returns a line for the parameters of each shape and name, where those of a stack's layers have
// one name.
std::string ParametersText(const Layer& layer) {
  std::map<std::string, Moments> alike;
  for (const auto& [name, tensor] : layer.parameters()) {
    const std::string of_any_layer = std::regex_replace(name, std::regex("[0-9]+"), "#");
    alike[absl::StrCat(of_any_layer, " ", Name(tensor.dtype()), " ", ShapeString(tensor.shape()))]
        .Add(tensor.view());
  }
  std::string text;
  for (const auto& [name, moments] : alike) {
    absl::StrAppend(&text, "  parameter ", name, moments.tensors > 1 ? " x " : "",
                    moments.tensors > 1 ? absl::StrCat(moments.tensors) : "", ", ", moments.Text(),
                    "\n");
  }
  return text;
}

// Returns the number, mean and root mean square of all elements.
std::string SumOfParametersText(const Layer& layer) {
  if (layer.parameters().empty()) return "";
  Moments all;
  for (const auto& [name, tensor] : layer.parameters()) all.Add(tensor.view());
  return absl::StrFormat(", %.0f parameters, %s", all.elements, all.Text());
}

std::string StreamText(const Layer& layer) {
  const auto* stream = dynamic_cast<const StreamingLayer*>(&layer);
  if (stream == nullptr) return "";
  std::string text;
  for (const TensorSpec& spec : stream->segment_inputs()) {
    text += TensorText("segment's input", spec);
  }
  for (const TensorSpec& spec : stream->segment_outputs()) {
    text += TensorText("segment's output", spec);
  }
  return absl::StrCat(text, "  segments of at most ", stream->max_segment_tokens(),
                      " tokens, split by ", stream->split_tokens(), "\n");
}

std::string NumberText(const std::optional<double>& number) {
  return number.has_value() ? absl::StrFormat("%.12g", *number) : "unknown";
}

// Returns the counterpart with the options that are not at their defaults.
std::string CounterpartText(const Job& job) {
  auto spec = job.technique->Counterpart(job.problem, job.options);
  if (!spec.ok()) return spec.status().ToString();
  const auto technique = Registry::Global().Find(spec->technique);
  if (!technique.ok()) return technique.status().ToString();
  for (const OptionSpec& option : (*technique)->info().options) {
    const auto given = spec->options.find(option.name);
    if (given == spec->options.end() || given->second != option.default_value) continue;
    spec->options.erase(given);
  }
  return ToString(*spec);
}

// Sets the layer up on drawn inputs, which most costs are known after.
absl::Status SetUp(const Job& job, Layer* layer) {
  TFB_ASSIGN_OR_RETURN(const NamedTensors inputs, job.LoadInputs());
  ThreadPool pool(2);
  TFB_ASSIGN_OR_RETURN(const BoundLayer bound, Bind(layer, job.device, ViewsOf(inputs), &pool,
                                                    /*optional_too=*/false));
  return bound.Setup();
}

// Returns "64, 192, 0 bytes": for 1 and 3 threads, and on a GPU.
std::string WorkspaceText(Job job, const Layer& layer) {
  job.device = Device::kSimulator;
  const auto on_gpu = job.CreateLayer();
  return absl::StrCat(
      layer.workspace_bytes(1), ", ", layer.workspace_bytes(3), ", ",
      on_gpu.ok() ? absl::StrCat((*on_gpu)->workspace_bytes(1)) : on_gpu.status().ToString());
}

// Sets the backward pass up behind Setup, which its costs may be known after.
absl::Status SetUpBackward(const Job& job, Layer* layer) {
  TFB_ASSIGN_OR_RETURN(const NamedTensors inputs, job.LoadInputs());
  TFB_ASSIGN_OR_RETURN(const DeviceTensors read, DeviceTensors::Of(job.device, ViewsOf(inputs)));
  ThreadPool pool(2);
  const size_t bytes = std::max<size_t>(layer->backward_workspace_bytes(pool.threads()), 1);
  TFB_ASSIGN_OR_RETURN(const DeviceMemory workspace, DeviceMemory::Allocate(job.device, bytes));
  Execution execution;
  execution.pool = &pool;
  execution.workspace = workspace.bytes();
  return layer->SetUpBackward(read.inputs(), execution);
}

// Tells whether the technique's layers have backward passes with the default options.
bool HasBackward(Job job) {
  job.options = {};
  const auto layer = job.CreateLayer();
  return layer.ok() && (*layer)->CheckBackward().ok();
}

// Returns the costs of the backward pass of a layer that is set up, with workspaces for 1 and 3
// threads; nothing for a technique that has none.
std::string BackwardText(const Job& job, Layer* layer) {
  if (!HasBackward(job)) return "";
  const absl::Status status = SetUpBackward(job, layer);
  if (!status.ok()) return absl::StrCat(", backward ", status.ToString());
  return absl::StrCat(", backward ", NumberText(layer->backward_cost().flops), " FLOPs, keeps ",
                      layer->kept_bytes(), ", workspace ", layer->backward_workspace_bytes(1), ", ",
                      layer->backward_workspace_bytes(3));
}

// Returns a line of the gradients that the layer gives, and one for each that it stops.
std::string GradientsText(const Layer& layer) {
  if (!layer.CheckBackward().ok()) return "";
  std::vector<std::string> names;
  for (const TensorSpec& spec : layer.input_gradients()) names.push_back(spec.name);
  for (const TensorSpec& spec : layer.parameter_gradients()) names.push_back(spec.name);
  std::string text = absl::StrCat("  gradients of ", Join(names), " by those of ",
                                  Join(layer.differentiable_outputs()), "\n");
  for (const auto& [name, reason] : layer.stopped_gradients()) {
    absl::StrAppend(&text, "  no gradient of ", name, ": ", reason, "\n");
  }
  return text;
}

// Returns the layer's statistics that are known before a Run.
std::string StatisticsText(const Layer& layer) {
  std::string text;
  for (const auto& [name, value] : layer.statistics()) {
    absl::StrAppend(&text, ", ", name, absl::StrFormat(" %.4g", value));
  }
  return text;
}

// Returns the costs, statistics and parameters of the job in a line, or its refusal; and the tensors
// that are not among the usual ones.
std::string LineOf(const Job& job, const std::vector<std::string>* usual_tensors = nullptr) {
  const auto layer = job.CreateLayer();
  if (!layer.ok()) return layer.status().ToString();
  const std::string of_creation =
      absl::StrCat("workspace ", WorkspaceText(job, **layer), SumOfParametersText(**layer),
                   ", against ", CounterpartText(job));
  const absl::Status setup = SetUp(job, layer->get());
  if (!setup.ok()) return setup.ToString();
  const Cost cost = (*layer)->cost();
  std::string text =
      absl::StrCat(NumberText(cost.flops), " FLOPs, ", NumberText(cost.bytes), " bytes, ",
                   of_creation, StatisticsText(**layer), BackwardText(job, layer->get()));
  if (usual_tensors == nullptr) return text;
  for (const std::string& line : TensorLines(**layer)) {
    if (absl::c_linear_search(*usual_tensors, line)) continue;
    absl::StrAppend(&text, "\n  ", absl::StripSuffix(line, "\n"));
  }
  return text;
}

std::vector<std::string> ValuesOnRecord(const OptionSpec& option, int64_t tokens) {
  if (option.type == "ints") return {"1", "2/3"};
  return ValuesToTry(option, tokens, /*few=*/true);
}

// Returns the line of each value of the option, the others at their defaults. Values that follow
// each other share a line where they can, which says so where it is the `usual` one, of defaults.
std::string OptionText(const Job& job, const OptionSpec& option, const std::string& usual,
                       const std::vector<std::string>& usual_tensors) {
  std::string text, last;
  const auto end_line = [&] {
    if (!last.empty()) absl::StrAppend(&text, ": ", last == usual ? "as by default" : last, "\n");
  };
  for (const std::string& value : ValuesOnRecord(option, job.problem.query_tokens)) {
    Job varied = job;
    varied.options[option.name] = value;
    if (option.type == "techniques") varied.options["layers"] = absl::StrCat(kLayersOfLists);
    const std::string line = LineOf(varied, &usual_tensors);
    if (line != last) end_line();
    text += line == last ? ", " : absl::StrCat("  ", option.name, "=");
    text += value;
    last = line;
  }
  end_line();
  return text;
}

std::string DetailsText(const Job& job, const Layer& layer, const std::string& usual) {
  const std::vector<std::string> tensors = TensorLines(layer);
  std::string text = absl::StrCat(absl::StrJoin(tensors, ""), ParametersText(layer),
                                  GradientsText(layer), StreamText(layer));
  for (const OptionSpec& option : job.technique->info().options) {
    text += OptionText(job, option, usual, tensors);
  }
  return text;
}

constexpr char kCombination[] = "with ";

// Returns the lines of each combination of options that the recorded text has, under the line that
// names it.
std::string CombinationsText(const Job& job, const std::string& recorded) {
  const auto layer = job.CreateLayer();
  if (!layer.ok()) return "";
  const std::vector<std::string> tensors = TensorLines(**layer);
  std::string text;
  for (const absl::string_view line : absl::StrSplit(recorded, '\n')) {
    if (!absl::StartsWith(line, kCombination)) continue;
    const std::string options(absl::StripPrefix(line, kCombination));
    const auto spec = ParseTechniqueSpec(absl::StrCat(job.technique->info().name, ":", options));
    Job combined = job;
    if (spec.ok()) combined.options = spec->options;
    absl::StrAppend(&text, "\n", line, "\n  ",
                    spec.ok() ? LineOf(combined, &tensors) : spec.status().ToString(), "\n");
  }
  return text;
}

std::string TextOf(const std::string& file) {
  std::ifstream stream(file);
  return {std::istreambuf_iterator<char>(stream), {}};
}

}  // namespace

std::string InterfaceOf(const Technique& technique, const std::string& recorded) {
  std::string text = DescriptionOf(technique.info());
  Job job;
  job.technique = &technique;
  job.seed = kSeed;
  std::string combinations;
  bool has_details = false;
  for (const Problem& problem : ProblemsOf(technique.info())) {
    job.problem = problem;
    const std::string line = LineOf(job);
    absl::StrAppend(&text, "\n", problem.ToString(), "\n  ", line, "\n");
    const auto layer = job.CreateLayer();
    if (has_details || !layer.ok()) continue;
    has_details = true;
    text += DetailsText(job, **layer, line);
    combinations = CombinationsText(job, recorded);
  }
  return text + combinations;
}

Case InterfaceCase(const std::string& file) {
  Case one;
  one.name = "ItsInterfaceIsTheOneOnRecord";
  one.problems = {Usual()};
  one.default_options_only = true;
  one.check = [file](const Job& job) {
    const std::string recorded = TextOf(file);
    ASSERT_FALSE(recorded.empty()) << "cannot read " << file;
    EXPECT_EQ(InterfaceOf(*job.technique, recorded), recorded)
        << "Where the change is meant: bazel run //harness:all_conformance -- "
           "--write_interface=$PWD";
  };
  return one;
}

absl::Status WriteInterface(const Technique& technique, const std::string& root) {
  const TechniqueInfo& info = technique.info();
  const std::filesystem::path folder =
      std::filesystem::path(root) / info.family / info.name / "testdata";
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const std::string path = folder / "interface.txt";
  const std::string text = InterfaceOf(technique, TextOf(path));
  std::ofstream file(path);
  if (file << text << std::flush) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("cannot write ", path));
}

}  // namespace tfb::conformance
