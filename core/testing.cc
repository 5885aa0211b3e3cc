#include "core/testing.h"

#include <algorithm>
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
                       technique.Create(problem, request.options, request.device, request.seed));
  if (request.parameters != nullptr) {
    TFB_RETURN_IF_ERROR(layer->SetParameters(*request.parameters));
  }
  if (request.device != Device::kCpu) {
    return BackwardOfCudaLayer(*layer, request.device, inputs, output_gradients);
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
  const std::vector<std::string>& asked = request.input_gradients;
  std::vector<TensorSpec> of_inputs = layer->input_gradients();
  of_inputs.erase(std::remove_if(of_inputs.begin(), of_inputs.end(),
                                 [&asked](const TensorSpec& spec) {
                                   return !asked.empty() && std::find(asked.begin(), asked.end(),
                                                                      spec.name) == asked.end();
                                 }),
                  of_inputs.end());
  result.inputs = NanOutputs(of_inputs);
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

namespace {

// Memory of a device, filled with NaN.
absl::StatusOr<DeviceBuffer> NanBuffer(CudaRuntime* runtime, size_t bytes) {
  TFB_ASSIGN_OR_RETURN(DeviceBuffer buffer, runtime->Allocate(bytes));
  TFB_RETURN_IF_ERROR(runtime->Fill(buffer.data(), 0xFF, bytes));
  return buffer;
}
absl::Span<std::byte> BytesOf(const DeviceBuffer& buffer, size_t bytes) {
  return absl::MakeSpan(buffer.As<std::byte>(), bytes);
}

absl::StatusOr<Inputs> CopyTo(DeviceMirror* mirror, const Inputs& host) {
  Inputs copies;
  for (const auto& [name, view] : host) {
    TFB_ASSIGN_OR_RETURN(const ConstTensorView copy, mirror->Copy(view));
    copies.Set(name, copy);
  }
  return copies;
}
absl::StatusOr<Outputs> CopyForWriting(DeviceMirror* mirror, NamedTensors& host) {
  Outputs copies;
  for (auto& [name, tensor] : host) {
    TFB_ASSIGN_OR_RETURN(const TensorView copy, mirror->CopyForWriting(tensor.view()));
    copies.Set(name, copy);
  }
  return copies;
}

}  // namespace

absl::StatusOr<RunAndGradients> BackwardOfCudaLayer(Layer& layer, Device device,
                                                    const Inputs& inputs,
                                                    const NamedTensors& output_gradients) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  DeviceMirror mirror(runtime);
  ThreadPool pool(1);
  RunAndGradients result = {NanOutputs(layer.outputs()), NanOutputs(layer.input_gradients()),
                            NanOutputs(layer.parameter_gradients())};
  BackwardCall call;
  TFB_ASSIGN_OR_RETURN(call.inputs, CopyTo(&mirror, inputs));
  TFB_ASSIGN_OR_RETURN(call.output_gradients, CopyTo(&mirror, ViewsOf(output_gradients)));
  TFB_ASSIGN_OR_RETURN(const Outputs outputs, CopyForWriting(&mirror, result.outputs));
  for (const auto& [name, view] : outputs) call.outputs.Set(name, view);
  TFB_ASSIGN_OR_RETURN(call.input_gradients, CopyForWriting(&mirror, result.inputs));
  TFB_ASSIGN_OR_RETURN(call.parameter_gradients, CopyForWriting(&mirror, result.parameters));
  const size_t forward_bytes = layer.workspace_bytes(1);
  TFB_ASSIGN_OR_RETURN(const DeviceBuffer forward, NanBuffer(runtime, forward_bytes));
  TFB_ASSIGN_OR_RETURN(const DeviceBuffer kept, NanBuffer(runtime, layer.kept_bytes()));
  Execution execution;
  execution.pool = &pool;
  execution.kept = BytesOf(kept, layer.kept_bytes());
  execution.workspace = BytesOf(forward, forward_bytes);
  TFB_RETURN_IF_ERROR(layer.Setup(call.inputs, execution));
  TFB_RETURN_IF_ERROR(layer.Run(call.inputs, outputs, execution));
  const size_t bytes = layer.backward_workspace_bytes(1);
  TFB_ASSIGN_OR_RETURN(const DeviceBuffer backward, NanBuffer(runtime, bytes));
  execution.workspace = BytesOf(backward, bytes);
  TFB_RETURN_IF_ERROR(layer.SetUpBackward(call.inputs, execution));
  TFB_RETURN_IF_ERROR(layer.Backward(call, execution));
  TFB_RETURN_IF_ERROR(mirror.CopyBack());
  return result;
}

absl::StatusOr<NamedTensors> RunCudaLayer(Layer& layer, Device device, const Inputs& inputs) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  DeviceMirror mirror(runtime);
  TFB_ASSIGN_OR_RETURN(const Inputs device_inputs, CopyTo(&mirror, inputs));
  NamedTensors outputs = NanOutputs(layer.outputs());
  TFB_ASSIGN_OR_RETURN(const Outputs device_outputs, CopyForWriting(&mirror, outputs));
  ThreadPool pool(1);
  const size_t bytes = layer.workspace_bytes(1);
  TFB_ASSIGN_OR_RETURN(const DeviceBuffer workspace, NanBuffer(runtime, bytes));
  Execution execution;
  execution.pool = &pool;
  execution.workspace = BytesOf(workspace, bytes);
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

double SumOfProducts(const ConstTensorView& a, const ConstTensorView& b) {
  double sum = 0;
  ForEachOffset(a, b, [&](int64_t i, int64_t j) { sum += a.Get(i) * b.Get(j); });
  return sum;
}

Tensor RandomDirection(const Shape& shape, uint64_t seed) {
  Tensor direction(DType::kF64, shape);
  FillNormal(&direction, seed, "direction");
  const double length = std::sqrt(SumOfProducts(direction.view(), direction.view()));
  for (double& d : direction.span<double>()) d /= length;
  return direction;
}

double CentralDifference(Tensor* x, const ConstTensorView& direction,
                         absl::FunctionRef<double()> f) {
  const Tensor at = x->Clone();
  const double h = 1e-5 * std::sqrt(SumOfProducts(at.view(), at.view()));
  const auto moved_by = [&](double step) {
    ForEachOffset(at.view(), direction, [&](int64_t n, int64_t d) {
      x->view().Set(n, at.view().Get(n) + step * direction.Get(d));
    });
    return f();
  };
  const double slope = (moved_by(h) - moved_by(-h)) / (2 * h);
  *x = at.Clone();
  return slope;
}

namespace {

// Numbers that a definition is given, in float64.
struct Numbers {
  NamedTensors inputs, parameters, output_gradients;

  template <class Body>
  void ForEach(const Body& body) {
    for (NamedTensors* tensors : {&inputs, &parameters, &output_gradients}) {
      for (auto& [name, tensor] : *tensors) body(name, tensor);
    }
  }
};

NamedTensors InFloat64(const NamedTensors& tensors) {
  NamedTensors converted;
  for (const auto& [name, tensor] : tensors) {
    converted[name] = IsFloating(tensor.dtype()) ? tensor.CloneAs(DType::kF64) : tensor.Clone();
  }
  return converted;
}

}  // namespace

DirectionalDerivative DerivativeOf(absl::string_view input_or_parameter, const Technique& technique,
                                   const Problem& problem, const NamedTensors& inputs,
                                   const NamedTensors& output_gradients,
                                   const RunAndGradients& pass, const RunRequest& request) {
  const auto layer = technique.Create(problem, request.options, Device::kCpu, request.seed).value();
  const NamedTensors& parameters =
      request.parameters == nullptr ? layer->parameters() : *request.parameters;
  const std::string name(input_or_parameter);
  const bool is_input = inputs.count(name) > 0;
  const Tensor& gradient = is_input ? pass.inputs.at(name) : pass.parameters.at(name);
  const Tensor direction = RandomDirection(gradient.shape(), /*seed=*/23);
  const auto slope_at = [&](Numbers* numbers) {
    const auto f = [&] {
      NamedTensors outputs;
      const absl::Status status =
          technique.Define(problem, request.options, numbers->parameters, ViewsOf(numbers->inputs),
                           DefinitionRequest(), &outputs);
      if (!status.ok()) std::abort();
      double sum = 0;
      for (const auto& [output, g] : numbers->output_gradients) {
        // The log-sum-exp of a row without keys is -inf whatever x is.
        for (double& y : outputs.at(output).span<double>()) y = std::isinf(y) ? 0 : y;
        sum += SumOfProducts(outputs.at(output).view(), g.view());
      }
      return sum;
    };
    Tensor& x = (is_input ? numbers->inputs : numbers->parameters).at(name);
    return CentralDifference(&x, direction.view(), f);
  };
  Numbers numbers{InFloat64(inputs), InFloat64(parameters), InFloat64(output_gradients)};
  DirectionalDerivative result;
  result.of_layer = SumOfProducts(gradient.view(), direction.view());
  result.of_definition = slope_at(&numbers);
  constexpr int kPoints = 3;
  double squares = 0;
  for (int point = 0; point < kPoints; ++point) {
    Numbers near{InFloat64(inputs), InFloat64(parameters), InFloat64(output_gradients)};
    near.ForEach([&](const std::string& of, Tensor& tensor) {
      if (tensor.dtype() != DType::kF64) return;
      const RandomStream noise(point, of);
      for (int64_t n = 0; n < tensor.num_elements(); ++n) {
        tensor.span<double>()[n] *= 1 + 2e-5 * noise.Normal(n);
      }
    });
    const double difference = slope_at(&near) - result.of_definition;
    squares += difference * difference;
  }
  result.bound = 3 * std::sqrt(squares / kPoints);
  return result;
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
