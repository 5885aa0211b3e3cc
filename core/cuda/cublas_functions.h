// The functions of cuBLAS that this project uses, as its header cublas_api.h declares them for CUDA
// 12 and 13, in plain C types: handles are void*, enumerations int. library_prototypes.cu checks
// them against the header where there is one, so that a build needs no header.
#ifndef TFB_CORE_CUDA_CUBLAS_FUNCTIONS_H_
#define TFB_CORE_CUDA_CUBLAS_FUNCTIONS_H_

#include <stddef.h>
#include <stdint.h>

namespace tfb {

constexpr int kCublasSuccess = 0;      // CUBLAS_STATUS_SUCCESS
constexpr int kCublasNoTranspose = 0;  // CUBLAS_OP_N
constexpr int kCublasCompute32F = 68;  // CUBLAS_COMPUTE_32F: sums are fp32
constexpr int kCublasDefault = -1;     // CUBLAS_GEMM_DEFAULT: the library chooses
// cudaDataType, in which cuBLAS takes the types of matrices.
constexpr int kCublasF32 = 0;    // CUDA_R_32F
constexpr int kCublasF16 = 2;    // CUDA_R_16F
constexpr int kCublasBf16 = 14;  // CUDA_R_16BF

struct CublasFunctions {
  int (*create)(void** handle);                                       // cublasCreate_v2
  int (*get_version)(void* handle, int* version);                     // cublasGetVersion_v2
  int (*set_stream)(void* handle, void* stream);                      // cublasSetStream_v2
  int (*set_workspace)(void* handle, void* workspace, size_t bytes);  // cublasSetWorkspace_v2
  const char* (*status_string)(int status);                           // cublasGetStatusString
  // c = alpha a b + beta c, column-major: a [m, k], b [k, n], c [m, n].     cublasSgemm_v2_64
  int (*sgemm)(void* handle, int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k,
               const float* alpha, const float* a, int64_t lda, const float* b, int64_t ldb,
               const float* beta, float* c, int64_t ldc);
  // The same for matrices of other types.                                 cublasGemmEx_64
  int (*gemm)(void* handle, int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k,
              const void* alpha, const void* a, int type_a, int64_t lda, const void* b, int type_b,
              int64_t ldb, const void* beta, void* c, int type_c, int64_t ldc, int compute_type,
              int algorithm);
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_CUBLAS_FUNCTIONS_H_
