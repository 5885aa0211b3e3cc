#include "positional/shaw/shaw.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "core/cpu/kernels.h"
#include "core/cuda/device_array.h"
#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/definition.h"
#include "core/flash/flash_technique.h"
#include "core/flash/rows.h"
#include "core/workspace.h"
#include "positional/shaw/shaw_cpu.h"
#include "positional/shaw/shaw_cuda.h"
#include "positional/shaw/shaw_functors.h"

namespace tfb::shaw {
namespace {

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

// What the engine writes for the far keys before and behind a query: f32 [batch, query_heads,
// query_tokens, value_dim] and [batch, query_heads, query_tokens].
constexpr const char* kFarRows[] = {"rows_before", "rows_behind"};
constexpr const char* kFarLogSumExp[] = {"lse_before", "lse_behind"};

// The softmax over the bins of the clipped offsets, behind those over the far keys.
class SoftmaxOfBins : public FlashStep {
 public:
  SoftmaxOfBins(const Problem& problem, const ShawOptions& options, const NamedTensors& parameters)
      : sizes_(SizesOf(problem, options)), parameters_(parameters) {}

  absl::Status Setup(Device device, const Inputs&, const Execution&) override {
    device_ = device;
    TFB_ASSIGN_OR_RETURN(key_table_, CopyFloats(device, parameters_.at("key_positions").view()));
    const auto values = parameters_.find("value_positions");
    if (values == parameters_.end()) return absl::OkStatus();
    TFB_ASSIGN_OR_RETURN(value_table_, CopyPadded(values->second.view()));
    return absl::OkStatus();
  }

  void LayOut(Workspace* workspace, Inputs* tensors) override {
    const auto set = [&](const char* name, const Shape& shape) {
      tensors->Set(name,
                   ConstTensorView(workspace->Take<float>(NumElements(shape)), DType::kF32, shape));
    };
    const Shape of_rows = {sizes_.batch, sizes_.query_heads, sizes_.query_tokens};
    const Shape of_values = {sizes_.batch, sizes_.query_heads, sizes_.query_tokens,
                             sizes_.value_dim};
    for (int64_t part = 0; part < sizes_.far_parts; ++part) {
      set(kFarRows[part], of_values);
      set(kFarLogSumExp[part], of_rows);
    }
  }
  size_t workspace_bytes(Device device, int threads) const override {
    return device == Device::kCpu ? ShawCpuWorkspaceBytes(sizes_, threads) : 0;
  }

  absl::Status Run(const Inputs&, const Outputs&, const Execution&) override {
    return absl::OkStatus();
  }
  absl::Status Finish(const Inputs& inputs, const Outputs& outputs,
                      const Execution& execution) override {
    if (device_ != Device::kCpu) return RunOnCuda(inputs, outputs, execution.stream);
    ShawCall call = CallOf(inputs);
    call.out = outputs.Get("out");
    call.log_sum_exp = outputs.Get("log_sum_exp");
    ShawCpu(sizes_, call, execution);
    return absl::OkStatus();
  }

  absl::Status CheckBackward(Device) const override { return absl::OkStatus(); }
  size_t backward_workspace_bytes(Device device, int threads) const override {
    if (device == Device::kCpu) return ShawCpuBackwardWorkspaceBytes(sizes_, threads);
    return Workspace::Measure([&](Workspace& workspace) { TakeSums(&workspace); });
  }
  bool adds_before_softmaxes() const override { return true; }
  absl::Status FinishBackward(const Inputs& tensors, const Inputs& output_gradients,
                              const Outputs& gradients, const ParameterGradients& parameters,
                              const Execution& execution) override {
    ShawGradients of = {};
    of.out = output_gradients.Get("out");
    of.log_sum_exp = output_gradients.Get("log_sum_exp");
    of.q = gradients.Get("q");
    of.k = gradients.Get("k");
    of.v = gradients.Get("v");
    for (int64_t part = 0; part < sizes_.far_parts; ++part) {
      of.far_rows[part] = static_cast<float*>(gradients.Get(kFarRows[part]).mutable_data());
      of.far_log_sum_exp[part] =
          static_cast<float*>(gradients.Get(kFarLogSumExp[part]).mutable_data());
    }
    of.key_table = parameters.Of(parameters_.at("key_positions").raw());
    const auto values = parameters_.find("value_positions");
    if (values != parameters_.end()) of.value_table = parameters.Of(values->second.raw());
    if (device_ != Device::kCpu) return DifferentiateOnCuda(tensors, of, execution);
    ShawCpuBackward(sizes_, CallOf(tensors), of, execution);
    return absl::OkStatus();
  }

  double flops() const override { return FlopsOf(1, 1); }
  // Scores again, and the gradients of queries and keys; those of weights and values.
  double backward_flops() const override { return FlopsOf(3, 2); }

 private:
  // Returns the FLOPs of some products of near pairs, and of queries and weights with the tables,
  // over the channels of keys and of values.
  double FlopsOf(double of_keys, double of_values) const {
    const double keys = of_keys * static_cast<double>(sizes_.head_dim);
    const double values = of_values * static_cast<double>(sizes_.value_dim);
    const double of_bin = keys + (parameters_.count("value_positions") > 0 ? values : 0);
    return 2 * static_cast<double>(sizes_.batch * sizes_.query_heads) * NearPairs() *
               (keys + values) +
           2 * static_cast<double>(sizes_.rows() * sizes_.bins()) * of_bin;
  }

  // Returns the call of the tensors of a Run, without where to write.
  ShawCall CallOf(const Inputs& tensors) const {
    ShawCall call = {};
    call.q = tensors.Get("q");
    call.k = tensors.Get("k");
    call.v = tensors.Get("v");
    call.key_mask = tensors.Get("key_mask");
    for (int64_t part = 0; part < sizes_.far_parts; ++part) {
      call.far.rows[part] = static_cast<const float*>(tensors.Get(kFarRows[part]).data);
      call.far.log_sum_exp[part] = static_cast<const float*>(tensors.Get(kFarLogSumExp[part]).data);
    }
    call.key_table = key_table_.data();
    call.value_table = value_table_.data();
    return call;
  }

  // Copies rows, each padded to value_row numbers.
  absl::StatusOr<DeviceArray<float>> CopyPadded(const ConstTensorView& table) const {
    Tensor padded(DType::kF32, {table.dim(0), table.dim(1), sizes_.value_row});
    Fill(padded.view(), 0);
    CopyElements(table, Slice(padded.view(), 2, 0, table.dim(2)));
    return CopyFloats(device_, padded.view());
  }

  // Returns the arguments of the tensors of a Run, without where to write.
  ShawArguments ArgumentsOf(const Inputs& inputs) const {
    ShawArguments a = {};
    a.sizes = sizes_;
    a.q = ToDeviceView(inputs.Get("q"));
    a.k = ToDeviceView(inputs.Get("k"));
    a.v = ToDeviceView(inputs.Get("v"));
    const ConstTensorView mask = inputs.Get("key_mask");
    a.key_mask = static_cast<const uint8_t*>(mask.data);
    std::copy_n(mask.strides.data(), 2, a.mask_strides);
    for (int64_t part = 0; part < sizes_.far_parts; ++part) {
      a.far_rows[part] = static_cast<const float*>(inputs.Get(kFarRows[part]).data);
      a.far_log_sum_exp[part] = static_cast<const float*>(inputs.Get(kFarLogSumExp[part]).data);
    }
    a.key_table = key_table_.data();
    a.value_table = value_table_.data();
    return a;
  }

  absl::Status RunOnCuda(const Inputs& inputs, const Outputs& outputs, void* stream) const {
    ShawArguments a = ArgumentsOf(inputs);
    a.out = ToDeviceView(outputs.Get("out"));
    const TensorView log_sum_exp = outputs.Get("log_sum_exp");
    a.log_sum_exp = static_cast<float*>(log_sum_exp.mutable_data());
    std::copy_n(log_sum_exp.strides.data(), 3, a.log_sum_exp_strides);
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    return ToStatus(KernelsOn<ShawKernels>(runtime->target()).softmax_of_bins(a, stream));
  }

  // The scratch of a backward pass on CUDA.
  struct Sums {
    float* weights;
    float* score_gradients;
    float* of_tables;
  };
  Sums TakeSums(Workspace* workspace) const {
    const int64_t rows = sizes_.rows() * sizes_.bins();
    const SumOfBins sum = {sizes_, nullptr, {}, nullptr, 0};
    const int64_t of_channel = sizes_.table_heads * sum.chunks() * sizes_.bins();
    return {workspace->Take<float>(rows), workspace->Take<float>(rows),
            workspace->Take<float>(of_channel * std::max(sizes_.head_dim, sizes_.value_dim))};
  }

  absl::Status DifferentiateOnCuda(const Inputs& inputs, const ShawGradients& of,
                                   const Execution& execution) const {
    Workspace workspace(execution.workspace);
    const Sums sums = TakeSums(&workspace);
    ShawBackwardArguments a = {};
    a.forward = ArgumentsOf(inputs);
    a.out_gradient = ToDeviceView(of.out);
    a.log_sum_exp_gradient = ToDeviceView(of.log_sum_exp);
    a.q_gradient = ToDeviceView(of.q);
    std::copy_n(of.far_rows, 2, a.far_rows);
    std::copy_n(of.far_log_sum_exp, 2, a.far_log_sum_exp);
    a.weights = sums.weights;
    a.score_gradients = sums.score_gradients;
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    TFB_RETURN_IF_ERROR(ToStatus(
        KernelsOn<ShawKernels>(runtime->target()).differentiate_bins(a, execution.stream)));
    const Products of_keys = {sums.score_gradients, inputs.Get("q"), of.k, of.key_table,
                              sizes_.scale};
    TFB_RETURN_IF_ERROR(AddProducts(of_keys, sums.of_tables, execution));
    const Products of_values = {sums.weights, of.out, of.v, of.value_table, 1};
    return AddProducts(of_values, sums.of_tables, execution);
  }

  // Numbers of queries' bins times rows of queries, which near keys and a table receive.
  struct Products {
    const float* numbers;
    ConstTensorView rows;
    TensorView near;  // or empty
    double* table;    // or null
    float factor;
  };
  absl::Status AddProducts(const Products& of, float* sums, const Execution& execution) const {
    const DeviceView rows = ToDeviceView(of.rows);
    const int64_t channels = of.rows.dim(3), bins = sizes_.bins();
    if (!of.near.empty()) {
      const AddToNearKeys add = {sizes_, of.numbers, rows, ToDeviceView(of.near), of.factor};
      const int64_t keys = sizes_.batch * (sizes_.query_heads / sizes_.group) * sizes_.kv_tokens;
      TFB_RETURN_IF_ERROR(ForEachInRows(device_, keys, channels, add, execution));
    }
    if (of.table == nullptr) return absl::OkStatus();
    const SumOfBins sum = {sizes_, of.numbers, rows, sums, channels};
    TFB_RETURN_IF_ERROR(
        ForEachInRows(device_, sizes_.table_heads * sum.chunks() * bins, channels, sum, execution));
    const AddSumsOfBins add = {sums, sum.chunks(), bins, channels, of.factor, of.table};
    return ForEachInRows(device_, sizes_.table_heads * bins, channels, add, execution);
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
  const NamedTensors& parameters_;
  Device device_ = Device::kCpu;
  DeviceArray<float> key_table_;
  DeviceArray<float> value_table_;  // empty: none
};

class Shaw : public FlashTechnique<ShawOptions> {
 public:
  Shaw()
      : FlashTechnique({"shaw", "positional", "Shaw relative positions",
                        "Shaw, Uszkoreit, Vaswani 2018, arXiv:1803.02155v2, section 3"}) {}

 private:
  absl::StatusOr<NamedTensors> Draw(const Job& job) const override {
    const ShawSizes sizes = SizesOf(job.problem, job.options);
    const auto table = [&](const char* name, int64_t channels) {
      return NormalParameter{name, {sizes.table_heads, sizes.bins(), channels}, 0.1};
    };
    std::vector<NormalParameter> tables = {table("key_positions", sizes.head_dim)};
    if (job.options.values) tables.push_back(table("value_positions", sizes.value_dim));
    return DrawNormal(job.seed, tables);
  }

  // A softmax over the keys at distance k or more on each side. With k = 0 all are in one bin.
  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    const Problem& p = job.problem;
    const int64_t k = job.options.max_distance, here = p.causal_offset();
    FlashPlan plan = FlashPlan::Empty(p);
    plan.AddStep<SoftmaxOfBins>(p, job.options, job.parameters);
    for (int64_t part = 0; part < SizesOf(p, job.options).far_parts; ++part) {
      plan.AddRows(TokenRange{0, p.query_tokens}).Writes(kFarRows[part], kFarLogSumExp[part]);
      plan.AddPart().Causal();
      if (k > 0 && part == 0) plan.Sees(BandPattern(-p.query_tokens, here - k));
      if (k > 0 && part == 1) plan.Sees(BandPattern(here + k, p.kv_tokens));
    }
    return plan;
  }

  // P^V is added to v_j before the sum, pair by pair.
  absl::Status Definition(const Problem& problem, const ShawOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override {
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
};

const bool registered = RegisterTechnique<Shaw>();

}  // namespace
}  // namespace tfb::shaw
