#include "adaptive/universal_transformer/universal_transformer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "adaptive/universal_transformer/compacted_steps.h"
#include "adaptive/universal_transformer/listed_steps.h"
#include "adaptive/universal_transformer/shared_block.h"
#include "adaptive/universal_transformer/steps_backward.h"
#include "adaptive/universal_transformer/universal_transformer_definition.h"
#include "core/cuda/device_array.h"
#include "core/layers/attention/projected_attention.h"
#include "core/layers/copy_tensor.h"
#include "core/layers/recompute.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb::universal_transformer {
namespace {

using layers::ParameterSpec;

const bool registered = RegisterTechnique<UniversalTransformer>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "universal_transformer";
  info.family = "adaptive";
  info.title = "Universal Transformer with adaptive computation time";
  info.citation = "Dehghani et al. 2019, arXiv:1807.03819v3, section 2";
  info.input_kind = InputKind::kHidden;
  info.exactness = Exactness::kOwn;
  info.budget_option = "threshold";
  info.growth = 2;
  return info;
}

std::vector<ParameterSpec> ParameterSpecs(const Problem& problem,
                                          const UniversalTransformerOptions& options) {
  const UniversalSizes s(problem, options);
  const auto deviation = [](int64_t in) { return 1 / std::sqrt(static_cast<double>(in)); };
  std::vector<ParameterSpec> specs =
      layers::WithPrefix("attention.", layers::ProjectionSpecs(problem, options.bias));
  const auto add = [&](const std::string& name, const Shape& shape, double mean, double of) {
    specs.push_back({name, shape, mean, of});
  };
  for (const char* name : {"attention_norm", "ff_norm"}) {
    layers::AddSpecs(layers::NormSpecs(name, s.width), &specs);
  }
  if (options.convolves()) {
    add("ff.k1", {kFirstKernel, s.width}, 0, deviation(kFirstKernel));
    add("ff.k2", {kSecondKernel, s.inner}, 0, deviation(kSecondKernel));
  }
  layers::AddSpecs(layers::FeedForwardSpecs("ff", s.width, s.inner), &specs);
  if (options.halts()) {
    add("halting.w", {s.width}, 0, deviation(s.width));
    add("halting.b", {1}, 1, 0);
  }
  layers::AddSpecs(layers::TimeParameters(options.encoding, options.steps, s.width), &specs);
  return specs;
}

class UniversalTransformerLayer : public Layer {
 public:
  UniversalTransformerLayer(const Problem& problem, std::vector<TensorSpec> inputs,
                            std::vector<TensorSpec> outputs,
                            const UniversalTransformerOptions& options, Device device)
      : Layer(problem, std::move(inputs), std::move(outputs)),
        options_(options),
        device_(device),
        backward_(device, problem, options) {
    if (device == Device::kCpu) {
      runner_ = std::make_unique<CompactedSteps>(problem, options);
    } else {
      runner_ = std::make_unique<ListedSteps>(device, problem, options);
    }
  }

  absl::Status Draw(uint64_t seed) {
    return layers::DrawParameters(ParameterSpecs(problem(), options_), seed, &parameters_);
  }

  size_t workspace_bytes(int threads) const override { return runner_->workspace_bytes(threads); }

  // On a GPU the last Run must be done: the computed work depends on its data.
  Cost cost() const override {
    Cost cost;
    cost.bytes = TensorBytes();
    if (!options_.halts()) {
      cost.flops = UniversalTransformerFlops(problem(), options_, AllSteps());
    } else if (has_run_) {
      cost.flops = UniversalTransformerFlops(problem(), options_, StepsTaken());
    }
    return cost;
  }

  // On a GPU the last Run must be done for these, too.
  std::map<std::string, double> statistics() const override {
    if (!has_run_) return {};
    const std::vector<int32_t> steps = StepsTaken();
    std::vector<float> ponder(static_cast<size_t>(ponder_.size()));
    if (!ponder_.Read(ponder.data()).ok()) ponder.clear();
    std::map<std::string, double> statistics = {
        {"mean_steps", 0}, {"max_steps", 0}, {"mean_ponder", 0}, {"saved_flops", 0}};
    std::vector<int32_t> unhalted = steps;
    double tokens = 0;
    for (size_t r = 0; r < ponder.size(); ++r) {
      if (steps[r] == 0) continue;  // padding
      ++tokens;
      unhalted[r] = static_cast<int32_t>(options_.steps);
      statistics["mean_steps"] += steps[r];
      statistics["mean_ponder"] += ponder[r];
      statistics["max_steps"] = std::max<double>(statistics["max_steps"], steps[r]);
    }
    if (device_ == Device::kCuda) statistics["cublas"] = MatMulUsesCublas(device_) ? 1 : 0;
    if (CheckBackward().ok()) {
      statistics[kKeptBytesPerBlock] = static_cast<double>(
          problem().batch * problem().query_tokens * problem().model_dim() * SizeOf(DType::kF32));
    }
    if (tokens == 0) return statistics;
    statistics["mean_steps"] /= tokens;
    statistics["mean_ponder"] /= tokens;
    UniversalTransformerOptions fixed = options_;
    fixed.halting = UniversalTransformerOptions::Halting::kNone;
    statistics["saved_flops"] = 1 - UniversalTransformerFlops(problem(), options_, steps) /
                                        UniversalTransformerFlops(problem(), fixed, unhalted);
    return statistics;
  }

  absl::Status CheckBackward() const override { return absl::OkStatus(); }
  size_t kept_bytes() const override {
    return Workspace::Measure([this](Workspace& workspace) { LayOutKept(workspace); });
  }
  size_t backward_workspace_bytes(int threads) const override {
    return backward_.workspace_bytes(threads);
  }
  Cost backward_cost() const override {
    Cost cost;
    cost.bytes = 2 * TensorBytes() + static_cast<double>(kept_bytes());
    if (!options_.halts() || has_run_) {
      cost.flops = UniversalTransformerBackwardFlops(problem(), options_,
                                                     options_.halts() ? StepsTaken() : AllSteps());
    }
    return cost;
  }
  std::vector<std::string> differentiable_outputs() const override {
    return options_.halts() ? std::vector<std::string>{"out", "ponder"}
                            : std::vector<std::string>{"out"};
  }

 protected:
  absl::Status DoSetup(const Inputs&, const Execution&) override {
    TFB_ASSIGN_OR_RETURN(block_, SharedBlock::Create(device_, problem(), options_, parameters_));
    const int64_t rows = problem().batch * problem().query_tokens;
    TFB_ASSIGN_OR_RETURN(ponder_, DeviceArray<float>::Allocate(device_, rows));
    TFB_ASSIGN_OR_RETURN(steps_, DeviceArray<int32_t>::Allocate(device_, rows));
    has_run_ = false;
    return runner_->Setup();
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    UniversalSteps::Call call;
    call.x = inputs.Get("x");
    call.key_mask = inputs.Get("key_mask");
    call.out = outputs.Get("out");
    call.ponder = ponder_.mutable_data();
    call.steps = steps_.mutable_data();
    call.ponder_out = outputs.Get("ponder");
    call.steps_out = outputs.Get("steps");
    if (!execution.kept.empty()) {
      Workspace kept(execution.kept);
      call.kept = LayOutKept(kept);
    }
    has_run_ = true;
    return runner_->Run(block_, call, execution);
  }

  absl::Status DoSetUpBackward(const Inputs&, const Execution&) override {
    return backward_.SetUp(parameters_);
  }

  absl::Status DoBackward(const BackwardCall& call, const Execution& execution) override {
    for (const auto& [name, gradient] : call.parameter_gradients) {
      if (!gradient.empty()) TFB_RETURN_IF_ERROR(ClearTensor(device_, gradient, execution));
    }
    if (problem().batch * problem().query_tokens == 0) return absl::OkStatus();
    Workspace kept(execution.kept);
    return backward_.Run(
        {block_, LayOutKept(kept), call.inputs.Get("x"), call.inputs.Get("key_mask"),
         call.output_gradients.Get("out"), call.output_gradients.Get("ponder"),
         call.input_gradients.Get("x"), call.parameter_gradients},
        execution);
  }

 private:
  StepsKept LayOutKept(Workspace& workspace) const {
    return StepsKept::LayOut(UniversalSizes(problem(), options_), options_, workspace);
  }
  std::vector<int32_t> AllSteps() const {
    return std::vector<int32_t>(static_cast<size_t>(problem().batch * problem().query_tokens),
                                static_cast<int32_t>(options_.steps));
  }
  // Returns the steps of the last Run, on the host.
  std::vector<int32_t> StepsTaken() const {
    std::vector<int32_t> steps(static_cast<size_t>(steps_.size()));
    if (!steps_.Read(steps.data()).ok()) std::fill(steps.begin(), steps.end(), 0);
    return steps;
  }

  UniversalTransformerOptions options_;
  Device device_;
  std::unique_ptr<UniversalSteps> runner_;
  SharedBlock block_;
  StepsBackward backward_;
  DeviceArray<float> ponder_;  // [batch, tokens], of the last Run
  DeviceArray<int32_t> steps_;
  bool has_run_ = false;
};

}  // namespace

namespace {

// How often a pass computes each product of a matrix, and of a pair of a query and a key.
struct Products {
  double of_matrix;
  double of_pair;
};

double FlopsOf(const Problem& problem, const UniversalTransformerOptions& options,
               const std::vector<int32_t>& steps, const Products& products) {
  const UniversalSizes s(problem, options);
  const double width = static_cast<double>(s.width), inner = static_cast<double>(s.inner);
  double of_step =
      2 * width * static_cast<double>(s.query_width + s.context_width) + 4 * width * inner;
  const double of_gate = options.halts() ? 2 * width : 0;
  if (options.convolves()) {
    of_step += 2 * (static_cast<double>(kFirstKernel) * width +
                    static_cast<double>(kSecondKernel) * inner);
  }
  const double of_key = 2 * width * static_cast<double>(s.keys_values());
  const double of_pair =
      2 * static_cast<double>(problem.query_heads * (problem.head_dim + problem.value_dim));
  double flops = 0;
  for (int64_t b = 0; b < problem.batch; ++b) {
    const int32_t* taken = steps.data() + b * problem.query_tokens;
    const int64_t tokens =
        std::count_if(taken, taken + problem.query_tokens, [](int32_t n) { return n > 0; });
    const int32_t last = tokens > 0 ? *std::max_element(taken, taken + problem.query_tokens) : 0;
    int64_t seen = 0;  // tokens up to this one
    for (int64_t t = 0; t < problem.query_tokens; ++t) {
      if (taken[t] == 0) continue;
      ++seen;
      const double keys = static_cast<double>(problem.causal ? seen : tokens);
      const int32_t computed = options.recomputes() ? last : taken[t];
      flops += products.of_matrix * (static_cast<double>(taken[t]) * of_gate +
                                     static_cast<double>(computed) * of_step +
                                     static_cast<double>(std::min(computed + 1, last)) * of_key) +
               products.of_pair * static_cast<double>(computed) * of_pair * keys;
    }
  }
  return flops;
}

}  // namespace

double UniversalTransformerFlops(const Problem& problem, const UniversalTransformerOptions& options,
                                 const std::vector<int32_t>& steps) {
  return FlopsOf(problem, options, steps, {1, 1});
}

// Each matrix's product again, and two for its gradients; of a pair's two products one again for its
// score, and five for gradients, beside the forward pass's two.
double UniversalTransformerBackwardFlops(const Problem& problem,
                                         const UniversalTransformerOptions& options,
                                         const std::vector<int32_t>& steps) {
  return FlopsOf(problem, options, steps, {3, (2 + 5) / 2.0});
}

UniversalTransformer::UniversalTransformer() : TechniqueOf(Info()) {}

std::vector<TensorSpec> UniversalTransformer::ReadTensors(
    const Problem& problem, const UniversalTransformerOptions&) const {
  std::vector<TensorSpec> tensors = HiddenInputs(problem);
  tensors.push_back({"key_mask", {problem.batch, problem.kv_tokens}, DType::kU8, true});
  return tensors;
}

std::vector<TensorSpec> UniversalTransformer::WrittenTensors(
    const Problem& problem, const UniversalTransformerOptions& options) const {
  std::vector<TensorSpec> tensors = HiddenOutputs(problem);
  if (options.halts()) {
    const Shape shape = {problem.batch, problem.query_tokens};
    tensors.push_back({"ponder", shape, problem.dtype, true});
    tensors.push_back({"steps", shape, DType::kI32, true});
  }
  return tensors;
}

absl::Status UniversalTransformer::Check(const Problem& problem,
                                         const UniversalTransformerOptions&) const {
  if (problem.kv_tokens != problem.query_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("keys are of the same tokens as queries: kv_tokens is ", problem.kv_tokens,
                     "; allowed is query_tokens, ", problem.query_tokens));
  }
  constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();
  if (problem.query_tokens > 0 && problem.batch > kMaxRows / problem.query_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(problem.batch, " batches of ",
                                                   problem.query_tokens, " tokens; allowed are ",
                                                   kMaxRows, " in all"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Layer>> UniversalTransformer::MakeLayer(
    const Problem& problem, const UniversalTransformerOptions& options, Device device,
    uint64_t seed) const {
  auto layer = std::make_unique<UniversalTransformerLayer>(
      problem, ReadTensors(problem, options), WrittenTensors(problem, options), options, device);
  TFB_RETURN_IF_ERROR(layer->Draw(seed));
  return layer;
}

absl::Status UniversalTransformer::Definition(const Problem& problem,
                                              const UniversalTransformerOptions& options,
                                              const NamedTensors& parameters, const Inputs& inputs,
                                              const DefinitionRequest& request,
                                              NamedTensors* outputs) const {
  return DefineUniversalTransformer(problem, options, parameters, inputs, request, outputs);
}

absl::StatusOr<TechniqueSpec> UniversalTransformer::Counterpart(const Problem&,
                                                                const Options& options) const {
  TFB_ASSIGN_OR_RETURN(UniversalTransformerOptions parsed,
                       ParseOptions<UniversalTransformerOptions>(options));
  // Options that only halting reads are reset to their defaults, so that networks that halt
  // otherwise share this one.
  const UniversalTransformerOptions unused;
  parsed.halting = UniversalTransformerOptions::Halting::kNone;
  parsed.threshold = unused.threshold;
  parsed.output = unused.output;
  parsed.halt_from = unused.halt_from;
  parsed.halt_when = unused.halt_when;
  parsed.halted = unused.halted;
  parsed.remainder_at_limit = unused.remainder_at_limit;
  OptionBinder binder;
  parsed.Describe(binder);
  return TechniqueSpec{info().name, binder.Values()};
}

}  // namespace tfb::universal_transformer
