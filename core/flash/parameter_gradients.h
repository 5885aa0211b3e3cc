// Sums of the gradients of a layer's parameters while Backward makes them.
#ifndef TFB_CORE_FLASH_PARAMETER_GRADIENTS_H_
#define TFB_CORE_FLASH_PARAMETER_GRADIENTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/device_array.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"

namespace tfb {

// One float64 sum for each element of each parameter of floating dtype, named by the element's address
// in the host's memory. A step may write the gradients of some parameters itself instead.
class ParameterGradients {
 public:
  ParameterGradients() = default;
  // Makes sums for all parameters but those that steps write.
  ParameterGradients(const NamedTensors& parameters, std::vector<std::string> written_by_steps);

  // Takes memory for the sums, of the layer's device.
  void LayOut(Workspace* workspace);
  // Returns the place of an element's sum among all, which others of the parameter follow in its
  // order; -1 where the address is in no parameter.
  int64_t PlaceOf(const void* element) const;
  double* sums() const { return sums_; }
  // Returns the sum of an element, in the device's memory; null where the address is in no
  // parameter.
  double* Of(const void* element) const {
    const int64_t place = PlaceOf(element);
    return place < 0 ? nullptr : sums_ + place;
  }
  // Sets the tensors that the gradients are written to, by the parameters' names, for one Backward;
  // those that are absent are left out.
  void SetOutputs(const Outputs* gradients) { outputs_ = gradients; }
  // Returns where a step writes the gradient of a parameter, f32 of the parameter's shape, or an
  // empty view where it is not wanted.
  TensorView Output(const std::string& name) const;
  // Writes the sums.
  absl::Status Write(Device device, const Execution& execution) const;

 private:
  bool IsWrittenByStep(const std::string& name) const;

  struct Parameter {
    const std::string* name;
    ConstTensorView values;
    int64_t first;  // place of its first sum
  };
  std::vector<Parameter> parameters_;
  int64_t count_ = 0;
  double* sums_ = nullptr;
  std::vector<std::string> written_by_steps_;
  const Outputs* outputs_ = nullptr;
};

// The slopes of numbers, whose gradients an engine sums, by elements of parameters.
class GradientMap {
 public:
  // Number `number` has this slope by the element whose sum is in this place.
  struct Slope {
    int64_t element;
    int64_t number;
    double value;
  };
  GradientMap() = default;
  // The numbers are vectors of `channels`, side by side from `number` on; those of elements are
  // `stride` apart. Slopes by one element may be several. Returns the errors of
  // DeviceArray::Create.
  static absl::StatusOr<GradientMap> Create(Device device, std::vector<Slope> slopes,
                                            int64_t channels = 1, int64_t stride = 1);

  // Adds to the elements' sums what the sums of the numbers' gradients give, in the order of the
  // numbers: those of an element that has many of them are cut into runs, whose sums are added in their
  // order. It allocates nothing.
  absl::Status Add(const float* numbers, double* elements, const Execution& execution) const;
  // The workspace of Add, of any map.
  static constexpr size_t kWorkspaceBytes = 64 << 10;

 private:
  Device device_ = Device::kCpu;
  int64_t channels_ = 1;
  int64_t stride_ = 1;
  // Runs of slopes.
  DeviceArray<int64_t> targets_;  // the element, or -1 - the row of partial sums
  DeviceArray<int64_t> begins_;   // [runs + 1] into the others
  DeviceArray<int64_t> numbers_;
  DeviceArray<double> slopes_;
  // The elements that have several runs.
  DeviceArray<int64_t> long_elements_;
  DeviceArray<int64_t> partial_begins_;  // [long elements + 1]
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_PARAMETER_GRADIENTS_H_
