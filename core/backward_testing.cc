#include "core/backward_testing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/allocations.h"
#include "core/random.h"
#include "core/status.h"
#include "core/testing.h"
#include "core/thread_pool.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

// Aligned bytes, filled with the float NaN.
Tensor NanBytes(size_t bytes) {
  Tensor memory(DType::kF32, {static_cast<int64_t>((bytes + 3) / 4)});
  Fill(memory.view(), std::numeric_limits<double>::quiet_NaN());
  return memory;
}
absl::Span<std::byte> BytesOf(Tensor& memory, size_t bytes) {
  return absl::MakeSpan(static_cast<std::byte*>(memory.raw()), bytes);
}

double Norm(const ConstTensorView& view) {
  double sum = 0;
  ForEachOffset(view, view, [&](int64_t at, int64_t) { sum += view.Get(at) * view.Get(at); });
  return std::sqrt(sum);
}

double Dot(const ConstTensorView& a, const ConstTensorView& b) {
  double sum = 0;
  ForEachOffset(a, b, [&](int64_t i, int64_t j) { sum += a.Get(i) * b.Get(j); });
  return sum;
}

// Returns a unit direction: the first four are random, the others single coordinates.
Tensor Direction(const Shape& shape, const std::string& name, int number) {
  Tensor d(DType::kF64, shape);
  if (number < 4) {
    FillNormal(&d, 1, name + std::to_string(number));
    const double norm = Norm(d.view());
    for (double& value : d.span<double>()) value /= norm;
  } else {
    Fill(d.view(), 0);
    d.span<double>()[(d.num_elements() - 1) * (number - 4) / 3] = 1;
  }
  return d;
}

NamedTensors InDouble(const NamedTensors& tensors) {
  NamedTensors copies;
  for (const auto& [name, tensor] : tensors) {
    copies[name] = IsFloating(tensor.dtype()) ? tensor.CloneAs(DType::kF64) : tensor.Clone();
  }
  return copies;
}

void ExpectSameTensors(const NamedTensors& a, const NamedTensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) {
    const auto* bytes = static_cast<const std::byte*>(tensor.raw());
    const auto* others = static_cast<const std::byte*>(b.at(name).raw());
    EXPECT_TRUE(std::equal(bytes, bytes + tensor.bytes(), others)) << name;
  }
}

}  // namespace

absl::StatusOr<LayerGradients> RunBackward(Layer& layer, const Inputs& inputs,
                                           const NamedTensors& output_gradients, int threads) {
  ThreadPool pool(threads);
  const size_t forward = layer.workspace_bytes(threads);
  Tensor workspace = NanBytes(forward);
  Execution execution;
  execution.pool = &pool;
  execution.workspace = BytesOf(workspace, forward);
  TFB_RETURN_IF_ERROR(layer.Setup(inputs, execution));
  const size_t backward = layer.backward_workspace_bytes(threads), kept = layer.kept_bytes();
  Tensor backward_workspace = NanBytes(backward), memory = NanBytes(kept);
  Execution of_backward = execution;
  of_backward.workspace = BytesOf(backward_workspace, backward);
  TFB_RETURN_IF_ERROR(layer.SetUpBackward(inputs, of_backward));

  LayerGradients result;
  result.outputs = NanOutputs(layer.outputs());
  const auto add = [](const TensorSpec& spec, NamedTensors* tensors) {
    Tensor& tensor = (*tensors)[spec.name] = Tensor(spec.dtype, spec.shape);
    Fill(tensor.view(), std::numeric_limits<double>::quiet_NaN());
  };
  for (const TensorSpec& spec : layer.input_gradients()) {
    if (!inputs.Get(spec.name).empty()) add(spec, &result.inputs);
  }
  for (const TensorSpec& spec : layer.parameter_gradients()) add(spec, &result.parameters);

  NamedTensors without_kept = NanOutputs(layer.outputs());
  TFB_RETURN_IF_ERROR(layer.Run(inputs, MutableViewsOf(without_kept), execution));
  execution.kept = of_backward.kept = BytesOf(memory, kept);
  const Outputs outputs = MutableViewsOf(result.outputs);
  const BackwardCall call = {inputs, ViewsOf(result.outputs), ViewsOf(output_gradients),
                             MutableViewsOf(result.inputs), MutableViewsOf(result.parameters)};
  Fill(workspace.view(), std::numeric_limits<double>::quiet_NaN());
  Fill(backward_workspace.view(), std::numeric_limits<double>::quiet_NaN());
  const int64_t before = AllocationCount();
  TFB_RETURN_IF_ERROR(layer.Run(inputs, outputs, execution));
  TFB_RETURN_IF_ERROR(layer.Backward(call, of_backward));
  EXPECT_EQ(AllocationCount() - before, 0);
  ExpectSameTensors(result.outputs, without_kept);
  return result;
}

double AttentionRoundings(const Problem& p) {
  return static_cast<double>(8 * p.model_dim() + 4 * p.head_dim + 4 * p.kv_tokens +
                             p.batch * (p.query_tokens + p.kv_tokens));
}

void ExpectGradientsOfDefinition(const Technique& technique, const Problem& problem,
                                 const GradientRequest& request) {
  const std::unique_ptr<Layer> layer =
      technique.Create(problem, request.options, Device::kCpu, 1).value();
  NamedTensors moved;  // parameters that begin as 0
  for (const auto& [name, parameter] : layer->parameters()) {
    if (!IsFloating(parameter.dtype()) || Norm(parameter.view()) > 0) continue;
    FillNormal(&(moved[name] = parameter.Clone()), 1, name, 0, 0.5);
  }
  ASSERT_EQ(layer->SetParameters(moved), absl::OkStatus());
  NamedTensors inputs = RandomInputs(layer->inputs(), 1);
  for (const auto& [name, tensor] : request.inputs) inputs[name] = tensor.Clone();
  NamedTensors g;
  for (const TensorSpec& spec : layer->output_gradients()) {
    if (spec.name != "out") continue;
    g["out"] = Tensor(spec.dtype, spec.shape);
    FillNormal(&g["out"], 1, "gradient");
  }
  const absl::StatusOr<LayerGradients> gradients = RunBackward(*layer, ViewsOf(inputs), g);
  ASSERT_EQ(gradients.status(), absl::OkStatus());
  for (const int threads : {2, 3}) {
    const auto more = RunBackward(*layer, ViewsOf(inputs), g, threads);
    ASSERT_EQ(more.status(), absl::OkStatus());
    ExpectSameTensors(more->inputs, gradients->inputs);
    ExpectSameTensors(more->parameters, gradients->parameters);
  }

  NamedTensors exact_inputs, parameters;
  for (const auto& [name, tensor] : inputs) {
    exact_inputs[name] =
        tensor.dtype() == DType::kF32 ? tensor.CloneAs(DType::kF64) : tensor.Clone();
  }
  for (const auto& [name, tensor] : layer->parameters()) {
    parameters[name] = tensor.dtype() == DType::kF32 ? tensor.CloneAs(DType::kF64) : tensor.Clone();
  }
  const auto loss = [&] {
    NamedTensors outputs;
    EXPECT_EQ(
        technique.Define(problem, request.options, parameters, ViewsOf(exact_inputs), {}, &outputs),
        absl::OkStatus());
    return Dot(g.at("out").view(), outputs.at("out").view());
  };
  const double of_loss = Norm(g.at("out").view()) * Norm(gradients->outputs.at("out").view());
  const auto check = [&](const std::string& name, const Tensor& gradient, Tensor& x) {
    SCOPED_TRACE(name);
    if (x.num_elements() == 0) return;
    const double norm = Norm(gradient.view()), h = 1e-5 * Norm(x.view());
    const Tensor before = x.Clone();
    for (int number = 0; number < 7; ++number) {
      const Tensor d = Direction(x.shape(), name, number);
      double expected = 0;
      for (const double sign : {1.0, -1.0}) {
        for (int64_t n = 0; n < x.num_elements(); ++n) {
          x.span<double>()[n] = before.span<double>()[n] + sign * h * d.span<double>()[n];
        }
        expected += sign * loss() / (2 * h);
      }
      CopyElements(before.view(), x.view());
      // The difference of two losses of norm |g| |out| in float64 is off by 2^-52 of them.
      EXPECT_NEAR(Dot(gradient.view(), d.view()), expected,
                  (request.roundings * 0x1p-24 + 1e-9) * (norm + of_loss / Norm(x.view())) +
                      0x1p-52 * of_loss / h)
          << "direction " << number;
    }
  };
  for (const auto& [name, gradient] : gradients->inputs) {
    check(name, gradient, exact_inputs.at(name));
  }
  for (const auto& [name, gradient] : gradients->parameters) {
    check(name, gradient, parameters.at(name));
  }
}

NamedTensors RandomOutputGradients(const Layer& layer, uint64_t seed) {
  std::vector<TensorSpec> specs = layer.output_gradients();
  for (TensorSpec& spec : specs) spec.optional = false;
  return RandomInputs(specs, seed);
}

namespace {

absl::StatusOr<NamedTensors> Together(NamedTensors of_inputs, NamedTensors of_parameters) {
  for (auto& [name, gradient] : of_parameters) {
    if (!of_inputs.emplace(name, std::move(gradient)).second) {
      return absl::InternalError(absl::StrCat(name, " is an input and a parameter"));
    }
  }
  return of_inputs;
}

}  // namespace

absl::StatusOr<NamedTensors> GradientsOf(Layer& layer, const Inputs& inputs,
                                         const NamedTensors& output_gradients, int threads) {
  TFB_ASSIGN_OR_RETURN(LayerGradients gradients,
                       RunBackward(layer, inputs, output_gradients, threads));
  return Together(std::move(gradients.inputs), std::move(gradients.parameters));
}

absl::StatusOr<NamedTensors> GradientsOn(Device device, Layer& layer, const Inputs& inputs,
                                         const NamedTensors& output_gradients) {
  if (device == Device::kCpu) return GradientsOf(layer, inputs, output_gradients);
  TFB_ASSIGN_OR_RETURN(RunAndGradients pass,
                       BackwardOfCudaLayer(layer, device, inputs, output_gradients));
  NamedTensors of_inputs;
  for (auto& [name, gradient] : pass.inputs) {
    if (!inputs.Get(name).empty()) of_inputs[name] = std::move(gradient);
  }
  return Together(std::move(of_inputs), std::move(pass.parameters));
}

absl::StatusOr<std::vector<Slope>> SlopesOf(const GradientPoint& point,
                                            const NamedTensors& gradients) {
  constexpr double kErrorOfTerm = 2e-5;
  NamedTensors inputs = InDouble(*point.inputs), parameters = InDouble(*point.parameters);
  const auto define = [&]() -> absl::StatusOr<NamedTensors> {
    NamedTensors outputs;
    TFB_RETURN_IF_ERROR(point.technique->Define(point.problem, point.options, parameters,
                                                ViewsOf(inputs), {}, &outputs));
    return outputs;
  };
  std::vector<Slope> slopes;
  for (const auto& [name, gradient] : gradients) {
    const TensorView x = (inputs.count(name) > 0 ? inputs : parameters).at(name).view();
    Tensor origin(DType::kF64, x.shape());
    CopyElements(x, origin.view());
    for (int trial = 0; trial < 2; ++trial) {
      Tensor direction(DType::kF64, x.shape());
      FillNormal(&direction, /*seed=*/5, absl::StrCat(name, trial), /*mean=*/0, /*deviation=*/1);
      const double length = Norm(direction.view()), h = 1e-5 * Norm(x);
      Slope slope = {name, 0, 0, 0};
      for (int64_t n = 0; n < x.num_elements(); ++n) {
        slope.of_layer += gradient.view().Get(n) * direction.view().Get(n) / length;
      }
      const auto move = [&](double step) {
        for (int64_t n = 0; n < x.num_elements(); ++n) {
          x.Set(n, origin.view().Get(n) + step / length * direction.view().Get(n));
        }
        return define();
      };
      TFB_ASSIGN_OR_RETURN(const NamedTensors above, move(h));
      TFB_ASSIGN_OR_RETURN(const NamedTensors below, move(-h));
      CopyElements(origin.view(), x);
      double rounding = 0;
      for (const auto& [output, g] : *point.output_gradients) {
        const ConstTensorView high = above.at(output).view(), low = below.at(output).view();
        for (int64_t n = 0; n < g.num_elements(); ++n) {
          if (!std::isfinite(low.Get(n))) continue;
          slope.of_definition += g.view().Get(n) * (high.Get(n) - low.Get(n)) / (2 * h);
          rounding += std::pow(g.view().Get(n) * low.Get(n) * 0x1p-52 / h, 2);
        }
      }
      const double elements = static_cast<double>(x.num_elements());
      slope.bound = 3 * kErrorOfTerm * Norm(gradient.view()) / std::sqrt(elements) +
                    std::sqrt(rounding) + 1e-10 * std::abs(slope.of_definition);
      slopes.push_back(slope);
    }
  }
  return slopes;
}

}  // namespace tfb
