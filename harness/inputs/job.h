// Defines a job: a technique with its options, on a problem, a device and an input. A case is a job
// from the flags until its record (Case in results/results.proto): plans list jobs, and the code
// that makes, times or judges a layer is given one.
#ifndef TFB_HARNESS_INPUTS_JOB_H_
#define TFB_HARNESS_INPUTS_JOB_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/options.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "harness/inputs/inputs.h"
#include "results/results.pb.h"

namespace tfb {

// One configuration: together with the seed and the purpose, the key of a result.
struct Job {
  const Technique* technique = nullptr;
  Options options;  // canonical
  Device device = Device::kCpu;
  Problem problem;
  InputSource input;
  int threads = 1;    // of the CPU pool
  uint64_t seed = 1;  // of drawn inputs and of parameters
  Case::Purpose purpose = Case::PURPOSE_SCALING;
  Case::Pass pass = Case::PASS_FORWARD;  // what is timed
  bool added = false;  // whether it is a dense counterpart that the caller did not name
  bool check = true;   // whether to compare the outputs with the float64 definition
  // Why the job cannot run, if that is known beforehand: NotFound where the input lacks a tensor.
  absl::Status obstacle;

  // Returns the options that differ from their defaults, or from the language model's.
  Options ChangedOptions() const;
  // Returns "longformer window=256": with the changed options.
  std::string DisplayName() const;
  // Returns the display name, device, problem and input, and the pass where it is not the forward
  // one.
  std::string ToString() const;

  // Returns the technique's inputs, on the host, with the errors of InputSpecs and MakeInputs.
  absl::StatusOr<NamedTensors> LoadInputs() const;
  // Returns the layer, with the parameters of the seed.
  absl::StatusOr<std::unique_ptr<Layer>> CreateLayer() const;
};

}  // namespace tfb

#endif  // TFB_HARNESS_INPUTS_JOB_H_
