// The runtime's error of the calling host thread, as CUDA keeps it.
#ifndef TFB_CORE_CUDA_SIMULATOR_RUNTIME_ERROR_H_
#define TFB_CORE_CUDA_SIMULATOR_RUNTIME_ERROR_H_

#include <string>

#include "core/cuda/simulator/cuda_runtime.h"

namespace cuda_simulator {

// Returns `error`; `message` is what cudaGetErrorString says of launches.
cudaError_t SetLastError(cudaError_t error, std::string message);

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_RUNTIME_ERROR_H_
