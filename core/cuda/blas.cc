#include "core/cuda/blas.h"

#include "absl/strings/str_cat.h"
#include "core/status.h"

namespace tfb {
namespace {

int CublasType(Element element) {
  return element == Element::kBf16  ? kCublasBf16
         : element == Element::kF16 ? kCublasF16
                                    : kCublasF32;
}

absl::Status CublasError(const CublasFunctions& functions, int status) {
  if (status == kCublasSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("cuBLAS: ", functions.status_string(status)));
}

// The cuBLAS manual, cublasSetWorkspace, recommends 32 MiB from Hopper on and 4 MiB before.
size_t RecommendedWorkspaceBytes(const CudaDevice& gpu) {
  return size_t{gpu.compute_capability_major >= 9 ? 32u : 4u} << 20;
}

}  // namespace

absl::StatusOr<CublasFunctions> OpenCublas() {
  TFB_ASSIGN_OR_RETURN(const DynamicLibrary library,
                       DynamicLibrary::Open({"libcublas.so.13", "libcublas.so.12"}));
  CublasFunctions functions;
  TFB_RETURN_IF_ERROR(library.Resolve("cublasCreate_v2", &functions.create));
  TFB_RETURN_IF_ERROR(library.Resolve("cublasGetVersion_v2", &functions.get_version));
  TFB_RETURN_IF_ERROR(library.Resolve("cublasSetStream_v2", &functions.set_stream));
  TFB_RETURN_IF_ERROR(library.Resolve("cublasSetWorkspace_v2", &functions.set_workspace));
  TFB_RETURN_IF_ERROR(library.Resolve("cublasGetStatusString", &functions.status_string));
  TFB_RETURN_IF_ERROR(library.Resolve("cublasSgemm_v2_64", &functions.sgemm));
  TFB_RETURN_IF_ERROR(library.Resolve("cublasGemmEx_64", &functions.gemm));
  return functions;
}

absl::StatusOr<CudaBlas*> CudaBlas::For(Device device) {
  if (device != Device::kCuda) {
    return absl::InvalidArgumentError(absl::StrCat("device ", Name(device), " has no cuBLAS"));
  }
  static const auto* blas = new absl::StatusOr<CudaBlas*>(Create(device));
  return *blas;
}

absl::StatusOr<CudaBlas*> CudaBlas::Create(Device device) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  TFB_ASSIGN_OR_RETURN(const CublasFunctions functions, OpenCublas());
  void* handle = nullptr;
  int version = 0;
  absl::Status status = CublasError(functions, functions.create(&handle));
  if (status.ok()) status = CublasError(functions, functions.get_version(handle, &version));
  if (!status.ok()) return absl::UnavailableError(status.message());
  return new CudaBlas(functions, handle, version, RecommendedWorkspaceBytes(runtime->properties()));
}

std::string CudaBlas::name() const {
  return absl::StrCat("cuBLAS ", version_ / 10000, ".", version_ / 100 % 100, ".", version_ % 100);
}

absl::Status CudaBlas::Use(void* workspace, void* stream) {
  ++products_;
  void* aligned =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace) + kWorkspaceAlignment - 1) /
                              kWorkspaceAlignment * kWorkspaceAlignment);
  // The order matters: setting the stream resets the workspace.
  TFB_RETURN_IF_ERROR(CublasError(functions_, functions_.set_stream(handle_, stream)));
  return CublasError(functions_, functions_.set_workspace(handle_, aligned, workspace_bytes_));
}

// Read as column-major, the matrices are their transposes, and c^T = b^T a^T.
absl::Status CudaBlas::Multiply(const GemmCall& call, void* workspace, void* stream) {
  constexpr float kOne = 1, kZero = 0;
  const std::lock_guard<std::mutex> lock(mutex_);
  TFB_RETURN_IF_ERROR(Use(workspace, stream));
  return CublasError(functions_,
                     functions_.sgemm(handle_, kCublasNoTranspose, kCublasNoTranspose, call.columns,
                                      call.rows, call.depth, &kOne, call.b, call.b_stride, call.a,
                                      call.a_stride, &kZero, call.c, call.c_stride));
}

absl::Status CudaBlas::Multiply(const SixteenBitGemmCall& call, void* workspace, void* stream) {
  constexpr float kOne = 1;
  const float beta = call.adds ? 1 : 0;
  const int type = CublasType(call.element);
  const std::lock_guard<std::mutex> lock(mutex_);
  TFB_RETURN_IF_ERROR(Use(workspace, stream));
  return CublasError(
      functions_, functions_.gemm(handle_, kCublasNoTranspose, kCublasNoTranspose, call.columns,
                                  call.rows, call.depth, &kOne, call.b, type, call.b_stride, call.a,
                                  type, call.a_stride, &beta, call.c, CublasType(call.c_element),
                                  call.c_stride, kCublasCompute32F, kCublasDefault));
}

}  // namespace tfb
