// What callers see of a technique without running it, as text: its description and options, and on
// a few problems its tensors, parameters, costs, workspace and refusals. Every technique's folder
// keeps that text as testdata/interface.txt, so that a change of any of them is seen and reviewed.
#ifndef TFB_HARNESS_CONFORMANCE_INTERFACE_H_
#define TFB_HARNESS_CONFORMANCE_INTERFACE_H_

#include <string>

#include "absl/status/status.h"
#include "core/technique.h"
#include "harness/conformance/trial.h"

namespace tfb::conformance {

// Returns the text of the technique.
std::string InterfaceOf(const Technique& technique);

// Returns the case that compares it with the file.
Case InterfaceCase(const std::string& file);

// Writes it to testdata/interface.txt of the technique's folder in the repository `root`.
absl::Status WriteInterface(const Technique& technique, const std::string& root);

}  // namespace tfb::conformance

#endif  // TFB_HARNESS_CONFORMANCE_INTERFACE_H_
