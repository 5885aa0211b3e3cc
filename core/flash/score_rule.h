// What a score has besides the product of query and key, as plain data that the engines of all
// devices read: arrays in memory of the device, and what their numbers mean. core/flash/flash.h has
// the formula.
#ifndef TFB_CORE_FLASH_SCORE_RULE_H_
#define TFB_CORE_FLASH_SCORE_RULE_H_

#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb {

class RelativeKeys;

// One number per head and offset e: that of head h is values[h % heads * row + zero + e].
struct DistanceEntries {
  const float* values = nullptr;  // null: none
  int64_t heads = 1;
  int64_t row = 0;   // floats per head
  int64_t zero = 0;  // index of offset 0 in a row

  // Returns the address of a head's entry of offset 0; those of other offsets lie beside it.
  TFB_HOST_DEVICE const float* Of(int64_t head) const { return values + head % heads * row + zero; }
};

// One vector per head and offset for CUDA kernels: row e - low of head h % heads, zero outside
// [low, high]. Rows have the problem's dtype, are aligned to 16 bytes and are padded with zeros to
// `row` elements, a multiple of 8; in 16-bit dtypes a multiple of 32, with channel c at
// RelativeKeyPlace16(c).
struct RelativeKeyRows {
  const void* rows = nullptr;  // [heads][high - low + 1][row]; null: none
  int64_t heads = 1;
  int64_t low = 0;
  int64_t high = -1;
  int64_t row = 0;
};

// Returns the place of channel c. Among every 32 channels, the 8 that a lane needs for two steps of
// mma.m16n8k16 follow each other, so that it reads them at once: 0 1 8 9 16 17 24 25, 2 3 10 11 18
// 19 26 27, ...
constexpr int64_t RelativeKeyPlace16(int64_t c) {
  const int64_t pair = c % 32 / 8, lane = c % 8 / 2;
  return c / 32 * 32 + lane * 8 + pair * 2 + c % 2;
}

// Two vectors per head: one for pairs of a query and a key of different ids, one for pairs of the
// same id, and perhaps a number with each. The call brings the ids.
struct LabelKeys {
  // [heads][2][head_dim], the vector for equal ids second; null: no label keys.
  const float* keys = nullptr;
  int64_t heads = 1;  // head h reads vectors of head h % heads
  // c, [heads][2], which are added to the products with the vectors; null: none.
  const float* biases = nullptr;
};

// Query i of head h sees key j at distance x = i + causal_offset - j with weight clip((ramp + z -
// x) / ramp, 0, 1), where z = span[b batch_stride + h head_stride + i query_stride]. The engine
// does not visit keys of weight 0.
struct SoftSpan {
  const float* span = nullptr;  // null: none
  int64_t count = 0;            // floats at `span`
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t query_stride = 0;
  float ramp = 1;  // > 0, in tokens

  // Returns z of a query. Kernels take the distance, a whole number below 2^24, from it before they
  // add the ramp, which is exact where the weight lies between 0 and 1, whatever the position.
  TFB_HOST_DEVICE float Of(int64_t b, int64_t h, int64_t i) const {
    return span[b * batch_stride + h * head_stride + i * query_stride];
  }
  // Returns the weight before it is clipped.
  TFB_HOST_DEVICE float Weight(float z, float distance) const {
    return (z - distance + ramp) / ramp;
  }
};

// A number for each pair of a query and a key, which hides the pair where it is 0: that of query i
// and key j is data[b batch_stride + i query_stride + j key_stride]. Pairs with j - i below `low`
// or above `high` have none, and are not hidden by it: so a band [queries, high - low + 1] is a
// mask, too.
struct PairMask {
  const uint8_t* data = nullptr;  // null: none
  int64_t batch_stride = 0;
  int64_t query_stride = 0;
  int64_t key_stride = 0;
  int64_t low = INT64_MIN / 2;
  int64_t high = INT64_MAX / 2;

  // Tells whether the mask, which is there, shows key j to query i.
  TFB_HOST_DEVICE bool Shows(int64_t b, int64_t i, int64_t j) const {
    return j - i < low || j - i > high ||
           data[b * batch_stride + i * query_stride + j * key_stride] != 0;
  }
};

// A rule on pairs of tokens by their indices in the tensors, not by their places in the call's
// orders, for calls that gather tokens by content. i and j are the tokens that the orders name.
//
// Slot n shows key j to query i where 0 <= a_n(i) - b_n(j) <= 1, with codes a of queries and b of
// keys, such as their chunks in the n-th of several sortings.
struct TokenRule {
  bool causal = false;  // hides keys j > i
  // Divides the weight by the number of slots that show j to i, at least 1. A key that several
  // calls or places of one softmax contain then counts once.
  bool counts = false;
  float self_bias = 0;  // is added to the score of i = j
  int64_t own = -1;     // hides keys that slot `own` does not show; -1 for no such slot
  PairMask mask;        // hides pairs
  // Codes, one a token, of a slot, batch row and query head or key-value head.
  const int32_t* query_codes = nullptr;
  const int32_t* key_codes = nullptr;
  int64_t slots = 0;  // kMaxTokenSlots at most
  int64_t slot_stride = 0;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;

  TFB_HOST_DEVICE bool hides() const { return causal || own >= 0 || mask.data != nullptr; }
  TFB_HOST_DEVICE bool adjusts() const { return self_bias != 0 || counts; }
  TFB_HOST_DEVICE bool acts() const { return hides() || adjusts(); }
  // Returns the offset of the codes of a slot, batch row and head.
  TFB_HOST_DEVICE int64_t Codes(int64_t slot, int64_t b, int64_t h) const {
    return slot * slot_stride + b * batch_stride + h * head_stride;
  }
};
constexpr int kMaxTokenSlots = 64;

// The parts of a score rule. A part that is null or empty has no effect. Distance entries and
// relative keys are indexed by the offset j - i - query_position.
struct ScoreRule {
  const float* content_bias = nullptr;   // u [query_heads, head_dim]
  const float* position_bias = nullptr;  // w [query_heads, head_dim]
  // The relative keys, in the form of the CPU's engine and in that of kernels, which FlashCuda
  // makes of the first.
  const RelativeKeys* relative_keys = nullptr;
  RelativeKeyRows relative_key_rows;
  LabelKeys label_keys;
  DistanceEntries relu_multiplier;
  DistanceEntries bias;
  SoftSpan soft_span;
  // The position of query 0 among the keys. With 0 the offset is j - i; with the call's causal
  // offset it is minus the distance, whatever the number of keys, so that one table serves all
  // calls of a stream.
  int64_t query_position = 0;
  TokenRule tokens;

  bool has_relative_keys() const {
    return relative_keys != nullptr || relative_key_rows.rows != nullptr;
  }
  // Tells whether scores are products and biases alone, apart from relative keys: one kernel handles
  // these, another all other rules.
  bool is_plain_but_for_relative_keys() const {
    return label_keys.keys == nullptr && relu_multiplier.values == nullptr &&
           bias.values == nullptr && soft_span.span == nullptr && !tokens.acts();
  }
  bool is_plain() const { return !has_relative_keys() && is_plain_but_for_relative_keys(); }
};

// The schedule's row n is token tokens[b batch_stride + h / group head_stride + n] of the tensors;
// without one it is token n. h is a query head for queries, of which `group` share an order, and a
// key-value head for keys. The order may name some of the tensor's tokens, in any order: engines
// gather them. On the CPU an order of queries may contain numbers below 0, which name no token:
// such a row is not computed.
struct TokenOrder {
  const int32_t* tokens = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t group = 1;

  // Returns the list of a batch row and head, where there is an order.
  TFB_HOST_DEVICE const int32_t* Of(int64_t b, int64_t h) const {
    return tokens + b * batch_stride + h / group * head_stride;
  }
  TFB_HOST_DEVICE int64_t operator()(int64_t b, int64_t h, int64_t n) const {
    return tokens == nullptr ? n : Of(b, h)[n];
  }
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_SCORE_RULE_H_
