#include "attention/lsh/lsh_cuda.h"
#include "core/cuda/warp.cuh"

namespace tfb::lsh {
namespace {

// A thread does one token and round, or one place of a row's end.

constexpr int kThreads = 256;

KernelShape ShapeFor(int64_t items) { return {BlocksInTurns(CeilDiv(items, kThreads)), kThreads}; }

__global__ void __launch_bounds__(kThreads) Buckets(const LshBucketArguments a) {
  const LshSizes& s = a.sizes;
  const int64_t items = s.batch * s.heads * s.rounds * s.tokens;
  for (int64_t n = ThreadOfGrid(); n < items; n += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t token = n % s.tokens, round = n / s.tokens % s.rounds;
    const int64_t h = n / s.tokens / s.rounds % s.heads, b = n / s.tokens / s.rounds / s.heads;
    const auto offset = [&](const int64_t* strides) {
      return b * strides[0] + h * strides[1] + token * strides[2] + round * strides[3];
    };
    int32_t bucket = 0;
    if (s.buckets > 1) {
      bucket = a.given == nullptr ? a.buckets[n] : a.given[offset(a.given_strides)];
    }
    bucket = min(max(bucket, 0), s.buckets - 1);
    if (a.written != nullptr) a.written[offset(a.written_strides)] = bucket;
    const bool is_token =
        a.key_mask == nullptr ||
        a.key_mask[b * a.key_mask_strides[0] + token * a.key_mask_strides[1]] != 0;
    a.buckets[n] = is_token ? bucket : s.buckets;
  }
}

const char* LaunchBuckets(const LshBucketArguments& a, void* stream) {
  const LshSizes& s = a.sizes;
  return Launch("Buckets", &Buckets, ShapeFor(s.batch * s.heads * s.rounds * s.tokens), stream, a);
}

__global__ void __launch_bounds__(kThreads) Codes(const LshCodeArguments a) {
  const LshSizes& s = a.sizes;
  const int64_t heads = s.batch * s.heads, slot = heads * s.tokens, tail = s.order - s.tokens;
  const int64_t items = heads * s.rounds * s.order;
  for (int64_t n = ThreadOfGrid(); n < items; n += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t row = n / s.order, token = n % s.order;
    const int64_t head = row / s.rounds, round = row % s.rounds;
    const int64_t before = head * s.rounds + s.RoundBefore(round);
    if (token >= s.tokens) {
      a.orders[n] = a.orders[before * s.order + token - tail];
      continue;
    }
    const int64_t at = row * s.tokens + token, code = round * slot + head * s.tokens + token;
    a.query_codes[code] = s.Code(a.buckets[at], a.places[at]);
    if (tail == 0) continue;
    a.key_codes[code] = a.query_codes[code];
    a.query_codes[s.rounds * slot + code] = s.WrapQueryCode(a.places[at]);
    a.key_codes[s.rounds * slot + code] = s.WrapKeyCode(a.places[before * s.tokens + token]);
  }
}

const char* LaunchCodes(const LshCodeArguments& a, void* stream) {
  const LshSizes& s = a.sizes;
  return Launch("Codes", &Codes, ShapeFor(s.batch * s.heads * s.rounds * s.order), stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(LshKernels, {&LaunchBuckets, &LaunchCodes});

}  // namespace tfb::lsh
