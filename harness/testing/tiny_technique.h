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
// supports streaming. Without a fault it has a backward pass on the CPU.
struct TinyOptions {
  int64_t window = kMaxTokens;

  void Describe(OptionBinder& bind) {
    bind.Int("window", &window, 0, kMaxTokens, "tokens on each side that a query sees", {4, 16});
  }
};

// The faults, each named for its error.
enum class TinyFault {
  kNone,
  kWrongScale,          // the scale of the scores is wrong by a thousandth
  kWindowOffByOne,      // sees one key less
  kEmptyRowIsNan,       // 0 / 0 where no key is seen
  kFiniteSentinel,      // -1e30 instead of -inf for keys that are not seen
  kReadsMaskedValues,   // adds 0 times the value of keys that are not seen
  kDropsNan,            // treats a NaN score as not seen
  kLeavesEmptyRows,     // does not write rows without keys
  kNoMaxSubtracted,     // overflows with large scores
  kWrongLogSumExp,      // leaves the largest score out
  kIgnoresStrides,      // reads k as if it were contiguous
  kWritesBehindOutput,  // one element
  kWorkspaceOverrun,    // writes one byte more than it asked for
  kReadsWorkspace,      // adds the workspace's contents to row 0
  kDependsOnThreads,    // sums in an order that the number of threads decides
  kKeepsState,          // the second run differs from the first
  kSeesFuture,          // one token
  kWrongGroup,          // reads key-value head h % kv_heads
  kTopLeftCausal,       // j <= i, whatever the number of keys
  kAllocates,           // in Run
  kWrongFlops,          // counts every pair
  kFlopsOfKeys,         // counts head_dim FLOPs for a value, too
  kForgetsBytes,        // of the parameters
  kIgnoresParameters,   // ignores parameters that were set
  kForgetsInAppend,     // the first token of each segment
  kRoundsScores,        // to bf16
  kThreadsDefine,       // the definition sums in an order that the number of threads decides

  // Faults of the layer on a device; on the CPU the layer is correct.
  kKernelWritesBehindOutput,  // one element
  kKernelReadsUnwritten,      // workspace, and adds it to row 0
  kKernelDependsOnOrder,      // of the threads of a block
  kHostPointer,               // hands a kernel the host's parameters
  kDeviceScale,               // the scale of the scores is wrong by a thousandth
  kAllocatesOnDevice,         // in Run
  kWaits,                     // waits for the device, in Run
};

std::vector<TinyFault> AllTinyFaults();
bool IsOfDevices(TinyFault fault);
// Returns "tiny", "tiny_wrong_scale", ...
std::string TinyName(TinyFault fault);
std::unique_ptr<Technique> MakeTiny(TinyFault fault);

}  // namespace tfb

#endif  // TFB_HARNESS_TESTING_TINY_TECHNIQUE_H_
