#include "core/problem.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"

namespace tfb {

absl::string_view Name(Device device) {
  switch (device) {
    case Device::kCpu:
      return "cpu";
    case Device::kCuda:
      return "cuda";
    case Device::kSimulator:
      return "simulator";
  }
  return "unknown";
}

absl::StatusOr<Device> ParseDevice(absl::string_view name) {
  if (name == "cpu") return Device::kCpu;
  if (name == "cuda") return Device::kCuda;
  if (name == "simulator") return Device::kSimulator;
  return absl::InvalidArgumentError(
      absl::StrCat("unknown device \"", name, "\"; known are cpu, cuda, simulator"));
}

Problem Problem::SelfAttention(int64_t batch, int64_t heads, int64_t tokens, int64_t head_dim,
                               bool causal, DType dtype) {
  Problem problem;
  problem.batch = batch;
  problem.query_heads = problem.kv_heads = heads;
  problem.query_tokens = problem.kv_tokens = tokens;
  problem.head_dim = problem.value_dim = head_dim;
  problem.causal = causal;
  problem.dtype = dtype;
  return problem;
}

std::string Problem::ToString() const {
  std::string text = absl::StrCat("batch ", batch, ", ", query_heads, " heads of ", head_dim);
  if (value_dim != head_dim) absl::StrAppend(&text, " (values of ", value_dim, ")");
  if (kv_heads != query_heads) absl::StrAppend(&text, " over ", kv_heads, " key-value heads");
  absl::StrAppend(&text, ", ", query_tokens, " tokens");
  if (kv_tokens != query_tokens) absl::StrAppend(&text, " over ", kv_tokens, " keys");
  if (causal) absl::StrAppend(&text, ", causal");
  absl::StrAppend(&text, ", ", Name(dtype));
  return text;
}

bool operator==(const Problem& a, const Problem& b) {
  const auto key = [](const Problem& p) {
    return std::tie(p.batch, p.query_heads, p.kv_heads, p.query_tokens, p.kv_tokens, p.head_dim,
                    p.value_dim, p.causal, p.dtype);
  };
  return key(a) == key(b);
}

absl::Status Validate(const Problem& problem) {
  const auto check = [](absl::string_view name, int64_t value, int64_t min, int64_t max) {
    if (value >= min && value <= max) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is ", value, "; allowed are ", min, " to ", max));
  };
  absl::Status status;
  status.Update(check("batch", problem.batch, 0, kMaxSize));
  status.Update(check("query_heads", problem.query_heads, 1, kMaxSize));
  status.Update(check("kv_heads", problem.kv_heads, 1, kMaxSize));
  status.Update(check("query_tokens", problem.query_tokens, 0, kMaxSize));
  status.Update(check("kv_tokens", problem.kv_tokens, 0, kMaxSize));
  status.Update(check("head_dim", problem.head_dim, 1, kMaxHeadDim));
  status.Update(check("value_dim", problem.value_dim, 1, kMaxHeadDim));
  if (!status.ok()) return status;
  if (problem.query_heads % problem.kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat("query_heads is ", problem.query_heads,
                                                   ", which kv_heads (", problem.kv_heads,
                                                   ") does not divide"));
  }
  // 2^46 elements of f32 are 2^48 bytes, more than a process can address. They are refused here, so
  // that no layer has to check the sizes of its tensors for overflow.
  constexpr double kMaxElements = 0x1p46;
  const double elements =
      static_cast<double>(problem.batch) * static_cast<double>(problem.query_heads) *
      static_cast<double>(std::max({problem.query_tokens, problem.kv_tokens, int64_t{1}})) *
      static_cast<double>(std::max(problem.head_dim, problem.value_dim));
  if (elements > kMaxElements) {
    return absl::InvalidArgumentError(absl::StrCat("the tensors of ", problem.ToString(), " have ",
                                                   elements, " elements; allowed are ",
                                                   kMaxElements));
  }
  if (problem.dtype != DType::kF32 && problem.dtype != DType::kBF16 &&
      problem.dtype != DType::kF16) {
    return absl::InvalidArgumentError(
        absl::StrCat("dtype is ", Name(problem.dtype), "; allowed are f32, bf16, f16"));
  }
  return absl::OkStatus();
}

}  // namespace tfb
