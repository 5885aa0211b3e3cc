// The faults of the tiny technique (harness/testing/tiny_technique.h), each named for its error.
#ifndef TFB_HARNESS_TESTING_TINY_FAULT_H_
#define TFB_HARNESS_TESTING_TINY_FAULT_H_

namespace tfb {

enum class TinyFault {
  kNone,
  kWrongScale,            // the scale of the scores is wrong by a thousandth
  kWindowOffByOne,        // sees one key less
  kEmptyRowIsNan,         // 0 / 0 where no key is seen
  kFiniteSentinel,        // -1e30 instead of -inf for keys that are not seen
  kReadsMaskedValues,     // adds 0 times the value of keys that are not seen
  kDropsNan,              // treats a NaN score as not seen
  kLeavesEmptyRows,       // does not write rows without keys
  kNoMaxSubtracted,       // overflows with large scores
  kWrongLogSumExp,        // leaves the largest score out
  kIgnoresStrides,        // reads k as if it were contiguous
  kWritesBehindOutput,    // one element
  kWorkspaceOverrun,      // writes one byte more than it asked for
  kReadsWorkspace,        // adds unwritten contents of the workspace to row 0
  kDependsOnThreads,      // sums in an order that the number of threads decides
  kKeepsState,            // the second run differs from the first
  kSeesFuture,            // one token
  kWrongGroup,            // reads key-value head h % kv_heads
  kTopLeftCausal,         // j <= i, whatever the number of keys
  kAllocates,             // in Run
  kWrongFlops,            // counts every pair
  kFlopsOfKeys,           // counts head_dim FLOPs for a value, too
  kForgetsBytes,          // of the parameters
  kIgnoresParameters,     // ignores parameters that were set
  kForgetsInAppend,       // the first token of each segment
  kRoundsScores,          // to bf16
  kThreadsDefine,         // the definition sums in an order that the number of threads decides
  kDefinesBehindOutput,   // the definition writes one element behind its output
  kDependsOnBatch,        // sums in an order that the batch decides
  kMaskedTileIsNan,       // -inf - -inf in a first tile without keys
  kReadsMaskedKeys,       // adds 0 times the score of keys that are not seen
  kFourTiles,             // sees no key behind the first 256
  kMissesLastTile,        // leaves out the key of a tile of one
  kWholeVectors,          // below a tile, leaves out the keys behind the last multiple of 4
  kSmallSentinel,         // -1e5 instead of -inf for keys that are not seen
  kNeedsLogSumExp,        // writes another output where log_sum_exp is not requested
  kIgnoresOutputStrides,  // writes the output as if it were contiguous
  kRefusesOddStrides,     // takes a tensor for a gap where a dimension of size 1 has another stride
  kAppendAllocates,       // in Append
  kResetKeepsAToken,      // of what was appended
  kValuesOfHeadDim,       // gives channels behind head_dim no value
  kAddsToSum,             // 0.01, to the sum that divides
  kAddsToValues,          // 1e-30
  kWritesDenormals,       // in place of 0
  kMultipliesValues,      // by 2^60, and divides their mean by it
  kLimitsProducts,        // of queries and keys to those that 16 bits hold
  kDropsTies,             // leaves out a key whose score is that of the key before it
  kSubtractsNorms,        // |q|^2 / 2 from scores, not the largest of them
  kFewBatches,            // reads the keys of batch row b % 16
  kDrawsAnew,             // other parameters for every layer
  kIgnoresSeed,           // draws the same parameters for every seed
  kAllocatesUnchecked,    // memory of any size in Create
  kFailsWithoutWork,      // where there is no query
  kRefusesUsual,          // Create refuses all but one token
  kRefusesInCreate,       // a problem that the definition takes
  kDefinesRowsInOrder,    // the definition takes the n-th row that is asked for for row n
  kDefinesTheComputed,    // the definition returns what the layer computed
  kDeclaresOtherOutputs,  // than the layer has
  kLacksCitation,         // its description has none

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
  kGradientSumsIn16Bits,       // adds up those of queries and keys in bf16 where they have 16 bits
  kGradientOverflows,          // exp(s) / exp(l)
  kGradientOfDrawnParameters,  // ignores parameters that were set
  kGradientIgnoresStrides,     // reads the output's gradient as if it were contiguous
  kGradientIgnoresOwnStrides,  // writes gradients as if they were contiguous
  kBackwardRefusesOddStrides,  // as kRefusesOddStrides
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
  kDependsOnOrder,     // of the threads of a block
  kHostPointer,        // hands kernels the host's parameters
  kDeviceScale,        // the scale of the scores is wrong by a thousandth
  kAllocatesOnDevice,  // in Run and Backward
  kWaits,              // waits for the device, in Run and Backward
  kHeadsInGridZ,       // launches a kernel whose grid has a z for each head, a y for each batch row
  kOtherStream,        // enqueues on the default stream, whatever the caller's is
  kSetsUpOnOtherStream,  // the same in Setup, and does not wait
  kResetsOnOtherStream,  // the same in Reset
};

}  // namespace tfb

#endif  // TFB_HARNESS_TESTING_TINY_FAULT_H_
