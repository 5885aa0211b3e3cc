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
class ParameterGradients {
 public:
  ParameterGradients() = default;
  explicit ParameterGradients(const NamedTensors& parameters);

  // Takes memory for the sums.
  void LayOut(Workspace* workspace);
  void Clear();
  // Returns the sum of the parameter's element at this address, which others of the parameter follow
  // in its order; null where the address is in no parameter.
  double* Of(const void* element) const;
  // Writes the sums to the gradients, by the parameters' names; those that are absent are left out.
  void Write(const Outputs& gradients) const;

 private:
  struct Sums {
    const std::string* name;
    ConstTensorView parameter;
    double* sums;
  };
  std::vector<Sums> sums_;
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_PARAMETER_GRADIENTS_H_
