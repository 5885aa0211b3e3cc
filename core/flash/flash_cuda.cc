#include "core/flash/flash_cuda.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "core/flash/decode_splits.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

// Splitting rows shorter than two tiles a part costs more than it gives.
constexpr int64_t kTilesPerPart = 2;

// Returns the rows that read the same keys.
int64_t RowsOf(const Problem& problem) { return problem.query_tokens * problem.group(); }

int64_t Widest(const Problem& problem) { return std::max(problem.head_dim, problem.value_dim); }

// Tells whether a problem has rows for decoding on tensor cores. With one row the other kernel has as
// few instructions a key as memory needs.
bool IsFewOf16Bits(const Problem& problem) {
  return problem.dtype != DType::kF32 && RowsOf(problem) > 1 &&
         RowsOf(problem) <= FlashDecodeMmaRows(Widest(problem));
}
bool IsFew(const Problem& problem) {
  return IsFewOf16Bits(problem) || (RowsOf(problem) >= 1 && RowsOf(problem) <= kFlashDecodeRows);
}

// Returns the work of a problem that IsFew.
DecodeWork DecodeWorkOf(const CudaRuntime& runtime, const Problem& problem) {
  const int64_t blocks = IsFewOf16Bits(problem)
                             ? FlashDecodeMmaBlocks(RowsOf(problem), Widest(problem))
                             : FlashDecodeBlocks(RowsOf(problem));
  return {problem.batch * problem.kv_heads, (problem.kv_tokens + kFlashTile - 1) / kFlashTile,
          blocks * runtime.properties().multiprocessors};
}

int64_t PartialFloats(const Problem& problem, int64_t splits) {
  return splits == 1 ? 0 : splits * FlashCuda::FloatsOfSplit(problem);
}

// Returns how many parts a workspace has room for, at least one.
int SplitsWithin(const Problem& problem, size_t bytes) {
  const int64_t of_split = FlashCuda::FloatsOfSplit(problem) * static_cast<int64_t>(sizeof(float));
  const int64_t held = of_split == 0 ? 1 : static_cast<int64_t>(bytes) / of_split;
  return static_cast<int>(std::clamp<int64_t>(held, 1, INT32_MAX));
}

enum class Decoding { kNone, kOnLanes, kOnTensorCores };

// Returns the decoding kernel that takes the call, see FlashDecodeKernels. Strides do not matter, so
// that they change no bit of the result.
Decoding DecodingOf(const Problem& problem, const FlashArguments& a) {
  ScoreRule rule = a.rule;
  rule.bias = {};
  if (!IsFew(problem) || rule.content_bias != nullptr || !rule.is_plain() ||
      (a.schedule.heads != 1 && problem.group() != 1) || a.k.element != a.v.element) {
    return Decoding::kNone;
  }
  if (IsFewOf16Bits(problem) && a.k.element != Element::kF32) return Decoding::kOnTensorCores;
  return RowsOf(problem) <= kFlashDecodeRows ? Decoding::kOnLanes : Decoding::kNone;
}

// Tells whether tiles are filled from the list, see FlashCall::asked.
bool PacksAsked(const Problem& problem, const FlashArguments& a) {
  if (a.asked.rows == nullptr || DecodingOf(problem, a) != Decoding::kNone) return false;
  return problem.dtype == DType::kF32
             ? a.rule.is_plain_but_for_relative_keys()
             : a.rule.is_plain() && a.rule.content_bias == nullptr && a.scale > 0;
}

using Forward = const char* (*)(const FlashArguments&, void*);
Forward ForwardOf(CudaTarget target, const Problem& problem, const FlashArguments& a) {
  switch (DecodingOf(problem, a)) {
    case Decoding::kOnLanes:
      return KernelsOn<FlashDecodeKernels>(target).forward;
    case Decoding::kOnTensorCores:
      return KernelsOn<FlashDecodeMmaKernels>(target).forward;
    case Decoding::kNone:
      break;
  }
  switch (problem.dtype) {
    case DType::kBF16:
      return KernelsOn<FlashBf16Kernels>(target).forward;
    case DType::kF16:
      return KernelsOn<FlashF16Kernels>(target).forward;
    default:
      return KernelsOn<FlashF32Kernels>(target).forward;
  }
}

// Returns the blocks that a multiprocessor has at a time: flash_hopper.cuh's take all of it.
int64_t BlocksAtATime(const CudaRuntime& runtime, const Problem& problem) {
  const int64_t widest = std::max(problem.head_dim, problem.value_dim);
  const bool hopper = runtime.properties().compute_capability_major == 9 &&
                      problem.dtype != DType::kF32 && widest > 32 && widest <= 128;
  return hopper ? 1 : 2;
}

DeviceIds ToDeviceIds(const ConstTensorView& ids) {
  return {static_cast<const int32_t*>(ids.data), ids.stride(0), ids.stride(1)};
}

}  // namespace

absl::StatusOr<FlashCuda> FlashCuda::Create(CudaRuntime* runtime, const Problem& problem,
                                            const BlockSchedule* schedule, const ScoreRule& rule) {
  FlashCuda flash;
  flash.runtime_ = runtime;
  flash.query_tile_ = FlashCudaQueries(problem.dtype);
  flash.is_16_bit_ = problem.dtype != DType::kF32;
  if (schedule != nullptr) TFB_RETURN_IF_ERROR(flash.KeepSchedule(*schedule));
  TFB_RETURN_IF_ERROR(flash.KeepRule(problem, rule));
  return flash;
}

absl::StatusOr<FlashCuda> FlashCuda::CreateForBackward(CudaRuntime* runtime, const Problem& problem,
                                                       const BlockSchedule& schedule,
                                                       const ScoreRule& rule) {
  FlashCuda flash;
  flash.runtime_ = runtime;
  TFB_RETURN_IF_ERROR(flash.KeepSchedule(schedule));
  TFB_RETURN_IF_ERROR(flash.KeepRule(problem, rule));
  return flash;
}

// Tiles of queries are cut where there are so few that the device has room for each twice.
int64_t FlashCuda::Splits(const CudaRuntime& runtime, const Problem& problem) {
  if (IsFew(problem)) return DecodeSplits(DecodeWorkOf(runtime, problem));
  const int64_t queries = FlashCudaQueries(problem.dtype);
  const int64_t tasks =
      problem.batch * problem.query_heads * ((problem.query_tokens + queries - 1) / queries);
  const int64_t wanted = BlocksAtATime(runtime, problem) * runtime.properties().multiprocessors;
  if (tasks == 0 || tasks * 2 > wanted) return 1;
  const int64_t tiles = (problem.kv_tokens + kFlashTile - 1) / kFlashTile;
  return std::clamp<int64_t>(wanted / tasks, 1, std::max<int64_t>(tiles / kTilesPerPart, 1));
}

size_t FlashCuda::WorkspaceBytes(const CudaRuntime& runtime, const Problem& problem) {
  // Calls with fewer queries may be cut into more parts: as many as fill the device. Their rows,
  // and so their memory, are at most those of the largest call that is cut. The parts of few queries
  // are as many as have room in it.
  const int64_t queries = FlashCudaQueries(problem.dtype);
  Problem call = problem;
  int64_t floats = PartialFloats(call, Splits(runtime, call));
  for (call.query_tokens = std::min(problem.query_tokens, queries);
       call.query_tokens > 0 && call.query_tokens <= problem.query_tokens;
       call.query_tokens += queries) {
    const int64_t splits = Splits(runtime, call);
    floats = std::max(floats, PartialFloats(call, splits));
    if (splits == 1) break;
  }
  return Workspace::Measure([&](Workspace& workspace) { workspace.Take<float>(floats); });
}

absl::StatusOr<const void*> FlashCuda::Keep(const void* from, size_t bytes) {
  if (bytes == 0) return nullptr;
  TFB_ASSIGN_OR_RETURN(DeviceBuffer buffer, runtime_->Upload(from, bytes));
  buffers_.push_back(std::move(buffer));
  return buffers_.back().data();
}

namespace {

template <class T>
size_t BytesOf(const std::vector<T>& values) {
  return values.size() * sizeof(T);
}

}  // namespace

absl::Status FlashCuda::KeepSchedule(const BlockSchedule& schedule) {
  if (schedule.query_tile != query_tile_ || schedule.key_tile != kFlashTile) {
    return absl::InternalError(absl::StrCat("schedule of ", schedule.query_tile, " x ",
                                            schedule.key_tile, " tiles; CUDA wants ", query_tile_,
                                            " x ", kFlashTile));
  }
  has_schedule_ = true;
  schedule_.query_tiles = schedule.query_tiles();
  schedule_.heads = schedule.heads;
  const auto keep = [this](const auto& values, auto* to) -> absl::Status {
    TFB_ASSIGN_OR_RETURN(const void* kept, Keep(values.data(), BytesOf(values)));
    *to = static_cast<decltype(values.data())>(kept);
    return absl::OkStatus();
  };
  TFB_RETURN_IF_ERROR(keep(schedule.row_begin, &schedule_.row_begin));
  TFB_RETURN_IF_ERROR(keep(schedule.runs, &schedule_.runs));
  TFB_RETURN_IF_ERROR(keep(schedule.masks, &schedule_.masks));
  return keep(schedule.order, &schedule_.order);
}

// Converts panels [head_dim][64] of floats to rows, in the order of channels that the kernel reads, rounded to the
// problem's dtype.
absl::Status FlashCuda::KeepRelativeKeys(const Problem& problem, const RelativeKeys& keys) {
  RelativeKeyRows& device = rule_.relative_key_rows;
  device.heads = keys.heads();
  device.low = keys.low();
  device.high = keys.high();
  const int64_t multiple = is_16_bit_ ? 32 : 8;
  device.row = (problem.head_dim + multiple - 1) / multiple * multiple;
  const int64_t offsets = keys.high() - keys.low() + 1;
  TFB_ASSIGN_OR_RETURN(Tensor rows,
                       Tensor::Allocate(problem.dtype, Shape{keys.heads(), offsets, device.row}));
  Fill(rows.view(), 0);
  for (int64_t h = 0; h < keys.heads(); ++h) {
    for (int64_t n = 0; n < offsets; ++n) {
      const int64_t offset = keys.low() + n;
      const int64_t panel = (offset >= 0 ? offset : offset - kFlashTile + 1) / kFlashTile;
      const float* column = keys.Panel(h, panel) + (offset - panel * kFlashTile);
      for (int64_t c = 0; c < problem.head_dim; ++c) {
        const int64_t place = is_16_bit_ ? RelativeKeyPlace16(c) : c;
        rows.view().Set(rows.view().Offset(h, n, place), column[c * kFlashTile]);
      }
    }
  }
  if (!is_16_bit_) rows = rows.CloneAs(DType::kF32);
  TFB_ASSIGN_OR_RETURN(device.rows, Keep(rows.raw(), rows.bytes()));
  return absl::OkStatus();
}

// Replaces the arrays of the rule by copies on the device.
absl::Status FlashCuda::KeepRule(const Problem& problem, const ScoreRule& rule) {
  rule_ = rule;
  const auto keep = [this](const float** array, int64_t count) -> absl::Status {
    if (*array == nullptr) return absl::OkStatus();
    TFB_ASSIGN_OR_RETURN(const void* kept, Keep(*array, count * sizeof(float)));
    *array = static_cast<const float*>(kept);
    return absl::OkStatus();
  };
  const int64_t bias = problem.query_heads * problem.head_dim;
  TFB_RETURN_IF_ERROR(keep(&rule_.content_bias, bias));
  TFB_RETURN_IF_ERROR(keep(&rule_.position_bias, bias));
  TFB_RETURN_IF_ERROR(keep(&rule_.soft_span.span, rule.soft_span.count));
  LabelKeys& labels = rule_.label_keys;
  TFB_RETURN_IF_ERROR(keep(&labels.keys, labels.heads * 2 * problem.head_dim));
  TFB_RETURN_IF_ERROR(keep(&labels.biases, labels.heads * 2));
  for (DistanceEntries* entries : {&rule_.relu_multiplier, &rule_.bias}) {
    TFB_RETURN_IF_ERROR(keep(&entries->values, entries->heads * entries->row));
  }
  rule_.relative_keys = nullptr;
  if (rule.relative_keys == nullptr || rule.relative_keys->empty()) return absl::OkStatus();
  return KeepRelativeKeys(problem, *rule.relative_keys);
}

absl::StatusOr<FlashArguments> FlashCuda::ArgumentsOf(const Problem& problem,
                                                      const FlashCall& call) const {
  FlashArguments a = {};
  a.q = ToDeviceView(call.q);
  a.k = ToDeviceView(call.k);
  a.v = ToDeviceView(call.v);
  a.out = ToDeviceView(call.out);
  a.out_rest = ToDeviceView(call.out_rest);
  if (!call.key_mask.empty()) {
    a.key_mask = static_cast<const uint8_t*>(call.key_mask.data);
    std::copy_n(call.key_mask.strides.begin(), 2, a.key_mask_strides);
  }
  if (rule_.label_keys.keys != nullptr) {
    TFB_RETURN_IF_ERROR(CheckIds(call));
    a.query_ids = ToDeviceIds(call.query_ids);
    a.key_ids = ToDeviceIds(call.key_ids);
  }
  if (!call.log_sum_exp.empty()) {
    a.log_sum_exp = static_cast<float*>(call.log_sum_exp.mutable_data());
    std::copy_n(call.log_sum_exp.strides.begin(), 3, a.log_sum_exp_strides);
    a.log_sum_exp_rest = static_cast<float*>(call.log_sum_exp_rest.mutable_data());
  }
  a.query_order = call.query_order;
  a.key_order = call.key_order;
  a.out_by_row = call.out_by_row;
  a.ring_tiles = call.ring.tiles;
  a.first_tile = call.ring.first_tile;
  a.batch = problem.batch;
  a.query_heads = problem.query_heads;
  a.kv_heads = problem.kv_heads;
  a.query_tokens = problem.query_tokens;
  a.kv_tokens = problem.kv_tokens;
  a.head_dim = static_cast<int>(problem.head_dim);
  a.value_dim = static_cast<int>(problem.value_dim);
  a.causal_offset = problem.causal_offset();
  if (call.band != nullptr) {
    a.schedule.query_tiles = (problem.query_tokens + query_tile_ - 1) / query_tile_;
    a.schedule.heads = 1;
    a.schedule.band = *call.band;
  } else if (has_schedule_ && call.asked.rows == nullptr) {
    a.schedule = schedule_;
  } else {
    return absl::InternalError(call.asked.rows == nullptr
                                   ? "a call has neither a schedule nor a band"
                                   : "a call that asks for some queries has no band");
  }
  a.rule = rule_;
  a.rule.query_position = call.rule.query_position;
  if (call.rule.soft_span.span != nullptr) a.rule.soft_span = call.rule.soft_span;
  TFB_RETURN_IF_ERROR(CheckTokenRule(call.rule.tokens));
  a.rule.tokens = call.rule.tokens;
  a.scale = static_cast<float>(ProductScale(problem, call.scale));
  a.splits = 1;
  a.asked = call.asked;
  a.max_blocks = max_blocks_;
  const CudaDevice& device = runtime_->properties();
  a.multiprocessors = device.multiprocessors;
  a.compute_capability = device.compute_capability_major * 10 + device.compute_capability_minor;
  a.decode_queries = static_cast<int>(query_tile_);
  a.packs_asked = PacksAsked(problem, a);
  return a;
}

absl::Status FlashCuda::Run(const Problem& problem, const FlashCall& call, const SoftmaxPart& part,
                            const Execution& execution) const {
  TFB_ASSIGN_OR_RETURN(FlashArguments a, ArgumentsOf(problem, call));
  a.splits = static_cast<int>(Splits(*runtime_, problem));
  Workspace workspace(execution.workspace);
  if (part.rows != nullptr) {
    a.partial = part.rows;
    a.first_split = static_cast<int>(part.first_split);
    a.partial_by_token = true;
  } else {
    a.splits = std::min(a.splits, SplitsWithin(problem, execution.workspace.size()));
    if (a.splits > 1) a.partial = workspace.Take<float>(PartialFloats(problem, a.splits));
  }

  const CudaTarget target = runtime_->target();
  TFB_RETURN_IF_ERROR(ToStatus(ForwardOf(target, problem, a)(a, execution.stream)));
  if (a.partial == nullptr || (part.rows != nullptr && !part.is_last)) {
    return absl::OkStatus();
  }
  if (part.rows != nullptr) a.splits = static_cast<int>(part.splits);
  return ToStatus(KernelsOn<FlashF32Kernels>(target).combine(a, execution.stream));
}

}  // namespace tfb
