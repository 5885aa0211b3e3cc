#include "harness/inputs/continuation.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/status.h"

namespace tfb {
namespace {

const TensorSpec* FindSpec(const std::vector<TensorSpec>& specs, absl::string_view name) {
  const auto found = std::find_if(specs.begin(), specs.end(),
                                  [&](const TensorSpec& spec) { return spec.name == name; });
  return found == specs.end() ? nullptr : &*found;
}

// Returns the dimensions in which two shapes differ, or nothing where the ranks differ.
std::optional<std::vector<int>> DifferentAxes(const Shape& a, const Shape& b) {
  if (a.size() != b.size()) return std::nullopt;
  std::vector<int> axes;
  for (size_t n = 0; n < a.size(); ++n) {
    if (a[n] != b[n]) axes.push_back(static_cast<int>(n));
  }
  return axes;
}

// Returns the part of the inputs from token `begin` on, with the shapes of its specs.
absl::StatusOr<Inputs> Cut(const std::vector<TensorSpec>& specs, const Inputs& inputs,
                           int64_t begin) {
  Inputs part;
  for (const TensorSpec& spec : specs) {
    const ConstTensorView* whole = inputs.Find(spec.name);
    if (whole == nullptr) continue;
    const auto axes = DifferentAxes(spec.shape, whole->shape());
    if (!axes.has_value() || axes->size() > 1) {
      return absl::FailedPreconditionError(absl::StrCat("input ", spec.name, " cannot be cut"));
    }
    ConstTensorView view = *whole;
    for (const int axis : *axes) view = Slice(view, axis, begin, spec.shape[axis]);
    part.Set(spec.name, view);
  }
  return part;
}

// Tells whether the inputs of those names have the shapes of the outputs.
bool AreGiven(const std::vector<TensorSpec>& inputs, const std::vector<TensorSpec>& outputs,
              const std::set<std::string>& names) {
  return std::all_of(names.begin(), names.end(), [&](const std::string& name) {
    const TensorSpec *input = FindSpec(inputs, name), *output = FindSpec(outputs, name);
    if (input == nullptr || output == nullptr) return input == output;
    return input->shape == output->shape;
  });
}

}  // namespace

absl::StatusOr<std::map<std::string, std::set<std::string>>> HandedOverBy(
    const Technique& technique, const Problem& problem, const Options& options) {
  std::map<std::string, std::set<std::string>> handed_over;
  for (const OptionSpec& option : technique.info().options) {
    if (!absl::StartsWith(option.name, "given_")) continue;
    Options nothing = options, one = options;
    nothing[option.name] = "0";
    one[option.name] = "1";
    TFB_ASSIGN_OR_RETURN(const auto without, technique.InputSpecs(problem, nothing));
    TFB_ASSIGN_OR_RETURN(const auto with, technique.InputSpecs(problem, one));
    for (const TensorSpec& spec : with) {
      if (FindSpec(without, spec.name) == nullptr) handed_over[option.name].insert(spec.name);
    }
  }
  return handed_over;
}

Problem CutSequence::Part(bool is_second) const {
  Problem part = whole;
  part.query_tokens = part.kv_tokens = is_second ? whole.query_tokens - first : first;
  return part;
}

absl::StatusOr<Options> CutSequence::SecondOptions() const {
  TFB_ASSIGN_OR_RETURN(const auto outputs, technique->OutputSpecs(Part(false), options));
  TFB_ASSIGN_OR_RETURN(const auto handed_over, HandedOverBy(*technique, whole, options));
  TFB_ASSIGN_OR_RETURN(Options second, technique->Canonical(options));
  for (const auto& [option, names] : handed_over) {
    int64_t before = 0;
    if (!absl::SimpleAtoi(second[option], &before)) {
      return absl::FailedPreconditionError(absl::StrCat("option ", option, " is no number"));
    }
    // Where the option counts tokens, the tensor may have the last of them only.
    std::vector<int64_t> numbers = {before + first, 0};
    for (const std::string& name : names) {
      const TensorSpec* output = FindSpec(outputs, name);
      if (output == nullptr) continue;
      numbers.insert(numbers.end(), output->shape.begin(), output->shape.end());
    }
    const auto serves = [&, &option = option, &names = names](int64_t number) {
      second[option] = absl::StrCat(number);
      const auto inputs = technique->InputSpecs(Part(true), second);
      return inputs.ok() && AreGiven(*inputs, outputs, names);
    };
    if (std::any_of(numbers.begin(), numbers.end(), serves)) {
      continue;
    }
    return absl::FailedPreconditionError(
        absl::StrCat("no value of ", option, " makes inputs of the outputs' shapes"));
  }
  return second;
}

absl::StatusOr<Inputs> CutSequence::FirstInputs(const Inputs& inputs) const {
  TFB_ASSIGN_OR_RETURN(const auto specs, technique->InputSpecs(Part(false), options));
  return Cut(specs, inputs, 0);
}

absl::StatusOr<Inputs> CutSequence::SecondInputs(const Inputs& inputs,
                                                 const NamedTensors& outputs) const {
  TFB_ASSIGN_OR_RETURN(const Options second, SecondOptions());
  Options given_nothing = second;
  TFB_ASSIGN_OR_RETURN(const auto handed_over, HandedOverBy(*technique, whole, options));
  for (const auto& each : handed_over) given_nothing[each.first] = "0";
  TFB_ASSIGN_OR_RETURN(const auto specs, technique->InputSpecs(Part(true), second));
  TFB_ASSIGN_OR_RETURN(const auto own, technique->InputSpecs(Part(true), given_nothing));
  TFB_ASSIGN_OR_RETURN(Inputs all, Cut(own, inputs, first));
  for (const TensorSpec& spec : specs) {
    if (FindSpec(own, spec.name) != nullptr) continue;
    const auto output = outputs.find(spec.name);
    if (output == outputs.end()) {
      return absl::FailedPreconditionError(
          absl::StrCat("the first run has no output for the input ", spec.name));
    }
    all.Set(spec.name, output->second.view());
  }
  return all;
}

absl::StatusOr<NamedTensors> CutSequence::Joined(const NamedTensors& of_first,
                                                 const NamedTensors& of_second) const {
  TFB_ASSIGN_OR_RETURN(const auto specs, technique->OutputSpecs(whole, options));
  NamedTensors joined;
  for (const TensorSpec& spec : specs) {
    const auto second = of_second.find(spec.name);
    if (second == of_second.end()) {
      return absl::FailedPreconditionError(absl::StrCat("the second run has no ", spec.name));
    }
    const auto axes = DifferentAxes(second->second.shape(), spec.shape);
    if (!axes.has_value() || axes->size() > 1) continue;
    Tensor& all = joined[spec.name] = Tensor(second->second.dtype(), spec.shape);
    if (axes->empty()) {
      CopyElements(second->second.view(), all.view());
      continue;
    }
    const int axis = axes->front();
    const ConstTensorView begin = of_first.at(spec.name).view(), end = second->second.view();
    const int64_t at = begin.dim(axis);
    if (at + end.dim(axis) != spec.shape[axis]) {
      return absl::FailedPreconditionError(
          absl::StrCat(spec.name, " of the parts are ", ShapeString(begin.shape()), " and ",
                       ShapeString(end.shape()), ", of the whole ", ShapeString(spec.shape)));
    }
    CopyElements(begin, Slice(all.view(), axis, 0, at));
    CopyElements(end, Slice(all.view(), axis, at, end.dim(axis)));
  }
  return joined;
}

}  // namespace tfb
