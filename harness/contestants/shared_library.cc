#include "harness/contestants/shared_library.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "core/cuda/dynamic_library.h"
#include "core/options.h"
#include "core/status.h"
#include "harness/c/dlpack_dtype.h"
#include "harness/c/tfb.h"
#include "harness/measure/worker.h"
#include "nlohmann/json.hpp"

namespace tfb {
namespace {

using Json = nlohmann::json;

// ---- The library ----

// The functions that a layer needs.
struct Api {
  decltype(&tfb_interface_version) interface_version;
  decltype(&tfb_last_error) last_error;
  decltype(&tfb_techniques) techniques;
  decltype(&tfb_create) create;
  decltype(&tfb_destroy) destroy;
  decltype(&tfb_describe) describe;
  decltype(&tfb_workspace_bytes) workspace_bytes;
  decltype(&tfb_setup) setup;
  decltype(&tfb_run) run;
  decltype(&tfb_get_parameter) get_parameter;
  decltype(&tfb_set_parameters) set_parameters;

  // Returns the status of a call, with the library's message.
  absl::Status ToStatus(TfbStatus status) const {
    if (status == TFB_OK) return absl::OkStatus();
    const char* message = last_error();
    return absl::Status(static_cast<absl::StatusCode>(status), message == nullptr ? "" : message);
  }
};

absl::StatusOr<Api> Load(const std::string& path) {
  TFB_ASSIGN_OR_RETURN(const DynamicLibrary library, DynamicLibrary::Open({path}));
  Api api = {};
  TFB_RETURN_IF_ERROR(library.Resolve("tfb_interface_version", &api.interface_version));
  if (const int32_t version = api.interface_version(); version != TFB_INTERFACE_VERSION) {
    return absl::InvalidArgumentError(absl::StrCat(path, " has version ", version,
                                                   " of the interface; this program has ",
                                                   TFB_INTERFACE_VERSION));
  }
  TFB_RETURN_IF_ERROR(library.Resolve("tfb_last_error", &api.last_error));
  TFB_RETURN_IF_ERROR(library.Resolve("tfb_techniques", &api.techniques));
  TFB_RETURN_IF_ERROR(library.Resolve("tfb_create", &api.create));
  TFB_RETURN_IF_ERROR(library.Resolve("tfb_destroy", &api.destroy));
  TFB_RETURN_IF_ERROR(library.Resolve("tfb_describe", &api.describe));
  TFB_RETURN_IF_ERROR(library.Resolve("tfb_workspace_bytes", &api.workspace_bytes));
  TFB_RETURN_IF_ERROR(library.Resolve("tfb_setup", &api.setup));
  TFB_RETURN_IF_ERROR(library.Resolve("tfb_run", &api.run));
  TFB_RETURN_IF_ERROR(library.Resolve("tfb_get_parameter", &api.get_parameter));
  TFB_RETURN_IF_ERROR(library.Resolve("tfb_set_parameters", &api.set_parameters));
  return api;
}

// ---- Tensors ----

// Views as an argument of the library's functions. Reading views of the same number again allocates
// nothing.
class Tensors {
 public:
  void Clear() {
    tensors_.clear();
    named_.clear();
  }
  // The name and the view must stay as long as the argument is used.
  void Add(const std::string& name, const ConstTensorView& view, DLDevice device) {
    tensors_.push_back({const_cast<void*>(view.data), device, view.rank, ToDLDataType(view.dtype),
                        const_cast<int64_t*>(view.dims.data()),
                        const_cast<int64_t*>(view.strides.data()), 0});
    named_.push_back({name.c_str(), nullptr});
  }
  const TfbTensor* data() {
    for (size_t n = 0; n < named_.size(); ++n) named_[n].tensor = &tensors_[n];
    return named_.data();
  }
  size_t size() const { return named_.size(); }

 private:
  std::vector<DLTensor> tensors_;
  std::vector<TfbTensor> named_;
};

// ---- The technique ----

// A contestant names the code and the definition that its layers are made of.
struct Contestant {
  std::string path;
  std::string name;  // as the library calls it
  const Technique* definition;
  TechniqueSpec definition_spec;  // as the library states it
  absl::Status status;            // why there are no layers
};

class ContestantLayer : public Layer {
 public:
  ContestantLayer(const Api& api, const Contestant& contestant, const Problem& problem,
                  const Options& options, Device device, uint64_t seed,
                  std::vector<TensorSpec> inputs, std::vector<TensorSpec> outputs,
                  const Layer& ours)
      : Layer(problem, std::move(inputs), std::move(outputs)),
        api_(api),
        spec_(tfb::ToString(TechniqueSpec{contestant.name, options})),
        device_(device),
        seed_(seed),
        cost_(ours.cost()) {
    for (const auto& [name, tensor] : ours.parameters()) parameters_[name] = tensor.Clone();
  }
  ~ContestantLayer() override {
    if (own_ != nullptr) api_.destroy(own_);
  }

  // Makes the library's layer for so many threads, and asks it what it reads.
  absl::Status Make(int threads) const {
    if (own_ != nullptr && threads_ == threads) return absl::OkStatus();
    if (own_ != nullptr) api_.destroy(std::exchange(own_, nullptr));
    const Problem& p = problem();
    const TfbProblem asked = {p.batch,        p.query_heads,    p.kv_heads,
                              p.query_tokens, p.kv_tokens,      p.head_dim,
                              p.value_dim,    p.causal ? 1 : 0, ToDLDataType(p.dtype)};
    TFB_RETURN_IF_ERROR(api_.ToStatus(api_.create(
        spec_.c_str(), &asked, std::string(Name(device_)).c_str(), seed_, threads, &own_)));
    threads_ = threads;
    const char* text = nullptr;
    TFB_RETURN_IF_ERROR(api_.ToStatus(api_.describe(own_, &text)));
    const Json said = Json::parse(text == nullptr ? "" : text, nullptr, /*allow_exceptions=*/false);
    reads_.clear();
    has_.clear();
    for (const auto& [list, names] :
         {std::pair{"inputs", &reads_}, std::pair{"parameters", &has_}}) {
      if (!said.is_object() || !said.contains(list) || !said[list].is_array()) {
        return absl::InternalError(absl::StrCat("its description has no ", list));
      }
      for (const Json& one : said[list]) names->push_back(one.value("name", ""));
    }
    for (const std::string& name : reads_) {
      const bool known = std::any_of(inputs().begin(), inputs().end(),
                                     [&](const TensorSpec& spec) { return spec.name == name; });
      if (!known) {
        return absl::UnimplementedError(
            absl::StrCat("it reads ", name, ", which its definition does not have"));
      }
    }
    return absl::OkStatus();
  }

  size_t workspace_bytes(int threads) const override {
    size_t bytes = 0;
    if (!Make(threads).ok() || api_.workspace_bytes(own_, &bytes) != TFB_OK) return 0;
    return bytes;
  }
  Cost cost() const override { return cost_; }

 protected:
  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override {
    TFB_RETURN_IF_ERROR(Make(execution.pool->threads()));
    Inputs parameters;
    for (const std::string& name : has_) {
      const auto found = parameters_.find(name);
      if (found == parameters_.end()) {
        return absl::UnimplementedError(
            absl::StrCat("it has the parameter ", name, ", which its definition does not have"));
      }
      parameters.Set(name, found->second.view());
    }
    Tensors given;
    for (const auto& [name, view] : parameters) given.Add(name, view, {kDLCPU, 0});
    TFB_RETURN_IF_ERROR(api_.ToStatus(api_.set_parameters(own_, given.data(), given.size())));
    TFB_RETURN_IF_ERROR(ReadInputs(inputs));
    TFB_RETURN_IF_ERROR(
        api_.ToStatus(api_.setup(own_, read_.data(), read_.size(), execution.workspace.data(),
                                 execution.workspace.size(), execution.stream)));
    // A setup may fit parameters, as ours may; the definition is evaluated with those.
    for (const std::string& name : has_) {
      DLTensor tensor = {};
      TFB_RETURN_IF_ERROR(api_.ToStatus(api_.get_parameter(own_, name.c_str(), &tensor)));
      Tensor& ours = parameters_.find(name)->second;
      const Shape shape = ours.shape();
      if (tensor.data == nullptr || tensor.ndim != static_cast<int>(shape.size()) ||
          !std::equal(shape.begin(), shape.end(), tensor.shape)) {
        return absl::InternalError(absl::StrCat("its parameter ", name, " has another shape"));
      }
      ConstTensorView view(tensor.data, ours.dtype(), shape);
      if (tensor.strides != nullptr) {
        view = ConstTensorView(tensor.data, ours.dtype(), shape, {tensor.strides, shape.size()});
      }
      CopyElements(view, ours.view());
    }
    return absl::OkStatus();
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    if (std::exchange(is_first_run_, false) && device_ == Device::kCpu) {
      TFB_RETURN_IF_ERROR(RunOnOthers(inputs, outputs, execution));
    }
    return CallRun(inputs, outputs, execution);
  }

 private:
  absl::Status CallRun(const Inputs& inputs, const Outputs& outputs, const Execution& execution) {
    TFB_RETURN_IF_ERROR(ReadInputs(inputs));
    written_.Clear();
    for (const auto& [name, view] : outputs) written_.Add(name, view, OfDevice());
    return api_.ToStatus(api_.run(own_, read_.data(), read_.size(), written_.data(),
                                  written_.size(), execution.workspace.data(),
                                  execution.workspace.size(), execution.stream));
  }

  // Runs on the negative of every number, and fills the outputs with NaN: a library that gives its
  // last result again is wrong in the run that follows.
  absl::Status RunOnOthers(const Inputs& inputs, const Outputs& outputs,
                           const Execution& execution) {
    NamedTensors negative;
    Inputs others = inputs;
    for (const auto& [name, view] : inputs) {
      if (view.empty() || !IsFloating(view.dtype)) continue;
      Tensor& copy = negative[name] = Tensor(view.dtype, view.shape());
      CopyElements(view, copy.view());
      for (int64_t n = 0; n < copy.num_elements(); ++n) copy.view().Set(n, -copy.view().Get(n));
      others.Set(name, copy.view());
    }
    TFB_RETURN_IF_ERROR(CallRun(others, outputs, execution));
    for (const auto& [name, view] : outputs) {
      if (IsFloating(view.dtype)) Fill(view, std::numeric_limits<double>::quiet_NaN());
    }
    return absl::OkStatus();
  }

  DLDevice OfDevice() const { return {device_ == Device::kCpu ? kDLCPU : kDLCUDA, 0}; }

  absl::Status ReadInputs(const Inputs& inputs) {
    read_.Clear();
    for (const auto& [name, view] : inputs) {
      if (view.empty()) continue;
      if (std::find(reads_.begin(), reads_.end(), name) == reads_.end()) {
        return absl::UnimplementedError(absl::StrCat("it does not read ", name));
      }
      read_.Add(name, view, OfDevice());
    }
    return absl::OkStatus();
  }

  const Api api_;
  const std::string spec_;
  const Device device_;
  const uint64_t seed_;
  const Cost cost_;
  // Made when the number of threads is known.
  mutable TfbLayer* own_ = nullptr;
  mutable int threads_ = 0;
  mutable std::vector<std::string> reads_, has_;  // names of its inputs and parameters
  bool is_first_run_ = true;  // nothing has run yet, so that nothing is being timed
  Tensors read_, written_;
};

class ContestantTechnique : public Technique {
 public:
  ContestantTechnique(TechniqueInfo info, Contestant contestant)
      : Technique(std::move(info)), contestant_(std::move(contestant)) {}

  // Values are checked by the library, when a layer is created.
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
            absl::StrCat("unknown option \"", name, "\"; known are ", absl::StrJoin(known, ", ")));
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
    specs.erase(std::remove_if(specs.begin(), specs.end(),
                               [](const TensorSpec& spec) { return spec.name != "out"; }),
                specs.end());
    return specs;
  }
  absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem, const Options& options,
                                                Device device, uint64_t seed) const override {
    TFB_RETURN_IF_ERROR(contestant_.status);
    TFB_RETURN_IF_ERROR(CheckSupported(info(), problem, device));
    TFB_ASSIGN_OR_RETURN(const Api api, Load(contestant_.path));
    TFB_ASSIGN_OR_RETURN(const Options canonical, Canonical(options));
    TFB_ASSIGN_OR_RETURN(const Options defined, OfDefinition(options));
    TFB_ASSIGN_OR_RETURN(const std::unique_ptr<Layer> ours,
                         contestant_.definition->Create(problem, defined, Device::kCpu, seed));
    TFB_ASSIGN_OR_RETURN(std::vector<TensorSpec> outputs, OutputSpecs(problem, options));
    auto layer = std::make_unique<ContestantLayer>(api, contestant_, problem, canonical, device,
                                                   seed, ours->inputs(), std::move(outputs), *ours);
    TFB_RETURN_IF_ERROR(layer->Make(1));
    return layer;
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
  // Returns the definition's options: those that the library states, and the contestant's own where
  // the definition has options of their names.
  absl::StatusOr<Options> OfDefinition(const Options& options) const {
    TFB_ASSIGN_OR_RETURN(const Options canonical, Canonical(options));
    Options defined;
    for (const OptionSpec& option : contestant_.definition->info().options) {
      const auto own = canonical.find(option.name);
      if (own != canonical.end()) defined[option.name] = own->second;
    }
    for (const auto& [name, value] : contestant_.definition_spec.options) defined[name] = value;
    return contestant_.definition->Canonical(defined);
  }

  const Contestant contestant_;
};

// Returns FILE of a path to libFILE.so, with '_' for what a technique's name cannot have.
std::string FileName(absl::string_view path) {
  path.remove_prefix(path.find_last_of('/') + 1);
  std::string name(absl::StripSuffix(absl::StripPrefix(path, "lib"), ".so"));
  std::replace_if(
      name.begin(), name.end(), [](char c) { return !absl::ascii_isalnum(c); }, '_');
  return name;
}

// Returns a technique without layers, of a library that cannot be used.
std::unique_ptr<Technique> Unusable(const std::string& path, const absl::Status& status,
                                    const Technique* definition) {
  TechniqueInfo info = definition->info();
  info.name = absl::StrCat("unknown@", FileName(path));
  info.title = absl::StrCat("A contestant that cannot be used: ", path);
  info.citation = path;
  info.options.clear();
  info.budget_option.clear();
  return std::make_unique<ContestantTechnique>(
      std::move(info),
      Contestant{path, "unknown", definition, {definition->info().name, {}}, status});
}

// Returns the technique that an element of the library's list describes.
absl::StatusOr<std::unique_ptr<Technique>> ToTechnique(const std::string& path, const Json& said,
                                                       const Registry& registry) {
  if (!said.is_object()) return absl::InvalidArgumentError("an element is no object");
  const auto text = [&](const char* member) {
    return said.contains(member) && said[member].is_string() ? said[member].get<std::string>() : "";
  };
  Contestant contestant = {path, text("name"), nullptr, {}, {}};
  if (contestant.name.empty()) return absl::InvalidArgumentError("an element has no name");
  if (!std::all_of(contestant.name.begin(), contestant.name.end(),
                   [](char c) { return absl::ascii_isalnum(c) || c == '_'; })) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", contestant.name, "\" is no name: it may have letters, digits and _"));
  }
  const auto wrong = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat(contestant.name, ": ", what));
  };
  const absl::StatusOr<TechniqueSpec> definition = ParseTechniqueSpec(text("definition"));
  if (!definition.ok()) return wrong(absl::StrCat("definition: ", definition.status().message()));
  contestant.definition_spec = *definition;
  const auto found = registry.Find(definition->technique);
  if (!found.ok()) return wrong(absl::StrCat("definition: ", found.status().message()));
  contestant.definition = *found;

  const std::string file = FileName(path);
  TechniqueInfo info = contestant.definition->info();
  info.name = absl::StrCat(contestant.name, "@", file);
  if (registry.Find(info.name).ok())
    return wrong(absl::StrCat("there is a ", info.name, " already"));
  info.title = absl::StrCat(text("title").empty() ? contestant.name : text("title"), ", of ", file);
  info.citation = text("citation").empty() ? path : text("citation");
  info.budget_option.clear();
  info.selection.clear();
  info.options.clear();
  for (const Json& option : said.value("options", Json::array())) {
    if (!option.is_object()) return wrong("an option is no object");
    info.options.push_back({option.value("name", ""),
                            option.value("type", ""),
                            option.value("default", ""),
                            option.value("range", ""),
                            option.value("help", ""),
                            {}});
  }
  const Json devices = said.value("devices", Json::array({"cpu"}));
  info.devices.clear();
  for (const Device device : {Device::kCpu, Device::kCuda}) {
    if (std::find(devices.begin(), devices.end(), Json(std::string(Name(device)))) !=
        devices.end()) {
      info.devices.push_back(device);
    }
  }
  const Json causal = said.value("causal", Json::array({false, true}));
  const auto has = [&](bool value) {
    return std::find(causal.begin(), causal.end(), Json(value)) != causal.end();
  };
  info.supports_causal = info.supports_causal && has(true);
  info.supports_noncausal = info.supports_noncausal && has(false);
  return std::make_unique<ContestantTechnique>(std::move(info), std::move(contestant));
}

}  // namespace

absl::StatusOr<std::string> AskForTechniques(const std::string& path, double seconds) {
  struct stat file;
  if (stat(path.c_str(), &file) != 0) {
    return absl::NotFoundError(absl::StrCat(path, ": there is no such file"));
  }
  // The first byte of the answer tells an error from a list.
  const auto ask = [&path](WorkerSide& side) {
    const absl::StatusOr<Api> api = Load(path);
    const char* list = api.ok() ? api->techniques() : nullptr;
    if (!api.ok()) {
      side.Send(absl::StrCat("E", api.status().message()));
    } else {
      side.Send(list == nullptr ? absl::StrCat("E", path, " lists no techniques")
                                : absl::StrCat("L", list));
    }
  };
  TFB_ASSIGN_OR_RETURN(const std::unique_ptr<Worker> worker, Worker::Start(ask, 0));
  std::string answer;
  switch (worker->Wait(seconds, &answer)) {
    case Worker::Event::kMessage:
      break;
    case Worker::Event::kEnded:
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": loading it ended with ", worker->HowItEnded()));
    case Worker::Event::kNothing:
      return absl::DeadlineExceededError(
          absl::StrCat(path, ": loading it took more than ", seconds, " s"));
  }
  if (answer[0] == 'E') return absl::InvalidArgumentError(answer.substr(1));
  return answer.substr(1);
}

absl::Status AddContestants(const std::string& path, const std::string& json, Registry* registry) {
  const Json list = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!list.is_array()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": its list of techniques is no JSON array"));
  }
  std::vector<std::unique_ptr<Technique>> techniques;
  for (const Json& said : list) {
    auto technique = ToTechnique(path, said, *registry);
    if (!technique.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": ", technique.status().message()));
    }
    for (const auto& other : techniques) {
      if (other->info().name == (*technique)->info().name) {
        return absl::InvalidArgumentError(
            absl::StrCat(path, ": ", other->info().name, " is listed twice"));
      }
    }
    techniques.push_back(*std::move(technique));
  }
  for (auto& technique : techniques) registry->Add(std::move(technique));
  return absl::OkStatus();
}

absl::Status AddContestantFiles(absl::string_view files, Registry* registry,
                                std::string* techniques) {
  const bool named = absl::StrContains(*techniques, "@");
  for (const absl::string_view one : absl::StrSplit(files, ',', absl::SkipEmpty())) {
    const std::string path(one);
    if (!absl::EndsWith(path, ".so")) {
      return absl::InvalidArgumentError(absl::StrCat(path, " is no shared library (FILE.so)"));
    }
    const absl::StatusOr<std::string> list = AskForTechniques(path);
    absl::Status status = list.status();
    if (status.ok()) status = AddContestants(path, *list, registry);
    if (!status.ok()) {
      TFB_ASSIGN_OR_RETURN(const Technique* dense, registry->Find("dense"));
      auto unusable = Unusable(path, status, dense);
      if (registry->Find(unusable->info().name).ok()) return status;
      registry->Add(std::move(unusable));
    }
    if (!named) absl::StrAppend(techniques, ",*@", FileName(path));
  }
  return absl::OkStatus();
}

}  // namespace tfb
