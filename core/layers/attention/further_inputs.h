// The inputs of a technique inside a layer that the layer does not compute: masks of its own,
// segments, scores, noise, a choice to follow.
#ifndef TFB_CORE_LAYERS_ATTENTION_FURTHER_INPUTS_H_
#define TFB_CORE_LAYERS_ATTENTION_FURTHER_INPUTS_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "core/options.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb::layers {

// What stands in front of the names of further inputs, outside of the technique that reads them.
struct InputPrefixes {
  std::string shared;  // of inputs that all techniques inside read, such as masks of tokens
  // Of inputs that each technique inside has for itself: noise, and what it writes as well as
  // reads, which is a choice made from its own scores.
  std::string own;
};

// The further inputs of one technique inside a layer: all that it reads, but for those that it is
// given by the layer. Both prefixes are empty where it is the only one inside.
class FurtherInputs {
 public:
  FurtherInputs() = default;
  // `given` are names of inputs. There are no further ones where the technique refuses the options.
  FurtherInputs(const TechniqueSpec& inside, const Problem& problem,
                const std::vector<std::string>& given, const InputPrefixes& prefixes);

  // Adds their specs under their names outside, but for names that `specs` has already.
  void AddTo(std::vector<TensorSpec>* specs) const;
  // Returns them under the technique's own names, empty where `inputs`, the layer's, lacks them. It
  // allocates nothing; the result is valid until the next call.
  const Inputs& From(const Inputs& inputs);
  // Does the same with the layer's gradients of its inputs.
  const Outputs& GradientsFrom(const Outputs& gradients);
  // Returns an input's name outside, or an empty one where it is not a further input.
  std::string Outside(absl::string_view inside) const;

  // Returns Unimplemented where several of a layer's techniques differentiate through the same input,
  // whose gradient would be the sum of theirs. Each is given with its layer.
  static absl::Status CheckBackward(
      const std::vector<std::pair<const FurtherInputs*, const Layer*>>& all);

 private:
  std::vector<TensorSpec> outside_;
  Inputs inside_;                   // in the same order
  Outputs gradients_;               // likewise
  std::vector<std::string> names_;  // of inside_
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_ATTENTION_FURTHER_INPUTS_H_
