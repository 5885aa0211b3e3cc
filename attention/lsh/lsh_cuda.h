// What LSH attention does beside core/gather and core/flash: what each token's bucket is, and what
// the sorted order says of it. Every pointer is to the memory of the device.
#ifndef TFB_ATTENTION_LSH_LSH_CUDA_H_
#define TFB_ATTENTION_LSH_LSH_CUDA_H_

#include <stdint.h>

#include "core/cuda/kernel_table.h"

namespace tfb {

struct LshSizes {
  int64_t batch;
  int64_t heads;
  int64_t rounds;
  int64_t tokens;
  int64_t chunk;
  int32_t buckets;   // a token that is none has bucket `buckets`
  int64_t order;     // of a row: tokens, and with wrap the chunk that the first one sees
  bool bucket_mask;  // codes are of buckets and chunks, else of chunks

  constexpr int64_t chunks() const { return (tokens + chunk - 1) / chunk; }
  // Chunk difference 0 or 1, and the same bucket where that counts, is a code difference of 0 or 1.
  constexpr int32_t Code(int32_t bucket, int64_t place) const {
    const int64_t in_chunks = place / chunk;
    return static_cast<int32_t>(bucket_mask ? bucket * (chunks() + 2) + in_chunks : in_chunks);
  }
  // The slot of the chunk that the first one sees by `wrap`: only that of the first and the last.
  constexpr int32_t WrapQueryCode(int64_t place) const { return place < chunk ? 0 : -4; }
  constexpr int32_t WrapKeyCode(int64_t place) const {
    return place / chunk == chunks() - 1 ? 0 : 4;
  }
  constexpr int64_t RoundBefore(int64_t round) const { return (round + rounds - 1) % rounds; }
};

// From hashes or given buckets to those that are sorted by.
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

// From places to the codes of core/flash's token rule, and the end of the orders.
struct LshCodeArguments {
  LshSizes sizes;
  const int32_t* buckets;  // [batch][heads][rounds][tokens]
  const int32_t* places;
  int32_t* orders;  // [batch][heads][rounds][order]
  // [slots][batch][heads][tokens]: a slot a round, and with wrap as many for what it shows. Codes of
  // keys are those of queries without it.
  int32_t* query_codes;
  int32_t* key_codes;
};

struct LshKernels {
  const char* (*buckets)(const LshBucketArguments& arguments, void* stream);
  const char* (*codes)(const LshCodeArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_ATTENTION_LSH_LSH_CUDA_H_
