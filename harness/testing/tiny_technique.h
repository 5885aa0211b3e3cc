// A small technique for tests of the harness: windowed attention in plain loops, with faults that
// can be switched on, so that a test can show that a check finds its fault.
#ifndef TFB_HARNESS_TESTING_TINY_TECHNIQUE_H_
#define TFB_HARNESS_TESTING_TINY_TECHNIQUE_H_

#include <memory>
#include <string>
#include <vector>

#include "core/technique.h"

namespace tfb {

//   y_i = sum_j a_ij v_j,   a_ij ~ exp(gain_h q_i . k_j / sqrt(head_dim))
//
// The sum is over the keys that are tokens, that are not in the future where the problem is causal,
// and that are at most `window` tokens away. gain is a parameter [query_heads]. The technique
// supports streaming. Without a fault of its forward pass it has a backward pass on the CPU.
struct TinyOptions {
  int64_t window = kMaxTokens;

  void Describe(OptionBinder& bind) {
    bind.Int("window", &window, 0, kMaxTokens, "tokens on each side that a query sees", {4, 16});
  }
};

// The faults, each named for its error.
enum class TinyFault {
  kNone,
  kWrongScale,           // the scale of the scores is wrong by a thousandth
  kWindowOffByOne,       // sees one key less
  kEmptyRowIsNan,        // 0 / 0 where no key is seen
  kFiniteSentinel,       // -1e30 instead of -inf for keys that are not seen
  kReadsMaskedValues,    // adds 0 times the value of keys that are not seen
  kDropsNan,             // treats a NaN score as not seen
  kLeavesEmptyRows,      // does not write rows without keys
  kNoMaxSubtracted,      // overflows with large scores
  kWrongLogSumExp,       // leaves the largest score out
  kIgnoresStrides,       // reads k as if it were contiguous
  kWritesBehindOutput,   // one element
  kWorkspaceOverrun,     // writes one byte more than it asked for
  kReadsWorkspace,       // adds the workspace's contents to row 0
  kDependsOnThreads,     // sums in an order that the number of threads decides
  kKeepsState,           // the second run differs from the first
  kSeesFuture,           // one token
  kWrongGroup,           // reads key-value head h % kv_heads
  kTopLeftCausal,        // j <= i, whatever the number of keys
  kAllocates,            // in Run
  kWrongFlops,           // counts every pair
  kFlopsOfKeys,          // counts head_dim FLOPs for a value, too
  kForgetsBytes,         // of the parameters
  kIgnoresParameters,    // ignores parameters that were set
  kForgetsInAppend,      // the first token of each segment
  kRoundsScores,         // to bf16
  kThreadsDefine,        // the definition sums in an order that the number of threads decides
  kDefinesBehindOutput,  // the definition writes one element behind its output

  // Faults of the backward pass.
  kGradientWrongScale,         // the gradient of queries is wrong by a thousandth
  kGradientMissesLastTile,     // leaves out the key of a tile of one
  kGradientOfWholeVectors,     // gives values none in channels behind the last multiple of 8
  kGradientOfOneHead,          // gives keys and values that of the first head of their group
  kGradientTopLeftCausal,      // takes j <= i for what is seen, whatever the number of keys
  kGradientOfMaskedKeys,       // gives one to keys that are padding
  kGradientReadsMasked,        // adds 0 times the value of keys that are not seen
  kGradientOfEmptyRowIsNan,    // -inf - -inf where no key is seen
  kGradientSeesFuture,         // one token
  kGradientOfOneBatch,         // gives the parameter that of the first batch row
  kGradientForgetsLogSumExp,   // ignores the gradient of log_sum_exp
  kGradientRoundsMean,         // rounds the mean that is taken off a row to bf16
  kGradientOfRoundedOutput,    // makes that mean from the output as it was rounded
  kGradientClips,              // limits the gradients of weights to 100
  kGradientRounds,             // rounds the gradients of scores to bf16
  kGradientSumsIn16Bits,       // adds up those of queries and keys in the problem's dtype
  kGradientOverflows,          // exp(s) / exp(l)
  kGradientOfDrawnParameters,  // ignores parameters that were set
  kGradientIgnoresStrides,     // reads the output's gradient as if it were contiguous
  kGradientDependsOnThreads,   // sums in an order that the number of threads decides
  kGradientDependsOnBatch,     // sums in an order that the batch decides
  kGradientKeepsState,         // the second backward pass differs from the first
  kGradientNeedsQueries,       // is wrong where the gradient of queries is left out
  kGradientOfLeftOutOutput,    // takes 1 for an output's gradient that is left out
  kGradientOfLastRun,          // reads what the last Run kept
  kKeepingChangesOutput,       // writes another output where it keeps memory
  kBackwardAllocates,          // in Backward
  kGradientWritesBehind,       // one element
  kGradientWritesInputs,       // changes the output's gradient
  kBackwardWorkspaceOverrun,   // writes one byte more than it asked for
  kKeptOverrun,                // keeps one byte more than it asked for
  kStopsUnknownGradient,       // stops that of a tensor which it does not have
  kDefinitionReadsFloats,      // the definition reads parameters as f32, whatever their dtype

  // Faults of the layer on a device; on the CPU the layer is correct.
  kKernelWritesBehindOutput,  // one element
  kKernelReadsUnwritten,      // workspace, and adds it to row 0
  kKernelDependsOnOrder,      // of the threads of a block
  kHostPointer,               // hands a kernel the host's parameters
  kDeviceScale,               // the scale of the scores is wrong by a thousandth
  kAllocatesOnDevice,         // in Run
  kWaits,                     // waits for the device, in Run
  kOtherStream,               // enqueues on the default stream, whatever the caller's is
};

std::vector<TinyFault> AllTinyFaults();
bool IsOfBackward(TinyFault fault);
bool IsOfDevices(TinyFault fault);
// Returns "tiny", "tiny_wrong_scale", ...
std::string TinyName(TinyFault fault);
std::unique_ptr<Technique> MakeTiny(TinyFault fault);

}  // namespace tfb

#endif  // TFB_HARNESS_TESTING_TINY_TECHNIQUE_H_
