// The CUDA kernel of calm as C++ sees it, and what the host computes with too. Pointers are to device
// memory.
#ifndef TFB_ADAPTIVE_CALM_CALM_CUDA_H_
#define TFB_ADAPTIVE_CALM_CALM_CUDA_H_

#include <math.h>
#include <stdint.h>

#include "core/cuda/kernel_table.h"

#ifdef __CUDACC__
#define TFB_CALM_HOST_DEVICE __host__ __device__
#else
#define TFB_CALM_HOST_DEVICE
#endif

namespace tfb {

enum class Confidence : unsigned char { kSoftmax, kSaturation, kClassifier };
enum class Schedule : unsigned char { kConstant, kDecaying, kT5x };

// lambda_t, as calm.h has it.
struct Threshold {
  float lambda;
  float temperature;
  int64_t tokens;  // T, at least 1
  Schedule schedule;

  TFB_CALM_HOST_DEVICE float At(int64_t t) const {
    if (schedule == Schedule::kConstant || lambda > 1) return lambda;
    const float first = schedule == Schedule::kT5x ? lambda : 1;
    const float place = static_cast<float>(t) / static_cast<float>(tokens);
    const float decayed = 0.9f * lambda + 0.1f * first * expf(-temperature * place);
    return fminf(fmaxf(decayed, 0.0f), 1.0f);
  }
};

// leaves[r] = whether the confidence of row r reaches its threshold.
struct ConfidenceArguments {
  Confidence confidence;
  const float* state;    // [rows, channels]; softmax: logits
  const float* before;   // saturation: the state before
  const float* weights;  // classifier: w [channels]
  float bias;
  uint8_t* leaves;
  int64_t rows;
  int64_t channels;
  int64_t tokens;  // of each batch row
  int64_t first_position;
  Threshold threshold;
};

struct CalmKernels {
  // Enqueues on the stream and returns null, or why not.
  const char* (*decide)(const ConfidenceArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_ADAPTIVE_CALM_CALM_CUDA_H_
