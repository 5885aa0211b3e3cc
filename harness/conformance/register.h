// Registers a GoogleTest for every case, technique, device and set of options.
#ifndef TFB_HARNESS_CONFORMANCE_REGISTER_H_
#define TFB_HARNESS_CONFORMANCE_REGISTER_H_

#include <string>
#include <utility>
#include <vector>

#include "core/technique.h"
#include "harness/conformance/trial.h"

namespace tfb::conformance {

// Returns the sets of options that the cases run with, by label: the defaults, and for a technique
// with a budget option a small value of that option which Usual() permits, so that the technique
// differs from dense attention on short sequences. In the simulator only some cases run with the
// latter, and most on smaller problems and under one mask, unless IsExhaustive.
std::vector<std::pair<std::string, Options>> OptionSets(const Technique& technique, Device device);

// Registers tests named <technique>.<case>/<device>/<options>/<problem>, and returns how many.
// Where a technique has no implementation for a device, or the machine no such device, one skipped
// test says so; it fails where a GPU is missing and TFB_REQUIRE_GPU is set in the environment.
int RegisterTests(const std::vector<const Technique*>& techniques,
                  const std::vector<Device>& devices);

// Registers the comparison of the technique's interface with the file (see interface.h).
void RegisterInterfaceTest(const Technique* technique, const std::string& file);

}  // namespace tfb::conformance

#endif  // TFB_HARNESS_CONFORMANCE_REGISTER_H_
