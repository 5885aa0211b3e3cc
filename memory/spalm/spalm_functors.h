// The backward pass of SPALM's gate and of the softmax over neighbours' embeddings, on the CPU and in
// kernels; spalm.h has the formulas. Pointers are to the device's memory.
#ifndef TFB_MEMORY_SPALM_SPALM_FUNCTORS_H_
#define TFB_MEMORY_SPALM_SPALM_FUNCTORS_H_

#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb::spalm {

// Returns ds, the gradient of the gate's score.
TFB_HOST_DEVICE float GateScoreGradient(float dz_x, float dz_mean, float g) {
  return (dz_x - dz_mean) * g * (1 - g);
}
// Returns dc_i, that of the score of a neighbour of weight w_i.
TFB_HOST_DEVICE float ScoreGradient(float weight, float dz_embedding, float dz_mean, float g) {
  return weight * (1 - g) * (dz_embedding - dz_mean);
}

// Writes dx, and dm in the place of dz. Sums are in the order of the neighbours. Rows are b * tokens + i.
struct ThroughGate {
  const int32_t* places;     // [rows][k]: the neighbours' tokens; -1 for none
  const float* embeddings;   // [vocabulary][dim]
  const float* gate;         // w_g [dim]
  const float* gates;        // g [rows]
  const float* gate_scores;  // ds [rows]
  const float* scores;       // dc [rows][k]
  float* z_gradient;         // [rows][dim]: dz, then dm
  DeviceView x_gradient;     // dx [batch, tokens, dim], unless null
  int64_t tokens;
  int64_t dim;
  int64_t k;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const float g = gates[row], ds = gate_scores[row];
    const float* own_gate = gate + piece.first();
    float* dz = z_gradient + row * dim + piece.first();
    float dx[Piece::kMost];
    for (int i = 0; i < piece.count(); ++i) {
      dx[i] = g * dz[i] + ds * own_gate[i];
      dz[i] *= 1 - g;
    }
    if (x_gradient.data == nullptr) return;
    for (int64_t n = row * k; n < (row + 1) * k; ++n) {
      if (places[n] < 0) continue;
      const float score = scores[n];
      const float* embedding = embeddings + places[n] * dim + piece.first();
      for (int i = 0; i < piece.count(); ++i) dx[i] += score * embedding[i];
    }
    piece.Store(dx, x_gradient, Offset(x_gradient, row / tokens, row % tokens, 0),
                x_gradient.strides[2]);
  }
};

}  // namespace tfb::spalm

#endif  // TFB_MEMORY_SPALM_SPALM_FUNCTORS_H_
