// The main of tests that compare all that a technique tells of itself with a golden text: its
// properties and options, and for each problem that the text names the tensors, parameters, cost,
// workspace, statistics and counterpart of its layers, or why there is none.
//
//   NAME_text_test TECHNIQUE GOLDEN            exits with 1 where the text is another
//   NAME_text_test TECHNIQUE GOLDEN --print    prints the text for the golden's problems
//
// A line of the golden that begins with "== " is a problem and a technique's options:
// "== batch 2, heads 3 of 8, tokens 20, causal: memorizing:store=40,k=5". It may name kv_heads,
// kv_tokens, value_dim and bf16, too.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/program_testing.h"
#include "core/technique.h"
#include "core/testing.h"

namespace tfb {
namespace {

constexpr char kHeading[] = "== ";

void AddInfo(const TechniqueInfo& info, std::string* text) {
  std::vector<absl::string_view> devices;
  for (const Device device : info.devices) devices.push_back(Name(device));
  absl::StrAppend(
      text, info.name, ", ", info.family, ": ", info.title, "\n", info.citation, "\n", "input ",
      Name(info.input_kind), ", ", Name(info.exactness), ", budget \"", info.budget_option,
      "\", growth ", info.growth, ", on ", absl::StrJoin(devices, " and "),
      info.supports_causal ? ", causal" : "", info.supports_noncausal ? ", not causal" : "",
      info.self_attention ? ", self-attention" : "", ", selection \"", info.selection, "\"\n");
  for (const OptionSpec& option : info.options) {
    absl::StrAppend(text, "  ", option.name, " (", option.type, ") = ", option.default_value, "; ",
                    option.range,
                    option.sweep.empty() ? "" : "; sweep " + absl::StrJoin(option.sweep, " "),
                    "\n");
  }
}

void AddSpecs(absl::string_view what, const std::vector<TensorSpec>& specs, std::string* text) {
  for (const TensorSpec& spec : specs) {
    absl::StrAppend(text, what, " ", spec.name, " ", Name(spec.dtype), " ", ShapeString(spec.shape),
                    spec.optional ? ", optional" : "", spec.noise.has_value() ? ", noise" : "",
                    "\n");
  }
}

// Adds the names, shapes, means and root mean squares of parameters. Those of equal shape whose
// names differ in numbers alone, as those of layers do, have a line: "layer*.w_q f32 [24, 24] x 2".
void AddParameters(const NamedTensors& parameters, std::string* text) {
  struct Moments {
    double count = 0, sum = 0, squares = 0;
    int tensors = 0;
  };
  std::map<std::string, Moments> lines;
  for (const auto& [name, tensor] : parameters) {
    const std::string pattern = std::regex_replace(name, std::regex("[0-9]+\\."), "*.");
    Moments& moments =
        lines[absl::StrCat(pattern, " ", Name(tensor.dtype()), " ", ShapeString(tensor.shape()))];
    ++moments.tensors;
    for (int64_t n = 0; n < tensor.num_elements(); ++n, ++moments.count) {
      moments.sum += tensor.view().Get(n);
      moments.squares += tensor.view().Get(n) * tensor.view().Get(n);
    }
  }
  for (const auto& [line, moments] : lines) {
    const double mean = moments.sum / moments.count;
    absl::StrAppend(text, "parameter ", line, " x ", moments.tensors,
                    absl::StrFormat(", mean %.3f, root mean square %.3f\n", mean,
                                    std::sqrt(moments.squares / moments.count)));
  }
}

// Returns a line for the FLOPs, the bytes and each statistic.
std::vector<std::string> NumbersOf(const Layer& layer) {
  const Cost cost = layer.cost();
  std::vector<std::string> lines;
  for (const auto& [name, number] :
       {std::pair("FLOPs", cost.flops), std::pair("bytes", cost.bytes)}) {
    lines.push_back(
        absl::StrCat(name, " ", number.has_value() ? absl::StrFormat("%.0f", *number) : "unknown"));
  }
  for (const auto& [name, value] : layer.statistics()) {
    lines.push_back(absl::StrCat(name, absl::StrFormat(" %.4f", value)));
  }
  return lines;
}

void AddLine(absl::string_view what, const std::vector<std::string>& parts, std::string* text) {
  absl::StrAppend(text, what, absl::StrJoin(parts, ", "), "\n");
}

std::vector<std::string> NumbersAfterSetup(Layer& layer, const Inputs& inputs) {
  ThreadPool pool(1);
  Tensor workspace(DType::kU8, {static_cast<int64_t>(layer.workspace_bytes(1))});
  const absl::Status status = layer.Setup(
      inputs, {&pool, absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes()),
               nullptr});
  return status.ok() ? NumbersOf(layer) : std::vector<std::string>{status.ToString()};
}

// Adds what the definition of a stack with Transformer-XL's attention, which checks its parameters,
// says of one of another shape.
void AddDefinition(const Technique& technique, const Problem& problem, const Options& options,
                   const Layer& layer, const Inputs& inputs, std::string* text) {
  NamedTensors parameters, outputs;
  for (const auto& [name, tensor] : layer.parameters()) parameters[name] = tensor.Clone();
  const auto found = parameters.find("layer0.w_q");
  if (found == parameters.end()) return;
  found->second = Tensor(DType::kF32, {1, 1});
  absl::StrAppend(text, "definition with another w_q: ",
                  technique.Define(problem, options, parameters, inputs, {}, &outputs).ToString(),
                  "\n");
}

// Adds the counterpart with those of its options that are not the technique's own.
void AddCounterpart(const Technique& technique, const Problem& problem, const Options& options,
                    std::string* text) {
  const auto counterpart = technique.Counterpart(problem, options);
  if (!counterpart.ok()) {
    absl::StrAppend(text, "counterpart ", counterpart.status().ToString(), "\n");
    return;
  }
  TechniqueSpec differing = {counterpart->technique, {}};
  const Options own = technique.Canonical(options).value();
  for (const auto& [name, value] : counterpart->options) {
    const auto found = own.find(name);
    if (found == own.end() || found->second != value) differing.options[name] = value;
  }
  absl::StrAppend(text, "counterpart ", ToString(differing), "\n");
}

void AddLayer(const Technique& technique, const Problem& problem, const Options& options,
              std::string* text) {
  const auto created = technique.Create(problem, options, Device::kCpu, /*seed=*/1);
  if (!created.ok()) {
    absl::StrAppend(text, created.status().ToString(), "\n");
    return;
  }
  Layer& layer = **created;
  AddSpecs("input", technique.InputSpecs(problem, options).value(), text);
  AddSpecs("output", technique.OutputSpecs(problem, options).value(), text);
  if (const auto* stream = dynamic_cast<const StreamingLayer*>(&layer)) {
    AddSpecs("segment input", stream->segment_inputs(), text);
    AddSpecs("segment output", stream->segment_outputs(), text);
    absl::StrAppend(text, "segments of ", stream->max_segment_tokens(), " tokens, split ",
                    stream->split_tokens(), "\n");
  }
  AddParameters(layer.parameters(), text);
  for (const int threads : {1, 3}) {
    absl::StrAppend(text, "workspace with ", threads, " threads ", layer.workspace_bytes(threads),
                    "\n");
  }
  if (RunsOn(technique.info(), Device::kSimulator)) {
    const auto on_device = technique.Create(problem, options, Device::kSimulator, /*seed=*/1);
    absl::StrAppend(text, "workspace in the simulator ",
                    on_device.ok() ? absl::StrCat((*on_device)->workspace_bytes(1))
                                   : on_device.status().ToString(),
                    "\n");
  }
  const std::vector<std::string> before = NumbersOf(layer);
  const NamedTensors inputs = RandomInputs(layer.inputs(), /*seed=*/1);
  const auto outputs = RunLayer(layer, ViewsOf(inputs));
  if (!outputs.ok()) absl::StrAppend(text, outputs.status().ToString(), "\n");
  const std::vector<std::string> after = NumbersOf(layer);
  if (before != after) AddLine("before a run: ", before, text);
  absl::StrAppend(text, absl::StrJoin(after, "\n"), "\n");
  const std::vector<std::string> again = NumbersAfterSetup(layer, ViewsOf(inputs));
  if (again != after) {
    AddLine("after another Setup: ",
            again == before ? std::vector<std::string>{"as before the run"} : again, text);
  }
  AddDefinition(technique, problem, options, layer, ViewsOf(inputs), text);
  AddCounterpart(technique, problem, options, text);
}

// Parses "batch 2, heads 3 of 8, tokens 20, causal: NAME:OPTIONS".
bool ParseCase(const std::string& line, Problem* problem, TechniqueSpec* spec) {
  const size_t colon = line.find(": ");
  if (colon == std::string::npos) return false;
  long long batch, heads, head_dim, tokens;
  if (std::sscanf(line.c_str(), "batch %lld, heads %lld of %lld, tokens %lld", &batch, &heads,
                  &head_dim, &tokens) != 4) {
    return false;
  }
  const std::string sizes = line.substr(0, colon);
  *problem =
      Problem::SelfAttention(batch, heads, tokens, head_dim, absl::StrContains(sizes, ", causal"),
                             absl::StrContains(sizes, ", bf16") ? DType::kBF16 : DType::kF32);
  for (const auto& [name, size] :
       {std::pair("kv_heads", &problem->kv_heads), std::pair("kv_tokens", &problem->kv_tokens),
        std::pair("value_dim", &problem->value_dim)}) {
    const size_t at = sizes.find(absl::StrCat(", ", name, " "));
    if (at != sizes.npos) *size = std::atoll(sizes.c_str() + at + std::string(name).size() + 3);
  }
  const auto parsed = ParseTechniqueSpec(line.substr(colon + 2));
  if (parsed.ok()) *spec = *parsed;
  return parsed.ok();
}

std::string TextFor(const Technique& technique, const std::string& golden) {
  std::string text;
  AddInfo(technique.info(), &text);
  for (const absl::string_view line : absl::StrSplit(golden, '\n')) {
    if (!absl::StartsWith(line, kHeading)) continue;
    absl::StrAppend(&text, "\n", line, "\n");
    Problem problem;
    TechniqueSpec spec;
    if (ParseCase(std::string(line.substr(sizeof(kHeading) - 1)), &problem, &spec)) {
      AddLayer(technique, problem, spec.options, &text);
    } else {
      absl::StrAppend(&text, "is no problem\n");
    }
  }
  return text;
}

int Main(const std::vector<std::string>& arguments) {
  if (arguments.size() < 3) return 2;
  const std::string golden = GoldenText(arguments[2]);
  const std::string text = TextFor(FindTechnique(arguments[1]), golden);
  if (arguments.size() > 3) {
    std::fputs(text.c_str(), stdout);
    return 0;
  }
  const std::string difference = TextDifference(text, golden);
  std::fputs(difference.c_str(), stderr);
  return difference.empty() ? 0 : 1;
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) { return tfb::Main({argv, argv + argc}); }
