#include "harness/inputs/technique_tensors.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/status.h"
#include "core/tensor.h"

namespace tfb {
namespace {

using Specs = std::vector<TensorSpec>;
using Lister = std::function<absl::StatusOr<Specs>(const Problem&, const Options&)>;

constexpr int64_t kLargestMultiple = 4;

// The tensors of a technique for one problem and its options.
struct Answer {
  Problem problem;
  Options options;
  Specs specs;
  std::string changed;  // the option whose value was varied, if any
};

// Returns problems that differ from `base` in one size, or in two that some techniques require to
// be equal.
std::vector<Problem> Variations(const Problem& base) {
  const auto other = [](int64_t channels) { return channels <= 128 ? 2 * channels : channels / 2; };
  std::vector<Problem> all(7, base);
  all[0].batch = base.batch + 1;
  all[1].query_heads = 2 * base.query_heads;
  all[1].kv_heads = 2 * base.kv_heads;
  all[2].query_heads = 2 * base.query_heads;
  all[3].query_tokens = 2 * base.query_tokens;
  all[3].kv_tokens = 2 * base.kv_tokens;
  all[4].kv_tokens = 2 * base.kv_tokens;
  all[5].head_dim = other(base.head_dim);
  all[5].value_dim = other(base.value_dim);
  all[6].head_dim = other(base.head_dim);
  return all;
}

Problem Small(const Problem& problem) {
  Problem small = Problem::SelfAttention(1, 2, 32, 16, problem.causal, problem.dtype);
  small.kv_tokens += problem.kv_tokens > problem.query_tokens ? 32 : 0;
  return small;
}

std::set<std::string> Names(const Specs& specs) {
  std::set<std::string> names;
  for (const TensorSpec& spec : specs) names.insert(absl::StrCat(spec.name, spec.shape.size()));
  return names;
}

// Adds the answer for the problem, and returns true, where it has the same tensors as the first.
bool Ask(const Lister& list, const Problem& problem, const Options& options,
         std::vector<Answer>* answers, const std::string& changed = "") {
  absl::StatusOr<Specs> specs = list(problem, options);
  if (!specs.ok() || Names(*specs) != Names(answers->front().specs)) return false;
  answers->push_back({problem, options, *std::move(specs), changed});
  return true;
}

// Asks about the problem at hand, whose specs are given, and about variations of `base`.
std::vector<Answer> AskAll(const TechniqueInfo& info, const Lister& list, const Problem& at_hand,
                           const Options& options, Specs specs, const Problem& base) {
  std::vector<Answer> answers = {{at_hand, options, std::move(specs), ""}};
  Ask(list, base, options, &answers);
  for (const Problem& problem : Variations(base)) Ask(list, problem, options, &answers);
  for (const OptionSpec& option : info.options) {
    int64_t value;
    if (option.type != "int" || !absl::SimpleAtoi(options.at(option.name), &value)) continue;
    for (const int64_t other :
         {value < kMaxTokens / 2 ? 2 * value : value - 1, value + 1, value - 1}) {
      Options changed = options;
      changed[option.name] = absl::StrCat(other);
      if (other != value && Ask(list, base, changed, &answers, option.name)) break;
    }
  }
  return answers;
}

// Returns every size that a dimension may be named after, in order of preference.
std::vector<NamedSize> Candidates(const TechniqueInfo& info, const Answer& answer) {
  std::vector<NamedSize> sizes = ProblemSizes(answer.problem);
  const size_t of_problem = sizes.size();
  for (const OptionSpec& option : info.options) {
    int64_t value;
    const bool is_number =
        option.type == "int" && absl::SimpleAtoi(answer.options.at(option.name), &value);
    if (is_number) sizes.push_back({option.name, value});
  }
  for (int64_t times = 2; times <= kLargestMultiple; ++times) {
    for (size_t i = 0; i < of_problem; ++i) {
      sizes.push_back({absl::StrCat(times, " ", sizes[i].name), times * sizes[i].value});
    }
  }
  return sizes;
}

const TensorSpec& SpecOf(const Answer& answer, const std::string& name) {
  return *std::find_if(answer.specs.begin(), answer.specs.end(),
                       [&name](const TensorSpec& spec) { return spec.name == name; });
}

// Returns the first candidate that equals the dimension in all answers, and is not constant.
// Answers with another varied option do not count, since e.g. 0 may stand for a computed size.
std::string SymbolOf(const std::vector<Answer>& answers,
                     const std::vector<std::vector<NamedSize>>& candidates, const std::string& name,
                     size_t axis) {
  const int64_t at_hand = SpecOf(answers[0], name).shape[axis];
  for (size_t c = 0; c < candidates[0].size(); ++c) {
    const NamedSize& candidate = candidates[0][c];
    bool is_equal = true, varies = false;
    for (size_t a = 0; a < answers.size() && is_equal; ++a) {
      if (!answers[a].changed.empty() && answers[a].changed != candidate.name) continue;
      const int64_t dimension = SpecOf(answers[a], name).shape[axis];
      is_equal = candidates[a][c].value == dimension;
      varies = varies || dimension != at_hand;
    }
    if (is_equal && varies) return candidate.name;
  }
  return absl::StrCat(at_hand);
}

std::vector<NamedTensorSpec> NameAll(const TechniqueInfo& info,
                                     const std::vector<Answer>& answers) {
  std::vector<std::vector<NamedSize>> candidates;
  candidates.reserve(answers.size());
  for (const Answer& answer : answers) candidates.push_back(Candidates(info, answer));
  std::vector<NamedTensorSpec> named;
  for (const TensorSpec& spec : answers[0].specs) {
    named.push_back({spec, {}});
    for (size_t axis = 0; axis < spec.shape.size(); ++axis) {
      named.back().symbols.push_back(SymbolOf(answers, candidates, spec.name, axis));
    }
  }
  return named;
}

Specs SpecsOf(const NamedTensors& tensors) {
  Specs specs;
  for (const auto& [name, tensor] : tensors)
    specs.push_back({name, tensor.shape(), tensor.dtype()});
  return specs;
}

absl::StatusOr<NamedTensors> ParametersOf(const Technique& technique, const Problem& problem,
                                          const Options& options, uint64_t seed) {
  TFB_RETURN_IF_ERROR(technique.Canonical(options).status());
  TFB_ASSIGN_OR_RETURN(const std::unique_ptr<Layer> layer,
                       technique.Create(problem, options, Device::kCpu, seed));
  NamedTensors copies;
  for (const auto& [name, tensor] : layer->parameters()) copies[name] = tensor.Clone();
  return copies;
}

bool SameBits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.raw(), b.raw(), a.bytes()) == 0;
}

// The part of a name that denotes a layer: "layer" and 12 in "layer12.w_q". The digits are empty
// where there is none.
struct LayerName {
  absl::string_view prefix, digits, rest;
};
LayerName SplitLayer(absl::string_view name) {
  const absl::string_view first = name.substr(0, name.find('.'));
  size_t letters = 0;
  while (letters < first.size() && !absl::ascii_isdigit(first[letters])) ++letters;
  const bool is_layer = letters > 0 && first.size() < name.size() && letters < first.size() &&
                        std::all_of(first.begin() + letters, first.end(), absl::ascii_isdigit);
  if (!is_layer) return {name, "", ""};
  return {name.substr(0, letters), first.substr(letters), name.substr(first.size())};
}

}  // namespace

std::vector<NamedSize> ProblemSizes(const Problem& p) {
  return {{"batch", p.batch},
          {"query_heads", p.query_heads},
          {"kv_heads", p.kv_heads},
          {"query_tokens", p.query_tokens},
          {"kv_tokens", p.kv_tokens},
          {"head_dim", p.head_dim},
          {"value_dim", p.value_dim},
          {"model_dim", p.model_dim()},
          {"query_heads value_dim", p.query_heads * p.value_dim},
          {"kv_heads head_dim", p.kv_heads * p.head_dim},
          {"kv_heads value_dim", p.kv_heads * p.value_dim}};
}

absl::StatusOr<TechniqueTensors> DescribeTensors(const Technique& technique, const Options& options,
                                                 const Problem& problem, uint64_t seed) {
  TechniqueTensors tensors;
  const TechniqueInfo& info = technique.info();
  const Lister inputs = [&](const Problem& p, const Options& o) {
    return technique.InputSpecs(p, o);
  };
  const Lister outputs = [&](const Problem& p, const Options& o) {
    return technique.OutputSpecs(p, o);
  };
  for (const auto& [list, named] :
       {std::make_pair(inputs, &tensors.inputs), {outputs, &tensors.outputs}}) {
    TFB_ASSIGN_OR_RETURN(Specs specs, list(problem, options));
    *named = NameAll(info, AskAll(info, list, problem, options, std::move(specs), problem));
  }
  const absl::StatusOr<NamedTensors> parameters = ParametersOf(technique, problem, options, seed);
  tensors.parameters_status = parameters.status();
  if (!parameters.ok()) return tensors;
  const Lister list = [&](const Problem& p, const Options& o) -> absl::StatusOr<Specs> {
    TFB_ASSIGN_OR_RETURN(const NamedTensors of, ParametersOf(technique, p, o, seed));
    return SpecsOf(of);
  };
  tensors.parameters =
      NameAll(info, AskAll(info, list, problem, options, SpecsOf(*parameters), Small(problem)));
  const auto drawn = DrawnParameters(technique, options, problem, *parameters, seed);
  for (NamedTensorSpec& one : tensors.parameters) {
    one.drawn = std::find(drawn.begin(), drawn.end(), one.spec.name) != drawn.end();
  }
  return tensors;
}

std::vector<std::string> DrawnParameters(const Technique& technique, const Options& options,
                                         const Problem& problem, const NamedTensors& parameters,
                                         uint64_t seed) {
  std::vector<std::string> drawn;
  if (parameters.empty()) return drawn;
  absl::StatusOr<NamedTensors> first = ParametersOf(technique, Small(problem), options, seed);
  const bool is_alike = first.ok() && Names(SpecsOf(*first)) == Names(SpecsOf(parameters));
  const Problem chosen = is_alike ? Small(problem) : problem;
  if (!is_alike) first = ParametersOf(technique, problem, options, seed);
  const absl::StatusOr<NamedTensors> second = ParametersOf(technique, chosen, options, seed + 1);
  if (!first.ok() || !second.ok()) return drawn;
  for (const auto& [name, tensor] : *first) {
    if (!SameBits(tensor, second->at(name))) drawn.push_back(name);
  }
  return drawn;
}

std::vector<NamedTensorSpec> JoinLayers(const std::vector<NamedTensorSpec>& tensors) {
  struct Group {
    const NamedTensorSpec* first;
    std::vector<std::string> numbers;
  };
  std::vector<Group> groups;
  std::map<std::string, size_t> places;
  for (const NamedTensorSpec& tensor : tensors) {
    const LayerName name = SplitLayer(tensor.spec.name);
    const std::string key = absl::StrCat(
        name.prefix, name.digits.empty() ? "" : "#", name.rest, " ", ShapeString(tensor.spec.shape),
        absl::StrJoin(tensor.symbols, ","), Name(tensor.spec.dtype), tensor.drawn);
    const auto [place, is_new] = places.emplace(key, groups.size());
    if (is_new) groups.push_back({&tensor, {}});
    groups[place->second].numbers.emplace_back(name.digits);
  }
  std::vector<NamedTensorSpec> joined;
  for (const Group& group : groups) {
    joined.push_back(*group.first);
    if (group.numbers.size() == 1) continue;
    std::vector<int64_t> numbers;
    for (const std::string& digits : group.numbers) {
      if (!absl::SimpleAtoi(digits, &numbers.emplace_back())) return tensors;
    }
    std::sort(numbers.begin(), numbers.end());
    const bool is_range =
        numbers.back() - numbers.front() + 1 == static_cast<int64_t>(numbers.size());
    const LayerName name = SplitLayer(group.first->spec.name);
    joined.back().spec.name =
        absl::StrCat(name.prefix, "{",
                     is_range ? absl::StrCat(numbers.front(), "..", numbers.back())
                              : absl::StrJoin(numbers, ","),
                     "}", name.rest);
  }
  return joined;
}

}  // namespace tfb
