// cuBLAS, which is opened at run time.
#ifndef TFB_CORE_CUDA_BLAS_H_
#define TFB_CORE_CUDA_BLAS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/cublas_functions.h"
#include "core/cuda/device_view.h"
#include "core/cuda/dynamic_library.h"
#include "core/cuda/runtime.h"
#include "core/problem.h"

namespace tfb {

// c = a b in fp32, row-major, in device memory. Rows lie `stride` floats apart, which is at least
// their length.
struct GemmCall {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t depth = 0;
  const float* a = nullptr;  // [rows, depth]
  int64_t a_stride = 0;
  const float* b = nullptr;  // [depth, columns]
  int64_t b_stride = 0;
  float* c = nullptr;  // [rows, columns]
  int64_t c_stride = 0;
};

// c = a b, or c += a b, of 16-bit matrices with fp32 sums. Strides are in elements.
struct SixteenBitGemmCall {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t depth = 0;
  Element element = Element::kBf16;  // of a and b: bf16 or f16
  const void* a = nullptr;
  int64_t a_stride = 0;
  const void* b = nullptr;
  int64_t b_stride = 0;
  Element c_element = Element::kF32;  // f32 or `element`
  void* c = nullptr;
  int64_t c_stride = 0;
  bool adds = false;
};

// A handle of cuBLAS. It is thread-safe: it runs one call at a time. Its math mode stays the
// default, in which fp32 products are fp32 throughout (no TF32). On one GPU, and with the workspace
// that a call brings, the same call gives the same bits. A row's bits depend on the number of rows of
// the call, by which cuBLAS chooses its kernel, and so the order of sums. Denormal numbers are not
// flushed (core/denormals.h).
class CudaBlas {
 public:
  // Returns the handle of the first GPU, which lives as long as the program. Returns Unavailable,
  // with the reason, where the library or the GPU is not present, and InvalidArgument for other
  // devices.
  static absl::StatusOr<CudaBlas*> For(Device device);

  std::string name() const;  // Returns, say, "cuBLAS 13.1.0".
  // Returns the scratch of a call in bytes: what NVIDIA recommends for the GPU, and room to align
  // it.
  size_t workspace_bytes() const { return workspace_bytes_ + kWorkspaceAlignment; }
  // Returns the number of products so far, by which tests know whether a layer's are cuBLAS's.
  int64_t products() const { return products_; }

  // Enqueues the product on the stream. `workspace` is device memory of workspace_bytes().
  absl::Status Multiply(const GemmCall& call, void* workspace, void* stream);
  absl::Status Multiply(const SixteenBitGemmCall& call, void* workspace, void* stream);

 private:
  static constexpr size_t kWorkspaceAlignment = 256;

  CudaBlas(const CublasFunctions& functions, void* handle, int version, size_t workspace_bytes)
      : functions_(functions),
        handle_(handle),
        version_(version),
        workspace_bytes_(workspace_bytes) {}
  static absl::StatusOr<CudaBlas*> Create(Device device);
  // Gives the handle, which is locked, the stream and the workspace of the next product.
  absl::Status Use(void* workspace, void* stream);

  CublasFunctions functions_;
  void* handle_;
  int version_;  // 10000 major + 100 minor + patch
  size_t workspace_bytes_;
  std::atomic<int64_t> products_{0};
  std::mutex mutex_;  // guards the handle
};

// Finds every function of CublasFunctions. Returns Unavailable, with the missing name, where it
// cannot.
absl::StatusOr<CublasFunctions> OpenCublas();

}  // namespace tfb

#endif  // TFB_CORE_CUDA_BLAS_H_
