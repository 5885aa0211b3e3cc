#include "core/cuda/cudnn.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/cuda/dynamic_library.h"
#include "core/cuda/runtime.h"
#include "core/status.h"

namespace tfb {
namespace {

std::vector<int64_t> ContiguousStrides(const std::vector<int64_t>& dims) {
  std::vector<int64_t> strides(dims.size(), 1);
  for (size_t axis = dims.size() - 1; axis > 0; --axis) {
    strides[axis - 1] = strides[axis] * dims[axis];
  }
  return strides;
}

}  // namespace

// ---- The library ----

absl::StatusOr<const Cudnn*> Cudnn::Open() {
  static const auto* cudnn = new absl::StatusOr<const Cudnn*>(Load());
  return *cudnn;
}

absl::StatusOr<const Cudnn*> Cudnn::Load() {
  TFB_ASSIGN_OR_RETURN(const DynamicLibrary library, DynamicLibrary::Open({"libcudnn.so.9"}));
  CudnnFunctions f;
  TFB_RETURN_IF_ERROR(library.Resolve("cudnnGetVersion", &f.get_version));
  TFB_RETURN_IF_ERROR(library.Resolve("cudnnCreate", &f.create));
  TFB_RETURN_IF_ERROR(library.Resolve("cudnnSetStream", &f.set_stream));
  TFB_RETURN_IF_ERROR(library.Resolve("cudnnGetErrorString", &f.error_string));
  TFB_RETURN_IF_ERROR(library.Resolve("cudnnGetLastErrorString", &f.last_error_string));
  TFB_RETURN_IF_ERROR(library.Resolve("cudnnBackendCreateDescriptor", &f.create_descriptor));
  TFB_RETURN_IF_ERROR(library.Resolve("cudnnBackendDestroyDescriptor", &f.destroy_descriptor));
  TFB_RETURN_IF_ERROR(library.Resolve("cudnnBackendSetAttribute", &f.set_attribute));
  TFB_RETURN_IF_ERROR(library.Resolve("cudnnBackendGetAttribute", &f.get_attribute));
  TFB_RETURN_IF_ERROR(library.Resolve("cudnnBackendFinalize", &f.finalize));
  TFB_RETURN_IF_ERROR(library.Resolve("cudnnBackendExecute", &f.execute));
  return new Cudnn(f);
}

std::string Cudnn::name() const {
  return absl::StrCat("cuDNN ", version_ / 10000, ".", version_ / 100 % 100, ".", version_ % 100);
}

std::string Cudnn::LastReason() const {
  char text[4096] = "";
  functions_.last_error_string(text, sizeof(text));
  return CudnnReason(text);
}

std::string CudnnReason(absl::string_view message) {
  constexpr absl::string_view kMark = "Reason: ";
  const size_t mark = message.find(kMark);
  if (mark != absl::string_view::npos) message.remove_prefix(mark + kMark.size());
  return std::string(message.substr(0, message.find('\n')));
}

absl::Status Cudnn::ToStatus(absl::string_view doing, int status) const {
  if (status == kCudnnSuccess) return absl::OkStatus();
  const std::string message =
      absl::StrCat(name(), ", ", doing, ": ", functions_.error_string(status), ": ", LastReason());
  // CUDNN_STATUS_NOT_SUPPORTED and its subcodes are 3000 to 3999.
  return status / 1000 == 3 ? absl::UnimplementedError(message) : absl::InternalError(message);
}

// ---- Descriptors ----

absl::StatusOr<CudnnDescriptor> CudnnDescriptor::Create(const Cudnn* cudnn, int type) {
  CudnnDescriptor result;
  TFB_RETURN_IF_ERROR(cudnn->ToStatus(
      "creating a descriptor", cudnn->functions().create_descriptor(type, &result.descriptor_)));
  result.cudnn_ = cudnn;
  return result;
}

CudnnDescriptor& CudnnDescriptor::operator=(CudnnDescriptor&& other) noexcept {
  std::swap(cudnn_, other.cudnn_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

CudnnDescriptor::~CudnnDescriptor() {
  if (descriptor_ != nullptr) cudnn_->functions().destroy_descriptor(descriptor_);
}

absl::Status CudnnDescriptor::Set(int name, int type, int64_t count, const void* elements) {
  return cudnn_->ToStatus(
      absl::StrCat("setting attribute ", name),
      cudnn_->functions().set_attribute(descriptor_, name, type, count, elements));
}

absl::Status CudnnDescriptor::SetDescriptor(int name, void* descriptor) {
  return Set(name, cudnn::kTypeBackendDescriptor, descriptor);
}

absl::Status CudnnDescriptor::Finalize() {
  return cudnn_->ToStatus("finalizing", cudnn_->functions().finalize(descriptor_));
}

// ---- Graphs ----

void* CudnnGraph::Keep(absl::StatusOr<CudnnDescriptor> descriptor) {
  if (!descriptor.ok()) {
    if (status_.ok()) status_ = descriptor.status();
    return nullptr;
  }
  descriptors_.push_back(*std::move(descriptor));
  return descriptors_.back().get();
}

CudnnGraph::Tensor CudnnGraph::Add(absl::StatusOr<CudnnDescriptor> operation, Tensor y) {
  operations_.push_back(Keep(std::move(operation)));
  return y;
}

absl::StatusOr<CudnnDescriptor> CudnnGraph::MakeTensor(int64_t id, int dtype,
                                                       const std::vector<int64_t>& dims,
                                                       const std::vector<int64_t>& strides,
                                                       bool is_virtual, bool is_value) const {
  const int64_t rank = static_cast<int64_t>(dims.size());
  TFB_ASSIGN_OR_RETURN(CudnnDescriptor tensor,
                       CudnnDescriptor::Create(cudnn_, cudnn::kBackendTensorDescriptor));
  TFB_RETURN_IF_ERROR(tensor.Set(cudnn::kAttrTensorDataType, cudnn::kTypeDataType, dtype));
  TFB_RETURN_IF_ERROR(
      tensor.Set(cudnn::kAttrTensorDimensions, cudnn::kTypeInt64, rank, dims.data()));
  TFB_RETURN_IF_ERROR(
      tensor.Set(cudnn::kAttrTensorStrides, cudnn::kTypeInt64, rank, strides.data()));
  TFB_RETURN_IF_ERROR(tensor.Set(cudnn::kAttrTensorUniqueId, cudnn::kTypeInt64, id));
  TFB_RETURN_IF_ERROR(tensor.Set(cudnn::kAttrTensorByteAlignment, cudnn::kTypeInt64, kAlignment));
  TFB_RETURN_IF_ERROR(tensor.Set(cudnn::kAttrTensorIsVirtual, cudnn::kTypeBoolean, is_virtual));
  TFB_RETURN_IF_ERROR(tensor.Set(cudnn::kAttrTensorIsByValue, cudnn::kTypeBoolean, is_value));
  TFB_RETURN_IF_ERROR(tensor.Finalize());
  return tensor;
}

CudnnGraph::Tensor CudnnGraph::Memory(int64_t id, int dtype, std::vector<int64_t> dims,
                                      std::vector<int64_t> strides) {
  return Keep(MakeTensor(id, dtype, dims, strides, /*is_virtual=*/false, /*is_value=*/false));
}

CudnnGraph::Tensor CudnnGraph::Value(int64_t id, int dtype) {
  const std::vector<int64_t> ones(4, 1);
  return Keep(MakeTensor(id, dtype, ones, ones, /*is_virtual=*/false, /*is_value=*/true));
}

CudnnGraph::Tensor CudnnGraph::Virtual(int dtype, std::vector<int64_t> dims) {
  return Keep(MakeTensor(next_virtual_id_++, dtype, dims, ContiguousStrides(dims),
                         /*is_virtual=*/true, /*is_value=*/false));
}

absl::StatusOr<CudnnDescriptor> CudnnGraph::MakeMatMul(Tensor a, Tensor b, Tensor y) {
  TFB_RETURN_IF_ERROR(status_);
  TFB_ASSIGN_OR_RETURN(CudnnDescriptor product,
                       CudnnDescriptor::Create(cudnn_, cudnn::kBackendMatmulDescriptor));
  TFB_RETURN_IF_ERROR(
      product.Set(cudnn::kAttrMatmulCompType, cudnn::kTypeDataType, cudnn::kDataFloat));
  TFB_RETURN_IF_ERROR(product.Finalize());
  TFB_ASSIGN_OR_RETURN(CudnnDescriptor operation,
                       CudnnDescriptor::Create(cudnn_, cudnn::kBackendOperationMatmulDescriptor));
  TFB_RETURN_IF_ERROR(operation.SetDescriptor(cudnn::kAttrOperationMatmulDesc, product.get()));
  TFB_RETURN_IF_ERROR(operation.SetDescriptor(cudnn::kAttrOperationMatmulAdesc, a));
  TFB_RETURN_IF_ERROR(operation.SetDescriptor(cudnn::kAttrOperationMatmulBdesc, b));
  TFB_RETURN_IF_ERROR(operation.SetDescriptor(cudnn::kAttrOperationMatmulCdesc, y));
  TFB_RETURN_IF_ERROR(operation.Finalize());
  Keep(std::move(product));
  return operation;
}

CudnnGraph::Tensor CudnnGraph::MatMul(Tensor a, Tensor b, Tensor y) {
  return Add(MakeMatMul(a, b, y), y);
}

absl::StatusOr<CudnnDescriptor> CudnnGraph::MakeReduction(int operation, Tensor x, Tensor y) {
  TFB_RETURN_IF_ERROR(status_);
  TFB_ASSIGN_OR_RETURN(CudnnDescriptor reduction,
                       CudnnDescriptor::Create(cudnn_, cudnn::kBackendReductionDescriptor));
  TFB_RETURN_IF_ERROR(
      reduction.Set(cudnn::kAttrReductionCompType, cudnn::kTypeDataType, cudnn::kDataFloat));
  TFB_RETURN_IF_ERROR(
      reduction.Set(cudnn::kAttrReductionOperator, cudnn::kTypeReductionOperatorType, operation));
  TFB_RETURN_IF_ERROR(reduction.Finalize());
  TFB_ASSIGN_OR_RETURN(
      CudnnDescriptor result,
      CudnnDescriptor::Create(cudnn_, cudnn::kBackendOperationReductionDescriptor));
  TFB_RETURN_IF_ERROR(result.SetDescriptor(cudnn::kAttrOperationReductionDesc, reduction.get()));
  TFB_RETURN_IF_ERROR(result.SetDescriptor(cudnn::kAttrOperationReductionXdesc, x));
  TFB_RETURN_IF_ERROR(result.SetDescriptor(cudnn::kAttrOperationReductionYdesc, y));
  TFB_RETURN_IF_ERROR(result.Finalize());
  Keep(std::move(reduction));
  return result;
}

CudnnGraph::Tensor CudnnGraph::Reduce(int operation, Tensor x, Tensor y) {
  return Add(MakeReduction(operation, x, y), y);
}

absl::StatusOr<CudnnDescriptor> CudnnGraph::MakePointwise(int mode, int dtype, int64_t axis,
                                                          Tensor x, Tensor b, Tensor y, Tensor t) {
  TFB_RETURN_IF_ERROR(status_);
  TFB_ASSIGN_OR_RETURN(CudnnDescriptor pointwise,
                       CudnnDescriptor::Create(cudnn_, cudnn::kBackendPointwiseDescriptor));
  TFB_RETURN_IF_ERROR(pointwise.Set(cudnn::kAttrPointwiseMode, cudnn::kTypePointwiseMode, mode));
  TFB_RETURN_IF_ERROR(pointwise.Set(cudnn::kAttrPointwiseMathPrec, cudnn::kTypeDataType, dtype));
  if (axis >= 0) {
    TFB_RETURN_IF_ERROR(pointwise.Set(cudnn::kAttrPointwiseAxis, cudnn::kTypeInt64, axis));
  }
  TFB_RETURN_IF_ERROR(pointwise.Finalize());
  TFB_ASSIGN_OR_RETURN(
      CudnnDescriptor operation,
      CudnnDescriptor::Create(cudnn_, cudnn::kBackendOperationPointwiseDescriptor));
  TFB_RETURN_IF_ERROR(
      operation.SetDescriptor(cudnn::kAttrOperationPointwisePwDescriptor, pointwise.get()));
  TFB_RETURN_IF_ERROR(operation.SetDescriptor(cudnn::kAttrOperationPointwiseXdesc, x));
  TFB_RETURN_IF_ERROR(operation.SetDescriptor(cudnn::kAttrOperationPointwiseYdesc, y));
  if (b != nullptr) {
    TFB_RETURN_IF_ERROR(operation.SetDescriptor(cudnn::kAttrOperationPointwiseBdesc, b));
  }
  if (t != nullptr) {
    TFB_RETURN_IF_ERROR(operation.SetDescriptor(cudnn::kAttrOperationPointwiseTdesc, t));
  }
  TFB_RETURN_IF_ERROR(operation.Finalize());
  Keep(std::move(pointwise));
  return operation;
}

CudnnGraph::Tensor CudnnGraph::Pointwise(int mode, int dtype, Tensor x, Tensor b, Tensor y,
                                         Tensor t) {
  return Add(MakePointwise(mode, dtype, /*axis=*/-1, x, b, y, t), y);
}

CudnnGraph::Tensor CudnnGraph::Index(int64_t axis, Tensor x, Tensor y) {
  return Add(
      MakePointwise(cudnn::kPointwiseGenIndex, cudnn::kDataFloat, axis, x, nullptr, y, nullptr), y);
}

// ---- Plans ----

absl::StatusOr<CudnnPlan> CudnnGraph::Plan(const CudnnTarget& target) {
  TFB_RETURN_IF_ERROR(status_);
  CudnnDescriptor properties;
  if (target.handle == nullptr) {
    TFB_ASSIGN_OR_RETURN(properties,
                         CudnnDescriptor::Create(cudnn_, cudnn::kBackendDevicepropDescriptor));
    TFB_RETURN_IF_ERROR(properties.Set(cudnn::kAttrDevicepropJsonRepresentation, cudnn::kTypeChar,
                                       static_cast<int64_t>(target.device_properties.size()),
                                       target.device_properties.data()));
    TFB_RETURN_IF_ERROR(properties.Finalize());
  }
  TFB_ASSIGN_OR_RETURN(CudnnDescriptor graph,
                       CudnnDescriptor::Create(cudnn_, cudnn::kBackendOperationgraphDescriptor));
  TFB_RETURN_IF_ERROR(graph.Set(cudnn::kAttrOperationgraphOps, cudnn::kTypeBackendDescriptor,
                                static_cast<int64_t>(operations_.size()), operations_.data()));
  if (target.handle != nullptr) {
    TFB_RETURN_IF_ERROR(
        graph.Set(cudnn::kAttrOperationgraphHandle, cudnn::kTypeHandle, target.handle));
  }
  TFB_RETURN_IF_ERROR(graph.Finalize());
  absl::StatusOr<CudnnPlan> plan =
      PlanWith(cudnn::kHeurModeA, graph.get(), target, properties.get());
  if (plan.ok()) return plan;
  absl::StatusOr<CudnnPlan> fallback =
      PlanWith(cudnn::kHeurModeFallback, graph.get(), target, properties.get());
  return fallback.ok() ? std::move(fallback) : std::move(plan);
}

absl::StatusOr<CudnnPlan> CudnnGraph::PlanWith(int heuristic, void* graph,
                                               const CudnnTarget& target,
                                               void* device_properties) const {
  const CudnnFunctions& f = cudnn_->functions();
  TFB_ASSIGN_OR_RETURN(CudnnDescriptor heuristics,
                       CudnnDescriptor::Create(cudnn_, cudnn::kBackendEngineheurDescriptor));
  TFB_RETURN_IF_ERROR(heuristics.SetDescriptor(cudnn::kAttrEngineheurOperationGraph, graph));
  TFB_RETURN_IF_ERROR(heuristics.Set(cudnn::kAttrEngineheurMode, cudnn::kTypeHeurMode, heuristic));
  if (device_properties != nullptr) {
    TFB_RETURN_IF_ERROR(
        heuristics.SetDescriptor(cudnn::kAttrEngineheurDeviceprop, device_properties));
  }
  TFB_RETURN_IF_ERROR(heuristics.Finalize());

  int64_t count = 0;
  TFB_RETURN_IF_ERROR(cudnn_->ToStatus(
      "counting engines", f.get_attribute(heuristics.get(), cudnn::kAttrEngineheurResults,
                                          cudnn::kTypeBackendDescriptor, 0, &count, nullptr)));
  std::vector<CudnnDescriptor> engines;
  std::vector<void*> results;
  for (int64_t n = 0; n < count; ++n) {
    TFB_ASSIGN_OR_RETURN(CudnnDescriptor engine,
                         CudnnDescriptor::Create(cudnn_, cudnn::kBackendEnginecfgDescriptor));
    results.push_back(engine.get());
    engines.push_back(std::move(engine));
  }
  TFB_RETURN_IF_ERROR(cudnn_->ToStatus(
      "choosing an engine",
      f.get_attribute(heuristics.get(), cudnn::kAttrEngineheurResults,
                      cudnn::kTypeBackendDescriptor, count, &count, results.data())));
  // Only plans that support the graph remain, the best of them first.
  absl::Status reason = absl::UnimplementedError(
      absl::StrCat(cudnn_->name(), " has no engine for the graph: ", cudnn_->LastReason()));
  for (int64_t n = 0; n < count; ++n) {
    TFB_ASSIGN_OR_RETURN(CudnnDescriptor descriptor,
                         CudnnDescriptor::Create(cudnn_, cudnn::kBackendExecutionPlanDescriptor));
    TFB_RETURN_IF_ERROR(
        descriptor.SetDescriptor(cudnn::kAttrExecutionPlanEngineConfig, results[n]));
    if (device_properties != nullptr) {
      TFB_RETURN_IF_ERROR(
          descriptor.SetDescriptor(cudnn::kAttrExecutionPlanDeviceprop, device_properties));
    } else {
      TFB_RETURN_IF_ERROR(
          descriptor.Set(cudnn::kAttrExecutionPlanHandle, cudnn::kTypeHandle, target.handle));
    }
    if (absl::Status status = descriptor.Finalize(); !status.ok()) {
      reason = status;
      continue;
    }
    int64_t bytes = 0, one = 0;
    TFB_RETURN_IF_ERROR(
        cudnn_->ToStatus("asking for the workspace",
                         f.get_attribute(descriptor.get(), cudnn::kAttrExecutionPlanWorkspaceSize,
                                         cudnn::kTypeInt64, 1, &one, &bytes)));
    CudnnPlan plan;
    plan.cudnn_ = cudnn_;
    plan.plan_ = std::move(descriptor);
    plan.workspace_bytes_ = static_cast<size_t>(bytes);
    return plan;
  }
  return reason;
}

absl::Status CudnnPlan::Execute(void* handle, absl::Span<const int64_t> ids,
                                absl::Span<void* const> pointers, void* workspace) {
  const bool same = pointers_.size() == pointers.size() + 1 && pointers_.back() == workspace &&
                    std::equal(pointers.begin(), pointers.end(), pointers_.begin());
  if (!same) {
    pointers_.clear();
    TFB_ASSIGN_OR_RETURN(CudnnDescriptor pack,
                         CudnnDescriptor::Create(cudnn_, cudnn::kBackendVariantPackDescriptor));
    const int64_t count = static_cast<int64_t>(ids.size());
    TFB_RETURN_IF_ERROR(
        pack.Set(cudnn::kAttrVariantPackUniqueIds, cudnn::kTypeInt64, count, ids.data()));
    TFB_RETURN_IF_ERROR(
        pack.Set(cudnn::kAttrVariantPackDataPointers, cudnn::kTypeVoidPtr, count, pointers.data()));
    TFB_RETURN_IF_ERROR(pack.Set(cudnn::kAttrVariantPackWorkspace, cudnn::kTypeVoidPtr, workspace));
    TFB_RETURN_IF_ERROR(pack.Finalize());
    pack_ = std::move(pack);
    pointers_.assign(pointers.begin(), pointers.end());
    pointers_.push_back(workspace);
  }
  return cudnn_->ToStatus("executing",
                          cudnn_->functions().execute(handle, plan_.get(), pack_.get()));
}

// ---- The GPU ----

absl::StatusOr<CudnnDevice*> CudnnDevice::Get() {
  static const auto* device = new absl::StatusOr<CudnnDevice*>(Create());
  return *device;
}

absl::StatusOr<CudnnDevice*> CudnnDevice::Create() {
  TFB_RETURN_IF_ERROR(CudaRuntime::For(Device::kCuda).status());
  TFB_ASSIGN_OR_RETURN(const Cudnn* cudnn, Cudnn::Open());
  void* handle = nullptr;
  const absl::Status status =
      cudnn->ToStatus("creating a handle", cudnn->functions().create(&handle));
  if (!status.ok()) return absl::UnavailableError(status.message());
  return new CudnnDevice(cudnn, handle);
}

absl::StatusOr<CudnnPlan> CudnnDevice::Plan(CudnnGraph* graph) {
  const std::lock_guard<std::mutex> lock(mutex_);
  CudnnTarget target;
  target.handle = handle_;
  return graph->Plan(target);
}

absl::Status CudnnDevice::Execute(CudnnPlan* plan, absl::Span<const int64_t> ids,
                                  absl::Span<void* const> pointers, void* workspace, void* stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TFB_RETURN_IF_ERROR(
      cudnn_->ToStatus("setting the stream", cudnn_->functions().set_stream(handle_, stream)));
  return plan->Execute(handle_, ids, pointers, workspace);
}

}  // namespace tfb
