#include "harness/inputs/job.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/status.h"
#include "results/reader.h"

namespace tfb {

Options Job::ChangedOptions() const {
  Options defaults, changed;
  if (input.text != nullptr) defaults = input.text->FitOptions(technique->info(), {});
  for (const OptionSpec& spec : technique->info().options) {
    defaults.emplace(spec.name, spec.default_value);
    const auto found = options.find(spec.name);
    if (found != options.end() && found->second != defaults.at(spec.name)) changed.insert(*found);
  }
  return changed;
}

std::string Job::DisplayName() const {
  const Options changed = ChangedOptions();
  return absl::StrCat(technique->info().name, changed.empty() ? "" : " ",
                      absl::StrJoin(changed, " ", absl::PairFormatter("=")));
}

std::string Job::ToString() const {
  return absl::StrCat(DisplayName(), ", ", Name(device), ", ", problem.ToString(), ", ",
                      input.ToString(), pass == Case::PASS_FORWARD ? "" : ", ",
                      pass == Case::PASS_FORWARD ? "" : Name(pass));
}

absl::StatusOr<NamedTensors> Job::LoadInputs() const {
  TFB_ASSIGN_OR_RETURN(const std::vector<TensorSpec> specs,
                       technique->InputSpecs(problem, options));
  return MakeInputs(input, specs, problem, seed);
}

absl::StatusOr<std::unique_ptr<Layer>> Job::CreateLayer() const {
  return technique->Create(problem, options, device, seed);
}

}  // namespace tfb
