// Applies one technique to the caller's own tensors and prints its errors.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "core/command_line.h"
#include "core/output_file.h"
#include "core/safetensors.h"
#include "core/status.h"
#include "core/technique.h"
#include "core/thread_pool.h"
#include "harness/contestants/flags.h"
#include "harness/inputs/job.h"
#include "harness/inputs/technique_help.h"
#include "harness/inputs/technique_tensors.h"
#include "harness/judge/bound_layer.h"
#include "harness/judge/evaluate.h"
#include "harness/judge/judge_gradients.h"
#include "harness/measure/machine.h"
#include "results/files.h"
#include "results/table.h"

ABSL_FLAG(std::string, technique, "",
          "The technique: NAME, or NAME:option=value,option=value. //harness:sweep -- --list shows "
          "them.");
ABSL_FLAG(std::string, options, "", "Its options: option=value,option=value.");
ABSL_FLAG(std::string, device, "cpu",
          "cpu, cuda, or simulator, which runs the code for GPUs on the host, slowly.");
ABSL_FLAG(
    std::string, dtype, "f32",
    "f32, bf16 or f16: what the file's tensors are converted to, and the type of the output.");
ABSL_FLAG(
    std::string, input, "",
    "A safetensors file with the tensors that the technique reads, which --technique=NAME --help "
    "lists: most read q, k and v, each [batch, heads, tokens, channels], or x, [batch, tokens, "
    "model_dim], bare or as layer<N>.q, and key_mask, u8 [batch, tokens], where there is one. Or "
    "\"real\": the tensors shipped with the repository.");
ABSL_FLAG(
    std::string, draw_input, "",
    "A safetensors file to write in place of all else: drawn tensors of the names, shapes and "
    "types that the technique reads for 512 tokens, as --technique=NAME --help lists them.");
ABSL_FLAG(std::string, layer, "",
          "Which layer of the input file, as in layer2, where it has several.");
ABSL_FLAG(int64_t, heads, 0,
          "Heads that x is split into. 0: as many as the file's q has, or 8 where it has none.");
ABSL_FLAG(std::string, output, "",
          "The safetensors file to write: out and, where the technique has it, log_sum_exp. Empty: "
          "none, the errors are printed all the same.");
ABSL_FLAG(std::string, parameters, "",
          "A safetensors file of parameters, which replace those drawn from the seed.");
ABSL_FLAG(std::string, dump_parameters, "",
          "The safetensors file to write the technique's parameters to, as used.");
ABSL_FLAG(
    bool, backward, false,
    "Also call the backward pass. The input file then has grad_out, the gradient of a loss by the "
    "output, of the output's shape, and may have grad_log_sum_exp. --output gets grad_NAME, the "
    "loss's gradient by each input and parameter; the norm of each is printed, what in it is NaN "
    "or "
    "infinite, and its error against derivatives of the definition, of the loss over --rows. With "
    "--draw_input grad_out is drawn, too.");
ABSL_FLAG(bool, causal, false,
          "Query i sees keys up to i + (keys - queries), as with a key-value cache.");
ABSL_FLAG(int64_t, rows, 256,
          "Query tokens that are held against float64, evenly spread; 0 for all.");
ABSL_FLAG(int, threads, 0, "Threads on the CPU. 0: as many as usable cores.");
ABSL_FLAG(uint64_t, seed, 1, "Of the technique's parameters.");

namespace tfb {
namespace {

constexpr char kProgram[] = "apply";
constexpr char kUsage[] =
    "apply --technique=NAME --input=FILE [--output=FILE] [flags]\n"
    "Applies a technique to tensors of your own, writes the result, and prints its errors against\n"
    "its definition and against dense attention, both in float64.\n\n"
    "apply --technique=NAME[:option=value,...] --help [--input=FILE] [flags]\n"
    "Prints the technique's formula, options, inputs, outputs and parameters, with their shapes\n"
    "for the file's sizes, or else for 512 tokens.\n\n"
    "Exit status: 0 done, 1 an error exceeds its bound or a gradient is not finite (the result is\n"
    "written all the same), 2 bad usage.";

absl::Status WithFlag(absl::string_view flag, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("--", flag, ": ", status.message()));
}

absl::Status ReadTechnique(Job* job) {
  std::string text = absl::GetFlag(FLAGS_technique);
  std::string all;
  TFB_RETURN_IF_ERROR(AddContestantsFromFlags(/*memory_limit=*/0, &Registry::Global(), &all));
  if (text.empty()) {
    std::vector<std::string> names;
    for (const Technique* technique : Registry::Global().All()) {
      names.push_back(technique->info().name);
    }
    return absl::InvalidArgumentError(
        absl::StrCat("--technique: name one of ", absl::StrJoin(names, ", ")));
  }
  const std::string options = absl::GetFlag(FLAGS_options);
  if (!options.empty()) absl::StrAppend(&text, absl::StrContains(text, ':') ? "," : ":", options);
  absl::string_view flag = options.empty() ? "technique" : "options";
  const absl::StatusOr<TechniqueSpec> spec = ParseTechniqueSpec(text);
  if (!spec.ok()) return WithFlag(flag, spec.status());
  const absl::StatusOr<const Technique*> technique = Registry::Global().Find(spec->technique);
  if (!technique.ok()) return WithFlag("technique", technique.status());
  const absl::StatusOr<Options> canonical = (*technique)->Canonical(spec->options);
  if (!canonical.ok()) return WithFlag(flag, canonical.status());
  job->technique = *technique;
  job->options = *canonical;
  return absl::OkStatus();
}

absl::StatusOr<InputSource> ReadInput() {
  const std::string input = absl::GetFlag(FLAGS_input);
  if (input.empty()) return absl::InvalidArgumentError("--input: name a safetensors file");
  const bool is_path = absl::EndsWith(input, ".safetensors");
  const auto sources = ParseInputSources(is_path ? CallerPath(input) : input);
  if (!sources.ok()) return WithFlag("input", sources.status());
  if (sources->front().captured == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("--input: \"", input, "\" is drawn; tensors of your own are asked for"));
  }
  const std::string layer = absl::GetFlag(FLAGS_layer);
  if (layer.empty() && sources->size() == 1) return sources->front();
  // A name that several files have means the layer of the first; FILE/LAYER tells them apart.
  std::vector<std::string> layers;
  for (const InputSource& source : *sources) {
    const CapturedLayer& captured = *source.captured;
    const bool again = std::find(layers.begin(), layers.end(), captured.layer) != layers.end();
    const std::string with_file =
        absl::StrCat(absl::StripSuffix(captured.file, ".safetensors"), "/", captured.layer);
    layers.push_back(again ? with_file : captured.layer);
    if (layer == captured.layer || layer == with_file) return source;
  }
  return absl::InvalidArgumentError(
      layer.empty()
          ? absl::StrCat("--layer: ", input, " has several; name one of ",
                         absl::StrJoin(layers, ", "))
          : absl::StrCat("--layer: ", input, " has no \"", layer, "\"; it has ",
                         layers == std::vector<std::string>{""} ? "tensors without a layer"
                                                                : absl::StrJoin(layers, ", ")));
}

// Checks, before anything is computed, that flags name different files to read and to write, and
// that the latter can be written.
absl::Status CheckPaths() {
  const std::pair<const char*, std::string> written[] = {
      {"output", absl::GetFlag(FLAGS_output)},
      {"dump_parameters", absl::GetFlag(FLAGS_dump_parameters)},
      {"draw_input", absl::GetFlag(FLAGS_draw_input)}};
  const std::pair<const char*, std::string> others[] = {
      {"input", absl::GetFlag(FLAGS_input)},
      {"parameters", absl::GetFlag(FLAGS_parameters)},
      written[0]};
  for (const auto& [flag, path] : written) {
    for (const auto& [other_flag, other] : others) {
      if (path.empty() || other.empty() || absl::string_view(flag) == other_flag) continue;
      if (!IsSamePlainFile(CallerPath(path), CallerPath(other))) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("--", flag, ": is the file of --", other_flag, ", ", path));
    }
    if (path.empty()) continue;
    if (const absl::Status status = CheckWritable(CallerPath(path)); !status.ok()) {
      return WithFlag(flag, status);
    }
  }
  return absl::OkStatus();
}

// Reads technique, device, dtype, heads and direction, and checks the other numbers.
absl::StatusOr<Job> ReadWithoutInput() {
  Job job;
  TFB_RETURN_IF_ERROR(ReadTechnique(&job));
  const absl::StatusOr<Device> device = ParseDevice(absl::GetFlag(FLAGS_device));
  if (!device.ok()) return WithFlag("device", device.status());
  job.device = *device;
  const absl::StatusOr<DType> dtype = ParseDType(absl::GetFlag(FLAGS_dtype));
  if (!dtype.ok()) return WithFlag("dtype", dtype.status());
  job.problem.dtype = *dtype;
  if (const absl::Status valid = Validate(job.problem); !valid.ok()) {
    return WithFlag("dtype", valid);
  }
  if (absl::GetFlag(FLAGS_heads) < 0 || absl::GetFlag(FLAGS_heads) > kMaxTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("--heads: ", absl::GetFlag(FLAGS_heads), "; allowed are 0 to ", kMaxTokens));
  }
  if (absl::GetFlag(FLAGS_rows) < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--rows: ", absl::GetFlag(FLAGS_rows), "; allowed are 0 and more"));
  }
  if (absl::GetFlag(FLAGS_threads) < 0 || absl::GetFlag(FLAGS_threads) > 4096) {
    return absl::InvalidArgumentError(
        absl::StrCat("--threads: ", absl::GetFlag(FLAGS_threads), "; allowed are 0 to 4096"));
  }
  if (absl::GetFlag(FLAGS_heads) > 0) {
    job.problem.query_heads = job.problem.kv_heads = absl::GetFlag(FLAGS_heads);
  }
  job.problem.causal = absl::GetFlag(FLAGS_causal);
  const int threads = absl::GetFlag(FLAGS_threads);
  job.threads = threads == 0 ? UsableCores() : threads;
  job.seed = absl::GetFlag(FLAGS_seed);
  return job;
}

absl::Status CheckDirection(const Job& job) {
  const TechniqueInfo& info = job.technique->info();
  if (job.problem.causal ? info.supports_causal : info.supports_noncausal) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      job.problem.causal ? absl::StrCat("--causal: ", info.name, " has no causal form")
                         : absl::StrCat("--causal: ", info.name, " is causal only: give it"));
}

// Reads the input, and gives the problem its sizes.
absl::Status FitToInput(Job* job) {
  TFB_ASSIGN_OR_RETURN(job->input, ReadInput());
  Problem wanted = job->problem;
  wanted.batch = wanted.query_tokens = wanted.kv_tokens = kMaxTokens;  // all that the file has
  const absl::StatusOr<Problem> problem =
      FitProblem(job->input, *job->technique, job->options, wanted);
  if (!problem.ok()) return WithFlag("input", problem.status());
  job->problem = *problem;
  return absl::OkStatus();
}

absl::StatusOr<Job> ReadJob() {
  TFB_RETURN_IF_ERROR(CheckPaths());
  TFB_ASSIGN_OR_RETURN(Job job, ReadWithoutInput());
  TFB_RETURN_IF_ERROR(FitToInput(&job));
  TFB_RETURN_IF_ERROR(CheckDirection(job));
  return job;
}

std::map<std::string, std::string> MetadataOf(const Job& job) {
  return {{"technique", job.technique->info().name},
          {"options", ToString(job.options)},
          {"problem", job.problem.ToString()},
          {"device", std::string(Name(job.device))},
          {"input", job.input.ToString()},
          {"seed", absl::StrCat(job.seed)},
          {"made_by", "Transformer Family Bench, //harness:apply"}};
}

constexpr char kGradient[] = "grad_";  // with the name of a tensor behind it

// Moves the gradients of inputs and parameters to the outputs, which are written. Returns their
// names there.
absl::StatusOr<std::vector<std::string>> NameGradients(Accuracy* accuracy) {
  std::vector<std::string> names;
  for (NamedTensors* gradients : {&accuracy->input_gradients, &accuracy->parameter_gradients}) {
    for (auto& [name, gradient] : *gradients) {
      names.push_back(absl::StrCat(kGradient, name));
      if (accuracy->outputs.emplace(names.back(), std::move(gradient)).second) continue;
      return absl::InternalError(absl::StrCat("two tensors would be written as ", names.back()));
    }
  }
  return names;
}

// Returns the gradients of outputs that the input file has, by the outputs' names.
absl::StatusOr<NamedTensors> ReadOutputGradients(const Job& job,
                                                 const std::vector<TensorSpec>& specs) {
  TFB_RETURN_IF_ERROR(CheckTensorsAreThere(job.input, specs));
  for (const TensorSpec& spec : specs) {
    const Tensor* tensor = job.input.captured->Find(spec.name);
    if (tensor == nullptr || tensor->shape() == spec.shape) continue;
    return absl::InvalidArgumentError(absl::StrCat(spec.name, " is ", ShapeString(tensor->shape()),
                                                   "; the output is ", ShapeString(spec.shape)));
  }
  TFB_ASSIGN_OR_RETURN(NamedTensors read, MakeInputs(job.input, specs, job.problem, job.seed));
  NamedTensors gradients;
  for (auto& [name, tensor] : read) {
    gradients[std::string(absl::StripPrefix(name, kGradient))] = std::move(tensor);
  }
  return gradients;
}

absl::Status WriteFiles(const Job& job, const Accuracy& accuracy) {
  const std::string output = absl::GetFlag(FLAGS_output);
  if (!output.empty()) {
    const absl::Status status =
        WriteSafetensors(CallerPath(output), accuracy.outputs, MetadataOf(job));
    if (!status.ok()) return WithFlag("output", status);
  }
  const std::string dump = absl::GetFlag(FLAGS_dump_parameters);
  if (!dump.empty()) {
    const absl::Status status =
        WriteSafetensors(CallerPath(dump), accuracy.parameters, MetadataOf(job));
    if (!status.ok()) return WithFlag("dump_parameters", status);
  }
  return absl::OkStatus();
}

void PrintLine(absl::string_view what, const std::string& text) {
  absl::PrintF("%-38s %s\n", what, text);
}

std::string Against(const Bounded& error) {
  if (std::isinf(error.bound)) return absl::StrCat(FormatError(error.value), " (no bound)");
  return absl::StrCat(FormatError(error.value), " (<= ", FormatBound(error.bound), ")",
                      error.passed() ? "" : "  EXCEEDED");
}

void PrintErrors(const Job& job, const Accuracy& accuracy) {
  absl::PrintF("%s\n%s, %s, on %s\n\n", ToString({job.technique->info().name, job.options}),
               job.problem.ToString(), job.input.ToString(), Name(job.device));
  const OutputError& own = accuracy.against_definition;
  const std::string rows =
      own.rows_checked == own.rows
          ? ""
          : absl::StrCat(", ", own.rows_checked, " of ", own.rows, " rows checked");
  PrintLine("error against its definition",
            absl::StrCat(FormatError(own.relative_frobenius), " relative", rows));
  PrintLine("  largest, over the largest value",
            Against({own.max_abs_over_max_value, accuracy.definition_bound}));
  if (own.not_finite > 0) {
    PrintLine("elements that are NaN or infinite",
              absl::StrCat(own.not_finite, " of ", own.checked,
                           own.unexpected == 0 ? ", as in its definition"
                                               : absl::StrCat(", of which ", own.unexpected,
                                                              " are finite in its definition")));
  }
  if (accuracy.log_sum_exp_error.has_value()) {
    PrintLine("  of log_sum_exp", Against(*accuracy.log_sum_exp_error));
  }
  for (const auto& [name, error] : accuracy.other_errors) {
    PrintLine(absl::StrCat("  of ", name), Against(error));
  }
  if (accuracy.ratio_to_dense_precision.has_value()) {
    PrintLine(absl::StrCat("  over that of dense attention in ", Name(job.problem.dtype)),
              Against(*accuracy.ratio_to_dense_precision));
  }
  if (accuracy.against_dense.has_value()) {
    PrintLine("error against dense attention",
              absl::StrCat(FormatError(accuracy.against_dense->relative_frobenius),
                           " relative, mean cosine ",
                           FormatSignificant(accuracy.against_dense->mean_cosine, 4), " (",
                           accuracy.counterpart, ")"));
  } else {
    PrintLine("error against dense attention",
              absl::StrCat("not known: ", accuracy.no_dense_reason));
  }
  if (accuracy.kept.has_value()) {
    PrintLine("kept mass of its attention", FormatSignificant(accuracy.kept->kept_mass));
    PrintLine("divergence from it (KL, nats)", FormatSignificant(accuracy.kept->kl_divergence));
    PrintLine(absl::StrCat("recall of its top ", kRecallKeys),
              FormatSignificant(accuracy.kept->recall));
  }
  for (const auto& [name, value] : accuracy.statistics) PrintLine(name, FormatSignificant(value));
}

// Prints the norm of each gradient. Returns whether all of their elements are finite.
bool PrintGradients(const NamedTensors& tensors, const std::vector<std::string>& names,
                    const std::map<std::string, std::string>& stopped) {
  bool all_finite = true;
  for (const std::string& name : names) {
    const Tensor& gradient = tensors.at(name);
    double squares = 0;
    int64_t not_finite = 0;
    const ConstTensorView view = gradient.view();
    for (int64_t n = 0; n < gradient.num_elements(); ++n) {
      const double element = view.Get(n);
      squares += element * element;
      not_finite += std::isfinite(element) ? 0 : 1;
    }
    all_finite = all_finite && not_finite == 0;
    PrintLine(absl::StrCat("norm of ", name),
              absl::StrCat(FormatSignificant(std::sqrt(squares)),
                           not_finite == 0 ? ""
                                           : absl::StrCat("  NaN or infinite: ", not_finite, " of ",
                                                          gradient.num_elements(), " elements")));
  }
  for (const auto& [name, reason] : stopped) {
    PrintLine(absl::StrCat("no ", kGradient, name), reason);
  }
  return all_finite;
}

// Holds the gradients against the definition and prints their errors. Returns whether all are
// within their bounds.
absl::StatusOr<bool> CheckGradients(const EvaluateRequest& request, Layer* layer) {
  TFB_ASSIGN_OR_RETURN(const std::vector<GradientError> errors, EvaluateGradients(request, layer));
  bool passed = true;
  for (const auto& [name, error] : errors) {
    passed = passed && error.passed();
    PrintLine(absl::StrCat("error of the gradient of ", name), Against(error));
  }
  for (const auto& [name, reason] : layer->estimated_gradients()) {
    PrintLine(absl::StrCat("no error of ", kGradient, name), reason);
  }
  return passed;
}

void PrintEnd(const Job& job, const Accuracy& accuracy) {
  for (const auto& [flag, path] : {std::make_pair("output", absl::GetFlag(FLAGS_output)),
                                   {"parameters", absl::GetFlag(FLAGS_dump_parameters)}}) {
    if (!path.empty()) PrintLine(absl::StrCat(flag, " written to"), CallerPath(path));
  }
  if (accuracy.parameters.empty() && !absl::GetFlag(FLAGS_dump_parameters).empty()) {
    absl::PrintF("%s has no parameters: that file is empty\n", job.technique->info().name);
  }
  if (!accuracy.passed) absl::PrintF("FAILED: %s\n", accuracy.failure);
}

// Returns the page about the named technique, or "" where none is named.
absl::StatusOr<std::string> Help() {
  if (absl::GetFlag(FLAGS_technique).empty()) return "";
  TFB_ASSIGN_OR_RETURN(Job job, ReadWithoutInput());
  // A technique of only one direction is explained without the flag.
  const TechniqueInfo& info = job.technique->info();
  if (!info.supports_noncausal) job.problem.causal = true;
  std::string sizes_from = "by default";
  if (!absl::GetFlag(FLAGS_input).empty()) {
    TFB_RETURN_IF_ERROR(FitToInput(&job));
    sizes_from = absl::StrCat("of ", job.input.ToString());
  }
  TFB_RETURN_IF_ERROR(CheckDirection(job));
  return TechniqueHelp(job, sizes_from);
}

absl::StatusOr<int> DrawInput() {
  TFB_RETURN_IF_ERROR(CheckPaths());
  const std::pair<const char*, std::string> without[] = {
      {"input", absl::GetFlag(FLAGS_input)},
      {"parameters", absl::GetFlag(FLAGS_parameters)},
      {"output", absl::GetFlag(FLAGS_output)},
      {"dump_parameters", absl::GetFlag(FLAGS_dump_parameters)}};
  for (const auto& [flag, value] : without) {
    if (value.empty()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "--draw_input: writes drawn tensors in place of all else; leave out --", flag));
  }
  TFB_ASSIGN_OR_RETURN(Job job, ReadWithoutInput());
  TFB_RETURN_IF_ERROR(CheckDirection(job));
  // What the technique refuses, such as a list of another length than it has layers, is refused
  // here and not first by the run that reads the tensors.
  job.device = Device::kCpu;
  TFB_ASSIGN_OR_RETURN(const std::unique_ptr<Layer> layer, job.CreateLayer());
  TFB_ASSIGN_OR_RETURN(NamedTensors inputs, job.LoadInputs());
  if (absl::GetFlag(FLAGS_backward)) {
    TFB_RETURN_IF_ERROR(layer->CheckBackward());
    TFB_ASSIGN_OR_RETURN(NamedTensors gradients, DrawOutputGradients(*layer, job.seed));
    for (auto& [name, gradient] : gradients) {
      inputs[absl::StrCat(kGradient, name)] = std::move(gradient);
    }
  }
  const std::string path = CallerPath(absl::GetFlag(FLAGS_draw_input));
  // As a slip for --input it would cost the tensors.
  std::error_code ignored;
  if (std::filesystem::exists(path, ignored)) {
    return absl::AlreadyExistsError(absl::StrCat("--draw_input: ", path, " is there already"));
  }
  const absl::Status written = WriteSafetensors(path, inputs, MetadataOf(job));
  if (!written.ok()) return WithFlag("draw_input", written);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : inputs) {
    names.push_back(absl::StrCat(name, " ", ShapeString(tensor.shape())));
  }
  absl::PrintF("%s written to %s\n", absl::StrJoin(names, ", "), path);
  return kExitDone;
}

// Prints to standard error the inputs and parameters that were drawn, since none were given.
void PrintDrawn(const Job& job, const std::vector<TensorSpec>& specs,
                const std::vector<std::string>& given_parameters, const NamedTensors& parameters) {
  std::vector<std::string> drawn;
  for (const std::string& name :
       DrawnParameters(*job.technique, job.options, job.problem, parameters, job.seed)) {
    if (std::find(given_parameters.begin(), given_parameters.end(), name) ==
        given_parameters.end()) {
      drawn.push_back(name);
    }
  }
  for (const std::string& line :
       DrawnLines(DrawnInputs(job.input, specs), drawn, parameters, job.seed)) {
    PrintError(kProgram, line);
  }
}

absl::StatusOr<int> Apply() {
  if (!absl::GetFlag(FLAGS_draw_input).empty()) return DrawInput();
  TFB_ASSIGN_OR_RETURN(const Job job, ReadJob());
  TFB_ASSIGN_OR_RETURN(const std::vector<TensorSpec> specs,
                       job.technique->InputSpecs(job.problem, job.options));
  TFB_ASSIGN_OR_RETURN(const std::unique_ptr<Layer> layer, job.CreateLayer());
  const bool backward = absl::GetFlag(FLAGS_backward);
  if (backward) TFB_RETURN_IF_ERROR(layer->CheckBackward());
  std::vector<TensorSpec> gradient_specs;
  for (TensorSpec spec : backward ? layer->output_gradients() : std::vector<TensorSpec>()) {
    spec.optional = spec.name != "out";
    spec.name = absl::StrCat(kGradient, spec.name);
    gradient_specs.push_back(std::move(spec));
  }
  std::vector<TensorSpec> all_read = specs;
  all_read.insert(all_read.end(), gradient_specs.begin(), gradient_specs.end());
  if (const absl::Status read = CheckTensorsAreRead(job.input, all_read); !read.ok()) {
    return WithFlag("input", read);
  }
  const absl::StatusOr<NamedTensors> inputs = job.LoadInputs();
  if (!inputs.ok()) return WithFlag("input", inputs.status());

  ThreadPool pool(job.threads);
  EvaluateRequest request;
  request.job = job;
  request.inputs = &*inputs;
  request.pool = &pool;
  NamedTensors output_gradients;
  if (backward) {
    absl::StatusOr<NamedTensors> read = ReadOutputGradients(job, gradient_specs);
    if (!read.ok()) return WithFlag("backward", read.status());
    output_gradients = *std::move(read);
    request.output_gradients = &output_gradients;
  }
  if (const int64_t rows = absl::GetFlag(FLAGS_rows); rows > 0) {
    request.rows = SampleRows(job.problem.query_tokens, rows, job.seed);
  }
  std::vector<std::string> given_parameters;
  if (const std::string path = absl::GetFlag(FLAGS_parameters); !path.empty()) {
    absl::StatusOr<SafetensorsFile> file = ReadSafetensors(CallerPath(path));
    if (!file.ok()) return WithFlag("parameters", file.status());
    for (const auto& entry : file->tensors) given_parameters.push_back(entry.first);
    const absl::Status fits = layer->SetParameters(std::move(file->tensors));
    if (!fits.ok()) return WithFlag("parameters", fits);
  }
  TFB_ASSIGN_OR_RETURN(Accuracy accuracy, EvaluateLayer(request, layer.get()));
  TFB_ASSIGN_OR_RETURN(const std::vector<std::string> gradients, NameGradients(&accuracy));
  TFB_RETURN_IF_ERROR(WriteFiles(job, accuracy));
  PrintDrawn(job, specs, given_parameters, accuracy.parameters);
  PrintErrors(job, accuracy);
  bool are_finite = true, are_right = true;
  if (backward) {
    are_finite = PrintGradients(accuracy.outputs, gradients, layer->stopped_gradients());
    if (are_finite) {
      TFB_ASSIGN_OR_RETURN(are_right, CheckGradients(request, layer.get()));
    }
  }
  PrintEnd(job, accuracy);
  if (!are_finite) absl::PrintF("FAILED: a gradient has elements that are NaN or infinite\n");
  if (!are_right) absl::PrintF("FAILED: the error of a gradient exceeds its bound\n");
  return accuracy.passed && are_finite && are_right ? kExitDone : kExitCheckFailed;
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  return tfb::RunMain(tfb::kProgram, tfb::kUsage, {argv, argv + argc}, tfb::Apply, tfb::Help);
}
