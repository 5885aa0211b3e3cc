#ifndef TFB_HARNESS_TESTING_TINY_KERNELS_H_
#define TFB_HARNESS_TESTING_TINY_KERNELS_H_

#include <stdint.h>

namespace tfb {

// Makes the factors 1 / sum of rows of weights [rows, keys], of which a negative one does not count.
// The threads of a block add their shares by atomics, in an unspecified order.
struct TinySumsInAnyOrder {
  const float* weights;
  float* factors;  // by row; those of sums in order, which are replaced
  float* kept;     // log-sum-exps by row, which are made those of these sums; may be null
  int64_t rows, keys;
};

// Each launcher enqueues on the stream, and returns null, or a text that says why it failed.
struct TinyKernels {
  const char* (*sum_in_any_order)(const TinySumsInAnyOrder& sums, void* stream);
  // A kernel that does nothing, with a grid of one x `batch` x `heads` blocks.
  const char* (*visit_heads)(int64_t batch, int64_t heads, void* stream);
};

}  // namespace tfb

#endif  // TFB_HARNESS_TESTING_TINY_KERNELS_H_
