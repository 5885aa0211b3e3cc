// Steps of LSH attention beside core/gather and core/flash: the bucket of each token, and the codes
// that follow from the sorted order. Every pointer is to the memory of the device.
#ifndef TFB_ATTENTION_LSH_LSH_FUNCTORS_H_
#define TFB_ATTENTION_LSH_LSH_FUNCTORS_H_

#include <stdint.h>

#include "core/cuda/functor.h"

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
  constexpr int32_t WrapKeyCode(int64_t place, int64_t last_chunk) const {
    return place >= last_chunk ? 0 : 4;
  }
  constexpr int64_t RoundBefore(int64_t round) const { return (round + rounds - 1) % rounds; }
};

// Turns hashes or given buckets into the buckets to sort by. Row (b * heads + h) * rounds + round
// has the tokens as columns.
struct BucketsToSortBy {
  LshSizes sizes;
  const int32_t* given;  // [batch, heads, tokens, rounds], or null
  int64_t given_strides[4];
  int32_t* written;  // the same, or null
  int64_t written_strides[4];
  const uint8_t* key_mask;  // [batch, tokens], or null
  int64_t key_mask_strides[2];
  int32_t* buckets;  // [batch][heads][rounds][tokens], in place

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t head = row / sizes.rounds, round = row % sizes.rounds;
    const int64_t b = head / sizes.heads, h = head % sizes.heads;
    int32_t* own = buckets + row * sizes.tokens;
    for (int64_t i = piece.first(); i < piece.end(); ++i) {
      const auto offset = [&](const int64_t* strides) {
        return b * strides[0] + h * strides[1] + i * strides[2] + round * strides[3];
      };
      int32_t bucket = 0;
      if (sizes.buckets > 1) bucket = given == nullptr ? own[i] : given[offset(given_strides)];
      bucket = bucket < 0 ? 0 : bucket < sizes.buckets ? bucket : sizes.buckets - 1;
      if (written != nullptr) written[offset(written_strides)] = bucket;
      const bool is_token =
          key_mask == nullptr || key_mask[b * key_mask_strides[0] + i * key_mask_strides[1]] != 0;
      own[i] = is_token ? bucket : sizes.buckets;
    }
  }
};

// Computes, from places, the codes of core/flash's token rule, and the end of the orders. Rows are
// as above, with the places of an order as columns.
struct CodesOfPlaces {
  LshSizes sizes;
  const int32_t* buckets;  // [batch][heads][rounds][tokens]
  const int32_t* places;
  int32_t* orders;  // [batch][heads][rounds][order]
  // [slots][batch][heads][tokens]: a slot a round, and with wrap as many again for the wrapped
  // chunks. Without wrap, codes of keys are those of queries.
  int32_t* query_codes;
  int32_t* key_codes;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t head = row / sizes.rounds, round = row % sizes.rounds;
    const int64_t before = head * sizes.rounds + sizes.RoundBefore(round);
    const int64_t tokens = sizes.tokens, tail = sizes.order - tokens;
    const int64_t slot = sizes.batch * sizes.heads * tokens, further = sizes.rounds * slot;
    const int64_t last_chunk = (sizes.chunks() - 1) * sizes.chunk;  // its first place
    for (int64_t i = piece.first(); i < piece.end(); ++i) {
      if (i >= tokens) {
        orders[row * sizes.order + i] = orders[before * sizes.order + i - tail];
        continue;
      }
      const int32_t place = places[row * tokens + i];
      const int64_t code = round * slot + head * tokens + i;
      query_codes[code] = sizes.Code(buckets[row * tokens + i], place);
      if (tail == 0) continue;
      key_codes[code] = query_codes[code];
      query_codes[further + code] = sizes.WrapQueryCode(place);
      key_codes[further + code] = sizes.WrapKeyCode(places[before * tokens + i], last_chunk);
    }
  }
};

}  // namespace tfb::lsh

#endif  // TFB_ATTENTION_LSH_LSH_FUNCTORS_H_
