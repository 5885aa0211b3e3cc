#include "results/describe.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "results/analysis.h"
#include "results/reader.h"
#include "results/table.h"

namespace tfb {

std::string DescribeProblem(const ProblemSize& problem, bool with_tokens) {
  std::vector<std::string> parts;
  const bool equal = problem.query_tokens() == problem.kv_tokens();
  const bool few_queries = problem.query_tokens() < problem.kv_tokens();
  if (with_tokens && equal) {
    parts.push_back(absl::StrCat(problem.query_tokens(), " tokens"));
  } else if (!equal) {
    // The shorter of the two stays the same within a scaling table.
    if (with_tokens || few_queries) {
      parts.push_back(absl::StrCat(problem.query_tokens(),
                                   problem.query_tokens() == 1 ? " query" : " queries"));
    }
    if (with_tokens || !few_queries) {
      parts.push_back(
          absl::StrCat(problem.kv_tokens(), problem.kv_tokens() == 1 ? " key" : " keys"));
    }
  }
  std::string heads =
      absl::StrCat(problem.query_heads(), problem.query_heads() == 1 ? " head" : " heads");
  if (problem.kv_heads() != problem.query_heads()) {
    absl::StrAppend(&heads, " on ", problem.kv_heads());
  }
  absl::StrAppend(&heads, " of ", problem.head_dim());
  if (problem.value_dim() != problem.head_dim()) {
    absl::StrAppend(&heads, " (values of ", problem.value_dim(), ")");
  }
  parts.push_back(heads);
  if (problem.batch() != 1) parts.push_back(absl::StrCat("batch ", problem.batch()));
  if (problem.causal()) parts.push_back("causal");
  return absl::StrJoin(parts, ", ");
}

absl::string_view DescribePass(Case::Pass pass) {
  switch (pass) {
    case Case::PASS_FORWARD:
      return "run";
    case Case::PASS_BACKWARD:
      return "backward pass";
    case Case::PASS_TRAINING:
      return "training step";
    default:
      return "call of an unknown pass";
  }
}

std::string DescribeProblem(const Case::Key& key, bool with_tokens) {
  const std::string problem = DescribeProblem(key.problem(), with_tokens);
  if (key.pass() == Case::PASS_FORWARD) return problem;
  return absl::StrCat(problem, ", ", DescribePass(key.pass()));
}

std::string DescribeInput(const InputProfile& input) {
  std::vector<std::string> parts;
  const std::string& source = input.file().empty() ? input.model() : input.file();
  if (!source.empty()) parts.push_back(Printable(source));
  if (!input.layer().empty()) parts.push_back("layer " + Printable(input.layer()));
  const std::string details = CanonicalOptions({input.details().begin(), input.details().end()});
  if (!details.empty()) parts.push_back(details);
  const std::string name = Printable(input.name());
  return parts.empty() ? name : absl::StrCat(name, " (", absl::StrJoin(parts, ", "), ")");
}

std::string DescribeCase(const Case& result) {
  const Case::Key& key = result.key();
  std::string text = absl::StrCat(Printable(DisplayName(result)), ", ", Name(key.device()), " ",
                                  Name(key.dtype()), ", ", DescribeProblem(key, true));
  const std::string input = DescribeInput(key.input());
  if (!input.empty()) absl::StrAppend(&text, ", ", input);
  return text;
}

}  // namespace tfb
