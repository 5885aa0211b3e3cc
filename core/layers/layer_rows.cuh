// Rows of a hidden state in kernels, and work on them with a warp each.
#ifndef TFB_CORE_LAYERS_LAYER_ROWS_CUH_
#define TFB_CORE_LAYERS_LAYER_ROWS_CUH_

#include "core/cuda/warp.cuh"
#include "core/layers/layer_kernels.h"

namespace tfb {
namespace {  // internal linkage, as in kernel.cuh

// The indices of a row, which tensors of one shape share.
struct RowIndices {
  int64_t batch;
  int64_t token;
};
__device__ inline RowIndices IndicesOf(const DeviceRows& rows, int64_t row) {
  return {row / rows.tokens, row % rows.tokens};
}
__device__ inline int64_t RowOffset(const DeviceRows& rows, const RowIndices& row) {
  return row.batch * rows.batch_stride + row.token * rows.token_stride;
}
__device__ inline int64_t RowOffset(const DeviceRows& rows, int64_t row) {
  return RowOffset(rows, IndicesOf(rows, row));
}
__device__ inline float Load(const DeviceRows& rows, int64_t row_offset, int64_t channel) {
  return LoadElement(rows.data, rows.element, row_offset + channel * rows.channel_stride);
}
__device__ inline void Store(const DeviceRows& rows, int64_t row_offset, int64_t channel,
                             float value) {
  StoreElement(rows.data, rows.element, row_offset + channel * rows.channel_stride, value);
}

constexpr int kPartChannels = 512;  // channels of a warp's part of a row: 16 a lane

// Return how many of `rows` rows there are to work on, and which is the n-th.
__device__ inline int64_t RowsOfList(const RowList& list, int64_t rows) {
  return list.rows == nullptr ? rows : *list.count;
}
__device__ inline int64_t RowOfList(const RowList& list, int64_t n) {
  return list.rows == nullptr ? n : list.rows[n];
}
// Returns the row of a warp in a grid with one warp for each row, or -1 where it has no work.
__device__ inline int64_t RowOfWarp(const RowList& list, int64_t rows) {
  const int64_t n = WarpOfGrid();
  return n < RowsOfList(list, rows) ? RowOfList(list, n) : -1;
}

// Rows cut into parts of kPartChannels, one for each warp of a grid of RowParts.
struct RowPart {
  int64_t row;  // beyond the last row there is no work
  int64_t begin;
  int64_t end;
};
inline int64_t RowParts(int64_t rows, int64_t channels) {
  return rows * CeilDiv(channels, kPartChannels);
}
__device__ inline RowPart RowPartOfWarp(int64_t channels) {
  const int64_t parts = CeilDiv(channels, kPartChannels);
  const int64_t begin = WarpOfGrid() % parts * kPartChannels;
  return {WarpOfGrid() / parts, begin, min(begin + kPartChannels, channels)};
}

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_LAYERS_LAYER_ROWS_CUH_
