#include "attention/hard/hard.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/hard/hard_backward.h"
#include "attention/hard/hard_cpu.h"
#include "attention/hard/hard_cuda.h"
#include "core/cuda/runtime.h"
#include "core/definition.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb::hard {
namespace {

using Sample = HardOptions::Sample;

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "hard";
  info.family = "attention";
  info.title = "Hard attention: the value of one key";
  info.citation = "Xu et al. 2015, arXiv:1502.03044v3, section 4.1";
  info.exactness = Exactness::kOwn;
  info.growth = 2;
  return info;
}

// Returns the factor of scores: 1 where only their order counts.
double Scale(const Problem& problem, const HardOptions& options) {
  if (options.sample == Sample::kNone) return 1;
  return options.scale != 0 ? options.scale : 1 / std::sqrt(static_cast<double>(problem.head_dim));
}

const char* NoiseName(const HardOptions& options) {
  return options.sample == Sample::kGumbel ? "g" : "u";
}

class HardLayer : public Layer {
 public:
  HardLayer(const Problem& problem, std::vector<TensorSpec> inputs, std::vector<TensorSpec> outputs,
            const HardOptions& options, Device device)
      : Layer(problem, std::move(inputs), std::move(outputs)), options_(options), device_(device) {}

  size_t workspace_bytes(int threads) const override {
    return device_ == Device::kCpu ? HardCpuWorkspaceBytes(problem(), threads) : 0;
  }

  Cost cost() const override {
    const Problem& p = problem();
    const double rows = static_cast<double>(p.batch * p.query_heads * p.query_tokens);
    Cost cost;
    cost.flops = 2.0 * static_cast<double>(p.head_dim) * Pairs();
    // The noise and the index have four bytes each.
    const double noise = options_.sample == Sample::kNone ? 0
                         : options_.sample == Sample::kInverseCdf
                             ? 1
                             : static_cast<double>(p.kv_tokens);
    cost.bytes = AttentionBytes(p) + 4 * rows * (noise + 1);
    return cost;
  }

  absl::Status CheckBackward() const override { return absl::OkStatus(); }
  size_t kept_bytes() const override {
    return Workspace::Measure([this](Workspace& workspace) { KeptIndex(workspace); });
  }
  size_t backward_workspace_bytes(int threads) const override {
    if (device_ == Device::kCpu) return HardBackwardCpuWorkspaceBytes(problem(), threads);
    return Workspace::Measure([this](Workspace& workspace) { TakeRows(&workspace); });
  }
  Cost backward_cost() const override {
    const Problem& p = problem();
    const double rows = static_cast<double>(p.batch * p.query_heads * p.query_tokens);
    const double key_rows = static_cast<double>(p.batch * p.kv_heads * p.kv_tokens);
    const double element = static_cast<double>(SizeOf(p.dtype));
    const double head_dim = static_cast<double>(p.head_dim);
    const double value_dim = static_cast<double>(p.value_dim);
    Cost cost;
    cost.flops = rows * value_dim;
    cost.bytes = element * value_dim * (rows + key_rows) + 4 * rows;
    if (options_.sample == Sample::kNone) return cost;
    *cost.flops += 6 * head_dim * Pairs() + 2 * rows * value_dim;
    *cost.bytes += element * (2 * head_dim * (rows + key_rows) + value_dim * key_rows);
    return cost;
  }
  std::map<std::string, std::string> stopped_gradients() const override {
    if (options_.sample == Sample::kNone) {
      const char* why = "an argmax is constant wherever it has a derivative";
      return {{"q", why}, {"k", why}};
    }
    return {{NoiseName(options_), "noise: the estimate is a mean over it"},
            {"baseline", "the estimate's mean does not depend on it"}};
  }
  std::map<std::string, std::string> estimated_gradients() const override {
    if (options_.sample == Sample::kNone) return {};
    const char* why = "the score-function estimate of a drawn key";
    return {{"q", why}, {"k", why}};
  }

 protected:
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    HardCall call;
    call.q = inputs.Get("q");
    call.k = inputs.Get("k");
    call.v = inputs.Get("v");
    call.key_mask = inputs.Get("key_mask");
    call.noise = inputs.Get(NoiseName(options_));
    call.out = outputs.Get("out");
    call.index = outputs.Get("index");
    if (!execution.kept.empty()) {
      Workspace kept(execution.kept);
      call.kept_index = KeptIndex(kept);
    }
    call.sample = options_.sample;
    call.scale = static_cast<float>(Scale(problem(), options_));
    if (device_ != Device::kCpu) return RunCuda(call, execution);
    HardCpu(problem(), call, execution);
    return absl::OkStatus();
  }

  absl::Status DoBackward(const BackwardCall& of_layer, const Execution& execution) override {
    Workspace kept(execution.kept);
    HardBackwardCall call;
    call.q = of_layer.inputs.Get("q");
    call.k = of_layer.inputs.Get("k");
    call.v = of_layer.inputs.Get("v");
    call.key_mask = of_layer.inputs.Get("key_mask");
    call.index = KeptIndex(kept);
    call.baseline = of_layer.inputs.Get("baseline");
    call.out_gradient = of_layer.output_gradients.Get("out");
    call.q_gradient = of_layer.input_gradients.Get("q");
    call.k_gradient = of_layer.input_gradients.Get("k");
    call.v_gradient = of_layer.input_gradients.Get("v");
    call.scale = static_cast<float>(Scale(problem(), options_));
    if (device_ != Device::kCpu) return DifferentiateOnCuda(call, execution);
    HardBackwardCpu(problem(), call, execution);
    return absl::OkStatus();
  }

 private:
  // Returns the pairs of queries and keys of all heads.
  double Pairs() const {
    const Problem& p = problem();
    double of_head = 0;
    for (int64_t i = 0; i < p.query_tokens; ++i) {
      const int64_t seen = p.causal ? i + p.causal_offset() + 1 : p.kv_tokens;
      of_head += static_cast<double>(std::clamp<int64_t>(seen, 0, p.kv_tokens));
    }
    return static_cast<double>(p.batch * p.query_heads) * of_head;
  }

  // Returns the index, as a Run keeps it for Backward.
  TensorView KeptIndex(Workspace& kept) const {
    const Shape shape = {problem().batch, problem().query_heads, problem().query_tokens};
    return TensorView(kept.Take<int32_t>(NumElements(shape)), DType::kI32, shape);
  }

  // Returns the arguments of the tensors and numbers that a Run and its Backward have in common.
  HardArguments ArgumentsOf(const ConstTensorView& q, const ConstTensorView& k,
                            const ConstTensorView& v, const ConstTensorView& key_mask) const {
    const Problem& p = problem();
    HardArguments arguments = {};
    arguments.q = ToDeviceView(q);
    arguments.k = ToDeviceView(k);
    arguments.v = ToDeviceView(v);
    if (!key_mask.empty()) {
      arguments.key_mask = static_cast<const uint8_t*>(key_mask.data);
      std::copy_n(key_mask.strides.data(), 2, arguments.key_mask_strides);
    }
    arguments.batch = p.batch;
    arguments.query_heads = p.query_heads;
    arguments.group = p.group();
    arguments.query_tokens = p.query_tokens;
    arguments.kv_tokens = p.kv_tokens;
    arguments.head_dim = static_cast<int>(p.head_dim);
    arguments.value_dim = static_cast<int>(p.value_dim);
    arguments.causal = p.causal;
    arguments.sample = options_.sample == Sample::kNone         ? HardSample::kNone
                       : options_.sample == Sample::kInverseCdf ? HardSample::kInverseCdf
                                                                : HardSample::kGumbel;
    arguments.scale = static_cast<float>(Scale(p, options_));
    return arguments;
  }

  absl::Status RunCuda(const HardCall& call, const Execution& execution) const {
    HardArguments arguments = ArgumentsOf(call.q, call.k, call.v, call.key_mask);
    arguments.out = ToDeviceView(call.out);
    arguments.noise = ToDeviceView(call.noise);
    if (!call.index.empty()) {
      arguments.index = static_cast<int32_t*>(call.index.mutable_data());
      std::copy_n(call.index.strides.data(), 3, arguments.index_strides);
    }
    arguments.kept_index = static_cast<int32_t*>(call.kept_index.mutable_data());
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    return ToStatus(KernelsOn<HardKernels>(runtime->target()).choose(arguments, execution.stream));
  }

  // Numbers of queries, which Backward has in its workspace on CUDA.
  struct Rows {
    float* weight;
    float* max;
    float* sum;
  };
  Rows TakeRows(Workspace* workspace) const {
    const int64_t rows = problem().batch * problem().query_heads * problem().query_tokens;
    return {workspace->Take<float>(rows), workspace->Take<float>(rows),
            workspace->Take<float>(rows)};
  }

  absl::Status DifferentiateOnCuda(const HardBackwardCall& call, const Execution& execution) const {
    Workspace workspace(execution.workspace);
    const Rows rows = TakeRows(&workspace);
    HardBackwardArguments arguments = {};
    arguments.forward = ArgumentsOf(call.q, call.k, call.v, call.key_mask);
    arguments.index = static_cast<const int32_t*>(call.index.data);
    arguments.baseline = ToDeviceView(call.baseline);
    arguments.out_gradient = ToDeviceView(call.out_gradient);
    arguments.q_gradient = ToDeviceView(call.q_gradient);
    arguments.k_gradient = ToDeviceView(call.k_gradient);
    arguments.v_gradient = ToDeviceView(call.v_gradient);
    arguments.weight = rows.weight;
    arguments.max = rows.max;
    arguments.sum = rows.sum;
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    const HardBackwardKernels& kernels = KernelsOn<HardBackwardKernels>(runtime->target());
    void* const stream = execution.stream;
    if (!call.q_gradient.empty() || !call.k_gradient.empty()) {
      TFB_RETURN_IF_ERROR(ToStatus(kernels.sum_rows(arguments, stream)));
    }
    if (!call.q_gradient.empty()) {
      TFB_RETURN_IF_ERROR(ToStatus(kernels.query_gradients(arguments, stream)));
    }
    if (!call.k_gradient.empty()) {
      TFB_RETURN_IF_ERROR(ToStatus(kernels.key_gradients(arguments, stream)));
    }
    if (call.v_gradient.empty()) return absl::OkStatus();
    return ToStatus(kernels.value_gradients(arguments, stream));
  }

  HardOptions options_;
  Device device_;
};

// ---- The definition ----

// The scores of one query with the keys: kNotSeen where it does not see one.
struct Scores {
  std::vector<double> score;
  std::vector<double> error;  // bound of the error of an fp32 implementation's score
};

// Returns the lowest key of the largest score, or -1 where none is above -inf.
int64_t ArgMax(const std::vector<double>& scores) {
  int64_t best = -1;
  for (size_t j = 0; j < scores.size(); ++j) {
    const double max = best < 0 ? kNotSeen : scores[best];
    if (scores[j] > max) best = static_cast<int64_t>(j);
  }
  return best;
}

// Returns the first key at which the weights from the left exceed u of their sum; or `computed`,
// where that is the first within `tolerance` of the sum.
int64_t DrawFrom(const std::vector<double>& scores, double u, int64_t computed, double tolerance) {
  const int64_t best = ArgMax(scores);
  if (best < 0) return -1;
  std::vector<double> weights;
  double sum = 0;
  for (const double score : scores) {
    const bool counts = score - scores[best] >= -87.33;  // false for NaN and -inf
    weights.push_back(counts ? std::exp(score - scores[best]) : 0);
    sum += weights.back();
  }
  const double target = std::max(u, 0.0) * sum;
  double passed = 0;
  int64_t drawn = -1, last = -1;
  for (int64_t j = 0; j < static_cast<int64_t>(weights.size()); ++j) {
    const double before = passed;
    passed += weights[j];
    if (weights[j] == 0) continue;
    last = j;
    if (drawn < 0 && passed > target) drawn = j;
    const bool near = before <= target + tolerance * sum && passed >= target - tolerance * sum;
    if (j == computed && near) return computed;
  }
  return drawn < 0 ? last : drawn;
}

// The definition's loops for one query.
class Choices {
 public:
  Choices(const Problem& problem, const HardOptions& options, const Inputs& inputs)
      : problem_(problem),
        options_(options),
        q_(inputs.Get("q")),
        k_(inputs.Get("k")),
        noise_(inputs.Get(NoiseName(options))),
        is_token_(inputs) {}

  // Returns the key that query i takes. `computed` is the key that a layer took, or -1: see
  // DefinitionRequest.
  int64_t Choose(int64_t b, int64_t h, int64_t i, int64_t computed) const {
    const Scores scores = ScoresOf(b, h, i);
    if (options_.sample == Sample::kInverseCdf) {
      const double u = noise_.Get(noise_.Offset(b, h, i));
      return DrawFrom(scores.score, u, computed, kWeightTolerance);
    }
    const int64_t best = ArgMax(scores.score);
    return best >= 0 && computed >= 0 && MayTake(b, h, scores, best, computed) ? computed : best;
  }

 private:
  // The relative error of sums of fp32 weights, which harness/judge/errors.h uses for their means.
  static constexpr double kWeightTolerance = 2e-5;

  const double* Key(int64_t b, int64_t h, int64_t j) const {
    return k_.Row(b, h / problem_.group(), j);
  }

  // A sum of n products has an error of at most n roundings of the sum of their magnitudes. The
  // scale and the noise are three more, and each product loses at most the smallest normal number
  // where it or its query is denormal (core/denormals.h).
  Scores ScoresOf(int64_t b, int64_t h, int64_t i) const {
    const double scale = Scale(problem_, options_);
    const double roundings = static_cast<double>(problem_.head_dim + 3) * UnitRoundoff(DType::kF32);
    const double* query = q_.Row(b, h, i);
    Scores scores;
    scores.score.assign(problem_.kv_tokens, kNotSeen);
    scores.error.assign(problem_.kv_tokens, 0);
    for (int64_t j = 0; j < problem_.kv_tokens; ++j) {
      if (!is_token_(b, j) || (problem_.causal && j > i + problem_.causal_offset())) continue;
      const double* key = Key(b, h, j);
      const double g =
          options_.sample == Sample::kGumbel ? noise_.Get(noise_.Offset(b, h, i, j)) : 0;
      double magnitude = std::abs(g), denormal = 0;
      for (int64_t c = 0; c < problem_.head_dim; ++c) {
        magnitude += scale * std::abs(query[c] * key[c]);
        denormal += (1 + std::abs(key[c])) * 0x1p-126;
      }
      scores.score[j] = scale * Dot(query, key, problem_.head_dim) + g;
      scores.error[j] = roundings * magnitude + denormal;
    }
    return scores;
  }

  // Tells whether fp32 may find the score of `computed` the largest. Among equal keys it must be
  // the first.
  bool MayTake(int64_t b, int64_t h, const Scores& scores, int64_t best, int64_t computed) const {
    const bool ties =
        scores.score[computed] + scores.error[computed] >= scores.score[best] - scores.error[best];
    if (!ties) return false;
    for (int64_t j = 0; j < computed; ++j) {
      if (scores.score[j] != scores.score[computed]) continue;
      if (std::equal(Key(b, h, j), Key(b, h, j) + problem_.head_dim, Key(b, h, computed))) {
        return false;
      }
    }
    return true;
  }

  const Problem& problem_;
  const HardOptions& options_;
  const DoubleTensor q_, k_;
  const ConstTensorView noise_;
  const KeyMask is_token_;
};

class Hard : public TechniqueOf<HardOptions> {
 public:
  Hard() : TechniqueOf(Info()) {}

 private:
  std::vector<TensorSpec> ReadTensors(const Problem& p, const HardOptions& options) const override {
    std::vector<TensorSpec> tensors = QkvInputs(p);
    if (options.sample == Sample::kNone) return tensors;
    TensorSpec noise{NoiseName(options), {p.batch, p.query_heads, p.query_tokens}};
    noise.noise = Distribution::kUniform;
    if (options.sample == Sample::kGumbel) {
      noise.shape.push_back(p.kv_tokens);
      noise.noise = Distribution::kGumbel;
    }
    TensorSpec baseline{"baseline", {p.batch, p.query_heads, p.query_tokens}};
    baseline.optional = true;
    tensors.push_back(std::move(noise));
    tensors.push_back(std::move(baseline));
    return tensors;
  }

  std::vector<TensorSpec> WrittenTensors(const Problem& p, const HardOptions&) const override {
    return {AttentionOutputs(p)[0],
            {"index", {p.batch, p.query_heads, p.query_tokens}, DType::kI32, true}};
  }

  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const HardOptions& options, Device device,
                                                   uint64_t) const override {
    constexpr int64_t kMaxKeys = std::numeric_limits<int32_t>::max();
    if (problem.kv_tokens > kMaxKeys) {
      return absl::InvalidArgumentError(absl::StrCat("kv_tokens is ", problem.kv_tokens,
                                                     "; allowed are 0 to ", kMaxKeys,
                                                     ", since the index is i32"));
    }
    return std::make_unique<HardLayer>(problem, ReadTensors(problem, options),
                                       WrittenTensors(problem, options), options, device);
  }

  absl::Status Definition(const Problem& problem, const HardOptions& options, const NamedTensors&,
                          const Inputs& inputs, const DefinitionRequest& request,
                          NamedTensors* outputs) const override {
    const Choices choices(problem, options, inputs);
    const DoubleTensor v(inputs.Get("v"));
    const std::vector<int64_t> rows = RowsOf(request, problem.query_tokens);
    const int64_t row_count = static_cast<int64_t>(rows.size());
    Tensor out(DType::kF64, {problem.batch, problem.query_heads, row_count, problem.value_dim});
    Tensor index(DType::kF64, {problem.batch, problem.query_heads, row_count});
    Tensor weights;
    if (request.weights) {
      weights =
          Tensor(DType::kF64, {problem.batch, problem.query_heads, row_count, problem.kv_tokens});
      Fill(weights.view(), 0);
    }
    Fill(out.view(), 0);
    const Tensor* computed = nullptr;
    if (request.computed != nullptr && request.computed->count("index") > 0) {
      computed = &request.computed->at("index");
    }
    const auto define_row = [&](int64_t b, int64_t h, int64_t r) {
      const int64_t given = computed == nullptr ? -1 : *computed->view().At<int32_t>(b, h, rows[r]);
      const int64_t chosen = choices.Choose(b, h, rows[r], given < problem.kv_tokens ? given : -1);
      *index.view().MutableAt<double>(b, h, r) = static_cast<double>(chosen);
      if (chosen < 0) return;
      std::copy_n(v.Row(b, h / problem.group(), chosen), problem.value_dim,
                  out.view().MutableAt<double>(b, h, r));
      if (request.weights) *weights.view().MutableAt<double>(b, h, r, chosen) = 1;
    };
    ForEachRow(request.pool, problem.batch, problem.query_heads, row_count, define_row);
    (*outputs)["out"] = std::move(out);
    (*outputs)["index"] = std::move(index);
    if (request.weights) (*outputs)["weights"] = std::move(weights);
    return absl::OkStatus();
  }
};

const bool registered = RegisterTechnique<Hard>();

}  // namespace
}  // namespace tfb::hard
