/* Causal windows of 64 keys over 1,000 tokens, and how far they are from dense attention. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "harness/c/tfb.h"

enum { kTokens = 1000, kDim = 16, kNumbers = 2 * kTokens * kDim };

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
    tensors[n] = (DLTensor){memory[n], {kDLCPU, 0}, 4, {kDLFloat, 32, 1}, shape, NULL, 0};
  }
  const TfbTensor inputs[] = {{"q", &tensors[0]}, {"k", &tensors[1]}, {"v", &tensors[2]}};
  const TfbTensor output = {"out", &tensors[3]};
  const TfbProblem problem = {1, 2, 2, kTokens, kTokens, kDim, kDim, 1, {kDLFloat, 32, 1}};
  TfbLayer* layer;
  Check(tfb_create("longformer:window=64", &problem, "cpu", 1, 0, &layer));
  Check(tfb_setup(layer, inputs, 3, NULL, 0, NULL));
  Check(tfb_run(layer, inputs, 3, &output, 1, NULL, 0, NULL));
  const char* json;
  Check(tfb_evaluate(layer, inputs, 3, &output, 1, 0, &json));
  printf("%s\n", json);
  tfb_destroy(layer);
  /* The first token sees itself alone. */
  return memory[3][0] == memory[2][0] && tfb_create("dens", &problem, "cpu", 1, 0, &layer) == TFB_NOT_FOUND ? 0 : 1;
}
