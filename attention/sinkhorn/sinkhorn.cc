#include "attention/sinkhorn/sinkhorn.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/sinkhorn/sinkhorn_backward.h"
#include "attention/sinkhorn/sinkhorn_cpu.h"
#include "attention/sinkhorn/sinkhorn_cuda.h"
#include "attention/sinkhorn/sinkhorn_device.h"
#include "attention/sinkhorn/sinkhorn_functors.h"
#include "core/cuda/device_array.h"
#include "core/cuda/for_each.h"
#include "core/workspace.h"

namespace tfb::sinkhorn {
namespace {

using Pooled = SinkhornOptions::Pooled;

const bool registered = RegisterTechnique<Sinkhorn>();

constexpr int64_t kMaxBlocks = 4096;  // a head's matrix of logarithms is then 128 MiB

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "sinkhorn";
  info.family = "attention";
  info.title = "Sparse Sinkhorn attention: sorted blocks";
  info.citation = "Tay, Bahri, Yang, Metzler, Juan 2020, arXiv:2002.11296";
  info.exactness = Exactness::kOwn;
  info.budget_option = "block";
  info.growth = 1.5;  // with the best block for each length; with one block, from 1 to 2
  info.self_attention = true;
  return info;
}

int64_t WidthOf(const Problem& problem, const SinkhornOptions& options) {
  switch (options.pooled) {
    case Pooled::kQueriesAndKeys:
      return 2 * problem.head_dim;
    case Pooled::kHidden:
      return problem.model_dim();
    default:
      return problem.head_dim;
  }
}

SinkhornSizes SizesOf(const Problem& problem, const SinkhornOptions& options) {
  SinkhornSizes sizes = {};
  sizes.batch = problem.batch;
  sizes.heads = problem.kv_heads;
  sizes.tokens = problem.kv_tokens;
  sizes.block = std::min(options.block, std::max<int64_t>(problem.kv_tokens, 1));
  sizes.blocks = std::max<int64_t>((problem.kv_tokens + sizes.block - 1) / sizes.block, 1);
  sizes.null_blocks = options.null_key ? 1 : 0;
  sizes.mixed_blocks =
      options.sorted_blocks == 0 ? sizes.blocks : std::min(options.sorted_blocks, sizes.blocks);
  sizes.width = WidthOf(problem, options);
  sizes.hidden = options.hidden;
  sizes.iterations = options.iterations;
  sizes.temperature = options.temperature;
  sizes.scores = options.scores;
  sizes.causal = problem.causal;
  return sizes;
}

TensorSpec MatrixSpec(const char* name, const SinkhornSizes& sizes) {
  return {name, {sizes.batch, sizes.heads, sizes.blocks, sizes.Columns()}};
}

// A pattern in which a query sees the keys of the sorted block in the place of its own.
class SortedBlockPattern : public Pattern {
 public:
  explicit SortedBlockPattern(const SinkhornSizes& sizes) : sizes_(sizes) {}
  int64_t AddKeys(int64_t, int64_t i, KeyList* keys) const override {
    const int64_t u = i / sizes_.block, end = (u + 1) * sizes_.block;
    if (sizes_.Support(u) > 0) keys->Add(end - sizes_.block, end);
    return end;
  }

 private:
  SinkhornSizes sizes_;
};

// A pattern in which it also sees those of its own block.
class OwnBlockPattern : public Pattern {
 public:
  explicit OwnBlockPattern(const SinkhornSizes& sizes) : sizes_(sizes) {}
  int64_t AddKeys(int64_t, int64_t i, KeyList* keys) const override {
    const int64_t begin = i / sizes_.block * sizes_.block;
    const int64_t end = sizes_.causal ? i + 1 : begin + sizes_.block;
    keys->Add(begin, end);
    return end;
  }

 private:
  SinkhornSizes sizes_;
};

// Sorts the blocks, and mixes keys, values and mask by it: the tensors sort_matrix [batch, kv_heads,
// blocks, columns], sorted_keys [batch, kv_heads, mixed_blocks block, head_dim], sorted_values and,
// where there is a key_mask, sorted_mask [batch, mixed_blocks block].
class SortBlocks : public FlashStep {
 public:
  SortBlocks(const Problem& problem, const SinkhornOptions& options, const NamedTensors& parameters)
      : problem_(problem),
        options_(options),
        parameters_(parameters),
        sizes_(SizesOf(problem, options)) {}

  absl::Status Setup(Device device, const Inputs&, const Execution&) override {
    device_ = device;
    for (const auto& [name, tensor] : parameters_) {
      const absl::Span<const float> values = tensor.span<float>();
      TFB_ASSIGN_OR_RETURN(network_[name],
                           DeviceArray<double>::Create(device, {values.begin(), values.end()}));
    }
    return absl::OkStatus();
  }

  void LayOut(Workspace* workspace, Inputs* tensors) override {
    const Problem& p = problem_;
    const auto take = [workspace](DType dtype, const Shape& shape) {
      std::byte* memory = workspace->Take<std::byte>(NumElements(shape) * SizeOf(dtype));
      return TensorView(memory, dtype, shape);
    };
    const int64_t mixed = sizes_.mixed_blocks * sizes_.block;
    sort_ = take(SortType(), {p.batch, p.kv_heads, sizes_.blocks, sizes_.Columns()});
    keys_ = take(p.dtype, {p.batch, p.kv_heads, mixed, p.head_dim});
    values_ = take(p.dtype, {p.batch, p.kv_heads, mixed, p.value_dim});
    key_mask_ = take(DType::kU8, {p.batch, mixed});
    tensors->Set("sort_matrix", sort_);
    tensors->Set("sorted_keys", keys_);
    tensors->Set("sorted_values", values_);
    const bool has_mask = !tensors->Get("key_mask").empty();
    tensors->Set("sorted_mask", has_mask ? key_mask_ : ConstTensorView());
  }

  size_t workspace_bytes(Device device, int threads) const override {
    if (device != Device::kCpu) {
      return SortCudaWorkspaceBytes(sizes_);
    }
    return std::max(SortCpuWorkspaceBytes(sizes_, threads),
                    MixCpuWorkspaceBytes(sizes_, SortType(), threads));
  }

  double flops() const override {
    const SinkhornSizes& s = sizes_;
    const auto product = [](auto... sizes) { return (1.0 * ... * static_cast<double>(sizes)); };
    double sums = 0;  // pairs of blocks that are summed
    for (int64_t u = 0; u < s.mixed_blocks; ++u) sums += static_cast<double>(s.Support(u));
    const double units = s.hidden == 0
                             ? product(s.width, s.Columns())
                             : product(s.hidden, s.width) + product(s.hidden, s.Columns());
    double of_head = product(s.iterations, 4, s.blocks, s.Columns());
    if (s.scores != SortScores::kGiven) {
      of_head += product(s.tokens, s.width) + 2 * product(s.blocks) * units;
    }
    of_head += 2 * sums * product(s.block, problem_.head_dim + problem_.value_dim);
    return product(s.batch, s.heads) * of_head;
  }

  absl::Status CheckBackward(Device) const override { return absl::OkStatus(); }
  std::vector<std::string> kept_tensors() const override { return {"sort_matrix"}; }
  absl::Status RunAgain(const Inputs& tensors, const Execution& execution) override {
    FindSort(tensors);
    return Mix(tensors, execution);
  }
  size_t backward_workspace_bytes(Device device, int threads) const override {
    const std::array<int64_t, 2> channels = {problem_.head_dim, problem_.value_dim};
    return device == Device::kCpu ? SortBackwardWorkspaceBytes(sizes_, channels, threads)
                                  : SortBackwardCudaWorkspaceBytes(sizes_, channels);
  }
  absl::Status Backward(const Inputs& tensors, const Outputs& gradients,
                        const ParameterGradients& of_parameters,
                        const Execution& execution) override {
    const auto sums = [&](const char* name) -> double* {
      const auto parameter = parameters_.find(name);
      return parameter == parameters_.end() ? nullptr : of_parameters.Of(parameter->second.raw());
    };
    SortBackwardCall call;
    call.forward = SortCallOf(tensors);
    call.sort_is_given = !tensors.Get("sort").empty();
    call.mixed[0] = {tensors.Get("k"), Numbers("null_key"), gradients.Get("sorted_keys"),
                     gradients.Get("k"), sums("null_key")};
    call.mixed[1] = {tensors.Get("v"), Numbers("null_value"), gradients.Get("sorted_values"),
                     gradients.Get("v"), sums("null_value")};
    call.pooled = PooledRowsOf<PooledGradients>(gradients);
    call.network = {sums("hidden_weights"), sums("hidden_bias"), sums("score_weights"),
                    sums("score_bias")};
    call.logits_gradient = gradients.Get("logits");
    call.noise_gradient = gradients.Get("g");
    call.sort_gradient = gradients.Get("sort");
    return device_ == Device::kCpu ? SortBackwardCpu(call, execution)
                                   : SortBackwardCuda(device_, call, execution);
  }

  absl::Status Run(const Inputs& tensors, const Outputs& outputs,
                   const Execution& execution) override {
    FindSort(tensors);
    const ConstTensorView given = tensors.Get("sort");
    if (!given.empty()) {
      TFB_RETURN_IF_ERROR(CopySort(given, sort_, execution));
    } else if (device_ == Device::kCpu) {
      SortCpu(SortCallOf(tensors), execution);
    } else {
      TFB_RETURN_IF_ERROR(SortCuda(device_, SortCallOf(tensors), execution));
    }
    const TensorView asked = outputs.Get("sort");
    if (!asked.empty()) TFB_RETURN_IF_ERROR(CopySort(sort_, asked, execution));
    return Mix(tensors, execution);
  }

 private:
  // Returns the dtype of S: sums that are rounded to 16 bits are computed in float64.
  DType SortType() const { return problem_.dtype == DType::kF32 ? DType::kF32 : DType::kF64; }

  // Returns a parameter on the device; null where the options have none.
  const double* Numbers(const char* name) const {
    const auto found = network_.find(name);
    return found == network_.end() ? nullptr : found->second.data();
  }
  SortNetwork Network() const {
    return {Numbers("hidden_weights"), Numbers("hidden_bias"), Numbers("score_weights"),
            Numbers("score_bias")};
  }

  // Returns the rows that are pooled, or their gradients.
  template <class Rows, class Views>
  std::array<Rows, 2> PooledRowsOf(const Views& tensors) const {
    if (options_.scores == SortScores::kGiven) return {};
    const Rows keys = {tensors.Get("k"), 1};
    switch (options_.pooled) {
      case Pooled::kQueriesAndKeys:
        return {Rows{tensors.Get("q"), problem_.group()}, keys};
      case Pooled::kHidden: {
        auto x = tensors.Get("x");  // the same for all heads
        if (x.empty()) return {};
        x.rank = 4;
        x.dims = {x.dim(0), sizes_.heads, x.dim(1), x.dim(2)};
        x.strides = {x.stride(0), 0, x.stride(1), x.stride(2)};
        return {Rows{x, 1}, Rows()};
      }
      default:
        return {keys, Rows()};
    }
  }

  SortCall SortCallOf(const Inputs& inputs) const {
    return {sizes_,
            Network(),
            PooledRowsOf<PooledRows>(inputs),
            inputs.Get("key_mask"),
            inputs.Get("logits"),
            inputs.Get("g"),
            sort_};
  }

  // S is where the layer keeps it, or in the workspace: the layer owns both, so that it may be written.
  void FindSort(const Inputs& tensors) {
    static_cast<ConstTensorView&>(sort_) = tensors.Get("sort_matrix");
  }

  // Mixes by the matrix that there is.
  absl::Status Mix(const Inputs& inputs, const Execution& execution) const {
    const ConstTensorView key_mask = inputs.Get("key_mask");
    const SinkhornMask mask = ToMask(key_mask);
    const auto mix = [&](const char* name, const char* null_rows,
                         const TensorView& to) -> absl::Status {
      const ConstTensorView from = inputs.Get(name);
      if (device_ == Device::kCpu) {
        MixCpu(sizes_, sort_, from, Numbers(null_rows), key_mask, to, execution);
        return absl::OkStatus();
      }
      TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
      const MixArguments arguments = {sizes_,
                                      ToSortMatrix(sort_),
                                      ToDeviceView(from),
                                      ToDeviceView(to),
                                      from.dim(3),
                                      Numbers(null_rows),
                                      mask};
      return ToStatus(
          KernelsOn<SinkhornKernels>(runtime->target()).mix(arguments, execution.stream));
    };
    TFB_RETURN_IF_ERROR(mix("k", "null_key", keys_));
    TFB_RETURN_IF_ERROR(mix("v", "null_value", values_));
    return FindKeys(mask, execution);
  }

  absl::Status CopySort(const ConstTensorView& from, const ConstTensorView& to,
                        const Execution& execution) const {
    return ForEachInRows(device_, sizes_.batch * sizes_.heads * sizes_.blocks, sizes_.Columns(),
                         CopyOfSort{sizes_, ToSortMatrix(from), ToSortMatrix(to)}, execution);
  }
  absl::Status FindKeys(const SinkhornMask& mask, const Execution& execution) const {
    if (mask.data == nullptr) return absl::OkStatus();
    const KeysAmongMixedRows keys = {sizes_, mask, key_mask_.MutableAt<uint8_t>(0)};
    return ForEach(device_, sizes_.batch * sizes_.block, keys, execution);
  }

  Problem problem_;
  SinkhornOptions options_;
  const NamedTensors& parameters_;
  SinkhornSizes sizes_;
  Device device_ = Device::kCpu;
  std::map<std::string, DeviceArray<double>, std::less<>> network_;  // parameters
  // The arrays of a Run, in the workspace.
  TensorView sort_;  // [batch, kv_heads, N, columns]
  TensorView keys_;
  TensorView values_;
  TensorView key_mask_;
};

}  // namespace

Sinkhorn::Sinkhorn() : FlashTechnique(Info()) {}

absl::StatusOr<NamedTensors> Sinkhorn::Draw(const Job& job) const {
  const SinkhornSizes s = SizesOf(job.problem, job.options);
  std::vector<NormalParameter> parameters;
  const auto add = [&](const char* name, const Shape& shape, int64_t inputs) {
    parameters.push_back({name, shape, 1 / std::sqrt(static_cast<double>(inputs))});
  };
  if (s.scores != SortScores::kGiven) {
    if (s.hidden > 0) {
      add("hidden_weights", {s.heads, s.width, s.hidden}, s.width);
      add("hidden_bias", {s.heads, s.hidden}, s.width);
    }
    const int64_t depth = s.hidden > 0 ? s.hidden : s.width;
    add("score_weights", {s.heads, depth, s.Columns()}, depth);
    add("score_bias", {s.heads, s.Columns()}, depth);
  }
  if (s.null_blocks > 0) {
    add("null_key", {s.heads, job.problem.head_dim}, 1);
    add("null_value", {s.heads, job.problem.value_dim}, 1);
  }
  return DrawNormal(job.seed, parameters);
}

// A softmax over the sorted blocks and, without SortCut, the queries' own.
absl::StatusOr<FlashPlan> Sinkhorn::Describe(const Job& job) const {
  const SinkhornSizes sizes = SizesOf(job.problem, job.options);
  FlashPlan plan = FlashPlan::Empty(job.problem);
  plan.AddStep<SortBlocks>(job.problem, job.options, job.parameters)
      .AddRows(TokenRange{0, job.problem.query_tokens})
      .AddPart({0, sizes.mixed_blocks * sizes.block})
      .Tensors("q", "sorted_keys", "sorted_values")
      .KeyMask("sorted_mask");
  if (job.options.sorted_blocks > 0) return plan;
  return plan.Sees(SortedBlockPattern(sizes)).AddPart().Sees(OwnBlockPattern(sizes));
}

absl::Status Sinkhorn::Check(const Problem& problem, const SinkhornOptions& options) const {
  if (problem.causal && options.sorted_blocks > 0) {
    return absl::UnimplementedError(
        absl::StrCat("sorted_blocks is ", options.sorted_blocks,
                     ": all queries would see blocks of the future; causal needs 0"));
  }
  if (options.null_key && !problem.causal) {
    return absl::UnimplementedError(
        "null_key is true: the null block is for the first block of a causal problem, which has no "
        "block before it");
  }
  const SinkhornSizes sizes = SizesOf(problem, options);
  if (sizes.blocks <= kMaxBlocks) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("kv_tokens ", problem.kv_tokens, " with block ",
                                                 options.block, " are ", sizes.blocks,
                                                 " blocks; allowed are 1 to ", kMaxBlocks));
}

std::vector<TensorSpec> Sinkhorn::ReadTensors(const Problem& problem,
                                              const SinkhornOptions& options) const {
  const SinkhornSizes sizes = SizesOf(problem, options);
  std::vector<TensorSpec> tensors = QkvInputs(problem);
  if (options.scores == SortScores::kGiven) {
    tensors.push_back(MatrixSpec("logits", sizes));
  } else if (options.pooled == Pooled::kHidden) {
    tensors.push_back(
        {"x", {problem.batch, problem.kv_tokens, problem.model_dim()}, problem.dtype});
  }
  if (options.gumbel) {
    tensors.push_back(MatrixSpec("g", sizes));
    tensors.back().noise = Distribution::kGumbel;
  }
  tensors.push_back(MatrixSpec("sort", sizes));
  tensors.back().optional = true;
  return tensors;
}

std::vector<TensorSpec> Sinkhorn::WrittenTensors(const Problem& problem,
                                                 const SinkhornOptions& options) const {
  std::vector<TensorSpec> tensors = AttentionOutputs(problem);
  tensors.push_back(MatrixSpec("sort", SizesOf(problem, options)));
  tensors.back().optional = true;
  return tensors;
}

}  // namespace tfb::sinkhorn
