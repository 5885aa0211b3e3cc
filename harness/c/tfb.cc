#include "harness/c/tfb.h"

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/cuda/runtime.h"
#include "core/options.h"
#include "core/status.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/thread_pool.h"
#include "harness/c/dlpack_dtype.h"
#include "harness/inputs/job.h"
#include "harness/judge/device_memory.h"
#include "harness/judge/errors.h"
#include "harness/judge/evaluate.h"
#include "harness/measure/machine.h"
#include "nlohmann/json.hpp"

using Json = nlohmann::ordered_json;

// The header's TfbLayer holds a layer with its threads and what its calls reuse.
struct TfbLayer {
  tfb::Job job;
  std::unique_ptr<tfb::ThreadPool> pool;
  std::unique_ptr<tfb::Layer> layer;

  std::atomic_flag busy = ATOMIC_FLAG_INIT;  // a call is running
  bool given_up = false;                     // a call was interrupted, and no Setup came since
  std::optional<tfb::DeviceMemory> workspace;

  // These are the tensors of the last call. They stay, so that a call with the same names allocates
  // nothing.
  tfb::Inputs inputs;
  tfb::Outputs outputs;
  tfb::BackwardCall backward;

  // The caller has pointers to these.
  std::string description, backward_description, evaluation;
  std::map<std::string, std::vector<int64_t>> parameter_sizes;  // shape, and then strides
};

namespace tfb {
namespace {

// ---- Errors ----

std::string& LastError() {
  static thread_local std::string message;
  return message;
}

TfbStatus ToC(const absl::Status& status) {
  if (status.ok()) return TFB_OK;
  LastError() = std::string(status.message());
  switch (status.code()) {
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kUnimplemented:
      return static_cast<TfbStatus>(status.code());
    case absl::StatusCode::kUnavailable:
      return TFB_UNIMPLEMENTED;
    default:
      return TFB_INTERNAL;
  }
}

// Returns the status of body(), that of what it throws included.
template <class Body>
TfbStatus Guarded(const Body& body) {
  try {
    return ToC(body());
  } catch (const ThreadPool::Interrupted&) {
    return ToC(absl::CancelledError("the call was interrupted"));
  } catch (const std::bad_alloc&) {
    return ToC(absl::ResourceExhaustedError("there is not enough memory"));
  } catch (const std::exception& error) {
    return ToC(absl::InternalError(error.what()));
  } catch (...) {
    return ToC(absl::InternalError("an exception of unknown type"));
  }
}

// The same for a call with a layer, which serves one at a time.
template <class Body>
TfbStatus WithLayer(TfbLayer* layer, const Body& body) {
  if (layer == nullptr) return ToC(absl::InvalidArgumentError("layer is null"));
  if (layer->busy.test_and_set(std::memory_order_acquire)) {
    return ToC(absl::FailedPreconditionError("another call with this layer is running"));
  }
  const TfbStatus status = Guarded(body);
  layer->busy.clear(std::memory_order_release);
  return status;
}

// ---- Tensors ----

absl::StatusOr<DType> DTypeOf(DLDataType type) {
  constexpr uint8_t kBool = 6;  // kDLBool of later versions of DLPack
  const struct {
    uint8_t code, bits;
    DType dtype;
  } known[] = {{kDLFloat, 32, DType::kF32}, {kDLFloat, 64, DType::kF64},
               {kDLFloat, 16, DType::kF16}, {kDLBfloat, 16, DType::kBF16},
               {kDLInt, 32, DType::kI32},   {kDLInt, 64, DType::kI64},
               {kDLUInt, 8, DType::kU8},    {kBool, 8, DType::kU8}};
  for (const auto& one : known) {
    if (type.lanes == 1 && type.code == one.code && type.bits == one.bits) return one.dtype;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "elements of DLPack's type code ", type.code, ", ", type.bits, " bits, ", type.lanes,
      " lanes; known are float of 16, 32 and 64 bits, bfloat16, int32, "
      "int64, uint8 and bool"));
}

// Returns the status of memory of device type `of` given to a layer on `device`.
absl::Status CheckDevice(DLDevice of, Device device) {
  constexpr int kManaged = 13;  // kDLCUDAManaged of later versions of DLPack
  const int type = static_cast<int>(of.device_type);
  const bool is_host = type == kDLCPU || type == kDLCUDAHost;
  if (device == Device::kCpu ? is_host
                             : (type == kDLCUDA || type == kManaged) && of.device_id == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("is on DLPack's device ", type, ":", of.device_id, "; it must be on ",
                   device == Device::kCpu ? "the CPU (1)" : "the GPU 0 (2:0)"));
}

absl::StatusOr<TensorView> ViewOf(const DLTensor& tensor, Device device) {
  TFB_ASSIGN_OR_RETURN(const DType dtype, DTypeOf(tensor.dtype));
  TFB_RETURN_IF_ERROR(CheckDevice(tensor.device, device));
  if (tensor.ndim < 1 || tensor.ndim > kMaxRank) {
    return absl::InvalidArgumentError(
        absl::StrCat("has ", tensor.ndim, " dimensions; allowed are 1 to ", kMaxRank));
  }
  if (tensor.shape == nullptr) return absl::InvalidArgumentError("has no shape");
  const absl::Span<const int64_t> shape(tensor.shape, tensor.ndim);
  for (const int64_t size : shape) {
    if (size < 0) return absl::InvalidArgumentError(absl::StrCat("has a size of ", size));
  }
  char* data = static_cast<char*>(tensor.data);
  if (data == nullptr && NumElements(shape) > 0) return absl::InvalidArgumentError("has no data");
  data += data == nullptr ? 0 : tensor.byte_offset;
  if (tensor.strides == nullptr) return TensorView(data, dtype, shape);
  return TensorView(data, dtype, shape, {tensor.strides, static_cast<size_t>(tensor.ndim)});
}

template <class View>
absl::Status Read(const char* what, const TfbTensor* tensors, size_t count, Device device,
                  NamedViews<View>* views) {
  if (tensors == nullptr && count > 0) {
    return absl::InvalidArgumentError(absl::StrCat("there are no ", what, "s: null"));
  }
  for (const auto& entry : *views) views->Set(entry.first, View());
  for (const TfbTensor& one : absl::MakeConstSpan(tensors, count)) {
    if (one.name == nullptr || one.tensor == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("the name or the tensor of one of the ", what, "s is null"));
    }
    if (!views->Get(one.name).empty()) {
      return absl::InvalidArgumentError(absl::StrCat(what, " ", one.name, " is given twice"));
    }
    const absl::StatusOr<TensorView> view = ViewOf(*one.tensor, device);
    if (!view.ok()) {
      return absl::Status(view.status().code(),
                          absl::StrCat(what, " ", one.name, " ", view.status().message()));
    }
    views->Set(one.name, *view);
  }
  return absl::OkStatus();
}

absl::StatusOr<Inputs> HostInputs(const TfbTensor* tensors, size_t count) {
  Inputs inputs;
  TFB_RETURN_IF_ERROR(Read("input", tensors, count, Device::kCpu, &inputs));
  return inputs;
}

// Returns tensors of the views: the same memory where it is contiguous, else copies.
template <class View>
NamedTensors TensorsOf(const NamedViews<View>& views) {
  NamedTensors tensors;
  for (const auto& [name, view] : views) {
    const TensorView shared(const_cast<void*>(view.data), view.dtype, view.shape());
    if (view.is_contiguous()) {
      tensors[name] = Tensor::Sharing(nullptr, shared);
      continue;
    }
    tensors[name] = Tensor(view.dtype, view.shape());
    CopyElements(view, tensors[name].view());
  }
  return tensors;
}

// ---- JSON ----

Json Number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}
Json Number(const std::optional<double>& value) {
  return value.has_value() ? Number(*value) : Json();
}

Json Specs(const std::vector<TensorSpec>& specs) {
  Json json = Json::array();
  for (const TensorSpec& spec : specs) {
    Json noise;
    if (spec.noise == Distribution::kNormal) noise = "normal";
    if (spec.noise == Distribution::kUniform) noise = "uniform";
    if (spec.noise == Distribution::kGumbel) noise = "gumbel";
    json.push_back({{"name", spec.name},
                    {"dtype", std::string(Name(spec.dtype))},
                    {"shape", std::vector<int64_t>(spec.shape.begin(), spec.shape.end())},
                    {"optional", spec.optional},
                    {"noise", noise}});
  }
  return json;
}

std::string Text(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string Techniques() {
  Json json = Json::array();
  for (const Technique* technique : Registry::Global().All()) {
    const TechniqueInfo& info = technique->info();
    Json causal = Json::array(), devices = Json::array(), options = Json::array();
    if (info.supports_noncausal) causal.push_back(false);
    if (info.supports_causal) causal.push_back(true);
    for (const Device device : info.devices) devices.push_back(std::string(Name(device)));
    for (const OptionSpec& option : info.options) {
      options.push_back({{"name", option.name},
                         {"type", option.type},
                         {"default", option.default_value},
                         {"range", option.range},
                         {"help", option.help}});
    }
    json.push_back({{"name", info.name},
                    {"family", info.family},
                    {"title", info.title},
                    {"citation", info.citation},
                    {"definition", info.name},
                    {"input_kind", std::string(Name(info.input_kind))},
                    {"exactness", std::string(Name(info.exactness))},
                    {"causal", causal},
                    {"devices", devices},
                    {"options", options}});
  }
  return Text(json);
}

std::string Description(const TfbLayer& own) {
  const Layer& layer = *own.layer;
  Json parameters = Json::array(), streaming, statistics = Json::object();
  for (const auto& [name, tensor] : layer.parameters()) {
    const Shape shape = tensor.shape();
    parameters.push_back({{"name", name},
                          {"dtype", std::string(Name(tensor.dtype()))},
                          {"shape", std::vector<int64_t>(shape.begin(), shape.end())}});
  }
  if (const auto* stream = dynamic_cast<const StreamingLayer*>(&layer)) {
    streaming = {{"max_segment_tokens", stream->max_segment_tokens()},
                 {"split_tokens", stream->split_tokens()},
                 {"inputs", Specs(stream->segment_inputs())},
                 {"outputs", Specs(stream->segment_outputs())}};
  }
  for (const auto& [name, value] : layer.statistics()) statistics[name] = Number(value);
  const auto counterpart = own.job.technique->Counterpart(own.job.problem, own.job.options);
  return Text({{"technique", own.job.DisplayName()},
               {"problem", own.job.problem.ToString()},
               {"device", std::string(Name(own.job.device))},
               {"threads", own.pool->threads()},
               {"workspace_bytes", layer.workspace_bytes(own.pool->threads())},
               {"inputs", Specs(layer.inputs())},
               {"outputs", Specs(layer.outputs())},
               {"parameters", parameters},
               {"streaming", streaming},
               {"flops", Number(layer.cost().flops)},
               {"bytes", Number(layer.cost().bytes)},
               {"counterpart", counterpart.ok() ? Json(ToString(*counterpart)) : Json()},
               {"statistics", statistics}});
}

std::string BackwardDescription(const TfbLayer& own) {
  const Layer& layer = *own.layer;
  Json stopped = Json::object();
  for (const auto& [name, reason] : layer.stopped_gradients()) stopped[name] = reason;
  return Text({{"kept_bytes", layer.kept_bytes()},
               {"workspace_bytes", layer.backward_workspace_bytes(own.pool->threads())},
               {"output_gradients", Specs(layer.output_gradients())},
               {"input_gradients", Specs(layer.input_gradients())},
               {"parameter_gradients", Specs(layer.parameter_gradients())},
               {"stopped", stopped},
               {"flops", Number(layer.backward_cost().flops)},
               {"bytes", Number(layer.backward_cost().bytes)}});
}

Json ErrorOf(const OutputError& error) {
  return {{"relative_frobenius", Number(error.relative_frobenius)},
          {"max_abs", Number(error.max_abs)},
          {"max_abs_over_max_value", Number(error.max_abs_over_max_value)},
          {"mean_cosine", Number(error.mean_cosine)},
          {"rows_checked", error.rows_checked},
          {"not_finite", error.not_finite}};
}

std::string EvaluationOf(const Accuracy& accuracy) {
  Json definition = ErrorOf(accuracy.against_definition);
  definition["bound"] = Number(accuracy.definition_bound);
  const auto kept = [&](double KeptAttention::*number) {
    return accuracy.kept.has_value() ? Number((*accuracy.kept).*number) : Json();
  };
  return Text(
      {{"definition", definition},
       {"dense", accuracy.against_dense.has_value() ? ErrorOf(*accuracy.against_dense) : Json()},
       {"no_dense_reason", accuracy.no_dense_reason},
       {"kept_mass", kept(&KeptAttention::kept_mass)},
       {"recall", kept(&KeptAttention::recall)},
       {"kl_divergence", kept(&KeptAttention::kl_divergence)},
       {"passed", accuracy.passed},
       {"failure", accuracy.failure},
       {"counterpart", accuracy.counterpart}});
}

// ---- Steps of the functions ----

absl::StatusOr<Problem> ToProblem(const TfbProblem& given) {
  Problem problem;
  problem.batch = given.batch;
  problem.query_heads = given.query_heads;
  problem.kv_heads = given.kv_heads;
  problem.query_tokens = given.query_tokens;
  problem.kv_tokens = given.kv_tokens;
  problem.head_dim = given.head_dim;
  problem.value_dim = given.value_dim;
  if (given.causal != 0 && given.causal != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("causal is ", given.causal, "; allowed are 0, 1"));
  }
  problem.causal = given.causal == 1;
  TFB_ASSIGN_OR_RETURN(problem.dtype, DTypeOf(given.dtype));
  TFB_RETURN_IF_ERROR(Validate(problem));
  return problem;
}

absl::Status Create(const char* technique, const TfbProblem* problem, const char* device,
                    uint64_t seed, int32_t threads, TfbLayer** layer) {
  constexpr int32_t kMaxThreads = 4096;
  if (technique == nullptr || problem == nullptr || device == nullptr || layer == nullptr) {
    return absl::InvalidArgumentError("technique, problem, device or layer is null");
  }
  if (threads < 0 || threads > kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("threads is ", threads, "; allowed are 0 to ", kMaxThreads));
  }
  auto made = std::make_unique<TfbLayer>();
  Job& job = made->job;
  TFB_ASSIGN_OR_RETURN(const TechniqueSpec spec, ParseTechniqueSpec(technique));
  TFB_ASSIGN_OR_RETURN(job.technique, Registry::Global().Find(spec.technique));
  TFB_ASSIGN_OR_RETURN(job.options, job.technique->Canonical(spec.options));
  TFB_ASSIGN_OR_RETURN(job.problem, ToProblem(*problem));
  TFB_ASSIGN_OR_RETURN(job.device, ParseDevice(device));
  if (job.device != Device::kCpu) TFB_RETURN_IF_ERROR(CudaRuntime::For(job.device).status());
  job.seed = seed;
  job.threads = threads == 0 ? UsableCores() : threads;
  TFB_ASSIGN_OR_RETURN(made->layer, job.CreateLayer());
  made->pool = std::make_unique<ThreadPool>(job.threads);
  *layer = made.release();
  return absl::OkStatus();
}

// Returns what a call that needs so many bytes of workspace works with.
absl::StatusOr<Execution> ExecutionOf(TfbLayer* own, size_t needed, void* workspace, size_t bytes,
                                      void* stream) {
  Execution execution;
  execution.pool = own->pool.get();
  execution.stream = stream;
  if (workspace != nullptr) {
    execution.workspace = {static_cast<std::byte*>(workspace), bytes};
    return execution;
  }
  if (bytes > 0) {
    return absl::InvalidArgumentError(absl::StrCat("workspace is null, and has ", bytes, " bytes"));
  }
  if (!own->workspace.has_value() || own->workspace->bytes().size() < needed) {
    own->workspace.reset();
    TFB_ASSIGN_OR_RETURN(own->workspace, DeviceMemory::Allocate(own->job.device, needed));
  }
  execution.workspace = own->workspace->bytes();
  return execution;
}

// Returns the status of body(), in which an interrupt gives the layer up.
template <class Body>
absl::Status Interruptible(TfbLayer* own, const Body& body) {
  try {
    return body();
  } catch (const ThreadPool::Interrupted&) {
    own->given_up = true;
    throw;
  }
}

// Calls body(execution) with own->inputs and own->outputs read.
template <class Body>
TfbStatus Call(TfbLayer* own, absl::Span<const TfbTensor> inputs,
               absl::Span<const TfbTensor> outputs, void* workspace, size_t workspace_bytes,
               void* stream, const Body& body) {
  return WithLayer(own, [&]() -> absl::Status {
    const Device device = own->job.device;
    TFB_RETURN_IF_ERROR(Read("input", inputs.data(), inputs.size(), device, &own->inputs));
    TFB_RETURN_IF_ERROR(Read("output", outputs.data(), outputs.size(), device, &own->outputs));
    TFB_ASSIGN_OR_RETURN(const Execution execution,
                         ExecutionOf(own, own->layer->workspace_bytes(own->pool->threads()),
                                     workspace, workspace_bytes, stream));
    return Interruptible(own, [&] { return body(execution); });
  });
}

// The same for a call of the backward pass, whose workspace is another.
template <class Body>
TfbStatus CallBackward(TfbLayer* own, const TfbBackwardCall& given, void* workspace,
                       size_t workspace_bytes, void* stream, const Body& body) {
  return WithLayer(own, [&]() -> absl::Status {
    TFB_RETURN_IF_ERROR(own->layer->CheckBackward());
    const auto read = [&](const char* what, const TfbTensors& from, auto* to) {
      return Read(what, from.tensors, from.count, own->job.device, to);
    };
    BackwardCall& call = own->backward;
    TFB_RETURN_IF_ERROR(read("input", given.inputs, &call.inputs));
    TFB_RETURN_IF_ERROR(read("output", given.outputs, &call.outputs));
    TFB_RETURN_IF_ERROR(read("output gradient", given.output_gradients, &call.output_gradients));
    TFB_RETURN_IF_ERROR(read("input gradient", given.input_gradients, &call.input_gradients));
    TFB_RETURN_IF_ERROR(
        read("parameter gradient", given.parameter_gradients, &call.parameter_gradients));
    TFB_ASSIGN_OR_RETURN(
        const Execution execution,
        ExecutionOf(own, own->layer->backward_workspace_bytes(own->pool->threads()), workspace,
                    workspace_bytes, stream));
    return Interruptible(own, [&] { return body(execution); });
  });
}

absl::StatusOr<absl::Span<std::byte>> KeptMemory(const TfbLayer& own, void* kept, size_t bytes) {
  TFB_RETURN_IF_ERROR(own.layer->CheckBackward());
  if (bytes < own.layer->kept_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "kept memory has ", bytes, " bytes; the layer needs ", own.layer->kept_bytes()));
  }
  if (kept == nullptr && bytes > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("kept memory is null, and has ", bytes, " bytes"));
  }
  return absl::MakeSpan(static_cast<std::byte*>(kept), bytes);
}

absl::Status CheckNotGivenUp(const TfbLayer& own) {
  if (!own.given_up) return absl::OkStatus();
  return absl::FailedPreconditionError("a call was interrupted: tfb_setup must come first");
}

absl::Status Define(const TfbLayer& own, const Inputs& inputs, Outputs outputs) {
  const Job& job = own.job;
  DefinitionRequest request;
  request.pool = own.pool.get();
  request.weights = outputs.Find("weights") != nullptr;
  NamedTensors defined;
  TFB_RETURN_IF_ERROR(job.technique->Define(job.problem, job.options, own.layer->parameters(),
                                            inputs, request, &defined));
  for (const auto& [name, view] : outputs) {
    const auto found = defined.find(name);
    if (found == defined.end()) {
      return absl::NotFoundError(absl::StrCat("the definition has no output \"", name, "\""));
    }
    if (found->second.shape() != view.shape()) {
      return absl::InvalidArgumentError(absl::StrCat("output ", name, " has shape ",
                                                     ShapeString(view.shape()), "; expected is ",
                                                     ShapeString(found->second.shape())));
    }
  }
  for (const auto& [name, view] : outputs) CopyElements(defined.find(name)->second.view(), view);
  return absl::OkStatus();
}

absl::StatusOr<Accuracy> EvaluateOutputs(const TfbLayer& own, const Inputs& inputs,
                                         const Outputs& outputs, int64_t rows) {
  if (rows < 0) return absl::InvalidArgumentError(absl::StrCat("rows is ", rows));
  const NamedTensors input_tensors = TensorsOf(inputs);
  EvaluateRequest request;
  request.job = own.job;
  request.inputs = &input_tensors;
  request.pool = own.pool.get();
  if (rows > 0) request.rows = SampleRows(own.job.problem.query_tokens, rows, own.job.seed);
  if (outputs.size() > 0) {
    TFB_RETURN_IF_ERROR(CheckOutputs(own.layer->outputs(), outputs));
    return Judge(request, own.layer->parameters(), TensorsOf(outputs));
  }
  // Another layer, so that this one stays as it is.
  TFB_ASSIGN_OR_RETURN(const std::unique_ptr<Layer> layer, own.job.CreateLayer());
  TFB_RETURN_IF_ERROR(layer->SetParameters(own.layer->parameters()));
  return EvaluateLayer(request, layer.get());
}

}  // namespace
}  // namespace tfb

// ---- The functions of the header ----

extern "C" {

int32_t tfb_interface_version(void) { return TFB_INTERFACE_VERSION; }

const char* tfb_last_error(void) { return tfb::LastError().c_str(); }

const char* tfb_techniques(void) {
  static const std::string& json = *new std::string(tfb::Techniques());  // never destroyed
  return json.c_str();
}

TfbStatus tfb_create(const char* technique, const TfbProblem* problem, const char* device,
                     uint64_t seed, int32_t threads, TfbLayer** layer) {
  return tfb::Guarded(
      [&] { return tfb::Create(technique, problem, device, seed, threads, layer); });
}

void tfb_destroy(TfbLayer* layer) { delete layer; }

TfbStatus tfb_describe(TfbLayer* layer, const char** json) {
  return tfb::WithLayer(layer, [&] {
    layer->description = tfb::Description(*layer);
    *json = layer->description.c_str();
    return absl::OkStatus();
  });
}

TfbStatus tfb_workspace_bytes(TfbLayer* layer, size_t* bytes) {
  return tfb::WithLayer(layer, [&] {
    *bytes = layer->layer->workspace_bytes(layer->pool->threads());
    return absl::OkStatus();
  });
}

TfbStatus tfb_setup(TfbLayer* layer, const TfbTensor* inputs, size_t input_count, void* workspace,
                    size_t workspace_bytes, void* stream) {
  return tfb::Call(layer, {inputs, input_count}, {}, workspace, workspace_bytes, stream,
                   [&](const tfb::Execution& execution) {
                     const absl::Status status = layer->layer->Setup(layer->inputs, execution);
                     if (status.ok()) layer->given_up = false;
                     return status;
                   });
}

TfbStatus tfb_run(TfbLayer* layer, const TfbTensor* inputs, size_t input_count,
                  const TfbTensor* outputs, size_t output_count, void* workspace,
                  size_t workspace_bytes, void* stream) {
  return tfb::Call(layer, {inputs, input_count}, {outputs, output_count}, workspace,
                   workspace_bytes, stream, [&](const tfb::Execution& execution) -> absl::Status {
                     TFB_RETURN_IF_ERROR(tfb::CheckNotGivenUp(*layer));
                     return layer->layer->Run(layer->inputs, layer->outputs, execution);
                   });
}

TfbStatus tfb_append(TfbLayer* layer, const TfbTensor* inputs, size_t input_count,
                     const TfbTensor* outputs, size_t output_count, void* workspace,
                     size_t workspace_bytes, void* stream) {
  return tfb::Call(layer, {inputs, input_count}, {outputs, output_count}, workspace,
                   workspace_bytes, stream, [&](const tfb::Execution& execution) -> absl::Status {
                     auto* streaming = dynamic_cast<tfb::StreamingLayer*>(layer->layer.get());
                     if (streaming == nullptr)
                       return absl::UnimplementedError("the layer reads no segments");
                     TFB_RETURN_IF_ERROR(tfb::CheckNotGivenUp(*layer));
                     return streaming->Append(layer->inputs, layer->outputs, execution);
                   });
}

TfbStatus tfb_reset(TfbLayer* layer) {
  return tfb::WithLayer(layer, [&]() -> absl::Status {
    auto* streaming = dynamic_cast<tfb::StreamingLayer*>(layer->layer.get());
    if (streaming == nullptr) return absl::UnimplementedError("the layer reads no segments");
    return streaming->Reset();
  });
}

TfbStatus tfb_get_parameter(TfbLayer* layer, const char* name, DLTensor* tensor) {
  return tfb::WithLayer(layer, [&]() -> absl::Status {
    if (name == nullptr || tensor == nullptr) {
      return absl::InvalidArgumentError("name or tensor is null");
    }
    const auto& parameters = layer->layer->parameters();
    const auto found = parameters.find(name);
    if (found == parameters.end()) {
      return absl::NotFoundError(absl::StrCat("there is no parameter \"", name, "\""));
    }
    const tfb::ConstTensorView view = found->second.view();
    std::vector<int64_t>& sizes = layer->parameter_sizes[name];
    sizes.assign(view.dims.begin(), view.dims.begin() + view.rank);
    sizes.insert(sizes.end(), view.strides.begin(), view.strides.begin() + view.rank);
    tensor->data = const_cast<void*>(view.data);
    tensor->device = {kDLCPU, 0};
    tensor->ndim = view.rank;
    tensor->dtype = tfb::ToDLDataType(view.dtype);
    tensor->shape = sizes.data();
    tensor->strides = sizes.data() + view.rank;
    tensor->byte_offset = 0;
    return absl::OkStatus();
  });
}

TfbStatus tfb_set_parameters(TfbLayer* layer, const TfbTensor* parameters, size_t count) {
  return tfb::WithLayer(layer, [&]() -> absl::Status {
    tfb::Inputs views;
    TFB_RETURN_IF_ERROR(tfb::Read("parameter", parameters, count, tfb::Device::kCpu, &views));
    const tfb::NamedTensors tensors = tfb::TensorsOf(views);
    return layer->layer->SetParameters(tensors);
  });
}

TfbStatus tfb_define(TfbLayer* layer, const TfbTensor* inputs, size_t input_count,
                     const TfbTensor* outputs, size_t output_count) {
  return tfb::WithLayer(layer, [&]() -> absl::Status {
    TFB_ASSIGN_OR_RETURN(const tfb::Inputs given, tfb::HostInputs(inputs, input_count));
    TFB_RETURN_IF_ERROR(tfb::CheckInputs(layer->layer->inputs(), given));
    tfb::Outputs written;
    TFB_RETURN_IF_ERROR(tfb::Read("output", outputs, output_count, tfb::Device::kCpu, &written));
    return tfb::Define(*layer, given, written);
  });
}

TfbStatus tfb_evaluate(TfbLayer* layer, const TfbTensor* inputs, size_t input_count,
                       const TfbTensor* outputs, size_t output_count, int64_t rows,
                       const char** json) {
  return tfb::WithLayer(layer, [&]() -> absl::Status {
    TFB_ASSIGN_OR_RETURN(const tfb::Inputs given, tfb::HostInputs(inputs, input_count));
    TFB_RETURN_IF_ERROR(tfb::CheckInputs(layer->layer->inputs(), given));
    tfb::Outputs judged;
    TFB_RETURN_IF_ERROR(tfb::Read("output", outputs, output_count, tfb::Device::kCpu, &judged));
    TFB_ASSIGN_OR_RETURN(const tfb::Accuracy accuracy,
                         tfb::EvaluateOutputs(*layer, given, judged, rows));
    layer->evaluation = tfb::EvaluationOf(accuracy);
    *json = layer->evaluation.c_str();
    return absl::OkStatus();
  });
}

TfbStatus tfb_set_interrupt(TfbLayer* layer, TfbInterrupted interrupted, void* context) {
  return tfb::WithLayer(layer, [&] {
    if (interrupted == nullptr) {
      layer->pool->SetInterrupt(nullptr);
    } else {
      layer->pool->SetInterrupt([=] { return interrupted(context) != 0; });
    }
    return absl::OkStatus();
  });
}

int32_t tfb_interface_revision(void) { return TFB_INTERFACE_REVISION; }

TfbStatus tfb_check_backward(TfbLayer* layer) {
  return tfb::WithLayer(layer, [&] { return layer->layer->CheckBackward(); });
}

TfbStatus tfb_describe_backward(TfbLayer* layer, const char** json) {
  return tfb::WithLayer(layer, [&]() -> absl::Status {
    TFB_RETURN_IF_ERROR(layer->layer->CheckBackward());
    layer->backward_description = tfb::BackwardDescription(*layer);
    *json = layer->backward_description.c_str();
    return absl::OkStatus();
  });
}

TfbStatus tfb_kept_bytes(TfbLayer* layer, size_t* bytes) {
  return tfb::WithLayer(layer, [&]() -> absl::Status {
    TFB_RETURN_IF_ERROR(layer->layer->CheckBackward());
    *bytes = layer->layer->kept_bytes();
    return absl::OkStatus();
  });
}

TfbStatus tfb_backward_workspace_bytes(TfbLayer* layer, size_t* bytes) {
  return tfb::WithLayer(layer, [&]() -> absl::Status {
    TFB_RETURN_IF_ERROR(layer->layer->CheckBackward());
    *bytes = layer->layer->backward_workspace_bytes(layer->pool->threads());
    return absl::OkStatus();
  });
}

TfbStatus tfb_setup_backward(TfbLayer* layer, const TfbTensor* inputs, size_t input_count,
                             void* workspace, size_t workspace_bytes, void* stream) {
  TfbBackwardCall given = {};
  given.inputs = {inputs, input_count};
  return tfb::CallBackward(layer, given, workspace, workspace_bytes, stream,
                           [&](const tfb::Execution& execution) -> absl::Status {
                             TFB_RETURN_IF_ERROR(tfb::CheckNotGivenUp(*layer));
                             return layer->layer->SetUpBackward(layer->backward.inputs, execution);
                           });
}

TfbStatus tfb_run_kept(TfbLayer* layer, const TfbTensor* inputs, size_t input_count,
                       const TfbTensor* outputs, size_t output_count, void* workspace,
                       size_t workspace_bytes, void* kept, size_t kept_bytes, void* stream) {
  return tfb::Call(layer, {inputs, input_count}, {outputs, output_count}, workspace,
                   workspace_bytes, stream, [&](tfb::Execution execution) -> absl::Status {
                     TFB_RETURN_IF_ERROR(tfb::CheckNotGivenUp(*layer));
                     TFB_ASSIGN_OR_RETURN(execution.kept,
                                          tfb::KeptMemory(*layer, kept, kept_bytes));
                     return layer->layer->Run(layer->inputs, layer->outputs, execution);
                   });
}

TfbStatus tfb_backward(TfbLayer* layer, const TfbBackwardCall* call, void* workspace,
                       size_t workspace_bytes, void* kept, size_t kept_bytes, void* stream) {
  if (call == nullptr) return tfb::ToC(absl::InvalidArgumentError("call is null"));
  return tfb::CallBackward(layer, *call, workspace, workspace_bytes, stream,
                           [&](tfb::Execution execution) -> absl::Status {
                             TFB_RETURN_IF_ERROR(tfb::CheckNotGivenUp(*layer));
                             TFB_ASSIGN_OR_RETURN(execution.kept,
                                                  tfb::KeptMemory(*layer, kept, kept_bytes));
                             return layer->layer->Backward(layer->backward, execution);
                           });
}

}  // extern "C"
