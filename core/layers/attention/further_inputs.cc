#include "core/layers/attention/further_inputs.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace tfb::layers {
namespace {

bool HasName(const std::vector<TensorSpec>& specs, absl::string_view name) {
  return std::any_of(specs.begin(), specs.end(),
                     [=](const TensorSpec& spec) { return spec.name == name; });
}

}  // namespace

FurtherInputs::FurtherInputs(const TechniqueSpec& inside, const Problem& problem,
                             const std::vector<std::string>& given, const InputPrefixes& prefixes) {
  const absl::StatusOr<const Technique*> technique = Registry::Global().Find(inside.technique);
  if (!technique.ok()) return;
  const auto read = (*technique)->InputSpecs(problem, inside.options);
  const auto written = (*technique)->OutputSpecs(problem, inside.options);
  if (!read.ok() || !written.ok()) return;
  for (TensorSpec spec : *read) {
    if (std::find(given.begin(), given.end(), spec.name) != given.end()) continue;
    inside_.Set(spec.name, {});
    gradients_.Set(spec.name, {});
    names_.push_back(spec.name);
    const bool is_own = spec.noise.has_value() || HasName(*written, spec.name);
    spec.name.insert(0, is_own ? prefixes.own : prefixes.shared);
    outside_.push_back(std::move(spec));
  }
}

void FurtherInputs::AddTo(std::vector<TensorSpec>* specs) const {
  for (const TensorSpec& spec : outside_) {
    if (!HasName(*specs, spec.name)) specs->push_back(spec);
  }
}

const Inputs& FurtherInputs::From(const Inputs& inputs) {
  for (size_t n = 0; n < names_.size(); ++n) {
    inside_.Set(names_[n], inputs.Get(outside_[n].name));
  }
  return inside_;
}

const Outputs& FurtherInputs::GradientsFrom(const Outputs& gradients) {
  for (size_t n = 0; n < names_.size(); ++n) {
    gradients_.Set(names_[n], gradients.Get(outside_[n].name));
  }
  return gradients_;
}

std::string FurtherInputs::Outside(absl::string_view inside) const {
  for (size_t n = 0; n < names_.size(); ++n) {
    if (names_[n] == inside) return outside_[n].name;
  }
  return "";
}

absl::Status FurtherInputs::CheckBackward(
    const std::vector<std::pair<const FurtherInputs*, const Layer*>>& all) {
  std::set<std::string> names;
  for (const auto& [further, layer] : all) {
    for (const TensorSpec& spec : layer->input_gradients()) {
      const std::string name = further->Outside(spec.name);
      if (name.empty() || names.insert(name).second) continue;
      return absl::UnimplementedError(
          absl::StrCat("no gradient of ", name, ", which several techniques inside read"));
    }
  }
  return absl::OkStatus();
}

}  // namespace tfb::layers
