#include "positional/shaw/shaw.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "core/cpu/kernels.h"
#include "core/cuda/device_array.h"
#include "core/cuda/runtime.h"
#include "core/definition.h"
#include "core/flash/flash_engine.h"
#include "core/flash/rows.h"
#include "core/random.h"
#include "core/workspace.h"
#include "positional/shaw/shaw_cpu.h"
#include "positional/shaw/shaw_cuda.h"

namespace tfb::shaw {
namespace {

const bool registered = RegisterTechnique<Shaw>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "shaw";
  info.family = "positional";
  info.title = "Shaw relative positions";
  info.citation = "Shaw, Uszkoreit, Vaswani 2018, arXiv:1803.02155v2, section 3";
  info.exactness = Exactness::kExact;
  info.growth = 2;
  return info;
}

ShawSizes SizesOf(const Problem& problem, const ShawOptions& options) {
  ShawSizes sizes = {};
  sizes.batch = problem.batch;
  sizes.query_heads = problem.query_heads;
  sizes.group = problem.group();
  sizes.query_tokens = problem.query_tokens;
  sizes.kv_tokens = problem.kv_tokens;
  sizes.head_dim = problem.head_dim;
  sizes.value_dim = problem.value_dim;
  sizes.value_row = RoundUp(problem.value_dim, kColumnQuantum);
  sizes.max_distance = options.max_distance;
  sizes.table_heads = options.per_head ? problem.query_heads : 1;
  sizes.far_parts = problem.causal || options.max_distance == 0 ? 1 : 2;
  sizes.causal = problem.causal;
  sizes.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(problem.head_dim)));
  return sizes;
}

class ShawLayer : public Layer {
 public:
  ShawLayer(const Problem& problem, const ShawOptions& options, NamedTensors parameters,
            Device device)
      : Layer(problem, QkvInputs(problem), AttentionOutputs(problem)),
        sizes_(SizesOf(problem, options)),
        device_(device) {
    parameters_ = std::move(parameters);
  }

  size_t workspace_bytes(int threads) const override {
    const size_t kept = Workspace::Measure([this](Workspace& workspace) { TakeFar(workspace); });
    const size_t own = device_ == Device::kCpu ? ShawCpuWorkspaceBytes(sizes_, threads) : 0;
    return kept + std::max(own, FlashEngine::WorkspaceBytes(device_, problem(),
                                                            /*relative_keys=*/false, threads));
  }

  // Returns the products of far pairs, of near pairs, and of queries and weights with the tables.
  Cost cost() const override {
    const Problem& p = problem();
    Cost cost;
    cost.bytes = TensorBytes();
    if (far_.empty()) return cost;
    double pairs = NearPairs() * static_cast<double>(p.query_heads);
    for (const FlashEngine& engine : far_) pairs += engine.schedule().KeptPairs(p.query_heads);
    const double values = static_cast<double>(p.value_dim);
    const double of_bin = static_cast<double>(p.head_dim) + (value_table_.size() > 0 ? values : 0);
    cost.flops =
        2 * static_cast<double>(p.batch) * pairs * (static_cast<double>(p.head_dim) + values) +
        2 * static_cast<double>(sizes_.rows() * sizes_.bins()) * of_bin;
    return cost;
  }

 protected:
  absl::Status DoSetup(const Inputs&, const Execution&) override {
    TFB_ASSIGN_OR_RETURN(key_table_, CopyFloats(device_, parameters_.at("key_positions").view()));
    const auto values = parameters_.find("value_positions");
    if (values != parameters_.end()) {
      TFB_ASSIGN_OR_RETURN(value_table_, CopyPadded(values->second.view()));
    }
    far_.clear();
    for (int64_t part = 0; part < sizes_.far_parts; ++part) {
      TFB_ASSIGN_OR_RETURN(FlashEngine engine,
                           FlashEngine::Create(device_, problem(), *FarPattern(part)));
      far_.push_back(std::move(engine));
    }
    return absl::OkStatus();
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    Workspace workspace(execution.workspace);
    const FarKeys far = TakeFar(workspace);
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    const Problem& p = problem();
    const Shape rows = {p.batch, p.query_heads, p.query_tokens};
    const Shape channels = {p.batch, p.query_heads, p.query_tokens, p.value_dim};
    for (int64_t part = 0; part < sizes_.far_parts; ++part) {
      FlashCall call = far_[part].NewCall(inputs, outputs);
      const int64_t first = part * sizes_.rows();
      call.out = TensorView(far.rows + first * p.value_dim, DType::kF32, channels);
      call.log_sum_exp = TensorView(far.log_sum_exp + first, DType::kF32, rows);
      TFB_RETURN_IF_ERROR(far_[part].Run(call, rest));
    }
    if (device_ != Device::kCpu) return RunOnCuda(inputs, outputs, far, execution.stream);
    ShawCpu(
        sizes_,
        {inputs.Get("q"), inputs.Get("k"), inputs.Get("v"), inputs.Get("key_mask"), far,
         key_table_.data(), value_table_.data(), outputs.Get("out"), outputs.Get("log_sum_exp")},
        rest);
    return absl::OkStatus();
  }

 private:
  FarKeys TakeFar(Workspace& workspace) const {
    const int64_t rows = sizes_.far_parts * sizes_.rows();
    FarKeys far;
    far.rows = workspace.Take<float>(rows * sizes_.value_dim);
    far.log_sum_exp = workspace.Take<float>(rows);
    return far;
  }

  // Copies rows, each padded to value_row numbers.
  absl::StatusOr<DeviceArray<float>> CopyPadded(const ConstTensorView& table) const {
    Tensor padded(DType::kF32, {table.dim(0), table.dim(1), sizes_.value_row});
    Fill(padded.view(), 0);
    CopyElements(table, Slice(padded.view(), 2, 0, table.dim(2)));
    return CopyFloats(device_, padded.view());
  }

  // Returns the pattern of the keys at distance k or more, before a query or behind it. With k = 0
  // all are in one bin.
  std::unique_ptr<Pattern> FarPattern(int64_t part) const {
    const Problem& p = problem();
    const int64_t k = sizes_.max_distance, here = p.causal_offset();
    if (k == 0) return std::make_unique<FullPattern>();
    return part == 0 ? std::make_unique<BandPattern>(-p.query_tokens, here - k)
                     : std::make_unique<BandPattern>(here + k, p.kv_tokens);
  }

  absl::Status RunOnCuda(const Inputs& inputs, const Outputs& outputs, const FarKeys& far,
                         void* stream) const {
    ShawArguments a = {};
    a.sizes = sizes_;
    a.q = ToDeviceView(inputs.Get("q"));
    a.k = ToDeviceView(inputs.Get("k"));
    a.v = ToDeviceView(inputs.Get("v"));
    a.out = ToDeviceView(outputs.Get("out"));
    const ConstTensorView mask = inputs.Get("key_mask");
    a.key_mask = static_cast<const uint8_t*>(mask.data);
    std::copy_n(mask.strides.data(), 2, a.mask_strides);
    a.far_rows = far.rows;
    a.far_log_sum_exp = far.log_sum_exp;
    a.key_table = key_table_.data();
    a.value_table = value_table_.data();
    const TensorView log_sum_exp = outputs.Get("log_sum_exp");
    a.log_sum_exp = static_cast<float*>(log_sum_exp.mutable_data());
    std::copy_n(log_sum_exp.strides.data(), 3, a.log_sum_exp_strides);
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    return ToStatus(KernelsOn<ShawKernels>(runtime->target()).softmax_of_bins(a, stream));
  }

  // Returns the near pairs of a head and batch row.
  double NearPairs() const {
    double pairs = 0;
    for (int64_t i = 0; i < sizes_.query_tokens; ++i) {
      const int64_t position = sizes_.Position(i);
      const int64_t near = sizes_.LastNear(position) - sizes_.FirstNear(position) + 1;
      pairs += static_cast<double>(std::max<int64_t>(near, 0));
    }
    return pairs;
  }

  ShawSizes sizes_;
  Device device_;
  std::vector<FlashEngine> far_;
  DeviceArray<float> key_table_;
  DeviceArray<float> value_table_;  // empty: none
};

}  // namespace

Shaw::Shaw() : TechniqueOf(Info()) {}

absl::StatusOr<std::unique_ptr<Layer>> Shaw::MakeLayer(const Problem& problem,
                                                       const ShawOptions& options, Device device,
                                                       uint64_t seed) const {
  const ShawSizes sizes = SizesOf(problem, options);
  NamedTensors parameters;
  const auto draw = [&](const char* name, int64_t channels) -> absl::Status {
    const Shape shape = {sizes.table_heads, sizes.bins(), channels};
    TFB_ASSIGN_OR_RETURN(Tensor table, Tensor::Allocate(DType::kF32, shape));
    FillNormal(&table, seed, name, 0, 0.1);
    parameters[name] = std::move(table);
    return absl::OkStatus();
  };
  TFB_RETURN_IF_ERROR(draw("key_positions", problem.head_dim));
  if (options.values) TFB_RETURN_IF_ERROR(draw("value_positions", problem.value_dim));
  return std::make_unique<ShawLayer>(problem, options, std::move(parameters), device);
}

// P^V is added to v_j before the sum, pair by pair.
absl::Status Shaw::Definition(const Problem& problem, const ShawOptions& options,
                              const NamedTensors& parameters, const Inputs& inputs,
                              const DefinitionRequest& request, NamedTensors* outputs) const {
  const DoubleTensor q(inputs.Get("q")), keys(parameters.at("key_positions").view());
  const int64_t k = options.max_distance, tables = options.per_head ? problem.query_heads : 1;
  const auto rho = [&](int64_t i, int64_t j) {
    return std::min(std::max(j - (i + problem.causal_offset()), -k), k) + k;
  };
  const double scale = 1 / std::sqrt(static_cast<double>(problem.head_dim));
  DefinitionRequest with_weights = request;
  with_weights.weights = request.weights || options.values;
  DefineMaskedAttention(
      problem, inputs, with_weights, 0, [](int64_t, int64_t, int64_t) { return true; },
      [&](int64_t b, int64_t h, int64_t i, int64_t j) {
        return scale * Dot(q.Row(b, h, i), keys.Row(h % tables, rho(i, j)), problem.head_dim);
      },
      outputs);
  if (!options.values) return absl::OkStatus();
  const DoubleTensor values(parameters.at("value_positions").view());
  const std::vector<int64_t> rows = RowsOf(request, problem.query_tokens);
  const ConstTensorView weights = outputs->at("weights").view();
  const TensorView out = outputs->at("out").view();
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t h = 0; h < problem.query_heads; ++h) {
      for (size_t r = 0; r < rows.size(); ++r) {
        const double* weight = weights.At<double>(b, h, r);
        double* y = out.MutableAt<double>(b, h, r);
        for (int64_t j = 0; j < problem.kv_tokens; ++j) {
          if (weight[j] == 0) continue;
          const double* position = values.Row(h % tables, rho(rows[r], j));
          for (int64_t c = 0; c < problem.value_dim; ++c) y[c] += weight[j] * position[c];
        }
      }
    }
  }
  if (!request.weights) outputs->erase("weights");
  return absl::OkStatus();
}

}  // namespace tfb::shaw
