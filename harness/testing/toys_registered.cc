// Registers the toys. With TFB_DEFER_ERRORS in the environment the simulator reports a failed
// kernel as late as a GPU does, and is then lost to the process.
#include <cstdlib>

#include "core/cuda/simulator/simulator.h"
#include "harness/testing/toys.h"

namespace tfb {
namespace {

bool RegisterAll() {
  AddToys(Registry::Global());
  cuda_simulator::Settings settings = cuda_simulator::CurrentSettings();
  settings.errors_are_deferred = std::getenv("TFB_DEFER_ERRORS") != nullptr;
  cuda_simulator::Configure(settings);
  return true;
}

const bool registered = RegisterAll();

}  // namespace
}  // namespace tfb
