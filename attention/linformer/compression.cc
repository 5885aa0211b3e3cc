#include "attention/linformer/compression.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "attention/linformer/linformer_cuda.h"
#include "core/cpu/kernels.h"
#include "core/cuda/runtime.h"
#include "core/flash/flash.h"
#include "core/flash/rows.h"
#include "core/status.h"

namespace tfb::linformer {
namespace {

// The tokens of a chunk, over which a product's sums run. On CUDA, blocks of a grid are 64 slots of
// a chunk, and chunks are short to have many blocks.
constexpr int64_t kCpuChunk = 1024;
constexpr int64_t kCudaChunk = 256;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Sets to[c] = combine(to[c], from[c]), 16 at a time, which the compiler vectorizes.
template <class Combine>
void CombineRows(int64_t row, const float* from, float* to, const Combine& combine) {
  constexpr int64_t kLanes = 16;  // divides PackedValueRow
  for (int64_t c = 0; c < row; c += kLanes) {
    for (int64_t n = 0; n < kLanes; ++n) to[c + n] = combine(to[c + n], from[c + n]);
  }
}
float Sum(float a, float b) { return a + b; }
float LargerOrNan(float a, float b) {
  const float larger = b > a ? b : a;  // `a` where b is NaN
  return b != b ? b : larger;
}

// Packs [table][slots][tokens] to [table][tokens][slots].
std::vector<float> PackProducts(const ConstTensorView& e) {
  std::vector<float> packed(e.num_elements());
  const Shape turned = {e.dim(0), e.dim(2), e.dim(1)};
  CopyElements(Transpose(e, 1, 2), TensorView(packed.data(), DType::kF32, turned));
  return packed;
}

// Packs [table][out][in][window] to [table][window][in][row], 0 beyond the last channel.
std::vector<float> PackConvolutions(const ConstTensorView& e) {
  const Shape padded = {e.dim(0), e.dim(3), e.dim(2), PackedValueRow(e.dim(1))};
  std::vector<float> packed(NumElements(padded), 0.0f);
  const TensorView all(packed.data(), DType::kF32, padded);
  CopyElements(Transpose(e, 1, 3), Slice(all, 3, 0, e.dim(1)));
  return packed;
}

// Packs [table][channels][window] to [table][window][row], 0 beyond the last channel.
std::vector<float> PackDepthwise(const ConstTensorView& e) {
  const Shape padded = {e.dim(0), e.dim(2), PackedValueRow(e.dim(1))};
  std::vector<float> packed(NumElements(padded), 0.0f);
  const TensorView all(packed.data(), DType::kF32, padded);
  CopyElements(Transpose(e, 1, 2), Slice(all, 2, 0, e.dim(1)));
  return packed;
}

std::vector<float> Pack(Compression kind, const ConstTensorView& e) {
  switch (kind) {
    case Compression::kConvolution:
      return PackConvolutions(e);
    case Compression::kDepthwiseConvolution:
      return PackDepthwise(e);
    default:
      return PackProducts(e);
  }
}

}  // namespace

absl::StatusOr<std::shared_ptr<const CompressionTables>> CompressionTables::Create(
    Device device, Compression kind, const ConstTensorView& parameters) {
  auto tables = std::make_shared<CompressionTables>();
  const std::vector<float> packed = Pack(kind, parameters);
  tables->table_floats_ =
      static_cast<int64_t>(packed.size()) / std::max<int64_t>(parameters.dim(0), 1);
  TFB_ASSIGN_OR_RETURN(tables->numbers_, DeviceArray<float>::Create(device, packed));
  return tables;
}

Compressor::Compressor(Device device, Compression kind, const Sizes& sizes)
    : device_(device), kind_(kind), sizes_(sizes) {}

int64_t Compressor::row() const { return PackedValueRow(sizes_.channels); }

int64_t Compressor::chunk_tokens() const {
  return device_ == Device::kCpu ? kCpuChunk : kCudaChunk;
}

int64_t Compressor::chunks() const {
  return kind_ == Compression::kProduct ? CeilDiv(sizes_.tokens, chunk_tokens()) : 1;
}

// `head` counts through all batch rows: b heads + h.
const float* Compressor::TableOf(int64_t head) const {
  return tables_->Table(head / sizes_.heads * table_of_batch_ +
                        head % sizes_.heads * table_of_head_);
}

float* Compressor::SlotRow(const Memory& memory, int64_t chunk, int64_t head, int64_t slot) const {
  return memory.sums + ((chunk * sizes_.batch * sizes_.heads + head) * sizes_.slots + slot) * row();
}

Compressor::Memory Compressor::LayOut(Workspace& workspace) const {
  const int64_t heads = sizes_.batch * sizes_.heads;
  Memory memory;
  memory.sums = workspace.Take<float>(chunks() * heads * sizes_.slots * row());
  const int64_t head_stride = sizes_.slots * row();
  memory.slots = TensorView(memory.sums, DType::kF32,
                            Shape{sizes_.batch, sizes_.heads, sizes_.slots, sizes_.channels},
                            Shape{sizes_.heads * head_stride, head_stride, row(), 1});
  return memory;
}

size_t Compressor::workspace_bytes(int threads) const {
  if (device_ != Device::kCpu) return 0;
  return Workspace::Measure(
      [&](Workspace& workspace) { workspace.Take<float>(threads * kBlockTokens * row()); });
}

double Compressor::flops() const {
  const double elements =
      static_cast<double>(sizes_.batch * sizes_.heads * sizes_.tokens * sizes_.channels);
  switch (kind_) {
    case Compression::kProduct:
      return 2 * elements * static_cast<double>(sizes_.slots);
    case Compression::kConvolution:
      return 2 * elements * static_cast<double>(sizes_.channels);
    case Compression::kDepthwiseConvolution:
      return 2 * elements;
    default:
      return elements;
  }
}

absl::Status Compressor::Run(const ConstTensorView& x, const ConstTensorView& key_mask,
                             const Memory& memory, const Execution& execution) const {
  const bool is_plain =
      x.dtype == DType::kF32 && x.stride(3) == 1 && key_mask.empty() && sizes_.channels == row();
  const Call call = {x, key_mask, memory, is_plain};
  return device_ == Device::kCpu ? RunCpu(call, execution) : RunCuda(call, execution);
}

// ---- CPU ----

absl::Status Compressor::RunCpu(const Call& call, const Execution& execution) const {
  const int64_t heads = sizes_.batch * sizes_.heads;
  Workspace workspace(execution.workspace);
  const int64_t scratch_floats = kBlockTokens * row();
  float* scratch = workspace.Take<float>(execution.pool->threads() * scratch_floats);
  const bool multiplies = kind_ == Compression::kProduct;
  // The heads of a chunk follow each other: where they share E, its part stays in a cache.
  const int64_t parts = multiplies ? chunks() : CeilDiv(sizes_.slots, kBlockSlots);
  execution.pool->ParallelFor(parts * heads, [&](int64_t task, int worker) {
    float* own = scratch + worker * scratch_floats;
    const int64_t head = task % heads, part = task / heads;
    if (multiplies) return Multiply(call, part, head, own);
    const int64_t first = part * kBlockSlots;
    if (kind_ == Compression::kConvolution) return Convolve(call, head, first, own);
    const int64_t end = std::min(first + kBlockSlots, sizes_.slots);
    for (int64_t slot = first; slot < end; ++slot) Pool(call, head, slot, own);
  });
  execution.pool->ParallelFor(heads, [&](int64_t head, int) { AddChunks(call, head); });
  return absl::OkStatus();
}

bool Compressor::IsToken(const Call& call, int64_t b, int64_t token) const {
  return token < sizes_.tokens &&
         (call.key_mask.empty() || *call.key_mask.At<uint8_t>(b, token) != 0);
}

// Returns the rows of tokens first, first + step, ...: in place, or in the scratch, with zeros for
// padding, for rows beyond the last token, and for channels up to row().
Compressor::Rows Compressor::TokenRows(const Call& call, int64_t head, int64_t first, int64_t step,
                                       int64_t count, float* scratch) const {
  const int64_t b = head / sizes_.heads, h = head % sizes_.heads;
  if (call.is_plain && first + (count - 1) * step < sizes_.tokens) {
    return {call.x.At<float>(b, h, first), step * call.x.stride(2)};
  }
  for (int64_t n = 0; n < count; ++n) {
    const int64_t token = first + n * step;
    float* to = scratch + n * row();
    int64_t loaded = 0;
    if (IsToken(call, b, token)) {
      loaded = sizes_.channels;
      LoadRow(call.x, call.x.Offset(b, h, token), call.x.stride(3), loaded, to);
    }
    std::fill(to + loaded, to + row(), 0.0f);
  }
  return {scratch, row()};
}

void Compressor::Multiply(const Call& call, int64_t chunk, int64_t head, float* scratch) const {
  const float* e = TableOf(head);
  float* sums = SlotRow(call.memory, chunk, head, 0);
  const int64_t begin = chunk * chunk_tokens();
  const int64_t end = std::min(begin + chunk_tokens(), sizes_.tokens);
  for (int64_t first = begin; first < end; first += kBlockTokens) {
    const int64_t count = std::min(kBlockTokens, end - first);
    const Rows rows = TokenRows(call, head, first, 1, count, scratch);
    BestCpuKernels().gemm(sizes_.slots, row(), count, e + first * sizes_.slots, 1, sizes_.slots,
                          rows.first, rows.stride, sums, row(), first > begin);
  }
}

void Compressor::AddChunks(const Call& call, int64_t head) const {
  const int64_t count = sizes_.slots * row();
  float* sums = SlotRow(call.memory, 0, head, 0);
  for (int64_t chunk = 1; chunk < chunks(); ++chunk) {
    CombineRows(count, SlotRow(call.memory, chunk, head, 0), sums, Sum);
  }
}

void Compressor::Pool(const Call& call, int64_t head, int64_t slot, float* scratch) const {
  float* to = SlotRow(call.memory, 0, head, slot);
  const int64_t begin = slot * sizes_.window;
  const int64_t count = std::min(sizes_.window, sizes_.tokens - begin);
  const bool is_max = kind_ == Compression::kMax;
  const bool convolves = kind_ == Compression::kDepthwiseConvolution;
  std::fill_n(to, row(), is_max ? -std::numeric_limits<float>::infinity() : 0.0f);
  for (int64_t n = 0; n < count; ++n) {
    const float* from = TokenRows(call, head, begin + n, 1, 1, scratch).first;
    if (is_max) {
      CombineRows(row(), from, to, LargerOrNan);
    } else if (convolves) {
      const float* kernel = TableOf(head) + n * row();
      for (int64_t c = 0; c < row(); ++c) to[c] += kernel[c] * from[c];
    } else {
      CombineRows(row(), from, to, Sum);
    }
  }
  if (is_max || convolves) return;
  for (int64_t c = 0; c < row(); ++c) to[c] /= static_cast<float>(count);
}

void Compressor::Convolve(const Call& call, int64_t head, int64_t first_slot,
                          float* scratch) const {
  const int64_t count = std::min(kBlockSlots, sizes_.slots - first_slot);
  const float* table = TableOf(head);
  for (int64_t t = 0; t < sizes_.window; ++t) {
    const Rows rows =
        TokenRows(call, head, first_slot * sizes_.window + t, sizes_.window, count, scratch);
    BestCpuKernels().gemm(count, row(), sizes_.channels, rows.first, rows.stride, 1,
                          table + t * sizes_.channels * row(), row(),
                          SlotRow(call.memory, 0, head, first_slot), row(), t > 0);
  }
}

// ---- CUDA ----

CompressionArguments Compressor::ArgumentsOf(const ConstTensorView& x,
                                             const ConstTensorView& key_mask) const {
  CompressionArguments a = {};
  a.x = ToDeviceView(x);
  if (!key_mask.empty()) {
    a.key_mask = static_cast<const uint8_t*>(key_mask.data);
    std::copy_n(key_mask.strides.begin(), 2, a.key_mask_strides);
  }
  if (tables_ != nullptr) {
    a.tables = tables_->Table(0);
    a.batch_stride = table_of_batch_ * tables_->table_floats();
    a.head_stride = table_of_head_ * tables_->table_floats();
  }
  a.batch = sizes_.batch;
  a.heads = sizes_.heads;
  a.tokens = sizes_.tokens;
  a.slot_count = sizes_.slots;
  a.window = sizes_.window;
  a.chunk_tokens = chunk_tokens();
  a.chunks = chunks();
  a.channels = sizes_.channels;
  a.row = row();
  a.is_max = kind_ == Compression::kMax;
  return a;
}

absl::Status Compressor::RunCuda(const Call& call, const Execution& execution) const {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  CompressionArguments a = ArgumentsOf(call.x, call.key_mask);
  a.sums = call.memory.sums;
  const LinformerKernels& kernels = KernelsOn<LinformerKernels>(runtime->target());
  switch (kind_) {
    case Compression::kProduct:
      TFB_RETURN_IF_ERROR(ToStatus(kernels.multiply(a, execution.stream)));
      return ToStatus(kernels.add_chunks(a, execution.stream));
    case Compression::kConvolution:
      return ToStatus(kernels.convolve(a, execution.stream));
    case Compression::kDepthwiseConvolution:
      return ToStatus(kernels.convolve_depthwise(a, execution.stream));
    default:
      return ToStatus(kernels.pool(a, execution.stream));
  }
}

}  // namespace tfb::linformer
