#include "harness/contestants/shared_library.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
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

// ---- The layer ----

class LibraryLayer : public ContestantLayer {
 public:
  LibraryLayer(const Api& api, const ContestantFile::LayerRequest& request)
      : ContestantLayer(request.problem, request.inputs, request.outputs),
        api_(api),
        spec_(tfb::ToString(request.spec)),
        device_(request.device),
        seed_(request.seed),
        cost_(request.ours->cost()) {
    for (const auto& [name, tensor] : request.ours->parameters()) {
      parameters_[name] = tensor.Clone();
    }
  }
  ~LibraryLayer() override {
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
    about_.clear();
    if (said.contains("about") && said["about"].is_object()) {
      for (const auto& [name, value] : said["about"].items()) {
        about_[name] = value.is_string() ? value.get<std::string>() : value.dump();
      }
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
  std::map<std::string, std::string> about() const override { return about_; }

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
    TFB_RETURN_IF_ERROR(ReadInputs(inputs));
    written_.Clear();
    for (const auto& [name, view] : outputs) written_.Add(name, view, OfDevice());
    return api_.ToStatus(api_.run(own_, read_.data(), read_.size(), written_.data(),
                                  written_.size(), execution.workspace.data(),
                                  execution.workspace.size(), execution.stream));
  }

 private:
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
  mutable std::map<std::string, std::string> about_;
  Tensors read_, written_;
};

}  // namespace

absl::StatusOr<std::string> SharedLibrary::List() const {
  struct stat file;
  if (stat(path().c_str(), &file) != 0) {
    return absl::NotFoundError(absl::StrCat(path(), ": there is no such file"));
  }
  // The first byte of the answer tells an error from a list.
  const auto ask = [this](WorkerSide& side) {
    const absl::StatusOr<Api> api = Load(path());
    const char* list = api.ok() ? api->techniques() : nullptr;
    if (!api.ok()) {
      side.Send(absl::StrCat("E", api.status().message()));
    } else {
      side.Send(list == nullptr ? absl::StrCat("E", path(), " lists no techniques")
                                : absl::StrCat("L", list));
    }
  };
  TFB_ASSIGN_OR_RETURN(const std::unique_ptr<Worker> worker, Worker::Start(ask, 0));
  std::string answer;
  switch (worker->Wait(seconds_, &answer)) {
    case Worker::Event::kMessage:
      break;
    case Worker::Event::kEnded:
      return absl::InvalidArgumentError(
          absl::StrCat(path(), ": loading it ended with ", worker->HowItEnded()));
    case Worker::Event::kNothing:
      return absl::DeadlineExceededError(
          absl::StrCat(path(), ": loading it took more than ", seconds_, " s"));
  }
  if (answer[0] == 'E') return absl::InvalidArgumentError(answer.substr(1));
  return answer.substr(1);
}

absl::StatusOr<std::unique_ptr<ContestantLayer>> SharedLibrary::Create(
    const LayerRequest& request) const {
  TFB_ASSIGN_OR_RETURN(const Api api, Load(path()));
  auto layer = std::make_unique<LibraryLayer>(api, request);
  TFB_RETURN_IF_ERROR(layer->Make(1));
  return layer;
}

}  // namespace tfb
