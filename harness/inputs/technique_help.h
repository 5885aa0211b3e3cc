// Writes the help page of one technique: formula, options, tensors, and commands that run it.
#ifndef TFB_HARNESS_INPUTS_TECHNIQUE_HELP_H_
#define TFB_HARNESS_INPUTS_TECHNIQUE_HELP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/technique.h"
#include "harness/inputs/job.h"

namespace tfb {

// Returns the page, or the error of InputSpecs or OutputSpecs. The formula is the comment at the
// head of the technique's header (core/header_text.h). `sizes_from` says where the sizes are from.
absl::StatusOr<std::string> TechniqueHelp(const Job& job, absl::string_view sizes_from);

// Returns a line for each input that was drawn, and one for the parameters named in `drawn`, whose
// tensors are `parameters`: name, shape, seed, and how to give the tensor.
std::vector<std::string> DrawnLines(const std::vector<TensorSpec>& inputs,
                                    const std::vector<std::string>& drawn,
                                    const NamedTensors& parameters, uint64_t seed);

}  // namespace tfb

#endif  // TFB_HARNESS_INPUTS_TECHNIQUE_HELP_H_
