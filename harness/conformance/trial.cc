#include "harness/conformance/trial.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/cuda/blas.h"
#include "core/cuda/simulator/simulator.h"
#include "core/random.h"
#include "core/status.h"
#include "gtest/gtest.h"
#include "harness/inputs/inputs.h"
#include "harness/judge/errors.h"
#include "harness/judge/guarded.h"

namespace tfb::conformance {
namespace {

// Runs a layer with RunSettings, and checks all accesses to memory.
absl::StatusOr<NamedTensors> GuardedRun(Layer* layer, Device device, const NamedTensors& inputs,
                                        const RunSettings& settings) {
  FollowSchedule(settings.schedule);
  TFB_ASSIGN_OR_RETURN(PlacedTensors read, PlacedTensors::Of(inputs, settings.inputs, device));
  TFB_ASSIGN_OR_RETURN(PlacedTensors written,
                       PlacedTensors::For(layer->outputs(), settings.outputs, device));
  ThreadPool pool(settings.threads);
  TFB_ASSIGN_OR_RETURN(
      GuardedWorkspace workspace,
      GuardedWorkspace::Allocate(layer->workspace_bytes(settings.threads), device));
  BoundLayer bound;
  bound.layer = layer;
  bound.outputs = written.outputs();
  bound.execution.pool = &pool;
  bound.execution.workspace = workspace.bytes();
  if (settings.setup) {
    const NamedTensors& seen = settings.setup_inputs ? *settings.setup_inputs : inputs;
    TFB_ASSIGN_OR_RETURN(PlacedTensors setup, PlacedTensors::Of(seen, settings.inputs, device));
    bound.inputs = setup.inputs();
    TFB_RETURN_IF_ERROR(workspace.Call("workspace of Setup", [&] { return bound.Setup(); }));
  }
  bound.inputs = read.inputs();
  TFB_RETURN_IF_ERROR(workspace.Call("workspace", [&] { return bound.Run(); }));
  TFB_RETURN_IF_ERROR(read.CheckUnchanged("input", inputs));
  return written.Written("output");
}

bool HasShape(const NamedTensors& tensors, absl::string_view name, const Shape& shape) {
  const auto found = tensors.find(name);
  return found != tensors.end() && found->second.shape() == shape;
}

}  // namespace

void FollowSchedule(uint64_t schedule) {
  cuda_simulator::Settings settings = cuda_simulator::CurrentSettings();
  settings.seed = schedule;
  cuda_simulator::Configure(settings);
}

std::string LabelOf(const Problem& p) {
  std::string label = absl::StrCat("b", p.batch, "_h", p.query_heads);
  if (p.kv_heads != p.query_heads) absl::StrAppend(&label, "over", p.kv_heads);
  absl::StrAppend(&label, "_t", p.query_tokens);
  if (p.kv_tokens != p.query_tokens) absl::StrAppend(&label, "over", p.kv_tokens);
  absl::StrAppend(&label, "_d", p.head_dim);
  if (p.value_dim != p.head_dim) absl::StrAppend(&label, "v", p.value_dim);
  if (p.causal) absl::StrAppend(&label, "_causal");
  if (p.dtype != DType::kF32) absl::StrAppend(&label, "_", Name(p.dtype));
  return label;
}

Problem Usual(bool causal, DType dtype) {
  return Problem::SelfAttention(2, 2, 130, 16, causal, dtype);
}

std::vector<Problem> UsualBoth() { return {Usual(false), Usual(true)}; }

bool IsExhaustive() {
  const char* exhaustive = std::getenv("TFB_EXHAUSTIVE");
  return exhaustive != nullptr && *exhaustive != '\0';
}

bool WouldTakeSeconds(Device device, double flops) {
  return device == Device::kSimulator && !IsExhaustive() && flops > 5e7;
}

void Skip(const std::string& reason) { GTEST_SKIP() << reason; }

bool IsRefusal(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsUnimplemented(status);
}

std::unique_ptr<Trial> Trial::Make(const Job& job, uint64_t seed) {
  std::unique_ptr<Trial> trial(new Trial(job));
  trial->job_.seed = seed;
  const auto stop = [](absl::string_view step, const absl::Status& status) {
    if (IsRefusal(status) || absl::IsUnavailable(status)) {
      Skip(std::string(status.message()));
    } else {
      ADD_FAILURE() << step << ": " << status;
    }
    return nullptr;
  };
  if (const absl::Status device = DeviceStatus(job.device); !device.ok()) {
    return stop("device", device);
  }
  auto layer = trial->job_.CreateLayer();
  if (!layer.ok()) return stop("Create", layer.status());
  trial->layer_ = *std::move(layer);
  auto inputs = trial->job_.LoadInputs();
  if (!inputs.ok()) return stop("inputs", inputs.status());
  trial->inputs_ = *std::move(inputs);
  return trial;
}

bool Trial::RequireQkv() {
  const Problem& p = job_.problem;
  if (HasShape(inputs_, "q", {p.batch, p.query_heads, p.query_tokens, p.head_dim}) &&
      (inputs_.count("k") == 0 ||
       HasShape(inputs_, "k", {p.batch, p.kv_heads, p.kv_tokens, p.head_dim})) &&
      HasShape(inputs_, "v", {p.batch, p.kv_heads, p.kv_tokens, p.value_dim})) {
    return true;
  }
  Skip("the technique does not read q, k and v of the problem's shapes");
  return false;
}

bool Trial::RequireKeyMask() {
  for (const TensorSpec& spec : layer_->inputs()) {
    if (spec.name != "key_mask" || spec.dtype != DType::kU8) continue;
    Tensor mask(spec.dtype, spec.shape);
    Fill(mask.view(), 1);
    inputs_["key_mask"] = std::move(mask);
    return true;
  }
  Skip("the technique reads no key_mask");
  return false;
}

bool Trial::RequireExact() {
  if (job_.technique->info().exactness == Exactness::kExact) return true;
  Skip(absl::StrCat("the case is about exact attention; this technique is ",
                    Name(job_.technique->info().exactness)));
  return false;
}

NamedTensors Trial::Run(const RunSettings& settings) {
  auto outputs = GuardedRun(layer_.get(), job_.device, inputs_, settings);
  if (outputs.ok()) return *std::move(outputs);
  ADD_FAILURE() << outputs.status();
  return {};
}

NamedTensors Trial::Define(bool weights, ThreadPool* pool) {
  return DefineOn(ViewsOf(inputs_), layer_->parameters(), weights, /*computed=*/nullptr, pool);
}

NamedTensors Trial::DefineOn(const Inputs& inputs, const NamedTensors& parameters, bool weights,
                             const NamedTensors* computed, ThreadPool* pool) {
  NamedTensors reference;
  DefinitionRequest request;
  request.weights = weights;
  request.computed = computed;
  request.pool = pool;
  const absl::Status status =
      job_.technique->Define(job_.problem, job_.options, parameters, inputs, request, &reference);
  for (const auto& [name, tensor] : reference) {
    EXPECT_TRUE(tensor.PaddingIsIntact()) << "the definition wrote behind the end of " << name;
  }
  if (status.ok() && reference.count("out") > 0) return reference;
  ADD_FAILURE() << "Define: " << (status.ok() ? "has no out" : status.ToString());
  return {};
}

// Evaluates the definition on inputs whose elements differ by about 16 roundings of fp32 (2^-20).
std::vector<NamedTensors> Trial::DefinitionsNearby() {
  std::vector<NamedTensors> nearby;
  for (uint64_t variant = 0; variant < 2; ++variant) {
    NamedTensors inputs;
    for (const auto& [name, tensor] : inputs_) {
      if (!IsFloating(tensor.dtype())) {
        inputs[name] = tensor.Clone();
        continue;
      }
      Tensor& moved = inputs[name] = tensor.CloneAs(DType::kF64);
      const RandomStream random(variant, absl::StrCat("nearby/", name));
      for (int64_t i = 0; i < moved.num_elements(); ++i) {
        moved.span<double>()[i] *= 1 + std::ldexp(random.Normal(i), -20);
      }
    }
    nearby.push_back(DefineOn(ViewsOf(inputs), layer_->parameters(), /*weights=*/false));
  }
  return nearby;
}

double Trial::ScaleOf(const std::string& name, const ConstTensorView& values,
                      const NamedTensors& reference) const {
  double scale = LargestMagnitude(values);
  const auto v = inputs_.find("v");
  if (v != inputs_.end()) scale = std::max(scale, LargestMagnitude(v->second.view()));
  const auto parts = reference.find(absl::StrCat(name, ".scale"));
  if (parts != reference.end()) scale = std::max(scale, LargestMagnitude(parts->second.view()));
  return scale;
}

Shape PlaceIn(const Shape& shape, int64_t element) {
  Shape place = shape;
  for (size_t axis = shape.size(); axis-- > 0;) {
    place[axis] = element % shape[axis];
    element /= shape[axis];
  }
  return place;
}

void Trial::ExpectMatchesDefinition(const NamedTensors& outputs, const Tolerance& tolerance) {
  if (outputs.empty()) return;  // the run has failed already
  const NamedTensors reference =
      DefineOn(ViewsOf(inputs_), layer_->parameters(), /*weights=*/false, &outputs);
  const std::vector<NamedTensors> nearby =
      tolerance.conditioned ? DefinitionsNearby() : std::vector<NamedTensors>();
  const int64_t keys = std::max(job_.problem.kv_tokens, job_.problem.query_tokens);
  for (const auto& [name, output] : outputs) {
    const auto found = reference.find(name);
    if (found == reference.end()) continue;
    const Tensor& expected = found->second;
    ASSERT_EQ(ShapeString(output.shape()), ShapeString(expected.shape())) << name;
    double scale = LargestMagnitude(expected.view());
    double bound = 0;  // of integers
    if (name == "log_sum_exp") {
      bound = LogSumExpBound(keys, scale) + tolerance.log_sum_exp;
    } else if (IsFloating(output.dtype())) {
      scale = ScaleOf(name, expected.view(), reference);
      bound = AbsoluteBound(output.dtype(), keys) * scale;
    }
    bound = bound * tolerance.factor + tolerance.absolute;
    int64_t reported = 0;
    for (int64_t i = 0; i < expected.num_elements() && reported < 3; ++i) {
      const double y = output.view().Get(i);
      const double r = expected.view().Get(i);
      if (y == r || (std::isnan(y) && std::isnan(r))) continue;
      double allowed = bound;
      for (const NamedTensors& other : nearby) {
        const double change = std::abs(other.at(name).view().Get(i) - r);
        if (!std::isnan(change)) allowed = std::max(allowed, bound + 4 * change);
      }
      if (std::abs(y - r) <= allowed) continue;
      ++reported;
      ADD_FAILURE() << name << " " << ShapeString(output.shape()) << ": element "
                    << ShapeString(PlaceIn(output.shape(), i)) << " is " << y
                    << ", the definition says " << r << ", allowed is a difference of " << allowed;
    }
  }
}

void Trial::ExpectRunMatchesDefinition(const Tolerance& tolerance) {
  ExpectMatchesDefinition(Run(), tolerance);
}

absl::StatusOr<BoundLayer> Bind(Trial* trial, ThreadPool* pool, bool optional_outputs) {
  return tfb::Bind(&trial->layer(), trial->job().device, ViewsOf(trial->inputs()), pool,
                   optional_outputs);
}

int64_t CublasProducts(Device device) {
  const absl::StatusOr<CudaBlas*> blas = CudaBlas::For(device);
  return blas.ok() ? (*blas)->products() : 0;
}

Tensor& KeysOf(NamedTensors& inputs) { return inputs.at(inputs.count("k") > 0 ? "k" : "q"); }

void MakeEqualAlongBatchAndHeads(Tensor* tensor) {
  const TensorView view = tensor->view();
  if (view.rank != 4) return;
  for (int64_t b = 0; b < view.dim(0); ++b) {
    for (int64_t h = 0; h < view.dim(1); ++h) {
      if (b == 0 && h == 0) continue;
      CopyElements(Slice(Slice(view, 0, 0, 1), 1, 0, 1), Slice(Slice(view, 0, b, 1), 1, h, 1));
    }
  }
}

NamedTensors Copies(const NamedTensors& tensors) {
  NamedTensors copies;
  for (const auto& [name, tensor] : tensors) copies[name] = tensor.Clone();
  return copies;
}

NamedTensors Smaller(const NamedTensors& parameters) {
  NamedTensors smaller = Copies(parameters);
  for (auto& [name, tensor] : smaller) {
    if (!IsFloating(tensor.dtype())) continue;
    for (int64_t i = 0; i < tensor.num_elements(); ++i) {
      tensor.view().Set(i, 0.75 * tensor.view().Get(i));
    }
  }
  return smaller;
}

void ExpectSameBits(const NamedTensors& a, const NamedTensors& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) {
    EXPECT_TRUE(SameBits(tensor.view(), b.at(name).view())) << what << ": " << name << " differs";
  }
}

int TokenAxis(const ConstTensorView& view) {
  return view.rank >= 3 ? view.rank - 2 : view.rank - 1;
}

void ExpectSameTokens(const NamedTensors& a, const NamedTensors& b, int64_t tokens_below,
                      const Problem& problem, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) {
    // log_sum_exp has no channels: its tokens are its last dimension.
    int axis = TokenAxis(tensor.view());
    if (name == "log_sum_exp") axis = 2;
    if (tensor.dim(axis) != problem.query_tokens) continue;
    EXPECT_TRUE(SameBits(Slice(tensor.view(), axis, 0, tokens_below),
                         Slice(b.at(name).view(), axis, 0, tokens_below)))
        << what << ": " << name << " differs before token " << tokens_below;
  }
}

}  // namespace tfb::conformance
