// The backward pass of a Compressor. Windows are functors on every device; products and full
// convolutions have matrix products on the CPU, and kernels and functors on CUDA.
//
// Each gradient has one task that owns it: those of rows a task of a block of tokens or slots of a
// head; those of tables a task of some of their elements, which walks the heads that share the table
// in their order.
#include <algorithm>

#include "attention/linformer/compression.h"
#include "attention/linformer/compression_functors.h"
#include "core/cpu/kernels.h"
#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/cuda/sum_in_runs.h"
#include "core/flash/rows.h"
#include "core/status.h"
#include "core/zeros.h"

namespace tfb::linformer {
namespace {

// E's gradient is made in blocks of 64 slots and 256 tokens, which are 64 KiB of floats. Its rows lie
// far apart in memory: the longer a block's rows are, the better do they stream.
constexpr int64_t kTableSlots = 64;
constexpr int64_t kTableTokens = 256;
constexpr int64_t kPanelTokens = 64;  // of transpose64

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

// The scratch of one thread.
struct Compressor::BackwardScratch {
  float* rows;     // [kBlockTokens][row]
  float* panels;   // [kTableTokens / kPanelTokens][row][kPanelTokens]
  float* product;  // [kTableSlots][kTableTokens], [channels][kBlockSlots] or [channels][row]
};

struct Compressor::BackwardMemory {
  float* slots;       // [heads][slots][row]: the slots' gradients, 0 behind the channels
  float* transposed;  // [heads][channels][slot_row], for a convolution
  int64_t slot_row;
  float* rows;  // of the threads' scratch
  float* panels;
  float* product;
  int64_t product_floats;
};

struct Compressor::BackwardCall {
  Call forward;
  const Gradients& gradients;
  const BackwardMemory& memory;

  float* Slots(const Compressor& of, int64_t head) const {
    return memory.slots + head * of.sizes_.slots * of.row();
  }
  float* Transposed(const Compressor& of, int64_t head) const {
    return memory.transposed + head * of.sizes_.channels * memory.slot_row;
  }
};

Compressor::BackwardMemory Compressor::LayOutBackward(int threads, Workspace& workspace) const {
  const int64_t heads = sizes_.batch * sizes_.heads;
  BackwardMemory memory;
  // A product reads whole blocks of slots.
  memory.slot_row = RoundUp(sizes_.slots, kBlockSlots);
  memory.slots = workspace.Take<float>(heads * sizes_.slots * row());
  const int64_t convolved_heads = kind_ == Compression::kConvolution ? heads : 0;
  memory.transposed = workspace.Take<float>(convolved_heads * sizes_.channels * memory.slot_row);
  memory.product_floats = std::max(
      {kTableSlots * kTableTokens, sizes_.channels * kBlockSlots, sizes_.channels * row()});
  memory.rows = workspace.Take<float>(threads * kBlockTokens * row());
  memory.panels = workspace.Take<float>(threads * row() * kTableTokens);
  memory.product = workspace.Take<float>(threads * memory.product_floats);
  return memory;
}

SumShape Compressor::ShapeOfDepthwise() const {
  return {Tables() * sizes_.window, sizes_.channels, sizes_.batch * sizes_.heads * sizes_.slots};
}

size_t Compressor::backward_workspace_bytes(int threads) const {
  if (kind_ == Compression::kDepthwiseConvolution) {
    return SumInRunsBytes<linformer::GradientOfDepthwise>(ShapeOfDepthwise());
  }
  if (device_ != Device::kCpu || !HasMatrices()) return 0;
  return Workspace::Measure([&](Workspace& workspace) { LayOutBackward(threads, workspace); });
}

absl::Status Compressor::Backward(const ConstTensorView& x, const ConstTensorView& key_mask,
                                  const Gradients& gradients, const Execution& execution) const {
  if (device_ == Device::kCpu && HasMatrices()) {
    Workspace workspace(execution.workspace);
    const BackwardMemory memory = LayOutBackward(execution.pool->threads(), workspace);
    const bool is_plain =
        x.dtype == DType::kF32 && x.stride(3) == 1 && key_mask.empty() && sizes_.channels == row();
    const Memory no_slots;
    BackwardOfMatrices({{x, key_mask, no_slots, is_plain}, gradients, memory}, execution);
    return absl::OkStatus();
  }
  const CompressionGradientArguments a = ArgumentsOf(x, key_mask, gradients);
  switch (kind_) {
    case Compression::kProduct:
      return BackwardOfProduct(a, execution);
    case Compression::kConvolution:
      return BackwardOfConvolution(a, execution);
    default:
      return BackwardOfWindows(a, execution);
  }
}

// ---- Functors and kernels ----

CompressionGradientArguments Compressor::ArgumentsOf(const ConstTensorView& x,
                                                     const ConstTensorView& key_mask,
                                                     const Gradients& gradients) const {
  CompressionGradientArguments a = {};
  a.forward = ArgumentsOf(x, key_mask);
  a.slots = ToDeviceView(gradients.slots);
  a.x_gradient = ToDeviceView(gradients.x);
  a.tables_gradient = ToDeviceView(gradients.tables);
  a.adds_to_tables = gradients.adds_to_tables;
  a.table_of_batch = table_of_batch_;
  a.table_of_head = table_of_head_;
  a.table_count = Tables();
  return a;
}

absl::Status Compressor::BackwardOfWindows(const CompressionGradientArguments& a,
                                           const Execution& execution) const {
  const int64_t heads = sizes_.batch * sizes_.heads, channels = sizes_.channels;
  if (a.x_gradient.data != nullptr) {
    TFB_RETURN_IF_ERROR(kind_ == Compression::kMax
                            ? ForEachInRows(device_, heads * sizes_.slots, channels,
                                            GradientOfMaximum{a}, execution)
                            : ForEachInRows(device_, heads * sizes_.tokens, channels,
                                            GradientOfWindowRows{a}, execution));
  }
  if (a.tables_gradient.data == nullptr) return absl::OkStatus();
  return SumInRuns(device_, ShapeOfDepthwise(), GradientOfDepthwise{a}, execution);
}

absl::Status Compressor::BackwardOfConvolution(const CompressionGradientArguments& a,
                                               const Execution& execution) const {
  const int64_t channels = sizes_.channels;
  if (a.x_gradient.data != nullptr) {
    TFB_RETURN_IF_ERROR(ForEachInRows(device_, sizes_.batch * sizes_.heads * sizes_.tokens,
                                      channels, linformer::GradientOfConvolvedRows{a}, execution));
  }
  if (a.tables_gradient.data == nullptr) return absl::OkStatus();
  return ForEachInRows(device_, Tables() * sizes_.window * channels, channels,
                       linformer::GradientOfConvolution{a}, execution);
}

absl::Status Compressor::BackwardOfProduct(const CompressionGradientArguments& a,
                                           const Execution& execution) const {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  const LinformerKernels& kernels = KernelsOn<LinformerKernels>(runtime->target());
  if (a.x_gradient.data != nullptr) {
    TFB_RETURN_IF_ERROR(ToStatus(kernels.gradient_of_rows(a, execution.stream)));
  }
  if (a.tables_gradient.data == nullptr) return absl::OkStatus();
  return ToStatus(kernels.gradient_of_tables(a, execution.stream));
}

// ---- Matrix products on the CPU ----

void Compressor::BackwardOfMatrices(const BackwardCall& call, const Execution& execution) const {
  const BackwardMemory& memory = call.memory;
  const int64_t heads = sizes_.batch * sizes_.heads;
  const auto for_each = [&](int64_t outer, int64_t inner, auto task_of) {
    execution.pool->ParallelFor(outer * inner, [&](int64_t task, int worker) {
      const BackwardScratch scratch = {memory.rows + worker * kBlockTokens * row(),
                                       memory.panels + worker * row() * kTableTokens,
                                       memory.product + worker * memory.product_floats};
      task_of(task / inner, task % inner, scratch);
    });
  };
  const bool is_product = kind_ == Compression::kProduct;
  execution.pool->ParallelFor(heads, [&](int64_t head, int) { PackGradients(call, head); });
  if (!call.gradients.x.empty() && is_product) {
    for_each(CeilDiv(sizes_.tokens, kBlockTokens), heads,
             [&](int64_t block, int64_t head, const auto& scratch) {
               GradientOfProductRows(call, head, block * kBlockTokens, scratch);
             });
  } else if (!call.gradients.x.empty()) {
    for_each(CeilDiv(sizes_.slots, kBlockSlots), heads,
             [&](int64_t block, int64_t head, const auto& scratch) {
               GradientOfConvolvedRows(call, head, block * kBlockSlots, scratch);
             });
  }
  if (call.gradients.tables.empty()) return;
  if (heads == 0) {  // no task sets a table's
    if (!call.gradients.adds_to_tables) SetToZero(call.gradients.tables, execution.pool);
  } else if (is_product) {
    for_each(CeilDiv(sizes_.tokens, kTableTokens), Tables(),
             [&](int64_t block, int64_t table, const auto& scratch) {
               GradientOfProductTable(call, table, block * kTableTokens, scratch);
             });
  } else {
    for_each(sizes_.window, Tables(), [&](int64_t t, int64_t table, const auto& scratch) {
      GradientOfConvolution(call, table, t, scratch);
    });
  }
}

int64_t Compressor::Tables() const {
  return (sizes_.batch - 1) * table_of_batch_ + (sizes_.heads - 1) * table_of_head_ + 1;
}

template <class Body>
void Compressor::ForEachHeadOf(int64_t table, const Body& body) const {
  for (int64_t head = 0; head < sizes_.batch * sizes_.heads; ++head) {
    const int64_t of_head =
        head / sizes_.heads * table_of_batch_ + head % sizes_.heads * table_of_head_;
    if (of_head == table) body(head);
  }
}

// Packs the slots' gradients of a head row by row and, for a convolution, channel by channel.
void Compressor::PackGradients(const BackwardCall& call, int64_t head) const {
  const ConstTensorView& from = call.gradients.slots;
  float* slots = call.Slots(*this, head);
  for (int64_t s = 0; s < sizes_.slots; ++s) {
    float* to = slots + s * row();
    LoadRow(from, from.Offset(head / sizes_.heads, head % sizes_.heads, s), from.stride(3),
            sizes_.channels, to);
    std::fill(to + sizes_.channels, to + row(), 0.0f);
  }
  if (kind_ != Compression::kConvolution) return;
  float* transposed = call.Transposed(*this, head);
  std::fill_n(transposed, sizes_.channels * call.memory.slot_row, 0.0f);
  for (int64_t s = 0; s < sizes_.slots; ++s) {
    for (int64_t c = 0; c < sizes_.channels; ++c) {
      transposed[c * call.memory.slot_row + s] = slots[s * row() + c];
    }
  }
}

// Writes sums to elements of the tables' gradient that lie `stride` apart, or adds them.
void Compressor::StoreSums(const float* sums, int64_t count, bool adds, int64_t stride, float* to) {
  if (!adds && stride == 1) {
    std::copy_n(sums, count, to);
    return;
  }
  for (int64_t n = 0; n < count; ++n) {
    float& element = to[n * stride];
    element = (adds ? element : 0) + sums[n];
  }
}

// Adds to the gradient of a token, where it is one.
void Compressor::AddToRow(const BackwardCall& call, int64_t head, int64_t token,
                          const float* from) const {
  const int64_t b = head / sizes_.heads;
  if (!IsToken(call.forward, b, token)) return;
  const TensorView& x = call.gradients.x;
  float* to = x.MutableAt<float>(b, head % sizes_.heads, token);
  for (int64_t c = 0; c < sizes_.channels; ++c) to[c * x.stride(3)] += from[c];
}

void Compressor::GradientOfProductRows(const BackwardCall& call, int64_t head, int64_t first,
                                       const BackwardScratch& scratch) const {
  const int64_t count = std::min(kBlockTokens, sizes_.tokens - first);
  const TensorView& x = call.gradients.x;
  const bool in_place =
      call.forward.key_mask.empty() && x.stride(3) == 1 && sizes_.channels == row();
  float* sums =
      in_place ? x.MutableAt<float>(head / sizes_.heads, head % sizes_.heads, first) : scratch.rows;
  BestCpuKernels().gemm(count, row(), sizes_.slots, TableOf(head) + first * sizes_.slots,
                        sizes_.slots, 1, call.Slots(*this, head), row(), sums,
                        in_place ? x.stride(2) : row(), in_place);
  if (in_place) return;
  for (int64_t n = 0; n < count; ++n) AddToRow(call, head, first + n, scratch.rows + n * row());
}

// Writes the gradient of E's columns first, first + 1, ..., in place where a block is whole, head after
// head.
void Compressor::GradientOfProductTable(const BackwardCall& call, int64_t table, int64_t first,
                                        const BackwardScratch& scratch) const {
  const CpuKernels& kernels = BestCpuKernels();
  const int64_t tokens = std::min(kTableTokens, sizes_.tokens - first);
  const TensorView& tables = call.gradients.tables;
  const bool in_place = tables.stride(2) == 1 && tokens == kTableTokens;
  bool adds = call.gradients.adds_to_tables;
  ForEachHeadOf(table, [&](int64_t head) {
    for (int64_t t = 0; t < tokens; t += kPanelTokens) {
      const Rows rows = TokenRows(call.forward, head, first + t, 1, kPanelTokens, scratch.rows);
      kernels.transpose64(rows.first, rows.stride, RoundUp(sizes_.channels, 4),
                          scratch.panels + t * row());
    }
    for (int64_t slot = 0; slot < sizes_.slots; slot += kTableSlots) {
      const int64_t slots = std::min(kTableSlots, sizes_.slots - slot);
      const float* of_slots = call.Slots(*this, head) + slot * row();
      float* sums = in_place ? tables.MutableAt<float>(table, slot, first) : scratch.product;
      const int64_t sum_row = in_place ? tables.stride(1) : kTableTokens;
      for (int64_t t = 0; t < tokens; t += kPanelTokens) {
        kernels.gemm(slots, kPanelTokens, sizes_.channels, of_slots, row(), 1,
                     scratch.panels + t * row(), kPanelTokens, sums + t, sum_row, in_place && adds);
      }
      for (int64_t s = 0; !in_place && s < slots; ++s) {
        StoreSums(sums + s * sum_row, tokens, adds, tables.stride(2),
                  tables.MutableAt<float>(table, slot + s, first));
      }
    }
    adds = true;
  });
}

void Compressor::GradientOfConvolvedRows(const BackwardCall& call, int64_t head, int64_t first_slot,
                                         const BackwardScratch& scratch) const {
  const int64_t count = std::min(kBlockSlots, sizes_.slots - first_slot);
  for (int64_t t = 0; t < sizes_.window; ++t) {
    BestCpuKernels().gemm(sizes_.channels, RoundUp(count, kColumnQuantum), sizes_.channels,
                          TableOf(head) + t * sizes_.channels * row(), row(), 1,
                          call.Transposed(*this, head) + first_slot, call.memory.slot_row,
                          scratch.product, kBlockSlots, false);
    for (int64_t s = 0; s < count; ++s) {
      for (int64_t c = 0; c < sizes_.channels; ++c) {
        scratch.rows[c] = scratch.product[c * kBlockSlots + s];
      }
      AddToRow(call, head, (first_slot + s) * sizes_.window + t, scratch.rows);
    }
  }
}

// Adds the gradient of the kernel's matrix t, [out][in].
void Compressor::GradientOfConvolution(const BackwardCall& call, int64_t table, int64_t t,
                                       const BackwardScratch& scratch) const {
  const int64_t channels = sizes_.channels;
  std::fill_n(scratch.product, channels * row(), 0.0f);
  ForEachHeadOf(table, [&](int64_t head) {
    for (int64_t first = 0; first < sizes_.slots; first += kBlockSlots) {
      const int64_t count = std::min(kBlockSlots, sizes_.slots - first);
      const Rows rows = TokenRows(call.forward, head, first * sizes_.window + t, sizes_.window,
                                  count, scratch.rows);
      BestCpuKernels().gemm(channels, row(), count, rows.first, 1, rows.stride,
                            call.Slots(*this, head) + first * row(), row(), scratch.product, row(),
                            true);
    }
  });
  const TensorView& tables = call.gradients.tables;
  for (int64_t in = 0; in < channels; ++in) {
    StoreSums(scratch.product + in * row(), channels, call.gradients.adds_to_tables,
              tables.stride(1), tables.MutableAt<float>(table, 0, in, t));
  }
}

}  // namespace tfb::linformer
