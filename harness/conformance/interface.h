// What callers see of a technique without running it, as text: its description and options, and on
// a few problems its tensors, parameters, costs, workspace and refusals, and those of its backward pass
// where it has one. Every technique's folder
// keeps that text as testdata/interface.txt, so that a change of any of them is seen and reviewed. A
// line "with OPTION=VALUE,OPTION=VALUE" that is added there has the text of that combination below it
// when the file is written again.
#ifndef TFB_HARNESS_CONFORMANCE_INTERFACE_H_
#define TFB_HARNESS_CONFORMANCE_INTERFACE_H_

#include <string>

#include "absl/status/status.h"
#include "core/technique.h"
#include "harness/conformance/trial.h"

namespace tfb::conformance {

// Returns the text of the technique, with the combinations of options that `recorded` has, the text
// of the file.
std::string InterfaceOf(const Technique& technique, const std::string& recorded);

// Returns the case that compares it with the file.
Case InterfaceCase(const std::string& file);

// Writes it to testdata/interface.txt of the technique's folder in the repository `root`.
absl::Status WriteInterface(const Technique& technique, const std::string& root);

}  // namespace tfb::conformance

#endif  // TFB_HARNESS_CONFORMANCE_INTERFACE_H_
