// The problem that a technique is asked to solve: the sizes, the mask's direction, and the
// precision.
#ifndef TFB_CORE_PROBLEM_H_
#define TFB_CORE_PROBLEM_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/dtype.h"

namespace tfb {

// kSimulator runs the CUDA sources on the host, slowly, and checks every access: for tests.
enum class Device : uint8_t { kCpu, kCuda, kSimulator };

absl::string_view Name(Device device);  // "cpu", "cuda", "simulator"
absl::StatusOr<Device> ParseDevice(absl::string_view name);

constexpr int64_t kMaxHeadDim = 256;
// More than 2^40 tokens or heads are beyond any machine; the limit keeps products of two sizes inside
// 64 bits.
constexpr int64_t kMaxSize = int64_t{1} << 40;

// Zero tokens, zero keys and a zero batch are legal: they give empty or zero outputs.
struct Problem {
  int64_t batch = 1;
  int64_t query_heads = 8;
  int64_t kv_heads =
      8;  // divides query_heads; query head h reads key-value head h / (query_heads / kv_heads)
  int64_t query_tokens = 512;
  int64_t kv_tokens = 512;
  int64_t head_dim = 64;   // channels of queries and keys, 1 to 256
  int64_t value_dim = 64;  // channels of values and outputs, 1 to 256
  // Query i sees keys j <= i + (kv_tokens - query_tokens): the mask is aligned at the bottom right,
  // as with a key-value cache.
  bool causal = false;
  // Type of inputs and outputs: f32, bf16 or f16; accumulation is in fp32.
  DType dtype = DType::kF32;

  // Returns the width of a hidden state.
  int64_t model_dim() const { return query_heads * head_dim; }
  int64_t group() const {
    return query_heads / kv_heads;
  }  // query heads that share a key-value head
  int64_t causal_offset() const { return kv_tokens - query_tokens; }

  // Sets query_tokens and kv_tokens, head_dim and value_dim, query_heads and kv_heads together.
  static Problem SelfAttention(int64_t batch, int64_t heads, int64_t tokens, int64_t head_dim,
                               bool causal = false, DType dtype = DType::kF32);

  std::string ToString() const;  // Returns, say, "batch 1, 8 heads of 64, 512 tokens, causal, f32".
  friend bool operator==(const Problem& a, const Problem& b);
};

// Returns InvalidArgument, with the offending value and the allowed range, where a size is out of
// bounds.
absl::Status Validate(const Problem& problem);

}  // namespace tfb

#endif  // TFB_CORE_PROBLEM_H_
