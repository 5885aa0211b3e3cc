#include "attention/sinkhorn/sinkhorn.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/sinkhorn/sinkhorn_cpu.h"
#include "attention/sinkhorn/sinkhorn_cuda.h"
#include "attention/sinkhorn/sinkhorn_functors.h"
#include "core/cuda/device_array.h"
#include "core/cuda/for_each.h"
#include "core/flash/flash_parts.h"
#include "core/random.h"
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

SortMatrix ToSortMatrix(const ConstTensorView& view) {
  SortMatrix sort = {const_cast<void*>(view.data), {}, view.dtype == DType::kF64};
  std::copy_n(view.strides.data(), 4, sort.strides);
  return sort;
}

class SinkhornLayer : public Layer {
 public:
  SinkhornLayer(const Problem& problem, std::vector<TensorSpec> inputs,
                std::vector<TensorSpec> outputs, const SinkhornOptions& options,
                NamedTensors parameters, Device device)
      : Layer(problem, std::move(inputs), std::move(outputs)),
        options_(options),
        sizes_(SizesOf(problem, options)),
        device_(device) {
    parameters_ = std::move(parameters);
    Problem part = problem;
    part.causal = false;  // the patterns are causal
    parts_.push_back(part);
    parts_[0].kv_tokens = sizes_.mixed_blocks * sizes_.block;
    if (!IsSortCut()) parts_.push_back(part);
    calls_.resize(parts_.size());
  }

  size_t workspace_bytes(int threads) const override {
    const size_t kept = Workspace::Measure([this](Workspace& workspace) { Take(workspace); });
    return kept +
           std::max(SortBytes(threads),
                    FlashParts::WorkspaceBytes(device_, parts_, /*relative_keys=*/false, threads));
  }

  Cost cost() const override {
    const Problem& p = problem();
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
    of_head += 2 * sums * product(s.block, p.head_dim + p.value_dim);
    Cost cost;
    if (is_set_up_) {
      double pairs = 0;
      for (const FlashEngine& engine : softmax_.engines()) {
        pairs += engine.schedule().KeptPairs(p.query_heads);
      }
      cost.flops = product(p.batch) *
                   (product(p.kv_heads) * of_head + 2 * pairs * product(p.head_dim + p.value_dim));
    }
    cost.bytes = TensorBytes();
    return cost;
  }

 protected:
  absl::Status DoSetup(const Inputs&, const Execution&) override {
    for (const auto& [name, tensor] : parameters_) {
      const absl::Span<const float> values = tensor.span<float>();
      TFB_ASSIGN_OR_RETURN(network_[name],
                           DeviceArray<double>::Create(device_, {values.begin(), values.end()}));
    }
    std::vector<FlashEngine> engines;
    for (size_t n = 0; n < parts_.size(); ++n) {
      TFB_ASSIGN_OR_RETURN(FlashEngine engine,
                           FlashEngine::Create(device_, parts_[n], *PatternOf(n)));
      engines.push_back(std::move(engine));
    }
    softmax_ = FlashParts(device_, std::move(engines));
    is_set_up_ = true;
    return absl::OkStatus();
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    Workspace workspace(execution.workspace);
    const Sorted sorted = Take(workspace);
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    if (device_ == Device::kCpu) {
      TFB_RETURN_IF_ERROR(SortAndMix(inputs, outputs, sorted, rest));
    } else {
      TFB_RETURN_IF_ERROR(SortAndMixOnCuda(inputs, outputs, sorted, rest));
    }
    for (size_t n = 0; n < calls_.size(); ++n) {
      calls_[n] = softmax_.engines()[n].NewCall(inputs, outputs);
    }
    calls_[0].k = sorted.keys;
    calls_[0].v = sorted.values;
    if (!calls_[0].key_mask.empty()) calls_[0].key_mask = sorted.key_mask;
    return softmax_.Run(calls_, rest);
  }

 private:
  // Tensors that are computed from the inputs.
  struct Sorted {
    TensorView sort;      // [batch, kv_heads, N, columns]
    TensorView keys;      // [batch, kv_heads, mixed_blocks block, head_dim]
    TensorView values;    // [batch, kv_heads, mixed_blocks block, value_dim]
    TensorView key_mask;  // u8 [batch, mixed_blocks block]
  };

  bool IsSortCut() const { return options_.sorted_blocks > 0; }
  // Returns the dtype of S: sums that are rounded to 16 bits are computed in float64.
  DType SortType() const { return problem().dtype == DType::kF32 ? DType::kF32 : DType::kF64; }
  int64_t MixedRows() const { return sizes_.mixed_blocks * sizes_.block; }

  Sorted Take(Workspace& workspace) const {
    const Problem& p = problem();
    const auto take = [&workspace](DType dtype, const Shape& shape) {
      std::byte* memory = workspace.Take<std::byte>(NumElements(shape) * SizeOf(dtype));
      return TensorView(memory, dtype, shape);
    };
    Sorted sorted;
    sorted.sort = take(SortType(), {p.batch, p.kv_heads, sizes_.blocks, sizes_.Columns()});
    sorted.keys = take(p.dtype, {p.batch, p.kv_heads, MixedRows(), p.head_dim});
    sorted.values = take(p.dtype, {p.batch, p.kv_heads, MixedRows(), p.value_dim});
    sorted.key_mask = take(DType::kU8, {p.batch, MixedRows()});
    return sorted;
  }

  std::unique_ptr<Pattern> PatternOf(size_t part) const {
    if (part == 1) return std::make_unique<OwnBlockPattern>(sizes_);
    if (IsSortCut()) return std::make_unique<FullPattern>();
    return std::make_unique<SortedBlockPattern>(sizes_);
  }

  struct CudaScratch {
    double* pooled;
    double* logits;
  };
  CudaScratch TakeCudaScratch(Workspace& workspace) const {
    const int64_t rows = sizes_.batch * sizes_.heads * sizes_.blocks;
    return {workspace.Take<double>(rows * sizes_.width),
            workspace.Take<double>(rows * sizes_.Columns())};
  }
  size_t SortBytes(int threads) const {
    if (device_ != Device::kCpu) {
      return Workspace::Measure([this](Workspace& workspace) { TakeCudaScratch(workspace); });
    }
    return std::max(SortCpuWorkspaceBytes(sizes_, threads),
                    MixCpuWorkspaceBytes(sizes_, SortType(), threads));
  }

  // Returns a parameter on the device; null where the options have none.
  const double* Numbers(const char* name) const {
    const auto found = network_.find(name);
    return found == network_.end() ? nullptr : found->second.data();
  }
  SortNetwork Network() const {
    return {Numbers("hidden_weights"), Numbers("hidden_bias"), Numbers("score_weights"),
            Numbers("score_bias")};
  }

  std::array<PooledRows, 2> PooledRowsOf(const Inputs& inputs) const {
    if (options_.scores == SortScores::kGiven) return {};
    const PooledRows keys = {inputs.Get("k"), 1};
    switch (options_.pooled) {
      case Pooled::kQueriesAndKeys:
        return {PooledRows{inputs.Get("q"), problem().group()}, keys};
      case Pooled::kHidden: {
        const ConstTensorView x = inputs.Get("x");  // the same for all heads
        const Shape shape = {x.dim(0), sizes_.heads, x.dim(1), x.dim(2)};
        const Shape strides = {x.stride(0), 0, x.stride(1), x.stride(2)};
        return {PooledRows{ConstTensorView(x.data, x.dtype, shape, strides), 1}, PooledRows()};
      }
      default:
        return {keys, PooledRows()};
    }
  }

  absl::Status SortAndMix(const Inputs& inputs, const Outputs& outputs, const Sorted& sorted,
                          const Execution& execution) const {
    const ConstTensorView key_mask = inputs.Get("key_mask"), given = inputs.Get("sort");
    if (given.empty()) {
      SortCpu({sizes_, Network(), PooledRowsOf(inputs), key_mask, inputs.Get("logits"),
               inputs.Get("g"), sorted.sort},
              execution);
    } else {
      TFB_RETURN_IF_ERROR(CopySort(given, sorted.sort, execution));
    }
    const TensorView asked = outputs.Get("sort");
    if (!asked.empty()) TFB_RETURN_IF_ERROR(CopySort(sorted.sort, asked, execution));
    MixCpu(sizes_, sorted.sort, inputs.Get("k"), Numbers("null_key"), key_mask, sorted.keys,
           execution);
    MixCpu(sizes_, sorted.sort, inputs.Get("v"), Numbers("null_value"), key_mask, sorted.values,
           execution);
    return FindKeys(ToMask(key_mask), sorted, execution);
  }

  absl::Status SortAndMixOnCuda(const Inputs& inputs, const Outputs& outputs, const Sorted& sorted,
                                const Execution& execution) const {
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    const SinkhornKernels& kernels = KernelsOn<SinkhornKernels>(runtime->target());
    const ConstTensorView key_mask = inputs.Get("key_mask"), given = inputs.Get("sort");
    const SinkhornMask mask = ToMask(key_mask);
    const auto mix = [&](const char* name, const char* null_rows, const TensorView& to) {
      const ConstTensorView from = inputs.Get(name);
      const MixArguments arguments = {sizes_,
                                      ToSortMatrix(sorted.sort),
                                      ToDeviceView(from),
                                      ToDeviceView(to),
                                      from.dim(3),
                                      Numbers(null_rows),
                                      mask};
      return ToStatus(kernels.mix(arguments, execution.stream));
    };
    if (given.empty()) {
      const SortArguments arguments = ArgumentsOf(inputs, mask, sorted, execution);
      TFB_RETURN_IF_ERROR(ToStatus(kernels.sort(arguments, execution.stream)));
    } else {
      TFB_RETURN_IF_ERROR(CopySort(given, sorted.sort, execution));
    }
    const TensorView asked = outputs.Get("sort");
    if (!asked.empty()) TFB_RETURN_IF_ERROR(CopySort(sorted.sort, asked, execution));
    TFB_RETURN_IF_ERROR(mix("k", "null_key", sorted.keys));
    TFB_RETURN_IF_ERROR(mix("v", "null_value", sorted.values));
    return FindKeys(mask, sorted, execution);
  }

  static SinkhornMask ToMask(const ConstTensorView& key_mask) {
    if (key_mask.empty()) return {};
    return {static_cast<const uint8_t*>(key_mask.data), {key_mask.stride(0), key_mask.stride(1)}};
  }
  absl::Status CopySort(const ConstTensorView& from, const ConstTensorView& to,
                        const Execution& execution) const {
    return ForEachInRows(device_, sizes_.batch * sizes_.heads * sizes_.blocks, sizes_.Columns(),
                         CopyOfSort{sizes_, ToSortMatrix(from), ToSortMatrix(to)}, execution);
  }
  absl::Status FindKeys(const SinkhornMask& mask, const Sorted& sorted,
                        const Execution& execution) const {
    if (mask.data == nullptr) return absl::OkStatus();
    const KeysAmongMixedRows keys = {sizes_, mask, sorted.key_mask.MutableAt<uint8_t>(0)};
    return ForEach(device_, sizes_.batch * sizes_.block, keys, execution);
  }

  SortArguments ArgumentsOf(const Inputs& inputs, const SinkhornMask& mask, const Sorted& sorted,
                            const Execution& execution) const {
    Workspace workspace(execution.workspace);
    const CudaScratch scratch = TakeCudaScratch(workspace);
    SortArguments arguments = {};
    arguments.sizes = sizes_;
    arguments.network = Network();
    const std::array<PooledRows, 2> pooled = PooledRowsOf(inputs);
    for (size_t n = 0; n < pooled.size() && !pooled[n].rows.empty(); ++n) {
      arguments.pooled_rows[n] = ToDeviceView(pooled[n].rows);
      arguments.channels[n] = pooled[n].rows.dim(3);
      arguments.heads_summed[n] = pooled[n].heads_summed;
    }
    arguments.key_mask = mask;
    arguments.given = ToDeviceView(inputs.Get("logits"));
    arguments.noise = ToDeviceView(inputs.Get("g"));
    arguments.pooled = scratch.pooled;
    arguments.logits = scratch.logits;
    arguments.sort = ToSortMatrix(sorted.sort);
    return arguments;
  }

  SinkhornOptions options_;
  SinkhornSizes sizes_;
  Device device_;
  std::vector<Problem> parts_;  // the sorted blocks; and, without SortCut, the queries' own
  FlashParts softmax_;
  std::vector<FlashCall> calls_;                                     // room for the calls of a Run
  std::map<std::string, DeviceArray<double>, std::less<>> network_;  // parameters
  bool is_set_up_ = false;
};

absl::Status DrawParameter(const char* name, const Shape& shape, int64_t inputs, uint64_t seed,
                           NamedTensors* parameters) {
  TFB_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(DType::kF32, shape));
  FillNormal(&tensor, seed, name, 0, 1 / std::sqrt(static_cast<double>(inputs)));
  (*parameters)[name] = std::move(tensor);
  return absl::OkStatus();
}

absl::Status DrawNetwork(const SinkhornSizes& s, uint64_t seed, NamedTensors* parameters) {
  int64_t depth = s.width;
  if (s.hidden > 0) {
    TFB_RETURN_IF_ERROR(
        DrawParameter("hidden_weights", {s.heads, s.width, s.hidden}, s.width, seed, parameters));
    TFB_RETURN_IF_ERROR(
        DrawParameter("hidden_bias", {s.heads, s.hidden}, s.width, seed, parameters));
    depth = s.hidden;
  }
  TFB_RETURN_IF_ERROR(
      DrawParameter("score_weights", {s.heads, depth, s.Columns()}, depth, seed, parameters));
  return DrawParameter("score_bias", {s.heads, s.Columns()}, depth, seed, parameters);
}

absl::StatusOr<NamedTensors> DrawParameters(const Problem& problem, const SinkhornSizes& s,
                                            uint64_t seed) {
  NamedTensors parameters;
  if (s.scores != SortScores::kGiven) TFB_RETURN_IF_ERROR(DrawNetwork(s, seed, &parameters));
  if (s.null_blocks == 0) return parameters;
  TFB_RETURN_IF_ERROR(
      DrawParameter("null_key", {s.heads, problem.head_dim}, /*inputs=*/1, seed, &parameters));
  TFB_RETURN_IF_ERROR(
      DrawParameter("null_value", {s.heads, problem.value_dim}, /*inputs=*/1, seed, &parameters));
  return parameters;
}

}  // namespace

Sinkhorn::Sinkhorn() : TechniqueOf(Info()) {}

absl::Status Sinkhorn::Check(const Problem& problem, const SinkhornOptions& options) {
  if (problem.query_tokens != problem.kv_tokens) {
    return absl::UnimplementedError(absl::StrCat("sinkhorn is self-attention: query_tokens is ",
                                                 problem.query_tokens, ", kv_tokens is ",
                                                 problem.kv_tokens));
  }
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

absl::StatusOr<std::unique_ptr<Layer>> Sinkhorn::MakeLayer(const Problem& problem,
                                                           const SinkhornOptions& options,
                                                           Device device, uint64_t seed) const {
  TFB_RETURN_IF_ERROR(Check(problem, options));
  TFB_ASSIGN_OR_RETURN(NamedTensors parameters,
                       DrawParameters(problem, SizesOf(problem, options), seed));
  return std::make_unique<SinkhornLayer>(problem, ReadTensors(problem, options),
                                         WrittenTensors(problem, options), options,
                                         std::move(parameters), device);
}

}  // namespace tfb::sinkhorn
