// The CUDA kernel of KeyValueCache as C++ sees it. Pointers are to device memory.
#ifndef TFB_CORE_FLASH_KEY_RING_H_
#define TFB_CORE_FLASH_KEY_RING_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"

namespace tfb {

// A copy of rows: token n of `from` goes to place (first_place + n) % places of `to`.
struct RingRows {
  DeviceView from;  // [batch, heads, tokens, channels]
  DeviceView to;    // [batch, heads, places, channels]
  int64_t channels;
};

struct KeyRingArguments {
  RingRows keys;
  RingRows values;
  int64_t batch;
  int64_t heads;
  int64_t tokens;  // at most `places`
  int64_t first_place;
  int64_t places;
};

struct KeyRingKernels {
  // Enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*append)(const KeyRingArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_KEY_RING_H_
