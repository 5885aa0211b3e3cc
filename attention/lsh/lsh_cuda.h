// The kernels of LSH attention beside core/gather and core/flash: the bucket of each token, and the
// codes that follow from the sorted order. Every pointer is to the memory of the device.
#ifndef TFB_ATTENTION_LSH_LSH_CUDA_H_
#define TFB_ATTENTION_LSH_LSH_CUDA_H_

#include <stdint.h>

#include "core/cuda/kernel_table.h"

namespace tfb::lsh {

struct LshSizes {
  int64_t batch;
  int64_t heads;
  int64_t rounds;
  int64_t tokens;
  int64_t chunk;
  int32_t buckets;   // padding tokens have bucket `buckets`
  int64_t order;     // length of a row: tokens, and with wrap the chunk that the first one sees
  bool bucket_mask;  // whether codes encode buckets and chunks; else only chunks

  constexpr int64_t chunks() const { return (tokens + chunk - 1) / chunk; }
  // Returns a code. Two codes differ by 0 or 1 where the chunks do and, where buckets count, the
  // buckets are the same.
  constexpr int32_t Code(int32_t bucket, int64_t place) const {
    const int64_t in_chunks = place / chunk;
    return static_cast<int32_t>(bucket_mask ? bucket * (chunks() + 2) + in_chunks : in_chunks);
  }
  // The codes of the slot for the chunk that the first one sees by `wrap`: only the first and the
  // last chunk have a pair.
  constexpr int32_t WrapQueryCode(int64_t place) const { return place < chunk ? 0 : -4; }
  constexpr int32_t WrapKeyCode(int64_t place) const {
    return place / chunk == chunks() - 1 ? 0 : 4;
  }
  constexpr int64_t RoundBefore(int64_t round) const { return (round + rounds - 1) % rounds; }
};

// Turns hashes or given buckets into the buckets to sort by.
struct LshBucketArguments {
  LshSizes sizes;
  const int32_t* given;  // [batch, heads, tokens, rounds], or null
  int64_t given_strides[4];
  int32_t* written;  // the same, or null
  int64_t written_strides[4];
  const uint8_t* key_mask;  // [batch, tokens], or null
  int64_t key_mask_strides[2];
  int32_t* buckets;  // [batch][heads][rounds][tokens], in place
};

// Computes, from places, the codes of core/flash's token rule, and the end of the orders.
struct LshCodeArguments {
  LshSizes sizes;
  const int32_t* buckets;  // [batch][heads][rounds][tokens]
  const int32_t* places;
  int32_t* orders;  // [batch][heads][rounds][order]
  // [slots][batch][heads][tokens]: a slot a round, and with wrap as many again for the wrapped
  // chunks. Without wrap, codes of keys are those of queries.
  int32_t* query_codes;
  int32_t* key_codes;
};

struct LshKernels {
  const char* (*buckets)(const LshBucketArguments& arguments, void* stream);
  const char* (*codes)(const LshCodeArguments& arguments, void* stream);
};

}  // namespace tfb::lsh

#endif  // TFB_ATTENTION_LSH_LSH_CUDA_H_
