// Implements bulk copies of a tensor's boxes to shared memory (TMA): PTX's cp.async.bulk.tensor.
#ifndef TFB_CORE_CUDA_SIMULATOR_TENSOR_COPY_H_
#define TFB_CORE_CUDA_SIMULATOR_TENSOR_COPY_H_

namespace cuda_simulator {

// Copies the box at these coordinates, innermost first, of the tensor that `map`, a CUtensorMap,
// describes. It does so at once, and completes the bytes of the whole box on the barrier. Elements
// outside the tensor are zeros.
void CopyBox(const char* name, void* to, const void* map, const unsigned at[4], void* barrier,
             const void* site);

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_TENSOR_COPY_H_
