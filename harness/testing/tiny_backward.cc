#include "harness/testing/tiny_backward.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tfb {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

float At(const ConstTensorView& view, int64_t b, int64_t h, int64_t i, int64_t c) {
  return static_cast<float>(view.Get(view.Offset(b, h, i, c)));
}

float Rounded(float value, DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return static_cast<float>(BFloat16(value));
    case DType::kF16:
      return static_cast<float>(Half(value));
    default:
      return value;
  }
}

// Calls body(n) for n from 0 to count - 1, or the other way round.
template <class Body>
void InOrder(int64_t count, bool reversed, const Body& body) {
  for (int64_t n = 0; n < count; ++n) body(reversed ? count - 1 - n : n);
}

}  // namespace

TinyBackward::Scratch TinyBackward::Take(const Problem& p, int threads, Workspace& workspace) {
  const int64_t rows = p.batch * p.query_heads * p.query_tokens;
  return {workspace.Take<float>(rows), workspace.Take<float>(rows),
          workspace.Take<float>(threads * (p.head_dim + p.value_dim))};
}

size_t TinyBackward::WorkspaceBytes(const Problem& problem, int threads) {
  return Workspace::Measure([&](Workspace& w) { Take(problem, threads, w); });
}

TinyBackward::TinyBackward(const Numbers& numbers, const BackwardCall& call,
                           const Execution& execution)
    : numbers_(numbers), problem_(*numbers.problem), call_(call), execution_(execution) {
  Workspace workspace(execution.workspace);
  scratch_ = Take(problem_, execution.pool->threads(), workspace);
  q_ = call.inputs.Get("q");
  k_ = call.inputs.Get("k");
  v_ = call.inputs.Get("v");
  key_mask_ = call.inputs.Get("key_mask");
  out_ = call.outputs.Get("out");
  out_gradient_ = call.output_gradients.Get("out");
  lse_gradient_ = call.output_gradients.Get("log_sum_exp");
  if (Is(TinyFault::kGradientIgnoresStrides) && !out_gradient_.empty()) {
    out_gradient_ = ConstTensorView(out_gradient_.data, out_gradient_.dtype, out_gradient_.shape());
  }
  dq_ = call.input_gradients.Get("q");
  dk_ = call.input_gradients.Get("k");
  dv_ = call.input_gradients.Get("v");
  dgain_ = call.parameter_gradients.Get("gain");
  scale_ = 1 / std::sqrt(static_cast<float>(problem_.head_dim));
}

bool TinyBackward::IsReversed() const {
  if (Is(TinyFault::kGradientDependsOnThreads)) return execution_.pool->threads() > 1;
  return Is(TinyFault::kGradientDependsOnBatch) && problem_.batch > 1;
}

float TinyBackward::GradientOf(const char* output, int64_t b, int64_t h, int64_t i,
                               int64_t c) const {
  const ConstTensorView& view = *output == 'o' ? out_gradient_ : lse_gradient_;
  if (view.empty()) return Is(TinyFault::kGradientOfLeftOutOutput) ? 1 : 0;
  return At(view, b, h, i, c);
}

bool TinyBackward::Sees(int64_t b, int64_t i, int64_t j) const {
  if (Is(TinyFault::kGradientMissesLastTile) && j >= 64 && j / 64 * 64 == problem_.kv_tokens - 1) {
    return false;
  }
  return numbers_.sees(i, j) && (key_mask_.empty() || *key_mask_.At<uint8_t>(b, j) != 0);
}

TinyBackward::Pair TinyBackward::PairOf(int64_t b, int64_t h, int64_t i, int64_t j) const {
  const int64_t row = (b * problem_.query_heads + h) * problem_.query_tokens + i;
  Pair pair;
  for (int64_t c = 0; c < problem_.head_dim; ++c) {
    pair.product += At(q_, b, h, i, c) * At(k_, b, KeyHead(h), j, c);
  }
  pair.product *= scale_;
  float dp = 0;
  for (int64_t c = 0; c < problem_.value_dim; ++c) {
    dp += GradientOf("out", b, h, i, c) * At(v_, b, KeyHead(h), j, c);
  }
  if (Is(TinyFault::kGradientClips)) dp = std::clamp(dp, -100.0f, 100.0f);
  const float score = numbers_.gain->span<float>()[h] * pair.product;
  const float lse = numbers_.log_sum_exp[row];
  pair.p =
      Is(TinyFault::kGradientOverflows) ? std::exp(score) / std::exp(lse) : std::exp(score - lse);
  pair.ds = pair.p * (dp - scratch_.mean[row]);
  if (Is(TinyFault::kGradientRounds)) pair.ds = static_cast<float>(BFloat16(pair.ds));
  return pair;
}

void TinyBackward::AddTo(float& sum, float term) const {
  sum += term;
  if (Is(TinyFault::kGradientSumsIn16Bits)) sum = Rounded(sum, problem_.dtype);
}

void TinyBackward::Row(int64_t b, int64_t h, int64_t i, float* dq) const {
  const int64_t row = (b * problem_.query_heads + h) * problem_.query_tokens + i;
  std::fill_n(dq, problem_.head_dim, 0.0f);
  float dgain = 0;
  const float gain = numbers_.gain->span<float>()[h];
  InOrder(problem_.kv_tokens, IsReversed(), [&](int64_t j) {
    const bool sees = Sees(b, i, j);
    if (!sees && Is(TinyFault::kGradientReadsMasked)) dq[0] += 0 * At(v_, b, KeyHead(h), j, 0);
    if (!sees) return;
    const Pair pair = PairOf(b, h, i, j);
    dgain += pair.ds * pair.product;
    for (int64_t c = 0; c < problem_.head_dim; ++c) {
      AddTo(dq[c], pair.ds * gain * scale_ * At(k_, b, KeyHead(h), j, c));
    }
  });
  const float lse = numbers_.log_sum_exp[row];
  if (Is(TinyFault::kGradientOfEmptyRowIsNan) && lse == kMinusInfinity) dq[0] = lse - lse;
  scratch_.gain[row] = dgain;
  const bool shifted = Is(TinyFault::kGradientKeepsState) && numbers_.passes > 0;
  for (int64_t c = 0; !dq_.empty() && c < problem_.head_dim; ++c) {
    if (Is(TinyFault::kGradientWrongScale)) dq[c] *= 1.001f;
    dq_.Set(dq_.Offset(b, h, i, c), dq[c] * (shifted ? 1.0001f : 1.0f));
  }
}

void TinyBackward::Column(int64_t b, int64_t h, int64_t j, float* dk, float* dv) const {
  std::fill_n(dk, problem_.head_dim, 0.0f);
  std::fill_n(dv, problem_.value_dim, 0.0f);
  const int64_t group = Is(TinyFault::kGradientOfOneHead) ? 1 : problem_.group();
  for (int64_t head = h * problem_.group(); head < h * problem_.group() + group; ++head) {
    const float gain = numbers_.gain->span<float>()[head];
    InOrder(problem_.query_tokens, IsReversed(), [&](int64_t i) {
      const bool sees = Is(TinyFault::kGradientOfMaskedKeys) ? numbers_.sees(i, j) : Sees(b, i, j);
      if (!sees) return;
      const Pair pair = PairOf(b, head, i, j);
      for (int64_t c = 0; c < problem_.head_dim; ++c) {
        AddTo(dk[c], pair.ds * gain * scale_ * At(q_, b, head, i, c));
      }
      for (int64_t c = 0; c < problem_.value_dim; ++c) {
        dv[c] += pair.p * GradientOf("out", b, head, i, c);
      }
    });
  }
  for (int64_t c = 0; !dk_.empty() && c < problem_.head_dim; ++c) {
    dk_.Set(dk_.Offset(b, h, j, c), dk[c]);
  }
  for (int64_t c = 0; !dv_.empty() && c < problem_.value_dim; ++c) {
    const bool missed = Is(TinyFault::kGradientOfWholeVectors) && problem_.value_dim > 8 &&
                        c >= problem_.value_dim / 8 * 8;
    dv_.Set(dv_.Offset(b, h, j, c), missed ? 0 : dv[c]);
  }
}

float TinyBackward::MeanOf(int64_t b, int64_t h, int64_t i) const {
  float mean = 0;
  if (Is(TinyFault::kGradientOfRoundedOutput)) {
    for (int64_t c = 0; c < problem_.value_dim; ++c) {
      mean += GradientOf("out", b, h, i, c) * At(out_, b, h, i, c);
    }
    return mean;
  }
  for (int64_t j = 0; j < problem_.kv_tokens; ++j) {
    if (Sees(b, i, j)) mean += PairOf(b, h, i, j).ds;
  }
  return mean;
}

void TinyBackward::Gain() const {
  const int64_t batch = Is(TinyFault::kGradientOfOneBatch) ? 1 : problem_.batch;
  for (int64_t h = 0; h < problem_.query_heads; ++h) {
    float sum = 0;
    for (int64_t b = 0; b < std::min(batch, problem_.batch); ++b) {
      for (int64_t i = 0; i < problem_.query_tokens; ++i) {
        sum += scratch_.gain[(b * problem_.query_heads + h) * problem_.query_tokens + i];
      }
    }
    dgain_.Set(dgain_.Offset(h), sum);
  }
}

void TinyBackward::Run() {
  const Problem& p = problem_;
  const int64_t rows = p.batch * p.query_heads * p.query_tokens;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t i = row % p.query_tokens, h = row / p.query_tokens % p.query_heads;
    const int64_t b = row / p.query_tokens / p.query_heads;
    float& mean = scratch_.mean[row];
    mean = 0;
    mean = MeanOf(b, h, i);
    if (!Is(TinyFault::kGradientForgetsLogSumExp)) mean -= GradientOf("lse", b, h, i, 0);
    if (Is(TinyFault::kGradientRoundsMean)) mean = static_cast<float>(BFloat16(mean));
    if (Is(TinyFault::kGradientNeedsQueries) && dq_.empty()) mean = 0;
  }
  const auto sums = [&](int worker) { return scratch_.sums + worker * (p.head_dim + p.value_dim); };
  execution_.pool->ParallelFor(rows, [&](int64_t row, int worker) {
    Row(row / p.query_tokens / p.query_heads, row / p.query_tokens % p.query_heads,
        row % p.query_tokens, sums(worker));
  });
  execution_.pool->ParallelFor(p.batch * p.kv_heads * p.kv_tokens, [&](int64_t n, int worker) {
    Column(n / p.kv_tokens / p.kv_heads, n / p.kv_tokens % p.kv_heads, n % p.kv_tokens,
           sums(worker), sums(worker) + p.head_dim);
  });
  if (!dgain_.empty()) Gain();
  if (Is(TinyFault::kGradientWritesBehind) && !dq_.empty() && dq_.is_contiguous()) {
    dq_.Set(dq_.num_elements(), 0);
  }
  if (Is(TinyFault::kBackwardWorkspaceOverrun)) {
    execution_.workspace.data()[WorkspaceBytes(p, execution_.pool->threads())] = std::byte{0};
  }
  if (Is(TinyFault::kGradientWritesInputs) && !out_gradient_.empty()) {
    const TensorView written(const_cast<void*>(out_gradient_.data), out_gradient_.dtype, {1});
    if (out_gradient_.num_elements() > 0) written.Set(0, 0.5);
  }
}

}  // namespace tfb
