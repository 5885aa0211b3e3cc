// Utilities of tests for techniques that are a stack of transformer_xl's layers.
#ifndef TFB_MEMORY_TRANSFORMER_XL_STACK_TESTING_H_
#define TFB_MEMORY_TRANSFORMER_XL_STACK_TESTING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/technique.h"
#include "core/tensor.h"

namespace tfb::transformer_xl {

// Returns causal self-attention, as every stack needs it.
Problem CausalProblem(int64_t batch, int64_t heads, int64_t tokens, int64_t head_dim,
                      DType dtype = DType::kF32);

// Returns a hidden state of the problem's shape and type, N(0, 1).
Tensor RandomHidden(const Problem& problem, uint64_t seed = 3);

// Returns a layer's parameters, with the vectors (gammas, betas and biases) moved off their initial
// 1 and 0. The second form is for the layer that the technique creates.
NamedTensors PerturbedParameters(const Layer& layer);
NamedTensors PerturbedParameters(const Technique& technique, const Problem& problem,
                                 const Options& options);

// Returns the bound of a stack of `layers` against its definition; transformer_xl_test.cc derives
// it.
double StackBound(const ConstTensorView& expected, int64_t layers);

// A technique's output for the hidden state `x`, and its definition's.
struct StackOutcome {
  NamedTensors computed;
  NamedTensors defined;
};
StackOutcome EvaluateStack(const Technique& technique, const Problem& problem,
                           const Options& options, const NamedTensors& parameters, const Tensor& x,
                           Device device = Device::kCpu, int threads = 1);

// Returns the outputs of two runs and of their definitions, of the first `first` tokens and of the
// others, which is given what the first hands over (harness/inputs/continuation.h); joined, they
// are as those of one run.
StackOutcome EvaluateInTwoRuns(const Technique& technique, const Problem& problem,
                               const Options& options, const NamedTensors& parameters,
                               const Inputs& inputs, int64_t first, Device device = Device::kCpu);

// Expects the outputs of two such runs to equal those of one: the definitions up to rounding in
// float64, the layers within StackBound of them, and in 16 bits 5 roundings more.
void ExpectTwoRunsAreOne(const Technique& technique, const Problem& problem, const Options& options,
                         int64_t first, Device device = Device::kCpu);

// Runs a sequence in two segments of the same length, with a loss of the second one's outputs alone.
// Expects its gradient to stop at the memory: the first segment's tokens have none, and all others
// are those of a run of the second segment that is given what the first one leaves. Such a run lays
// its keys out in other tiles, so that the two differ by roundings: their bound is that of a stack
// of twice as many layers, forwards and back. `options` have layers, a memory and the segment; all
// parameters take part in what the second segment computes.
void ExpectGradientsStopAtTheMemory(const Technique& technique, const Problem& problem,
                                    const Options& options);

// Expects a layer on KernelDevice() to have the gradients of one on the CPU, of all inputs and
// parameters, for random inputs and gradients of `outputs`, or of all outputs where there are none;
// the others are then left out. Each of the two is within the bound of a stack of twice as many
// layers, forwards and back, so that they differ by twice that. Where the layers choose, the choices
// that they write, which are integers, are equal. A second pass on the device has the same bits.
void ExpectTheCpusGradientsOnDevices(const Technique& technique, const Problem& problem,
                                     const Options& options,
                                     const std::vector<std::string>& outputs = {});

// Expects the counterpart of each number of tokens to have a memory and a segment of all of them, and
// at least of one; of the other options those in `fixed` have these values, and the rest are kept.
void ExpectCounterpartSeesAllTokens(const Technique& technique, const Options& options,
                                    const Options& fixed);

}  // namespace tfb::transformer_xl

#endif  // TFB_MEMORY_TRANSFORMER_XL_STACK_TESTING_H_
