// The functions of cuDNN's backend API that this project uses, and their constants, as
// cudnn_graph.h of cuDNN 9 has them, in plain C types: handles and descriptors are void*,
// enumerations int. library_prototypes.cu checks them against the header where there is one, so
// that a build needs no header.
#ifndef TFB_CORE_CUDA_CUDNN_FUNCTIONS_H_
#define TFB_CORE_CUDA_CUDNN_FUNCTIONS_H_

#include <stddef.h>
#include <stdint.h>

namespace tfb {

struct CudnnFunctions {
  size_t (*get_version)();                                    // cudnnGetVersion
  int (*create)(void** handle);                               // cudnnCreate
  int (*set_stream)(void* handle, void* stream);              // cudnnSetStream
  const char* (*error_string)(int status);                    // cudnnGetErrorString
  void (*last_error_string)(char* message, size_t max_size);  // cudnnGetLastErrorString
  int (*create_descriptor)(int type, void** descriptor);      // cudnnBackendCreateDescriptor
  int (*destroy_descriptor)(void* descriptor);                // cudnnBackendDestroyDescriptor
  int (*set_attribute)(void* descriptor, int name, int type, int64_t count,
                       const void* elements);  // cudnnBackendSetAttribute
  int (*get_attribute)(const void* descriptor, int name, int type, int64_t wanted, int64_t* count,
                       void* elements);                          // cudnnBackendGetAttribute
  int (*finalize)(void* descriptor);                             // cudnnBackendFinalize
  int (*execute)(void* handle, void* plan, void* variant_pack);  // cudnnBackendExecute
};

constexpr int kCudnnSuccess = 0;

// Constants have the header's names in this project's style: kBackendTensorDescriptor is
// CUDNN_BACKEND_TENSOR_DESCRIPTOR.
namespace cudnn {

// cudnnDataType_t
constexpr int kDataFloat = 0;
constexpr int kDataHalf = 2;
constexpr int kDataInt32 = 4;
constexpr int kDataBfloat16 = 9;
constexpr int kDataBoolean = 11;
// cudnnPointwiseMode_t
constexpr int kPointwiseAdd = 0;
constexpr int kPointwiseMul = 1;
constexpr int kPointwiseDiv = 6;
constexpr int kPointwiseSub = 9;
constexpr int kPointwiseExp = 13;
constexpr int kPointwiseLog = 15;
constexpr int kPointwiseCmpGe = 303;
constexpr int kPointwiseGenIndex = 501;
constexpr int kPointwiseBinarySelect = 601;
// cudnnReduceTensorOp_t
constexpr int kReduceTensorAdd = 0;
constexpr int kReduceTensorMax = 3;
// cudnnBackendHeurMode_t
constexpr int kHeurModeFallback = 2;
constexpr int kHeurModeA = 3;
// cudnnBackendDescriptorType_t
constexpr int kBackendPointwiseDescriptor = 0;
constexpr int kBackendEnginecfgDescriptor = 3;
constexpr int kBackendEngineheurDescriptor = 4;
constexpr int kBackendExecutionPlanDescriptor = 5;
constexpr int kBackendOperationPointwiseDescriptor = 13;
constexpr int kBackendOperationgraphDescriptor = 15;
constexpr int kBackendVariantPackDescriptor = 16;
constexpr int kBackendTensorDescriptor = 17;
constexpr int kBackendMatmulDescriptor = 18;
constexpr int kBackendOperationMatmulDescriptor = 19;
constexpr int kBackendReductionDescriptor = 21;
constexpr int kBackendOperationReductionDescriptor = 22;
constexpr int kBackendDevicepropDescriptor = 38;  // cuDNN 9.8 on
// cudnnBackendAttributeType_t
constexpr int kTypeHandle = 0;
constexpr int kTypeDataType = 1;
constexpr int kTypeBoolean = 2;
constexpr int kTypeInt64 = 3;
constexpr int kTypeVoidPtr = 6;
constexpr int kTypeHeurMode = 8;
constexpr int kTypePointwiseMode = 14;
constexpr int kTypeBackendDescriptor = 15;
constexpr int kTypeReductionOperatorType = 18;
constexpr int kTypeChar = 24;
// cudnnBackendAttributeName_t
constexpr int kAttrPointwiseMode = 0;
constexpr int kAttrPointwiseMathPrec = 1;
constexpr int kAttrPointwiseAxis = 9;
constexpr int kAttrEngineheurMode = 200;
constexpr int kAttrEngineheurOperationGraph = 201;
constexpr int kAttrEngineheurResults = 202;
constexpr int kAttrEngineheurDeviceprop = 204;
constexpr int kAttrExecutionPlanHandle = 400;
constexpr int kAttrExecutionPlanEngineConfig = 401;
constexpr int kAttrExecutionPlanWorkspaceSize = 402;
constexpr int kAttrExecutionPlanDeviceprop = 407;
constexpr int kAttrOperationPointwisePwDescriptor = 750;
constexpr int kAttrOperationPointwiseXdesc = 751;
constexpr int kAttrOperationPointwiseBdesc = 752;
constexpr int kAttrOperationPointwiseYdesc = 753;
constexpr int kAttrOperationPointwiseTdesc = 758;
constexpr int kAttrOperationgraphHandle = 800;
constexpr int kAttrOperationgraphOps = 801;
constexpr int kAttrTensorByteAlignment = 900;
constexpr int kAttrTensorDataType = 901;
constexpr int kAttrTensorDimensions = 902;
constexpr int kAttrTensorStrides = 903;
constexpr int kAttrTensorUniqueId = 906;
constexpr int kAttrTensorIsVirtual = 907;
constexpr int kAttrTensorIsByValue = 908;
constexpr int kAttrVariantPackUniqueIds = 1000;
constexpr int kAttrVariantPackDataPointers = 1001;
constexpr int kAttrVariantPackWorkspace = 1003;
constexpr int kAttrMatmulCompType = 1500;
constexpr int kAttrOperationMatmulAdesc = 1520;
constexpr int kAttrOperationMatmulBdesc = 1521;
constexpr int kAttrOperationMatmulCdesc = 1522;
constexpr int kAttrOperationMatmulDesc = 1523;
constexpr int kAttrReductionOperator = 1600;
constexpr int kAttrReductionCompType = 1601;
constexpr int kAttrOperationReductionXdesc = 1610;
constexpr int kAttrOperationReductionYdesc = 1611;
constexpr int kAttrOperationReductionDesc = 1612;
constexpr int kAttrDevicepropJsonRepresentation = 2702;

}  // namespace cudnn
}  // namespace tfb

#endif  // TFB_CORE_CUDA_CUDNN_FUNCTIONS_H_
