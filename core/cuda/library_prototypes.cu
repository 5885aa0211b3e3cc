// Checks our declarations of the functions of libraries that are opened at run time against the
// libraries' own headers, where the toolkit has them. The check is that this file compiles.
#include <stdint.h>

#include <type_traits>

#include "core/cuda/cublas_functions.h"
#include "core/cuda/cudnn_functions.h"

namespace tfb {
namespace {

// Whether two parameter types are passed in the same way: pointers as pointers, enumerations and
// integers of the same size.
template <class A, class B>
constexpr bool kPassedAlike =
    sizeof(A) == sizeof(B) && std::is_pointer<A>::value
                                  == std::is_pointer<B>::value&& std::is_floating_point<A>::value
                                  == std::is_floating_point<B>::value;

template <>
constexpr bool kPassedAlike<void, void> = true;

template <class A, class B>
struct Alike : std::false_type {};  // the numbers of parameters differ
template <class A, class B>
struct Alike<A (*)(), B (*)()> : std::bool_constant<kPassedAlike<A, B>> {};
template <class A, class FirstA, class... RestA, class B, class FirstB, class... RestB>
struct Alike<A (*)(FirstA, RestA...), B (*)(FirstB, RestB...)>
    : std::bool_constant<kPassedAlike<FirstA, FirstB> &&
                         Alike<A (*)(RestA...), B (*)(RestB...)>::value> {};

// Compares a pointer to a function of ours with the library's function.
template <class Ours, class Theirs>
constexpr bool kSameCall = Alike<Ours, Theirs*>::value;

}  // namespace
}  // namespace tfb

#if __has_include(<cublas_v2.h>)
#include <cublas_v2.h>

namespace tfb {

static_assert(kCublasSuccess == CUBLAS_STATUS_SUCCESS);
static_assert(kCublasNoTranspose == CUBLAS_OP_N);
static_assert(kSameCall<decltype(CublasFunctions::create), decltype(cublasCreate_v2)>);
static_assert(kSameCall<decltype(CublasFunctions::get_version), decltype(cublasGetVersion_v2)>);
static_assert(kSameCall<decltype(CublasFunctions::set_stream), decltype(cublasSetStream_v2)>);
static_assert(kSameCall<decltype(CublasFunctions::set_workspace), decltype(cublasSetWorkspace_v2)>);
static_assert(kSameCall<decltype(CublasFunctions::status_string), decltype(cublasGetStatusString)>);
static_assert(kSameCall<decltype(CublasFunctions::sgemm), decltype(cublasSgemm_v2_64)>);
static_assert(kSameCall<decltype(CublasFunctions::gemm), decltype(cublasGemmEx_64)>);
static_assert(kCublasCompute32F == CUBLAS_COMPUTE_32F);
static_assert(kCublasDefault == CUBLAS_GEMM_DEFAULT);
static_assert(kCublasF32 == CUDA_R_32F && kCublasF16 == CUDA_R_16F && kCublasBf16 == CUDA_R_16BF);
// These assertions test the check itself: one parameter more, or one of another size, makes another
// call.
static_assert(!kSameCall<decltype(CublasFunctions::create), decltype(cublasGetVersion_v2)>);
static_assert(!kSameCall<decltype(CublasFunctions::sgemm), decltype(cublasSgemm_v2)>);

}  // namespace tfb
#endif

#if __has_include(<cudnn.h>)
#include <cudnn.h>
#if CUDNN_MAJOR == 9 && CUDNN_MINOR >= 8

namespace tfb {

static_assert(kCudnnSuccess == CUDNN_STATUS_SUCCESS);
static_assert(kSameCall<decltype(CudnnFunctions::get_version), decltype(cudnnGetVersion)>);
static_assert(kSameCall<decltype(CudnnFunctions::create), decltype(cudnnCreate)>);
static_assert(kSameCall<decltype(CudnnFunctions::set_stream), decltype(cudnnSetStream)>);
static_assert(kSameCall<decltype(CudnnFunctions::error_string), decltype(cudnnGetErrorString)>);
static_assert(
    kSameCall<decltype(CudnnFunctions::create_descriptor), decltype(cudnnBackendCreateDescriptor)>);
static_assert(kSameCall<decltype(CudnnFunctions::destroy_descriptor),
                        decltype(cudnnBackendDestroyDescriptor)>);
static_assert(
    kSameCall<decltype(CudnnFunctions::set_attribute), decltype(cudnnBackendSetAttribute)>);
static_assert(
    kSameCall<decltype(CudnnFunctions::get_attribute), decltype(cudnnBackendGetAttribute)>);
static_assert(kSameCall<decltype(CudnnFunctions::finalize), decltype(cudnnBackendFinalize)>);
static_assert(kSameCall<decltype(CudnnFunctions::execute), decltype(cudnnBackendExecute)>);

static_assert(cudnn::kDataFloat == CUDNN_DATA_FLOAT);
static_assert(cudnn::kDataHalf == CUDNN_DATA_HALF);
static_assert(cudnn::kDataInt32 == CUDNN_DATA_INT32);
static_assert(cudnn::kDataBfloat16 == CUDNN_DATA_BFLOAT16);
static_assert(cudnn::kDataBoolean == CUDNN_DATA_BOOLEAN);
static_assert(cudnn::kPointwiseAdd == CUDNN_POINTWISE_ADD);
static_assert(cudnn::kPointwiseMul == CUDNN_POINTWISE_MUL);
static_assert(cudnn::kPointwiseDiv == CUDNN_POINTWISE_DIV);
static_assert(cudnn::kPointwiseSub == CUDNN_POINTWISE_SUB);
static_assert(cudnn::kPointwiseExp == CUDNN_POINTWISE_EXP);
static_assert(cudnn::kPointwiseLog == CUDNN_POINTWISE_LOG);
static_assert(cudnn::kPointwiseCmpGe == CUDNN_POINTWISE_CMP_GE);
static_assert(cudnn::kPointwiseGenIndex == CUDNN_POINTWISE_GEN_INDEX);
static_assert(cudnn::kPointwiseBinarySelect == CUDNN_POINTWISE_BINARY_SELECT);
static_assert(cudnn::kReduceTensorAdd == CUDNN_REDUCE_TENSOR_ADD);
static_assert(cudnn::kReduceTensorMax == CUDNN_REDUCE_TENSOR_MAX);
static_assert(cudnn::kHeurModeFallback == CUDNN_HEUR_MODE_FALLBACK);
static_assert(cudnn::kHeurModeA == CUDNN_HEUR_MODE_A);
static_assert(cudnn::kBackendPointwiseDescriptor == CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
static_assert(cudnn::kBackendEnginecfgDescriptor == CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
static_assert(cudnn::kBackendEngineheurDescriptor == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
static_assert(cudnn::kBackendExecutionPlanDescriptor == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
static_assert(cudnn::kBackendOperationPointwiseDescriptor ==
              CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
static_assert(cudnn::kBackendOperationgraphDescriptor == CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
static_assert(cudnn::kBackendVariantPackDescriptor == CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
static_assert(cudnn::kBackendTensorDescriptor == CUDNN_BACKEND_TENSOR_DESCRIPTOR);
static_assert(cudnn::kBackendMatmulDescriptor == CUDNN_BACKEND_MATMUL_DESCRIPTOR);
static_assert(cudnn::kBackendOperationMatmulDescriptor ==
              CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
static_assert(cudnn::kBackendReductionDescriptor == CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
static_assert(cudnn::kBackendOperationReductionDescriptor ==
              CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
static_assert(cudnn::kBackendDevicepropDescriptor == CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
static_assert(cudnn::kTypeHandle == CUDNN_TYPE_HANDLE);
static_assert(cudnn::kTypeDataType == CUDNN_TYPE_DATA_TYPE);
static_assert(cudnn::kTypeBoolean == CUDNN_TYPE_BOOLEAN);
static_assert(cudnn::kTypeInt64 == CUDNN_TYPE_INT64);
static_assert(cudnn::kTypeVoidPtr == CUDNN_TYPE_VOID_PTR);
static_assert(cudnn::kTypeHeurMode == CUDNN_TYPE_HEUR_MODE);
static_assert(cudnn::kTypePointwiseMode == CUDNN_TYPE_POINTWISE_MODE);
static_assert(cudnn::kTypeBackendDescriptor == CUDNN_TYPE_BACKEND_DESCRIPTOR);
static_assert(cudnn::kTypeReductionOperatorType == CUDNN_TYPE_REDUCTION_OPERATOR_TYPE);
static_assert(cudnn::kTypeChar == CUDNN_TYPE_CHAR);
static_assert(cudnn::kAttrPointwiseMode == CUDNN_ATTR_POINTWISE_MODE);
static_assert(cudnn::kAttrPointwiseMathPrec == CUDNN_ATTR_POINTWISE_MATH_PREC);
static_assert(cudnn::kAttrPointwiseAxis == CUDNN_ATTR_POINTWISE_AXIS);
static_assert(cudnn::kAttrEngineheurMode == CUDNN_ATTR_ENGINEHEUR_MODE);
static_assert(cudnn::kAttrEngineheurOperationGraph == CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
static_assert(cudnn::kAttrEngineheurResults == CUDNN_ATTR_ENGINEHEUR_RESULTS);
static_assert(cudnn::kAttrEngineheurDeviceprop == CUDNN_ATTR_ENGINEHEUR_DEVICEPROP);
static_assert(cudnn::kAttrExecutionPlanHandle == CUDNN_ATTR_EXECUTION_PLAN_HANDLE);
static_assert(cudnn::kAttrExecutionPlanEngineConfig == CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
static_assert(cudnn::kAttrExecutionPlanWorkspaceSize == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
static_assert(cudnn::kAttrExecutionPlanDeviceprop == CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP);
static_assert(cudnn::kAttrOperationPointwisePwDescriptor ==
              CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
static_assert(cudnn::kAttrOperationPointwiseXdesc == CUDNN_ATTR_OPERATION_POINTWISE_XDESC);
static_assert(cudnn::kAttrOperationPointwiseBdesc == CUDNN_ATTR_OPERATION_POINTWISE_BDESC);
static_assert(cudnn::kAttrOperationPointwiseYdesc == CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
static_assert(cudnn::kAttrOperationPointwiseTdesc == CUDNN_ATTR_OPERATION_POINTWISE_TDESC);
static_assert(cudnn::kAttrOperationgraphHandle == CUDNN_ATTR_OPERATIONGRAPH_HANDLE);
static_assert(cudnn::kAttrOperationgraphOps == CUDNN_ATTR_OPERATIONGRAPH_OPS);
static_assert(cudnn::kAttrTensorByteAlignment == CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
static_assert(cudnn::kAttrTensorDataType == CUDNN_ATTR_TENSOR_DATA_TYPE);
static_assert(cudnn::kAttrTensorDimensions == CUDNN_ATTR_TENSOR_DIMENSIONS);
static_assert(cudnn::kAttrTensorStrides == CUDNN_ATTR_TENSOR_STRIDES);
static_assert(cudnn::kAttrTensorUniqueId == CUDNN_ATTR_TENSOR_UNIQUE_ID);
static_assert(cudnn::kAttrTensorIsVirtual == CUDNN_ATTR_TENSOR_IS_VIRTUAL);
static_assert(cudnn::kAttrTensorIsByValue == CUDNN_ATTR_TENSOR_IS_BY_VALUE);
static_assert(cudnn::kAttrVariantPackUniqueIds == CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
static_assert(cudnn::kAttrVariantPackDataPointers == CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
static_assert(cudnn::kAttrVariantPackWorkspace == CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
static_assert(cudnn::kAttrMatmulCompType == CUDNN_ATTR_MATMUL_COMP_TYPE);
static_assert(cudnn::kAttrOperationMatmulAdesc == CUDNN_ATTR_OPERATION_MATMUL_ADESC);
static_assert(cudnn::kAttrOperationMatmulBdesc == CUDNN_ATTR_OPERATION_MATMUL_BDESC);
static_assert(cudnn::kAttrOperationMatmulCdesc == CUDNN_ATTR_OPERATION_MATMUL_CDESC);
static_assert(cudnn::kAttrOperationMatmulDesc == CUDNN_ATTR_OPERATION_MATMUL_DESC);
static_assert(cudnn::kAttrReductionOperator == CUDNN_ATTR_REDUCTION_OPERATOR);
static_assert(cudnn::kAttrReductionCompType == CUDNN_ATTR_REDUCTION_COMP_TYPE);
static_assert(cudnn::kAttrOperationReductionXdesc == CUDNN_ATTR_OPERATION_REDUCTION_XDESC);
static_assert(cudnn::kAttrOperationReductionYdesc == CUDNN_ATTR_OPERATION_REDUCTION_YDESC);
static_assert(cudnn::kAttrOperationReductionDesc == CUDNN_ATTR_OPERATION_REDUCTION_DESC);
static_assert(cudnn::kAttrDevicepropJsonRepresentation ==
              CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION);

}  // namespace tfb
#endif
#endif
