// Keeps the runtime's last error of each host thread, as CUDA does.
#ifndef TFB_CORE_CUDA_SIMULATOR_RUNTIME_ERROR_H_
#define TFB_CORE_CUDA_SIMULATOR_RUNTIME_ERROR_H_

#include <string>

#include "core/cuda/simulator/cuda_runtime.h"

namespace cuda_simulator {

cudaError_t SetLastError(cudaError_t error);  // returns `error`
// Sets the text that cudaGetErrorString returns for launches.
void SetLaunchMessage(std::string message);

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_RUNTIME_ERROR_H_
