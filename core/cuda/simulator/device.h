// Functions that the device half of the simulator shares.
#ifndef TFB_CORE_CUDA_SIMULATOR_DEVICE_H_
#define TFB_CORE_CUDA_SIMULATOR_DEVICE_H_

#include "core/cuda/simulator/cuda_runtime.h"
#include "core/cuda/simulator/machine.h"

namespace cuda_simulator {

// Calls MeetInWarp for all 32 lanes, none of which may have finished, as PTX's .aligned
// instructions require. `site` is the code address in the kernel: a return address.
inline void MeetInWholeWarp(const char* name, void* argument, Collective complete,
                            const void* site) {
  running_machine->block.MeetInWarp({name, ~0u, argument, complete, site, true});
}

// Starts an asynchronous copy to shared memory: see __pipeline_memcpy_async.
void StartCopy(void* to, const void* from, size_t bytes, size_t zero_bytes, const void* site);

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_DEVICE_H_
