// The CUDA kernels of linformer as C++ sees them. Pointers are to device memory.
#ifndef TFB_ATTENTION_LINFORMER_LINFORMER_CUDA_H_
#define TFB_ATTENTION_LINFORMER_LINFORMER_CUDA_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/functor.h"
#include "core/cuda/kernel_table.h"

namespace tfb::linformer {

struct CompressionArguments {
  DeviceView x;             // [batch, heads, tokens, channels]
  const uint8_t* key_mask;  // [batch, tokens], or null
  int64_t key_mask_strides[2];
  const float* tables;  // products [tokens][slots], convolutions [window][channels][row], depthwise
                        // [window][row], or null
  int64_t batch_stride;  // stride of the tables, in floats
  int64_t head_stride;
  float* sums;  // [chunks][batch * heads][slots][row]; slots are those of chunk 0
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int64_t slot_count;
  int64_t window;        // tokens of a slot, unless it is a product
  int64_t chunk_tokens;  // tokens of a chunk of a product
  int64_t chunks;
  int64_t channels;
  int64_t row;
  bool is_max;  // max pooling; else the mean
};

TFB_HOST_DEVICE bool IsToken(const CompressionArguments& a, int64_t b, int64_t token) {
  return token < a.tokens &&
         (a.key_mask == nullptr ||
          a.key_mask[b * a.key_mask_strides[0] + token * a.key_mask_strides[1]] != 0);
}
TFB_HOST_DEVICE const float* TableOf(const CompressionArguments& a, int64_t b, int64_t h) {
  return a.tables + b * a.batch_stride + h * a.head_stride;
}

// The arguments of a backward pass: see Compressor::Gradients. `sums` of the forward pass is not
// used.
struct CompressionGradientArguments {
  CompressionArguments forward;
  DeviceView slots;            // f32, given
  DeviceView x_gradient;       // f32, added to, or null
  DeviceView tables_gradient;  // f32, of the parameter's shape, or null
  bool adds_to_tables;         // else they are written
  // Head h of batch row b has table b * table_of_batch + h * table_of_head of `table_count`.
  int64_t table_of_batch;
  int64_t table_of_head;
  int64_t table_count;

  TFB_HOST_DEVICE int64_t TableIndex(int64_t b, int64_t h) const {
    return b * table_of_batch + h * table_of_head;
  }
  // Writes or adds a piece's numbers to the tables' gradient.
  template <class Piece>
  TFB_HOST_DEVICE void StoreTable(const Piece& piece, float (&x)[Piece::kMost], int64_t offset,
                                  int64_t stride) const {
    float before[Piece::kMost];
    if (adds_to_tables) {
      piece.Load(tables_gradient, offset, stride, before);
      for (int i = 0; i < piece.count(); ++i) x[i] += before[i];
    }
    piece.Store(x, tables_gradient, offset, stride);
  }
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct LinformerKernels {
  const char* (*multiply)(const CompressionArguments& arguments, void* stream);
  const char* (*add_chunks)(const CompressionArguments& arguments, void* stream);
  const char* (*pool)(const CompressionArguments& arguments, void* stream);
  const char* (*convolve)(const CompressionArguments& arguments, void* stream);
  const char* (*convolve_depthwise)(const CompressionArguments& arguments, void* stream);
  // The gradients of a product with E: those of x, and those of E.
  const char* (*gradient_of_rows)(const CompressionGradientArguments& arguments, void* stream);
  const char* (*gradient_of_tables)(const CompressionGradientArguments& arguments, void* stream);
};

}  // namespace tfb::linformer

#endif  // TFB_ATTENTION_LINFORMER_LINFORMER_CUDA_H_
