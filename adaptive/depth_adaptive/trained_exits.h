// The test of a technique whose tokens leave after layers of their own, with trained weights.
#ifndef TFB_ADAPTIVE_DEPTH_ADAPTIVE_TRAINED_EXITS_H_
#define TFB_ADAPTIVE_DEPTH_ADAPTIVE_TRAINED_EXITS_H_

#include <map>
#include <string>

#include "core/technique.h"

namespace tfb::depth_adaptive {

// Compares the shipped language model, run by `technique` with each of the options on 300 bytes of
// text, with the same in PyTorch, token by token in float64, where a token that has left is not
// computed but copied (tools/capture/golden_exits.py): the layer after which each byte leaves, and
// the prediction of the next one. `golden` is a path in the repository; for the case "name" it has
// "name.exits" and "name.bits" and, where the technique has them, "name.exit_probabilities" of
// every tenth byte.
//
// Tolerance. A byte's logarithm has an error of about 1e-5, as a stack's outputs have; the mean of
// 300 such errors, which have either sign, is smaller.
void ExpectTrainedExits(const Technique& technique, const std::string& golden,
                        const std::map<std::string, Options>& cases);

}  // namespace tfb::depth_adaptive

#endif  // TFB_ADAPTIVE_DEPTH_ADAPTIVE_TRAINED_EXITS_H_
