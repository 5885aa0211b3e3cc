#include "core/testing.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

#include "absl/strings/str_cat.h"
#include "core/cuda/mirror.h"
#include "core/random.h"

namespace tfb {

NamedTensors RandomInputs(const std::vector<TensorSpec>& specs, uint64_t seed) {
  NamedTensors inputs;
  for (const TensorSpec& spec : specs) {
    if (spec.optional) continue;
    Tensor tensor(spec.dtype, spec.shape);
    if (IsFloating(spec.dtype)) {
      FillDrawn(&tensor, spec.noise.value_or(Distribution::kNormal), seed, spec.name);
    } else {
      Fill(tensor.view(), 1);
    }
    inputs[spec.name] = std::move(tensor);
  }
  return inputs;
}

NamedTensors NanOutputs(const std::vector<TensorSpec>& specs) {
  NamedTensors outputs;
  for (const TensorSpec& spec : specs) {
    Fill((outputs[spec.name] = Tensor(spec.dtype, spec.shape)).view(), NAN);
  }
  return outputs;
}

namespace {

// Returns `bytes` bytes of NaN.
Tensor NanMemory(size_t bytes) {
  Tensor memory(DType::kU8, {static_cast<int64_t>(bytes)});
  std::memset(memory.raw(), 0xFF, bytes);
  return memory;
}

absl::Span<std::byte> BytesOf(Tensor& memory) {
  return absl::MakeSpan(static_cast<std::byte*>(memory.raw()), memory.bytes());
}

// Sets the layer up and runs it with the memory of `kept`.
absl::StatusOr<NamedTensors> RunKeeping(Layer& layer, const Inputs& inputs, ThreadPool* pool,
                                        absl::Span<std::byte> kept) {
  Tensor workspace = NanMemory(layer.workspace_bytes(pool->threads()));
  Execution execution;
  execution.pool = pool;
  execution.workspace = BytesOf(workspace);
  execution.kept = kept;
  TFB_RETURN_IF_ERROR(layer.Setup(inputs, execution));
  NamedTensors outputs = NanOutputs(layer.outputs());
  TFB_RETURN_IF_ERROR(layer.Run(inputs, MutableViewsOf(outputs), execution));
  return outputs;
}

}  // namespace

absl::StatusOr<NamedTensors> RunLayer(Layer& layer, const Inputs& inputs, int threads) {
  ThreadPool pool(threads);
  return RunKeeping(layer, inputs, &pool, /*kept=*/{});
}

absl::StatusOr<RunAndGradients> BackwardOfTechnique(const Technique& technique,
                                                    const Problem& problem, const Inputs& inputs,
                                                    const NamedTensors& output_gradients,
                                                    const RunRequest& request) {
  TFB_ASSIGN_OR_RETURN(const std::unique_ptr<Layer> layer,
                       technique.Create(problem, request.options, Device::kCpu, request.seed));
  if (request.parameters != nullptr) {
    TFB_RETURN_IF_ERROR(layer->SetParameters(*request.parameters));
  }
  ThreadPool pool(request.threads);
  Tensor kept = NanMemory(layer->kept_bytes());
  RunAndGradients result;
  TFB_ASSIGN_OR_RETURN(result.outputs, RunKeeping(*layer, inputs, &pool, BytesOf(kept)));
  Tensor workspace = NanMemory(layer->backward_workspace_bytes(request.threads));
  Execution execution;
  execution.pool = &pool;
  execution.workspace = BytesOf(workspace);
  execution.kept = BytesOf(kept);
  TFB_RETURN_IF_ERROR(layer->SetUpBackward(inputs, execution));
  result.inputs = NanOutputs(layer->input_gradients());
  result.parameters = NanOutputs(layer->parameter_gradients());
  BackwardCall call;
  call.inputs = inputs;
  call.outputs = ViewsOf(result.outputs);
  call.output_gradients = ViewsOf(output_gradients);
  call.input_gradients = MutableViewsOf(result.inputs);
  call.parameter_gradients = MutableViewsOf(result.parameters);
  TFB_RETURN_IF_ERROR(layer->Backward(call, execution));
  return result;
}

absl::StatusOr<NamedTensors> RunCudaLayer(Layer& layer, Device device, const Inputs& inputs) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  DeviceMirror mirror(runtime);
  Inputs device_inputs;
  for (const auto& [name, view] : inputs) {
    TFB_ASSIGN_OR_RETURN(const ConstTensorView copy, mirror.Copy(view));
    device_inputs.Set(name, copy);
  }
  NamedTensors outputs = NanOutputs(layer.outputs());
  Outputs device_outputs;
  for (auto& [name, tensor] : outputs) {
    TFB_ASSIGN_OR_RETURN(const TensorView copy, mirror.CopyForWriting(tensor.view()));
    device_outputs.Set(name, copy);
  }
  ThreadPool pool(1);
  const size_t bytes = layer.workspace_bytes(1);
  TFB_ASSIGN_OR_RETURN(const DeviceBuffer workspace, runtime->Allocate(bytes));
  TFB_RETURN_IF_ERROR(runtime->Fill(workspace.data(), 0xFF, bytes));
  Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(workspace.As<std::byte>(), bytes);
  TFB_RETURN_IF_ERROR(layer.Setup(device_inputs, execution));
  TFB_RETURN_IF_ERROR(layer.Run(device_inputs, device_outputs, execution));
  TFB_RETURN_IF_ERROR(mirror.CopyBack());
  return outputs;
}

absl::StatusOr<NamedTensors> RunTechnique(const Technique& technique, const Problem& problem,
                                          const Inputs& inputs, const RunRequest& request) {
  TFB_ASSIGN_OR_RETURN(const std::unique_ptr<Layer> layer,
                       technique.Create(problem, request.options, request.device, request.seed));
  if (request.parameters != nullptr) {
    TFB_RETURN_IF_ERROR(layer->SetParameters(*request.parameters));
  }
  if (request.device != Device::kCpu) return RunCudaLayer(*layer, request.device, inputs);
  return RunLayer(*layer, inputs, request.threads);
}

absl::StatusOr<NamedTensors> DefineTechnique(const Technique& technique, const Problem& problem,
                                             const Inputs& inputs, const RunRequest& request,
                                             const DefinitionRequest& definition) {
  TFB_ASSIGN_OR_RETURN(const std::unique_ptr<Layer> layer,
                       technique.Create(problem, request.options, request.device, request.seed));
  if (request.parameters != nullptr) {
    TFB_RETURN_IF_ERROR(layer->SetParameters(*request.parameters));
  }
  NamedTensors outputs;
  TFB_RETURN_IF_ERROR(technique.Define(problem, request.options, layer->parameters(), inputs,
                                       definition, &outputs));
  return outputs;
}

Cost CostOf(const Technique& technique, const Problem& problem, const Options& options) {
  const std::unique_ptr<Layer> layer =
      technique.Create(problem, options, Device::kCpu, /*seed=*/1).value();
  const NamedTensors inputs = RandomInputs(layer->inputs(), /*seed=*/1);
  RunLayer(*layer, ViewsOf(inputs)).value();
  return layer->cost();
}

std::vector<int64_t> KeysSeen(const Technique& technique, Problem problem, const Options& options,
                              int64_t head, int64_t i) {
  problem.value_dim = problem.kv_tokens;
  NamedTensors inputs = RandomInputs(technique.InputSpecs(problem, options).value(), 11);
  const TensorView v = inputs.at("v").view();
  Fill(v, 0);
  for (int64_t h = 0; h < problem.kv_heads; ++h) {
    for (int64_t j = 0; j < problem.kv_tokens; ++j) *v.MutableAt<float>(0, h, j, j) = 1;
  }
  const NamedTensors outputs = RunTechnique(technique, problem, ViewsOf(inputs), {options}).value();
  std::vector<int64_t> keys;
  for (int64_t j = 0; j < problem.kv_tokens; ++j) {
    if (*outputs.at("out").view().At<float>(0, head, i, j) > 0) keys.push_back(j);
  }
  return keys;
}

double MaxDifference(const ConstTensorView& a, const ConstTensorView& b) {
  if (a.shape() != b.shape()) return std::numeric_limits<double>::infinity();
  double max = 0;
  ForEachOffset(a, b, [&](int64_t i, int64_t j) {
    const double x = a.Get(i), y = b.Get(j);
    if (x == y || (std::isnan(x) && std::isnan(y))) return;
    const double difference = std::abs(x - y);
    if (!(difference <= max)) {
      max = std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
    }
  });
  return max;
}

double MaxAbs(const ConstTensorView& view) {
  double max = 0;
  ForEachOffset(view, view,
                [&](int64_t i, int64_t) { max = std::fmax(max, std::abs(view.Get(i))); });
  return max;
}

const Technique& FindTechnique(absl::string_view name) { return **Registry::Global().Find(name); }

SafetensorsFile GoldenFile(const std::string& path) {
  // Bazel runs a test in the root of its runfiles, where data files have their paths in the
  // repository.
  absl::StatusOr<SafetensorsFile> file = ReadSafetensors(path);
  if (!file.ok()) {
    std::fprintf(stderr, "%s\n", file.status().ToString().c_str());
    std::abort();
  }
  return *std::move(file);
}

}  // namespace tfb
