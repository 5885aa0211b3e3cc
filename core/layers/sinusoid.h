// Sinusoids of positions.
//
//   channel a_j of position p   sin(p f_j)    j = 0 .. ceil(channels / 2) - 1
//   channel b_j of position p   cos(p f_j)    j = 0 .. floor(channels / 2) - 1
//
//   interleaved    a_j = 2 j, b_j = 2 j + 1: Vaswani et al., arXiv:1706.03762v7, section 3.5
//   concatenated   a_j = j, b_j = ceil(channels / 2) + j: all sines, then all cosines
//
//   paper          f_j = base^(-2 j / channels), base 10000: the same section
//   inclusive      f_j = base^(-j / (n - 1)), n = ceil(channels / 2), so that 1 / base is the last
//                  one; f_0 = 1 where n is 1. As tensor2tensor and fairseq have it.
//
// With an odd number of channels the last cosine is missing. (tensor2tensor and fairseq leave the
// last channel 0 instead, with floor(channels / 2) sines.) Dai et al., arXiv:1901.02860v3, section
// 3.3 refer to the paper's; their code (mem_transformer.py, PositionalEmbedding) concatenates, which
// is the same up to a permutation of the rows of the matrix that a row is multiplied by.
#ifndef TFB_CORE_LAYERS_SINUSOID_H_
#define TFB_CORE_LAYERS_SINUSOID_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "core/tensor.h"

namespace tfb {

enum class SinusoidLayout { kInterleaved, kConcatenated };
enum class SinusoidFrequencies { kPaper, kInclusive };

struct SinusoidForm {
  SinusoidLayout layout = SinusoidLayout::kInterleaved;
  SinusoidFrequencies frequencies = SinusoidFrequencies::kPaper;
  double base = 10000;
};

// Returns rows of the positions `first` to `first` + `positions` - 1, f32 [positions, channels];
// angles are in double. Returns ResourceExhausted where there is no memory.
absl::StatusOr<Tensor> Sinusoids(int64_t first, int64_t positions, int64_t channels,
                                 const SinusoidForm& form);

// Returns rows of the distances 0 to `distances` - 1, concatenated, with the paper's frequencies,
// as Transformer-XL and its descendants use them.
Tensor RelativeSinusoids(int64_t distances, int64_t channels);

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_SINUSOID_H_
