// Describes the tensors of a technique for a problem, with symbolic shapes.
//
// A technique gives shapes in numbers. To find the size that determines a dimension, the technique
// is asked again for problems and options in which one size differs. A dimension is named after a
// size where it equals that size, or two to four times that size, for all of them.
#ifndef TFB_HARNESS_INPUTS_TECHNIQUE_TENSORS_H_
#define TFB_HARNESS_INPUTS_TECHNIQUE_TENSORS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/options.h"
#include "core/problem.h"
#include "core/technique.h"

namespace tfb {

struct NamedTensorSpec {
  TensorSpec spec;
  // A symbol for each dimension: "query_tokens", "4 model_dim", an option's name; the number where
  // no single size determines the dimension.
  std::vector<std::string> symbols;
  bool drawn = false;  // whether a parameter depends on the seed
};

struct TechniqueTensors {
  std::vector<NamedTensorSpec> inputs;
  std::vector<NamedTensorSpec> outputs;
  std::vector<NamedTensorSpec> parameters;
  absl::Status parameters_status;  // the error where the parameters are not known
};

// The sizes that dimensions are named after.
struct NamedSize {
  std::string name;
  int64_t value;
};
// Returns batch to value_dim, model_dim and the products of heads and channels that layers have.
std::vector<NamedSize> ProblemSizes(const Problem& problem);

// Creates a layer for the problem, and more for small problems. Returns the error of InputSpecs or
// OutputSpecs. `options` are canonical.
absl::StatusOr<TechniqueTensors> DescribeTensors(const Technique& technique, const Options& options,
                                                 const Problem& problem, uint64_t seed);

// Returns the names of those `parameters` of a layer on `problem` whose values depend on the seed.
// Creates layers for a small problem, or for this one where a small one has other parameters.
std::vector<std::string> DrawnParameters(const Technique& technique, const Options& options,
                                         const Problem& problem, const NamedTensors& parameters,
                                         uint64_t seed);

// Joins tensors of several layers that differ only in the layer's number, "layer0.w_q" and
// "layer1.w_q", to one "layer{0..1}.w_q", in the place of the first.
std::vector<NamedTensorSpec> JoinLayers(const std::vector<NamedTensorSpec>& tensors);

}  // namespace tfb

#endif  // TFB_HARNESS_INPUTS_TECHNIQUE_TENSORS_H_
