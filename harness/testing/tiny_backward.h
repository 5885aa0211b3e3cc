// The backward pass of the tiny technique, in plain loops, with the faults of its gradients.
#ifndef TFB_HARNESS_TESTING_TINY_BACKWARD_H_
#define TFB_HARNESS_TESTING_TINY_BACKWARD_H_

#include <cstdint>
#include <functional>

#include "core/technique.h"
#include "core/workspace.h"
#include "harness/testing/tiny_technique.h"

namespace tfb {

// With s_ij = gain_h scale q_i . k_j and p_ij = exp(s_ij - l_i) of the pairs that are seen:
//
//   ds_ij = p_ij (g_i . v_j - g_i . y_i + e_i),   dv_j = sum_i p_ij g_i
//   dq_i = sum_j ds_ij gain_h scale k_j,          dk_j = sum_i ds_ij gain_h scale q_i
//   dgain_h = sum_ij ds_ij scale q_i . k_j
//
// where e is the gradient of log_sum_exp l.
class TinyBackward {
 public:
  struct Numbers {
    const Problem* problem;
    const Tensor* gain;
    // Tells whether query i sees key j, apart from padding.
    std::function<bool(int64_t i, int64_t j)> sees;
    const float* log_sum_exp;  // [batch, query_heads, query_tokens], which the Run kept
    TinyFault fault = TinyFault::kNone;
    int passes = 0;  // that the layer has done before
  };

  static size_t WorkspaceBytes(const Problem& problem, int threads);
  TinyBackward(const Numbers& numbers, const BackwardCall& call, const Execution& execution);
  void Run();

 private:
  struct Scratch {
    float *mean, *gain;  // g_i . y_i - e_i, and the part of dgain, by row of queries
    float* sums;         // of a thread
  };
  // The factors of a pair: s_ij / gain_h, p_ij and ds_ij.
  struct Pair {
    float product = 0, p = 0, ds = 0;
  };
  static Scratch Take(const Problem& problem, int threads, Workspace& workspace);
  bool Is(TinyFault fault) const { return numbers_.fault == fault; }
  bool Sees(int64_t b, int64_t i, int64_t j) const;
  Pair PairOf(int64_t b, int64_t h, int64_t i, int64_t j) const;
  int64_t KeyHead(int64_t h) const { return h / problem_.group(); }
  bool IsReversed() const;
  float GradientOf(const char* output, int64_t b, int64_t h, int64_t i, int64_t c) const;
  void AddTo(float& sum, float term) const;
  void Row(int64_t b, int64_t h, int64_t i, float* dq) const;
  void Column(int64_t b, int64_t h, int64_t j, float* dk, float* dv) const;
  // Returns the mean of a row's dp, from its pairs, while scratch has 0 in its place.
  float MeanOf(int64_t b, int64_t h, int64_t i) const;
  void Gain() const;

  Numbers numbers_;
  const Problem& problem_;
  const BackwardCall& call_;
  const Execution& execution_;
  Scratch scratch_;
  ConstTensorView q_, k_, v_, key_mask_, out_, out_gradient_, lse_gradient_;
  TensorView dq_, dk_, dv_, dgain_;
  float scale_;
};

}  // namespace tfb

#endif  // TFB_HARNESS_TESTING_TINY_BACKWARD_H_
