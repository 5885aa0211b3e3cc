// Places the tensors of a layer's calls in guarded memory of its device, under layouts of choice.
#ifndef TFB_HARNESS_CONFORMANCE_PLACED_H_
#define TFB_HARNESS_CONFORMANCE_PLACED_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "harness/judge/guarded.h"

namespace tfb::conformance {

// The layout of an input or output in memory.
enum class Layout {
  kContiguous,
  kGaps,        // padding after every row
  kTransposed,  // the dimensions before the last in reversed order
  kBroadcast,   // stride 0 over batch and heads; the inputs must be equal along them
  kOddStrides,  // stride 12345 in dimensions of size 1
};

// Tensors of a layer by name, under a layout, in the memory of its device.
class PlacedTensors {
 public:
  // Places copies of the tensors.
  static absl::StatusOr<PlacedTensors> Of(const NamedTensors& tensors, Layout layout,
                                          Device device);
  // Places tensors for a layer to write, which no element of is written yet.
  static absl::StatusOr<PlacedTensors> For(const std::vector<TensorSpec>& specs, Layout layout,
                                           Device device);

  // These are on the device.
  const Inputs& inputs() const { return inputs_; }
  const Outputs& outputs() const { return outputs_; }

  // Wait for the device, and check the memory around the tensors. `what` begins messages: "input".
  //
  // Returns Internal unless the tensors, which are those of Of, still have their bits.
  absl::Status CheckUnchanged(absl::string_view what, const NamedTensors& tensors);
  // Returns copies of the tensors, or Internal where an element was not written.
  absl::StatusOr<NamedTensors> Written(absl::string_view what);

 private:
  // A tensor in guarded memory under a layout.
  struct Placed {
    GuardedTensor memory;
    TensorView view;
  };
  static absl::StatusOr<Placed> Place(DType dtype, const Shape& shape, Layout layout,
                                      Device device);
  absl::Status Add(const std::string& name, Placed placed, Contents contents);
  absl::Status Download(absl::string_view what);

  std::map<std::string, Placed> placed_;
  Inputs inputs_;
  Outputs outputs_;
};

bool SameBits(const ConstTensorView& a, const ConstTensorView& b);

}  // namespace tfb::conformance

#endif  // TFB_HARNESS_CONFORMANCE_PLACED_H_
