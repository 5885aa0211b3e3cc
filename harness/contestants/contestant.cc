#include "harness/contestants/contestant.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "core/options.h"
#include "core/status.h"
#include "nlohmann/json.hpp"

namespace tfb {
namespace {

using Json = nlohmann::json;

// A contestant names the code and the definition that its layers are made of.
struct Contestant {
  std::shared_ptr<const ContestantFile> file;
  std::string name;  // as the file calls it
  const Technique* definition;
  TechniqueSpec definition_spec;     // as the file states it
  std::vector<std::string> outputs;  // of the definition, which it writes
  absl::Status status;               // why there are no layers
};

class TechniqueOfFile : public ContestantTechnique {
 public:
  TechniqueOfFile(TechniqueInfo info, ContestantInfo about, Contestant contestant)
      : ContestantTechnique(std::move(info), std::move(about)),
        contestant_(std::move(contestant)) {}

  absl::StatusOr<TechniqueSpec> DefinitionOf(const Options& options) const override {
    TFB_ASSIGN_OR_RETURN(Options defined, OfDefinition(options));
    return TechniqueSpec{contestant_.definition->info().name, std::move(defined)};
  }
  // Values are checked by the contestant, when a layer is created.
  absl::StatusOr<Options> Canonical(const Options& options) const override {
    Options all;
    std::vector<std::string> known;
    for (const OptionSpec& option : info().options) {
      all[option.name] = option.default_value;
      known.push_back(option.name);
    }
    for (const auto& [name, value] : options) {
      const auto found = all.find(name);
      if (found == all.end()) {
        return absl::InvalidArgumentError(
            absl::StrCat("unknown option \"", name, "\"; ",
                         known.empty() ? "there are none"
                                       : absl::StrCat("known are ", absl::StrJoin(known, ", "))));
      }
      found->second = value;
    }
    return all;
  }
  absl::StatusOr<std::vector<TensorSpec>> InputSpecs(const Problem& problem,
                                                     const Options& options) const override {
    TFB_ASSIGN_OR_RETURN(const Options defined, OfDefinition(options));
    return contestant_.definition->InputSpecs(problem, defined);
  }
  absl::StatusOr<std::vector<TensorSpec>> OutputSpecs(const Problem& problem,
                                                      const Options& options) const override {
    TFB_ASSIGN_OR_RETURN(const Options defined, OfDefinition(options));
    TFB_ASSIGN_OR_RETURN(std::vector<TensorSpec> specs,
                         contestant_.definition->OutputSpecs(problem, defined));
    std::vector<TensorSpec> written;
    for (const std::string& name : contestant_.outputs) {
      const auto found = std::find_if(specs.begin(), specs.end(),
                                      [&](const TensorSpec& spec) { return spec.name == name; });
      if (found == specs.end()) {
        return absl::InvalidArgumentError(
            absl::StrCat("its definition has no output \"", name, "\""));
      }
      written.push_back(*found);
      written.back().optional = false;
    }
    return written;
  }
  absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem, const Options& options,
                                                Device device, uint64_t seed) const override {
    TFB_RETURN_IF_ERROR(contestant_.status);
    TFB_RETURN_IF_ERROR(CheckSupported(info(), problem, device));
    ContestantFile::LayerRequest request;
    request.spec.technique = contestant_.name;
    TFB_ASSIGN_OR_RETURN(request.spec.options, Canonical(options));
    TFB_ASSIGN_OR_RETURN(request.definition_options, OfDefinition(options));
    request.problem = problem;
    request.device = device;
    request.seed = seed;
    TFB_ASSIGN_OR_RETURN(
        const std::unique_ptr<Layer> ours,
        contestant_.definition->Create(problem, request.definition_options, Device::kCpu, seed));
    request.ours = ours.get();
    request.inputs = ours->inputs();
    TFB_ASSIGN_OR_RETURN(request.outputs, OutputSpecs(problem, options));
    return contestant_.file->Create(request);
  }
  absl::Status Define(const Problem& problem, const Options& options,
                      const NamedTensors& parameters, const Inputs& inputs,
                      const DefinitionRequest& request, NamedTensors* outputs) const override {
    TFB_ASSIGN_OR_RETURN(const Options defined, OfDefinition(options));
    return contestant_.definition->Define(problem, defined, parameters, inputs, request, outputs);
  }
  absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                            const Options& options) const override {
    TFB_ASSIGN_OR_RETURN(const Options defined, OfDefinition(options));
    return contestant_.definition->Counterpart(problem, defined);
  }

 private:
  // Returns the definition's options: those that the file states, and the contestant's own where
  // the definition has options of their names.
  absl::StatusOr<Options> OfDefinition(const Options& options) const {
    TFB_ASSIGN_OR_RETURN(const Options canonical, Canonical(options));
    Options defined = contestant_.definition_spec.options;
    for (const OptionSpec& option : contestant_.definition->info().options) {
      const auto own = canonical.find(option.name);
      if (own != canonical.end()) defined[option.name] = own->second;
    }
    return contestant_.definition->Canonical(defined);
  }

  const Contestant contestant_;
};

bool IsName(absl::string_view name) {
  return !name.empty() && std::all_of(name.begin(), name.end(),
                                      [](char c) { return absl::ascii_isalnum(c) || c == '_'; });
}

// Returns the member's text, "" where there is none.
std::string TextOf(const Json& said, const char* member) {
  return said.contains(member) && said[member].is_string() ? said[member].get<std::string>() : "";
}

// Returns an option of the contestant: an object that describes it, or the name of one of the
// definition's, whose values there are `defined`.
absl::StatusOr<OptionSpec> ToOption(const Json& said, const Technique& definition,
                                    const Options& defined) {
  if (said.is_object()) {
    return OptionSpec{TextOf(said, "name"),  TextOf(said, "type"), TextOf(said, "default"),
                      TextOf(said, "range"), TextOf(said, "help"), {}};
  }
  if (!said.is_string()) {
    return absl::InvalidArgumentError("an option is neither an object nor a name");
  }
  for (OptionSpec option : definition.info().options) {
    if (option.name != said.get<std::string>()) continue;
    option.default_value = defined.at(option.name);
    return option;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("its definition has no option \"", said.get<std::string>(), "\""));
}

// Tells whether the member is a list with the value; a list that is missing has every value.
bool Lists(const Json& said, const char* member, const Json& value) {
  if (!said.contains(member) || !said[member].is_array()) return true;
  return std::find(said[member].begin(), said[member].end(), value) != said[member].end();
}

// Returns the technique that an element of a file's list describes.
absl::StatusOr<std::unique_ptr<Technique>> ToTechnique(
    const std::shared_ptr<const ContestantFile>& file, const Json& said, const Registry& registry) {
  if (!said.is_object()) return absl::InvalidArgumentError("an element is no object");
  Contestant contestant = {file, TextOf(said, "name"), nullptr, {}, {"out"}, {}};
  if (contestant.name.empty()) return absl::InvalidArgumentError("an element has no name");
  if (!IsName(contestant.name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", contestant.name, "\" is no name: it may have letters, digits and _"));
  }
  const auto wrong = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat(contestant.name, ": ", what));
  };
  const std::string stated = TextOf(said, "definition");
  const absl::StatusOr<TechniqueSpec> definition = ParseTechniqueSpec(stated);
  if (!definition.ok()) return wrong(absl::StrCat("definition: ", definition.status().message()));
  contestant.definition_spec = *definition;
  const auto found = registry.Find(definition->technique);
  if (!found.ok()) return wrong(absl::StrCat("definition: ", found.status().message()));
  contestant.definition = *found;
  for (const Json& output : said.value("outputs", Json::array())) {
    if (!output.is_string()) return wrong("an output is no name");
    contestant.outputs.push_back(output.get<std::string>());
  }
  const auto defined = contestant.definition->Canonical(definition->options);
  if (!defined.ok()) return wrong(absl::StrCat("definition: ", defined.status().message()));

  TechniqueInfo info = contestant.definition->info();
  info.name = absl::StrCat(contestant.name, "@", file->name());
  if (registry.Find(info.name).ok()) {
    return wrong(absl::StrCat("there is a ", info.name, " already"));
  }
  const std::string title = TextOf(said, "title"), citation = TextOf(said, "citation");
  info.title = absl::StrCat(title.empty() ? contestant.name : title, ", of ", file->name());
  info.citation = citation.empty() ? file->path() : citation;
  ContestantInfo about = {file->path(), stated, said.value("exact", Json(true)) != Json(false)};
  if (!about.exact) info.exactness = Exactness::kApproximate;
  info.budget_option.clear();
  info.selection.clear();
  info.options.clear();
  for (const Json& option : said.value("options", Json::array())) {
    absl::StatusOr<OptionSpec> spec = ToOption(option, *contestant.definition, *defined);
    if (!spec.ok()) return wrong(spec.status().message());
    info.options.push_back(*std::move(spec));
  }
  info.devices.clear();
  for (const Device device : {Device::kCpu, Device::kCuda}) {
    const bool stated_devices = said.contains("devices");
    if (stated_devices ? Lists(said, "devices", std::string(Name(device)))
                       : device == Device::kCpu) {
      info.devices.push_back(device);
    }
  }
  info.supports_causal = info.supports_causal && Lists(said, "causal", true);
  info.supports_noncausal = info.supports_noncausal && Lists(said, "causal", false);
  return std::make_unique<TechniqueOfFile>(std::move(info), std::move(about),
                                           std::move(contestant));
}

}  // namespace

std::string ContestantFile::name() const {
  absl::string_view file = path_;
  file.remove_prefix(file.find_last_of('/') + 1);
  file = absl::StripPrefix(file, "lib");
  std::string name(absl::StripSuffix(absl::StripSuffix(file, ".so"), ".py"));
  std::replace_if(
      name.begin(), name.end(), [](char c) { return !absl::ascii_isalnum(c); }, '_');
  return name;
}

absl::Status AddContestants(const std::shared_ptr<const ContestantFile>& file,
                            const std::string& list, Registry* registry) {
  const Json elements = Json::parse(list, nullptr, /*allow_exceptions=*/false);
  if (!elements.is_array()) {
    return absl::InvalidArgumentError(
        absl::StrCat(file->path(), ": its list of techniques is no JSON array"));
  }
  std::vector<std::unique_ptr<Technique>> techniques;
  for (const Json& said : elements) {
    auto technique = ToTechnique(file, said, *registry);
    if (!technique.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(file->path(), ": ", technique.status().message()));
    }
    for (const auto& other : techniques) {
      if (other->info().name == (*technique)->info().name) {
        return absl::InvalidArgumentError(
            absl::StrCat(file->path(), ": ", other->info().name, " is listed twice"));
      }
    }
    techniques.push_back(*std::move(technique));
  }
  for (auto& technique : techniques) registry->Add(std::move(technique));
  return absl::OkStatus();
}

absl::Status AddUnusable(const std::shared_ptr<const ContestantFile>& file,
                         const absl::Status& status, Registry* registry) {
  TFB_ASSIGN_OR_RETURN(const Technique* dense, registry->Find("dense"));
  TechniqueInfo info = dense->info();
  info.name = absl::StrCat("unknown@", file->name());
  for (int n = 2; registry->Find(info.name).ok(); ++n) {
    info.name = absl::StrCat("unknown", n, "@", file->name());
  }
  info.title = absl::StrCat("A contestant that cannot be used: ", file->path());
  info.citation = file->path();
  info.options.clear();
  info.budget_option.clear();
  registry->Add(std::make_unique<TechniqueOfFile>(
      std::move(info), ContestantInfo{file->path(), "dense"},
      Contestant{file, "unknown", dense, {"dense", {}}, {"out"}, status}));
  return absl::OkStatus();
}

}  // namespace tfb
