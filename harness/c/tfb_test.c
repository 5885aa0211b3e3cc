/* Causal windows of 64 keys over 1,000 tokens, how far they are from dense attention, and gradients
 * of the first token's output. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "harness/c/tfb.h"

enum { kTokens = 1000, kDim = 16, kNumbers = 2 * kTokens * kDim };

static DLTensor Tensor(float* memory, int64_t* shape) {
  return (DLTensor){memory, {kDLCPU, 0}, 4, {kDLFloat, 32, 1}, shape, NULL, 0};
}

static void Check(TfbStatus status) {
  if (status == TFB_OK) return;
  fprintf(stderr, "%s\n", tfb_last_error());
  exit(1);
}

int main(void) {
  static float memory[4][kNumbers];
  int64_t shape[] = {1, 2, kTokens, kDim};
  DLTensor tensors[4];
  for (int n = 0; n < 4; ++n) {
    for (int i = 0; i < kNumbers; ++i) memory[n][i] = sinf((float)(i * (n + 2)));
    tensors[n] = Tensor(memory[n], shape);
  }
  const TfbTensor inputs[] = {{"q", &tensors[0]}, {"k", &tensors[1]}, {"v", &tensors[2]}};
  const TfbTensor output = {"out", &tensors[3]};
  const TfbProblem problem = {1, 2, 2, kTokens, kTokens, kDim, kDim, 1, {kDLFloat, 32, 1}};
  TfbLayer* layer;
  Check(tfb_create("longformer:window=64", &problem, "cpu", 1, 0, &layer));
  Check(tfb_setup(layer, inputs, 3, NULL, 0, NULL));
  size_t kept_bytes;
  Check(tfb_kept_bytes(layer, &kept_bytes));
  void* kept = aligned_alloc(64, (kept_bytes + 63) / 64 * 64);
  Check(tfb_run_kept(layer, inputs, 3, &output, 1, NULL, 0, kept, kept_bytes, NULL));
  const char* json;
  Check(tfb_evaluate(layer, inputs, 3, &output, 1, 0, &json));
  printf("%s\n", json);

  /* L is the sum of the first token's output in the first head. */
  static float of_out[kNumbers], of_q[kNumbers], of_v[kNumbers];
  for (int c = 0; c < kDim; ++c) of_out[c] = 1;
  DLTensor gradients[] = {Tensor(of_out, shape), Tensor(of_q, shape), Tensor(of_v, shape)};
  const TfbTensor out_gradient = {"out", &gradients[0]};
  const TfbTensor input_gradients[] = {{"q", &gradients[1]}, {"v", &gradients[2]}};
  const TfbBackwardCall call = {
      {inputs, 3}, {&output, 1}, {&out_gradient, 1}, {input_gradients, 2}, {NULL, 0}};
  Check(tfb_setup_backward(layer, inputs, 3, NULL, 0, NULL));
  Check(tfb_backward(layer, &call, NULL, 0, kept, kept_bytes, NULL));
  tfb_destroy(layer);
  free(kept);

  /* The first token sees itself alone, with the weight 1 whatever its query. Sums of 16 products
   * below 1 are 16 * 16 * 2^-24 = 1.5e-5 off; of two of them 1/4 is in the query's gradient. */
  int failures = memory[3][0] != memory[2][0];
  for (int i = 0; i < kNumbers; ++i) {
    failures += fabsf(of_q[i]) > 1e-5F;
    failures += i < kDim ? fabsf(of_v[i] - 1) > 1.5e-5F : of_v[i] != 0;
  }
  failures += tfb_create("dens", &problem, "cpu", 1, 0, &layer) != TFB_NOT_FOUND;
  return failures == 0 ? 0 : 1;
}
