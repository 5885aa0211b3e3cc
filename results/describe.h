// Describes in words what a case ran on.
#ifndef TFB_RESULTS_DESCRIBE_H_
#define TFB_RESULTS_DESCRIBE_H_

#include <string>

#include "absl/strings/string_view.h"
#include "results/results.pb.h"

namespace tfb {

// Returns "512 tokens, 8 heads of 64, causal", or the same without the tokens.
std::string DescribeProblem(const ProblemSize& problem, bool with_tokens);
// Returns what a case times: "run", "backward pass" or "training step".
absl::string_view DescribePass(Case::Pass pass);
// Returns the problem, with the pass where it is not the forward one: "8 heads of 64, training
// step".
std::string DescribeProblem(const Case::Key& key, bool with_tokens);
// Returns "real (file.safetensors, layer 3)", with the model where no file is named.
std::string DescribeInput(const InputProfile& input);
// Returns "near window=256, cpu f32, 512 tokens, 8 heads of 64, causal, real".
std::string DescribeCase(const Case& result);

}  // namespace tfb

#endif  // TFB_RESULTS_DESCRIBE_H_
