// A small technique for tests of the harness: windowed attention in plain loops, with faults that
// can be switched on, so that a test can show that a check finds its fault.
#ifndef TFB_HARNESS_TESTING_TINY_TECHNIQUE_H_
#define TFB_HARNESS_TESTING_TINY_TECHNIQUE_H_

#include <memory>
#include <string>
#include <vector>

#include "core/technique.h"
#include "harness/testing/tiny_fault.h"

namespace tfb {

//   y_i = sum_j a_ij v_j,   a_ij ~ exp(gain_h q_i . k_j / sqrt(head_dim))
//
// The sum is over the keys that are tokens, that are not in the future where the problem is causal,
// and that are at most `window` tokens away. gain is a parameter [query_heads]. The technique
// supports streaming. Without a fault of its forward pass it has a backward pass.
struct TinyOptions {
  int64_t window = kMaxTokens;

  void Describe(OptionBinder& bind) {
    bind.Int("window", &window, 0, kMaxTokens, "tokens on each side that a query sees", {4, 16});
  }
};

std::vector<TinyFault> AllTinyFaults();
bool IsOfBackward(TinyFault fault);
bool IsOfDevices(TinyFault fault);
// Returns "tiny", "tiny_wrong_scale", ...
std::string TinyName(TinyFault fault);
std::unique_ptr<Technique> MakeTiny(TinyFault fault);

}  // namespace tfb

#endif  // TFB_HARNESS_TESTING_TINY_TECHNIQUE_H_
