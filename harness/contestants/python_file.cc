#include "harness/contestants/python_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "core/status.h"
#include "harness/measure/affinity.h"
#include "nlohmann/json.hpp"

namespace tfb {
namespace {

using Json = nlohmann::json;

constexpr absl::string_view kSocket = "socket:";
constexpr size_t kAlignment = 64;  // of tensors in shared memory

// Memory that the Python process maps as well.
class SharedMemory {
 public:
  SharedMemory() = default;
  ~SharedMemory() {
    if (begin_ != nullptr) munmap(begin_, bytes_);
    if (file_ >= 0) close(file_);
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  absl::Status Allocate(size_t bytes) {
    bytes_ = std::max<size_t>(bytes, 1);
    file_ = memfd_create("tensors", MFD_CLOEXEC);
    // posix_fallocate, so that memory that is not there is an error here and not a signal later.
    if (file_ < 0 || posix_fallocate(file_, 0, static_cast<off_t>(bytes_)) != 0) {
      return absl::ResourceExhaustedError("no shared memory for the tensors");
    }
    void* begin = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (begin == MAP_FAILED) return absl::ResourceExhaustedError("no memory to map the tensors");
    begin_ = static_cast<std::byte*>(begin);
    return absl::OkStatus();
  }
  int file() const { return file_; }
  size_t bytes() const { return bytes_; }
  std::byte* begin() const { return begin_; }

 private:
  int file_ = -1;
  size_t bytes_ = 0;
  std::byte* begin_ = nullptr;
};

// Places tensors one after the other, and describes them as the other side reads it.
class Places {
 public:
  // `role` and the name together are the place's name: an input may be called as an output.
  Json Add(absl::string_view role, const TensorSpec& spec) {
    const Json said = {{"name", spec.name},
                       {"dtype", std::string(Name(spec.dtype))},
                       {"shape", spec.shape},
                       {"offset", bytes_}};
    tensors_[absl::StrCat(role, " ", spec.name)] = {bytes_, spec.dtype, spec.shape};
    size_t size = SizeOf(spec.dtype);
    for (const int64_t dimension : spec.shape) size *= static_cast<size_t>(dimension);
    bytes_ += (size + kAlignment - 1) / kAlignment * kAlignment;
    return said;
  }
  size_t bytes() const { return bytes_; }
  TensorView View(const SharedMemory& memory, absl::string_view role,
                  absl::string_view name) const {
    const Place& place = tensors_.at(absl::StrCat(role, " ", name));
    return TensorView(memory.begin() + place.offset, place.dtype, place.shape);
  }

 private:
  struct Place {
    size_t offset;
    DType dtype;
    Shape shape;
  };
  std::map<std::string, Place> tensors_;
  size_t bytes_ = 0;
};

Json ProblemJson(const Problem& problem, int threads) {
  return {{"batch", problem.batch},
          {"query_heads", problem.query_heads},
          {"kv_heads", problem.kv_heads},
          {"query_tokens", problem.query_tokens},
          {"kv_tokens", problem.kv_tokens},
          {"head_dim", problem.head_dim},
          {"value_dim", problem.value_dim},
          {"causal", problem.causal},
          {"dtype", std::string(Name(problem.dtype))},
          {"threads", threads}};
}

bool SameBytes(const ConstTensorView& contiguous, const ConstTensorView& view) {
  if (!view.is_contiguous()) {
    Tensor copy(view.dtype, view.shape());
    CopyElements(view, copy.view());
    return SameBytes(contiguous, copy.view());
  }
  const size_t bytes = static_cast<size_t>(view.num_elements()) * SizeOf(view.dtype);
  return bytes == 0 || std::memcmp(contiguous.data, view.data, bytes) == 0;
}

class PythonLayer : public ContestantLayer {
 public:
  PythonLayer(std::shared_ptr<const PythonFile> file, const ContestantFile::LayerRequest& request)
      : ContestantLayer(request.problem, request.inputs, request.outputs),
        file_(std::move(file)),
        name_(request.spec.technique),
        options_(request.definition_options),
        cost_(request.ours->cost()) {
    for (const auto& [name, tensor] : request.ours->parameters()) {
      parameters_[name] = tensor.Clone();
    }
  }
  ~PythonLayer() override { Destroy(); }

  size_t workspace_bytes(int) const override { return 0; }
  Cost cost() const override { return cost_; }
  std::map<std::string, std::string> about() const override { return about_; }

  bool times_itself() const override { return true; }
  absl::StatusOr<double> RunSeconds(int64_t calls, int64_t warm_calls) override {
    return Seconds(calls, warm_calls, 0);
  }
  absl::StatusOr<double> ColdRunSeconds(int64_t flush_bytes) override {
    return Seconds(1, 0, flush_bytes);
  }
  absl::StatusOr<double> SetupSeconds() override {
    TFB_RETURN_IF_ERROR(Revive());
    TFB_ASSIGN_OR_RETURN(setup_seconds_,
                         AskForSeconds({{"do", "setup"}, {"id", id_}, {"given", given_}}));
    return setup_seconds_;
  }
  double last_setup_seconds() const override { return setup_seconds_; }

 protected:
  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override {
    threads_ = execution.pool->threads();
    given_ = Json::array();
    for (const auto& [name, view] : inputs) {
      if (!view.empty()) given_.push_back(name);
    }
    TFB_RETURN_IF_ERROR(Make());
    CopyInputs(inputs);
    return SetupSeconds().status();
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs, const Execution&) override {
    TFB_RETURN_IF_ERROR(Revive());
    CopyInputs(inputs);
    outputs_ = outputs;
    inputs_ = inputs;
    TFB_RETURN_IF_ERROR(Ask({{"do", "run"}, {"id", id_}, {"given", given_}}).status());
    return TakeOutputs();
  }

 private:
  // Makes the layer of the other side, in a process for the number of threads.
  absl::Status Make() {
    Destroy();
    TFB_ASSIGN_OR_RETURN(process_, file_->Process(threads_));
    static int64_t layers_made = 0;
    id_ = ++layers_made;
    Json request = {{"do", "create"},
                    {"id", id_},
                    {"name", name_},
                    {"options", options_},
                    {"problem", ProblemJson(problem(), threads_)},
                    {"cpus", FirstCpus(threads_)},
                    {"inputs", Json::array()},
                    {"outputs", Json::array()},
                    {"parameters", Json::array()}};
    places_ = Places();
    for (const TensorSpec& spec : Layer::inputs())
      request["inputs"].push_back(places_.Add("input", spec));
    for (const TensorSpec& spec : Layer::outputs())
      request["outputs"].push_back(places_.Add("output", spec));
    for (const auto& [name, tensor] : parameters_) {
      request["parameters"].push_back(
          places_.Add("parameter", {name, tensor.shape(), tensor.dtype()}));
    }
    memory_ = std::make_unique<SharedMemory>();
    TFB_RETURN_IF_ERROR(memory_->Allocate(places_.bytes()));
    request["bytes"] = memory_->bytes();
    for (const auto& [name, tensor] : parameters_) {
      CopyElements(tensor.view(), places_.View(*memory_, "parameter", name));
    }
    TFB_ASSIGN_OR_RETURN(const Json answer, process_->Ask(request, memory_->file()));
    about_.clear();
    for (const auto& [name, value] : answer.at("about").items()) {
      about_[name] = value.get<std::string>();
    }
    return absl::OkStatus();
  }

  // Makes the layer again where another layer's call ended its process.
  absl::Status Revive() {
    if (!process_->has_ended() || calls_ended_it_) return absl::OkStatus();
    std::unique_ptr<SharedMemory> before = std::move(memory_);
    if (const absl::Status made = Make(); !made.ok()) {
      memory_ = std::move(before);
      return made;
    }
    std::memcpy(memory_->begin(), before->begin(), before->bytes());
    TFB_RETURN_IF_ERROR(AskForSeconds({{"do", "setup"}, {"id", id_}, {"given", given_}}).status());
    return process_->Ask({{"do", "run"}, {"id", id_}, {"given", given_}}).status();
  }

  void Destroy() {
    if (process_ == nullptr || process_->has_ended() || id_ == 0) return;
    process_->Ask({{"do", "destroy"}, {"id", id_}}).IgnoreError();
    id_ = 0;
  }

  absl::StatusOr<Json> Ask(const Json& request) {
    absl::StatusOr<Json> answer = process_->Ask(request);
    calls_ended_it_ |= process_->has_ended();
    return answer;
  }
  absl::StatusOr<double> AskForSeconds(const Json& request) {
    TFB_ASSIGN_OR_RETURN(const Json answer, Ask(request));
    return answer.at("seconds").get<double>();
  }
  absl::StatusOr<double> Seconds(int64_t calls, int64_t warm_calls, int64_t flush_bytes) {
    TFB_RETURN_IF_ERROR(Revive());
    TFB_ASSIGN_OR_RETURN(const double seconds, AskForSeconds({{"do", "seconds"},
                                                              {"id", id_},
                                                              {"calls", calls},
                                                              {"warm_calls", warm_calls},
                                                              {"flush_bytes", flush_bytes}}));
    TFB_RETURN_IF_ERROR(TakeOutputs());
    return seconds;
  }

  void CopyInputs(const Inputs& inputs) {
    for (const std::string name : given_) {
      CopyElements(inputs.Get(name), places_.View(*memory_, "input", name));
    }
  }
  absl::Status TakeOutputs() {
    for (const std::string name : given_) {
      if (!SameBytes(places_.View(*memory_, "input", name), inputs_.Get(name))) {
        return absl::InternalError(absl::StrCat("it wrote into its input ", name));
      }
    }
    for (const auto& [name, view] : outputs_) {
      CopyElements(places_.View(*memory_, "output", name), view);
    }
    return absl::OkStatus();
  }

  const std::shared_ptr<const PythonFile> file_;
  const std::string name_;
  const Options options_;
  const Cost cost_;
  int threads_ = 1;
  std::shared_ptr<PythonProcess> process_;
  std::unique_ptr<SharedMemory> memory_;
  Places places_;
  int64_t id_ = 0;
  Json given_;  // the names of the inputs that are there
  double setup_seconds_ = 0;
  bool calls_ended_it_ = false;  // whether a call of this layer ended the process
  Inputs inputs_;                // of the last Run, as the outputs
  Outputs outputs_;
  std::map<std::string, std::string> about_;
};

}  // namespace

PythonFile::PythonFile(const std::string& contestants, PythonSettings settings, double seconds)
    : ContestantFile(absl::StartsWith(contestants, kSocket)
                         ? "python"
                         : contestants.substr(0, contestants.rfind(':'))),
      contestants_(contestants),
      settings_(std::move(settings)),
      seconds_(seconds) {}

absl::StatusOr<std::unique_ptr<PythonProcess>> PythonFile::Start(int threads,
                                                                 double seconds) const {
  if (absl::StartsWith(contestants_, kSocket)) {
    return PythonProcess::Connect(std::string(absl::StripPrefix(contestants_, kSocket)));
  }
  return PythonProcess::Start(settings_, contestants_, threads, seconds);
}

absl::StatusOr<std::string> PythonFile::List() const {
  struct stat file;
  if (absl::EndsWith(path(), ".py") && stat(path().c_str(), &file) != 0) {
    return absl::NotFoundError(absl::StrCat(path(), ": there is no such file"));
  }
  TFB_ASSIGN_OR_RETURN(const std::unique_ptr<PythonProcess> process, Start(1, seconds_));
  TFB_ASSIGN_OR_RETURN(const Json answer, process->Ask({{"do", "list"}}));
  return answer.at("list").dump();
}

absl::StatusOr<std::unique_ptr<ContestantLayer>> PythonFile::Create(
    const LayerRequest& request) const {
  return std::make_unique<PythonLayer>(shared_from_this(), request);
}

absl::StatusOr<std::shared_ptr<PythonProcess>> PythonFile::Process(int threads) const {
  std::shared_ptr<PythonProcess>& process = processes_[threads];
  if (process == nullptr || process->has_ended()) {
    // The time limit is that of the case.
    TFB_ASSIGN_OR_RETURN(process, Start(threads, 0));
  }
  return process;
}

}  // namespace tfb
