// Sums of the gradients of a layer's parameters while Backward makes them.
#ifndef TFB_CORE_FLASH_PARAMETER_GRADIENTS_H_
#define TFB_CORE_FLASH_PARAMETER_GRADIENTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "core/workspace.h"

namespace tfb {

// One float64 sum for each element of each parameter of floating dtype, named by the element's address.
// A step may write the gradients of some parameters itself instead.
class ParameterGradients {
 public:
  ParameterGradients() = default;
  // Makes sums for all parameters but those that steps write.
  ParameterGradients(const NamedTensors& parameters, std::vector<std::string> written_by_steps);

  // Takes memory for the sums.
  void LayOut(Workspace* workspace);
  void Clear();
  // Returns the sum of the parameter's element at this address, which others of the parameter follow
  // in its order; null where the address is in no parameter.
  double* Of(const void* element) const;
  // Sets the tensors that the gradients are written to, by the parameters' names, for one Backward;
  // those that are absent are left out.
  void SetOutputs(const Outputs* gradients) { outputs_ = gradients; }
  // Returns where a step writes the gradient of a parameter, f32 of the parameter's shape, or an
  // empty view where it is not wanted.
  TensorView Output(const std::string& name) const;
  // Writes the sums.
  void Write() const;

 private:
  bool IsWrittenByStep(const std::string& name) const;

  struct Sums {
    const std::string* name;
    ConstTensorView parameter;
    double* sums;
  };
  std::vector<Sums> sums_;
  std::vector<std::string> written_by_steps_;
  const Outputs* outputs_ = nullptr;
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_PARAMETER_GRADIENTS_H_
