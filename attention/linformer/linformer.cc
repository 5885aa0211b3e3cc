#include "attention/linformer/linformer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/linformer/compression.h"
#include "attention/linformer/fit.h"
#include "core/cuda/device_array.h"
#include "core/cuda/runtime.h"
#include "core/definition.h"
#include "core/flash/flash_technique.h"
#include "core/layers/copy_tensor.h"
#include "core/random.h"
#include "core/workspace.h"

namespace tfb::linformer {
namespace {

using Projection = LinformerOptions::Projection;
using Sharing = LinformerOptions::Sharing;

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "linformer";
  info.family = "attention";
  info.title = "Linformer: keys and values projected along the sequence";
  info.citation = "Wang et al. 2020, arXiv:2006.04768v3, equation 7";
  info.exactness = Exactness::kOwn;
  info.budget_option = "k";
  info.growth = 1;
  info.supports_causal = false;
  return info;
}

// The sizes that follow from options and problem.
struct Plan {
  Plan(const LinformerOptions& options, const Problem& problem)
      : has_windows(options.projection == Projection::kMean ||
                    options.projection == Projection::kMax ||
                    options.projection == Projection::kConvolution ||
                    options.projection == Projection::kDepthwiseConvolution),
        is_fitted(options.projection == Projection::kFit) {
    const int64_t k = std::max<int64_t>(options.k - options.layer * options.k_step, 1);
    const int64_t tokens = problem.kv_tokens;
    if (tokens > 0) {
      window = (tokens + k - 1) / k;
      slots = has_windows ? (tokens + window - 1) / window : is_fitted ? std::min(k, tokens) : k;
    }
    const bool of_each_head = options.sharing == Sharing::kNone;
    table_of_head = of_each_head ? 1 : 0;
    tables_of_sequence = of_each_head ? problem.kv_heads : 1;
    table_of_batch = is_fitted ? tables_of_sequence : 0;
    tables = is_fitted ? problem.batch * tables_of_sequence : tables_of_sequence;
    has_e = options.projection != Projection::kMean && options.projection != Projection::kMax;
    has_f = has_e && !is_fitted &&
            (options.sharing == Sharing::kNone || options.sharing == Sharing::kHeadwise);
  }

  bool has_windows;
  bool is_fitted;
  int64_t window = 1;
  int64_t slots = 0;  // none where there are no tokens
  // Head h of batch row b has table b table_of_batch + h table_of_head.
  int64_t table_of_batch;
  int64_t table_of_head;
  int64_t tables_of_sequence;
  int64_t tables;  // all of them
  bool has_e;
  bool has_f;  // whether the values' tables are f; else they are e
};

Compression KindOf(const LinformerOptions& options) {
  switch (options.projection) {
    case Projection::kMean:
      return Compression::kMean;
    case Projection::kMax:
      return Compression::kMax;
    case Projection::kConvolution:
      return Compression::kConvolution;
    case Projection::kDepthwiseConvolution:
      return Compression::kDepthwiseConvolution;
    default:
      return Compression::kProduct;
  }
}

// Draws e (for keys) or f (for values).
absl::StatusOr<Tensor> DrawTables(const LinformerOptions& options, const Problem& problem,
                                  const char* name, int64_t channels, uint64_t seed) {
  const Plan plan(options, problem);
  Shape shape = {plan.tables, plan.slots, problem.kv_tokens};
  int64_t terms = problem.kv_tokens;  // of the sum that is an element of a slot
  if (options.projection == Projection::kConvolution) {
    shape = {plan.tables, channels, channels, plan.window};
    terms = plan.window * channels;
  } else if (options.projection == Projection::kDepthwiseConvolution) {
    shape = {plan.tables, channels, plan.window};
    terms = plan.window;
  }
  TFB_ASSIGN_OR_RETURN(Tensor tables, Tensor::Allocate(DType::kF32, shape));
  if (plan.is_fitted) {
    Fill(tables.view(), 0);
    return tables;
  }
  const std::string stream =
      options.sharing == Sharing::kLayerwise ? name : absl::StrCat(name, options.layer);
  const double variance = 1 / static_cast<double>(std::max<int64_t>(terms, 1));
  FillNormal(&tables, seed, stream, /*mean=*/0, std::sqrt(variance));
  return tables;
}

// Returns [tokens, channels] of one head.
ConstTensorView OfHead(const ConstTensorView& view, int64_t b, int64_t h) {
  const char* first = static_cast<const char*>(view.data) + view.Offset(b, h) * SizeOf(view.dtype);
  return ConstTensorView(first, view.dtype, Shape{view.dim(2), view.dim(3)},
                         Shape{view.stride(2), view.stride(3)});
}

// Fits all tables of e to keys, values and mask in host memory.
absl::Status FitTables(const Plan& plan, const ConstTensorView& k, const ConstTensorView& v,
                       const ConstTensorView& key_mask, Tensor* e) {
  const int64_t heads = k.dim(1), tokens = k.dim(2);
  for (int64_t table = 0; table < plan.tables; ++table) {
    const int64_t b = table / plan.tables_of_sequence;
    std::vector<bool> is_token(tokens, true);
    for (int64_t j = 0; !key_mask.empty() && j < tokens; ++j) {
      is_token[j] = *key_mask.At<uint8_t>(b, j) != 0;
    }
    std::vector<ConstTensorView> shared;
    for (int64_t h = 0; h < heads; ++h) {
      if (plan.table_of_head != 0 && h != table % heads) continue;
      shared.push_back(OfHead(k, b, h));
      shared.push_back(OfHead(v, b, h));
    }
    const TensorView own(e->view().MutableAt<float>(table), DType::kF32, {plan.slots, tokens});
    TFB_RETURN_IF_ERROR(FitTable(shared, is_token, own));
  }
  return absl::OkStatus();
}

// Tells whether e is still as drawn, not given by the caller.
bool IsUnfitted(const Tensor& e) {
  for (int64_t n = 0; n < e.num_elements(); ++n) {
    if (e.view().Get(n) != 0) return false;
  }
  return true;
}

bool SameBits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.raw(), b.raw(), a.bytes()) == 0;
}

// Makes the slots of keys and values, f32 [batch, kv_heads, slots, channels]: the tensors key_slots
// and value_slots.
class Compress : public FlashStep {
 public:
  Compress(const Problem& problem, const LinformerOptions& options, const NamedTensors& parameters,
           Device device)
      : device_(device),
        kind_(KindOf(options)),
        plan_(options, problem),
        parameters_(parameters),
        keys_(device, kind_, SizesOf(problem, problem.head_dim)),
        values_(device, kind_, SizesOf(problem, problem.value_dim)) {}

  absl::Status Setup(Device device, const Inputs&, const Execution&) override {
    if (plan_.has_e) {
      TFB_ASSIGN_OR_RETURN(const auto e,
                           CompressionTables::Create(device, kind_, parameters_.at("e").view()));
      keys_.set_tables(e, plan_.table_of_batch, plan_.table_of_head);
      values_.set_tables(e, plan_.table_of_batch, plan_.table_of_head);
    }
    if (plan_.has_f) {
      TFB_ASSIGN_OR_RETURN(const auto f,
                           CompressionTables::Create(device, kind_, parameters_.at("f").view()));
      values_.set_tables(f, plan_.table_of_batch, plan_.table_of_head);
    }
    return absl::OkStatus();
  }

  void LayOut(Workspace* workspace, Inputs* tensors) override {
    key_memory_ = keys_.LayOut(*workspace);
    value_memory_ = values_.LayOut(*workspace);
    tensors->Set("key_slots", key_memory_.slots);
    tensors->Set("value_slots", value_memory_.slots);
  }
  size_t workspace_bytes(Device, int threads) const override {
    return std::max(keys_.workspace_bytes(threads), values_.workspace_bytes(threads));
  }

  absl::Status Run(const Inputs& tensors, const Outputs&, const Execution& execution) override {
    const ConstTensorView key_mask = tensors.Get("key_mask");
    TFB_RETURN_IF_ERROR(keys_.Run(tensors.Get("k"), key_mask, key_memory_, execution));
    TFB_RETURN_IF_ERROR(values_.Run(tensors.Get("v"), key_mask, value_memory_, execution));
    TFB_RETURN_IF_ERROR(Keep(key_memory_.slots, tensors.Get("key_slots"), execution));
    return Keep(value_memory_.slots, tensors.Get("value_slots"), execution);
  }

  absl::Status CheckBackward(Device) const override { return absl::OkStatus(); }
  std::vector<std::string> kept_tensors() const override { return {"key_slots", "value_slots"}; }
  absl::Status RunAgain(const Inputs&, const Execution&) override { return absl::OkStatus(); }
  double backward_flops() const override { return 2 * flops(); }
  std::vector<std::string> written_gradients() const override {
    std::vector<std::string> names;
    if (plan_.has_e) names.push_back("e");
    if (plan_.has_f) names.push_back("f");
    return names;
  }
  size_t backward_workspace_bytes(Device, int threads) const override {
    return std::max(keys_.backward_workspace_bytes(threads),
                    values_.backward_workspace_bytes(threads));
  }
  absl::Status Backward(const Inputs& tensors, const Outputs& gradients,
                        const ParameterGradients& of_parameters,
                        const Execution& execution) override {
    const ConstTensorView key_mask = tensors.Get("key_mask");
    TFB_RETURN_IF_ERROR(
        keys_.Backward(tensors.Get("k"), key_mask,
                       {gradients.Get("key_slots"), gradients.Get("k"), of_parameters.Output("e"),
                        /*adds_to_tables=*/false},
                       execution));
    return values_.Backward(
        tensors.Get("v"), key_mask,
        {gradients.Get("value_slots"), gradients.Get("v"),
         of_parameters.Output(plan_.has_f ? "f" : "e"), /*adds_to_tables=*/!plan_.has_f},
        execution);
  }

  double flops() const override { return keys_.flops() + values_.flops(); }
  std::map<std::string, double> statistics() const override {
    return {{"slots", static_cast<double>(plan_.slots)}};
  }

 private:
  // Copies slots to where the layer keeps them, if it does. It owns that memory, so that it may be
  // written.
  absl::Status Keep(const TensorView& slots, const ConstTensorView& kept,
                    const Execution& execution) const {
    if (kept.data == slots.data) return absl::OkStatus();
    TensorView to;
    static_cast<ConstTensorView&>(to) = kept;
    return CopyTensor(device_, slots, to, execution);
  }
  Compressor::Sizes SizesOf(const Problem& p, int64_t channels) const {
    return {p.batch, p.kv_heads, p.kv_tokens, channels, plan_.slots, plan_.window};
  }

  Device device_;
  Compression kind_;
  Plan plan_;
  const NamedTensors& parameters_;
  Compressor keys_;
  Compressor values_;
  Compressor::Memory key_memory_;
  Compressor::Memory value_memory_;
};

absl::Status FitToInputs(const Plan& plan, Device device, const Inputs& inputs,
                         const Execution& execution, Tensor* e) {
  const auto copy = [&](const char* name) {
    return CopyToHost(device, inputs.Get(name), execution.stream);
  };
  TFB_ASSIGN_OR_RETURN(const Tensor k, copy("k"));
  TFB_ASSIGN_OR_RETURN(const Tensor v, copy("v"));
  if (inputs.Get("key_mask").empty()) return FitTables(plan, k.view(), v.view(), {}, e);
  TFB_ASSIGN_OR_RETURN(const Tensor mask, copy("key_mask"));
  return FitTables(plan, k.view(), v.view(), mask.view(), e);
}

// ---- The definition ----

// Returns E K or F V, or the pooled or convolved rows, f64 [batch, heads, slots, channels], row by
// row.
Tensor DefineSlots(const LinformerOptions& options, const Plan& plan, const ConstTensorView& x,
                   const KeyMask& is_token, const Tensor* tables) {
  const DoubleTensor rows(x);
  const DoubleTensor table = tables == nullptr ? DoubleTensor() : DoubleTensor(tables->view());
  const int64_t batch = x.dim(0), heads = x.dim(1), tokens = x.dim(2), channels = x.dim(3);
  Tensor slots(DType::kF64, {batch, heads, plan.slots, channels});
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t of = b * plan.table_of_batch + h * plan.table_of_head;
      for (int64_t s = 0; s < plan.slots; ++s) {
        double* to = slots.view().MutableAt<double>(b, h, s);
        const bool is_max = options.projection == Projection::kMax;
        std::fill_n(to, channels, is_max ? kNotSeen : 0.0);
        const int64_t begin = plan.has_windows ? s * plan.window : 0;
        const int64_t end = plan.has_windows ? std::min(begin + plan.window, tokens) : tokens;
        for (int64_t j = begin; j < end; ++j) {
          const double* row = rows.Row(b, h, j);
          const bool real = is_token(b, j);
          for (int64_t c = 0; c < channels; ++c) {
            const double element = real ? row[c] : 0;
            switch (options.projection) {
              case Projection::kMean:
                to[c] += element / static_cast<double>(end - begin);
                break;
              case Projection::kMax:
                if (!(element <= to[c]) && !std::isnan(to[c])) to[c] = element;
                break;
              case Projection::kConvolution:
                for (int64_t out = 0; real && out < channels; ++out) {
                  to[out] += table.Row(of, out, c)[j - begin] * element;
                }
                break;
              case Projection::kDepthwiseConvolution:
                if (real) to[c] += table.Row(of, c)[j - begin] * element;
                break;
              default:
                if (real) to[c] += table.Row(of, s)[j] * element;
            }
          }
        }
      }
    }
  }
  return slots;
}

class Linformer : public FlashTechnique<LinformerOptions> {
 public:
  Linformer() : FlashTechnique(Info()) {}

 private:
  absl::Status Check(const Problem& problem, const LinformerOptions& options) const override {
    const Plan plan(options, problem);
    const bool convolves = options.projection == Projection::kConvolution ||
                           options.projection == Projection::kDepthwiseConvolution;
    if (!convolves || plan.has_f || problem.head_dim == problem.value_dim) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrCat("one convolution for keys and values: value_dim is ", problem.value_dim,
                     "; allowed is head_dim, ", problem.head_dim));
  }

  absl::StatusOr<NamedTensors> Draw(const Job& job) const override {
    const Problem& p = job.problem;
    const Plan plan(job.options, p);
    NamedTensors parameters;
    if (plan.has_e) {
      TFB_ASSIGN_OR_RETURN(parameters["e"], DrawTables(job.options, p, "e", p.head_dim, job.seed));
    }
    if (plan.has_f) {
      TFB_ASSIGN_OR_RETURN(parameters["f"], DrawTables(job.options, p, "f", p.value_dim, job.seed));
    }
    return parameters;
  }

  // Tables that a Setup has fitted are fitted again, and those that the caller gives are not.
  PlannedLayer::Fit MakeFit(const Problem& problem,
                            const LinformerOptions& options) const override {
    const Plan plan(options, problem);
    if (!plan.is_fitted) return nullptr;
    const auto fitted = std::make_shared<Tensor>();
    return [plan, fitted](Device device, const Inputs& inputs, const Execution& execution,
                          NamedTensors* parameters) -> absl::Status {
      Tensor& e = parameters->at("e");
      if (!IsUnfitted(e) && !SameBits(e, *fitted)) return absl::OkStatus();
      TFB_RETURN_IF_ERROR(FitToInputs(plan, device, inputs, execution, &e));
      *fitted = e.Clone();
      return absl::OkStatus();
    };
  }

  // One softmax over the slots, in their precision.
  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    return FlashPlan::Empty(job.problem)
        .AddStep<Compress>(job.problem, job.options, job.parameters, job.device)
        .AddRows(TokenRange{0, job.problem.query_tokens})
        .Precision(DType::kF32)
        .AddPart({0, Plan(job.options, job.problem).slots})
        .Tensors("q", "key_slots", "value_slots")
        .KeyMask("");
  }

  absl::Status Definition(const Problem& problem, const LinformerOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override {
    const Plan plan(options, problem);
    const KeyMask is_token(inputs);
    const Tensor* e = plan.has_e ? &parameters.at("e") : nullptr;
    Tensor fitted;
    // So in a layer before its Setup, or inside another layer.
    if (plan.is_fitted && IsUnfitted(*e)) {
      fitted = e->Clone();
      TFB_RETURN_IF_ERROR(
          FitTables(plan, inputs.Get("k"), inputs.Get("v"), inputs.Get("key_mask"), &fitted));
      e = &fitted;
    }
    const Tensor* f = plan.has_f ? &parameters.at("f") : e;
    const Tensor keys = DefineSlots(options, plan, inputs.Get("k"), is_token, e);
    const Tensor values = DefineSlots(options, plan, inputs.Get("v"), is_token, f);

    Problem of_slots = problem;
    of_slots.kv_tokens = plan.slots;
    DefinitionRequest without_weights = request;  // weights of slots are not weights of keys
    without_weights.weights = false;
    const DoubleTensor q(inputs.Get("q")), k(keys.view());
    const double scale = 1 / std::sqrt(static_cast<double>(problem.head_dim));
    DefineAttention(
        of_slots, Inputs{{"v", values.view()}}, without_weights,
        [&](int64_t b, int64_t h, int64_t i, int64_t s) {
          return scale * Dot(q.Row(b, h, i), k.Row(b, h / problem.group(), s), problem.head_dim);
        },
        outputs);
    return absl::OkStatus();
  }
};

const bool registered = RegisterTechnique<Linformer>();

}  // namespace
}  // namespace tfb::linformer
