// Continues an earlier run where it ended.
//
// The state of a technique that reads its input in segments can be handed over where it has
//
//   an optional output NAME       the state after the last token,
//   an input of the same name     the state before the first token, which exists with
//   an option that begins with    the amount of state: the size of one of the tensor's dimensions,
//   given_                        or the number of earlier tokens. 0, its default, means none
//
// An option may add several such inputs. A technique that declares them this way is tested
// (conformance/continuation.cc) without code of its own.
#ifndef TFB_HARNESS_INPUTS_CONTINUATION_H_
#define TFB_HARNESS_INPUTS_CONTINUATION_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "absl/status/statusor.h"
#include "core/options.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

// Returns the options of the technique that begin with given_, each with the names of the inputs
// that it adds where a tensor is given, of which an output has the same name.
absl::StatusOr<std::map<std::string, std::set<std::string>>> HandedOverBy(
    const Technique& technique, const Problem& problem, const Options& options);

// A sequence that is cut in two, of which each part is a run.
struct CutSequence {
  const Technique* technique = nullptr;
  Problem whole;
  Options options;    // of the first run; it, too, may be given something
  int64_t first = 0;  // tokens of the first run

  // Returns the problem of the first or the second run.
  Problem Part(bool is_second) const;
  // Returns the options of the second run, which reads the first run's outputs. Returns
  // FailedPrecondition where no value of the options gives inputs of the outputs' shapes.
  absl::StatusOr<Options> SecondOptions() const;
  // Returns the inputs of the second run: `inputs`, those of the sequence, from the cut on, and the
  // state from the first run's `outputs`.
  absl::StatusOr<Inputs> SecondInputs(const Inputs& inputs, const NamedTensors& outputs) const;
  // Returns the inputs of the first run.
  absl::StatusOr<Inputs> FirstInputs(const Inputs& inputs) const;
  // Returns the outputs that a run over the whole sequence has. An output of the second run that
  // has the whole sequence's shape is returned as it is; else the outputs of both runs are
  // concatenated along the dimension in which the shapes differ. Leaves out outputs whose shapes
  // differ in several dimensions.
  absl::StatusOr<NamedTensors> Joined(const NamedTensors& first, const NamedTensors& second) const;
};

}  // namespace tfb

#endif  // TFB_HARNESS_INPUTS_CONTINUATION_H_
