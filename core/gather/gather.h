// Engine gather: the steps before and after attention in techniques that group tokens by content,
// on every device. The attention within the groups is engine flash's: its token orders gather the
// rows, its token rules mask and weigh pairs of tokens, and core/flash/flash_parts.h merges several
// groupings.
//
// Integer arrays lie in the memory of the device, rows after each other; a row is one batch row,
// head and, where there are several, round. Nothing here allocates or, on a GPU, synchronises, and
// no result depends on the number of threads or on the order in which a device works.
#ifndef TFB_CORE_GATHER_GATHER_H_
#define TFB_CORE_GATHER_GATHER_H_

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/device_array.h"
#include "core/gather/gather_kernels.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

// Measures how much of a layer's Run on the CPU finding the groups takes. It does not measure GPUs,
// whose work is asynchronous.
class GroupingShare {
 public:
  void Begin() { begin_ = Clock::now(); }
  void GroupsAreFound() { found_ = Clock::now(); }
  // Counts a Run. Groups that Backward finds again, which does not come here, do not count.
  void End() {
    grouping_ += found_ - begin_;
    all_ += Clock::now() - begin_;
  }
  // Returns the share as a layer's statistic, under its name.
  std::map<std::string, double> statistics(Device device) const {
    if (device != Device::kCpu) return {};
    const double ticks = static_cast<double>(std::max<int64_t>(all_.count(), 1));
    return {{"grouping_share", static_cast<double>(grouping_.count()) / ticks}};
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin_, found_;
  Clock::duration grouping_{0}, all_{0};
};

// ---- Normalised rows ----

// y = (x - m) / sqrt(s sum_c (x_c - m)^2 + epsilon) for every row x [batch, heads, tokens,
// channels], with m the mean of its channels where `centered`, else 0, and s = 1 / channels where
// `mean_square`, else 1. Where the root is 0, y is 0. y has the shape of x; both may be of any
// floating dtype. The computation is in float64, so that no square overflows.
struct RowNorm {
  bool centered = false;
  bool mean_square = false;
  double epsilon = 0;
};
absl::Status NormalizeRows(Device device, const RowNorm& norm, const ConstTensorView& x,
                           const TensorView& y, const Execution& execution);

// Adds to the gradient of x what the gradient of y says: with r the root above and u = dL/dy,
//
//   dL/dx_c += (w_c - mean w [centered]) / r,    w_c = u_c - s y_c sum_c' u_c' y_c'
//
// Both gradients are f32 and have the shape of x. A row whose u is 0 adds nothing, whatever x
// holds, and one whose root is 0 neither.
absl::Status AddNormalizedGradients(Device device, const RowNorm& norm, const ConstTensorView& x,
                                    const ConstTensorView& y_gradient, const TensorView& x_gradient,
                                    const Execution& execution);

// ---- Angular hashing ----

// Buckets of vectors x by random rotations: Andoni et al. 2015, arXiv:1509.02897v1, section 3.
//
//   h(x) = argmax [x R ; -x R]
//   bucket = h_1 + 2 n_1 (h_2 + 2 n_2 (h_3 + ...))
//
// The argmax is over 2 n numbers where R has n columns; the lowest index wins ties. The second line
// is of a hash that is a product of smaller ones. Sums are in fp32; NaN are smaller than all
// numbers.
class AngularHash {
 public:
  AngularHash() = default;
  // Creates hashes from rotations [head_dim, rounds, columns], or where each head has its own
  // [heads, head_dim, rounds, columns]; the columns of a round are those of its factors, n_1 + n_2
  // + ... .
  static absl::StatusOr<AngularHash> Create(Device device, const ConstTensorView& rotations,
                                            const std::vector<int64_t>& columns_of_factors);

  int64_t rounds() const { return rounds_; }
  static size_t WorkspaceBytes(Device device, int64_t head_dim, int64_t rounds, int64_t columns,
                               int threads);
  // Writes buckets [batch][heads][rounds][tokens] of x [batch, heads, tokens, head_dim].
  absl::Status Run(const ConstTensorView& x, int32_t* buckets, const Execution& execution) const;

 private:
  absl::Status RunCpu(const ConstTensorView& x, int32_t* buckets, const Execution& execution) const;

  int64_t head_dim_ = 0;
  int64_t rounds_ = 0;
  int64_t columns_ = 0;             // of a round
  std::vector<int64_t> factors_;    // their columns
  int64_t head_stride_ = 0;         // floats from a head's rotations to the next; 0: one for all
  DeviceArray<float> rotations_;    // [1 or heads][rounds * columns][head_dim]
  DeviceArray<int32_t> on_device_;  // factors_, where that is not the CPU
};

// ---- Scores against vectors ----

// scores[b, h, n, i] = vectors[h, n] . x[b, h, i], summed in fp32 in the order of the channels;
// -inf where key_mask [batch, tokens] says that token i is padding.
struct VectorScoreCall {
  ConstTensorView x;     // [batch, heads, tokens, head_dim]
  const float* vectors;  // [heads][count][head_dim]
  int64_t count;
  ConstTensorView key_mask;  // u8, or empty
  float* scores;             // [batch][heads][count][stride]
  int64_t stride;            // ScoreStride(tokens)
};
int64_t ScoreStride(int64_t tokens);
size_t VectorScoreWorkspaceBytes(Device device, int64_t head_dim, int threads);
absl::Status ScoreVectors(Device device, const VectorScoreCall& call, const Execution& execution);

// ---- Sorting ----

// Sorts tokens by ascending key, stably: tokens of one key keep their order. It is a counting sort.
struct TokenSortCall {
  const int32_t* keys;  // [rows][tokens], in [0, key_count)
  int64_t rows;
  int64_t tokens;
  int64_t key_count;
  int32_t* order;  // each row has `tokens` numbers, then its stride's padding
  int64_t order_stride;
  int32_t* places;  // [rows][tokens], each token's position in the order; may be null
};
size_t SortWorkspaceBytes(Device device, int64_t rows, int64_t key_count, int threads);
absl::Status SortTokens(Device device, const TokenSortCall& call, const Execution& execution);

// ---- The largest ----

// Finds the `count` tokens of largest score, in token order. Among equal scores the first tokens
// win; -0 equals 0, and NaN are below -inf.
struct LargestCall {
  const float* scores;  // [rows][stride], of which `tokens` are scores
  int64_t rows;
  int64_t tokens;
  int64_t stride;
  int64_t count;     // tokens at most
  int32_t* members;  // [rows][count]
};
size_t LargestWorkspaceBytes(Device device, int64_t tokens, int threads);
absl::Status LargestTokens(Device device, const LargestCall& call, const Execution& execution);

// ---- Means over groups ----

// Averages, for each token, its rows in all groups that have it as a member; 0 where none has.
//
//   out[b, h, i] = sum over n, r with members[b, h, n, r] = i of rows[b, h, n, r] / count of such n
//
// The sum is in the order of n. Members of a group are ascending.
struct GroupMeanCall {
  const int32_t* members;  // [batch][heads][groups][size]
  int64_t groups;
  int64_t size;
  ConstTensorView rows;  // f32 [batch, heads, groups * size, channels]
  TensorView out;        // [batch, heads, tokens, channels]
};
size_t GroupMeanWorkspaceBytes(Device device, int64_t channels, int threads);
absl::Status MeanOfGroups(Device device, const GroupMeanCall& call, const Execution& execution);

// Adds to the gradients of the rows what the gradient of out says: with m = members[b,
// h, n, r],
//
//   dL/drows[b, h, n, r] += dL/dout[b, h, m] / count of such n
//
// `rows` is the call's; the gradient of out is of any floating dtype, and that of the rows f32.
absl::Status AddGroupGradients(Device device, const GroupMeanCall& call,
                               const ConstTensorView& out_gradient, const TensorView& rows_gradient,
                               const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_GATHER_GATHER_H_
