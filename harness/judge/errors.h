// Computes the error of an output against its reference, the share of dense attention that a
// technique keeps, and the bounds of an implementation's error.
#ifndef TFB_HARNESS_JUDGE_ERRORS_H_
#define TFB_HARNESS_JUDGE_ERRORS_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/dtype.h"
#include "core/tensor.h"
#include "core/thread_pool.h"

namespace tfb {

// The errors of an output y against its reference r. An element that is not finite is right where
// the reference is the same infinity, or both are NaN, and infinitely wrong otherwise. Where y and
// r have elements and no two of them are finite, relative_frobenius and mean_cosine are NaN.
struct OutputError {
  double relative_frobenius = 0;      // |y - r| / |r|, over all elements; 0 where both are 0
  double max_abs = 0;                 // max |y - r|
  double max_abs_over_max_value = 0;  // max |y - r| / max |v|
  // Mean over the rows of y and r with two finite elements; rows that are both 0 have 1.
  double mean_cosine = 1;
  int64_t rows_checked = 0;  // rows of the last dimension
  int64_t rows = 0;          // of the whole output
  int64_t checked = 0;       // elements of the rows that were checked
  int64_t not_finite = 0;    // elements of y among them that are NaN or infinite
  int64_t unexpected = 0;    // of these, where r is finite
};

// The view of `output` that a reference of the given shape covers: the whole of it, or, where the
// reference has only `rows` of the tokens of one dimension, those rows. Returns InvalidArgument
// where the shapes have no such relation.
class ComparedRows {
 public:
  static absl::StatusOr<ComparedRows> Of(const ConstTensorView& output,
                                         const ConstTensorView& reference,
                                         absl::Span<const int64_t> rows);
  // Returns the offset in the output of the element of the reference at `index` (row-major).
  int64_t OutputOffset(int64_t index) const;

 private:
  ConstTensorView output_;
  Shape reference_shape_;
  absl::Span<const int64_t> rows_;
  int axis_ = -1;  // set where the reference has only `rows_`
};

// Compares an output with its reference. `max_value` is max |v| of the values that were mixed, or
// the reference's own largest element where a technique has none (see Scale). `rows` are the tokens
// that the reference has, empty for all.
absl::StatusOr<OutputError> CompareOutput(const ConstTensorView& output,
                                          const ConstTensorView& reference,
                                          absl::Span<const int64_t> rows, double max_value);

// Returns the largest |y - r| over elements; -inf equals -inf.
absl::StatusOr<double> MaxAbsError(const ConstTensorView& output, const ConstTensorView& reference,
                                   absl::Span<const int64_t> rows);

// Returns the largest finite |element|; 0 for an empty tensor.
double LargestMagnitude(const ConstTensorView& view);

// Compares a technique's weights w with dense attention's p, both f64 [batch, heads, rows, keys]. A
// technique attends to a key where w > 0. The numbers are means over the rows in which both see a
// key; absent where there is no such row. They do not depend on `pool`, which may be null.
struct KeptAttention {
  double kept_mass = 0;      // sum of p over the keys that the technique attends to
  double kl_divergence = 0;  // sum of w log(w / p), nats; infinite where w > 0 = p
  double recall = 0;         // share of the k keys of largest p among the k of largest w
};
constexpr int64_t kRecallKeys = 32;  // k, or the number of keys that dense attention sees
absl::StatusOr<std::optional<KeptAttention>> CompareWeights(const ConstTensorView& weights,
                                                            const ConstTensorView& dense,
                                                            int64_t recall_keys = kRecallKeys,
                                                            ThreadPool* pool = nullptr);

// --- Bounds. Each is a factor of max |v|; only the log-sum-exp's is absolute.

// Returns the bound of max |y - r| of an fp32 implementation of y = sum_j p_j v_j, in units of max
// |v|.
//
// Let u = 2^-24. The implementation has p_j (1 + e_j): |y - r| <= 2 max |e_j| max |v|, once for the
// numerator and once for the sum that divides it. e_j has three parts: the score's absolute error,
// about u sqrt(d) |q||k| scale, or some 20 u where scores are below 10; exp, 2 u; and the
// accumulation over n keys, whose roundings are independent: u sqrt(n), 128 u for n = 16384. So
// 2 (20 + 2 + 128) u = 300 u = 1.8e-5 <= 2e-5 up to 16384 keys, and beyond the last part grows as
// sqrt(n / 16384).
double Fp32Bound(int64_t keys);

// Returns the bound of an implementation that reads and writes bf16 or f16 and accumulates in fp32,
// in units of max |v|. The reference starts from the same rounded q, k and v. The remaining errors
// are the rounding of p to 16 bits before it is multiplied by v (u for each term, so at most u max
// |v| for their mean, and as much again where the sum that divides has been taken of the unrounded
// p), and of the output (u): 3 u. 5 u leaves room for a p that is rounded twice, where parts are
// merged: 2.0e-2 for bf16 (u = 2^-8), 2.4e-3 for f16 (u = 2^-11).
double HalfBound(DType dtype);

// Returns the bound for the dtype: Fp32Bound or HalfBound.
double AbsoluteBound(DType dtype, int64_t keys);

// Returns the largest permitted error of a 16-bit implementation where plain dense attention in the
// same precision has `dense_error`: twice that, as FlashAttention's tests require, but at least one
// rounding of the output, u max |r|: a small case may be exact by chance, and an output that
// averages fewer values than dense attention's has larger elements and so larger roundings. All
// numbers, `largest_output` included, are in units of max |v|.
double RatioBound(DType dtype, double dense_error, double largest_output);

// Returns the absolute bound of log-sum-exp = m + log(sum) with f32 scores. It has three parts: the
// error of scores below 10 and of the sum, which is Fp32Bound; for larger scores u sqrt(d) |q||k|
// scale, where |q||k| scale is at least the largest score, so 8 u of that score for d = 64; and
// three roundings of that score (its own, its scaled form's and the result's). The largest score is
// about the largest |log_sum_exp|. In 16 bits the scores are still fp32: q and k are not rounded.
double LogSumExpBound(int64_t keys, double largest_log_sum_exp);

}  // namespace tfb

#endif  // TFB_HARNESS_JUDGE_ERRORS_H_
