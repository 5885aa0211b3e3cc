// Checks the accesses of a running kernel, one by one.
#ifndef TFB_CORE_CUDA_SIMULATOR_CHECKER_H_
#define TFB_CORE_CUDA_SIMULATOR_CHECKER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/cuda/simulator/device_memory.h"
#include "core/cuda/simulator/order.h"
#include "core/cuda/simulator/shared_shadow.h"

namespace cuda_simulator {

struct Machine;

struct MemoryAccess {
  uintptr_t address;
  size_t bytes;
  AccessKind kind;
  bool aligned;      // the address must be a multiple of `bytes`
  const void* site;  // where in the kernel: a return address
};

class Checker {
 public:
  explicit Checker(Machine* machine);

  // Kernels may read their parameters' bytes.
  void StartLaunch(size_t dynamic_shared_bytes, const void* parameters, size_t parameter_bytes);
  void StartBlock() { order.StartBlock(); }
  // Of the running thread. Returns if the kernel may make the access, for better or worse.
  void Check(const MemoryAccess& access);

  void* dynamic_shared() { return dynamic_shared_; }
  bool IsShared(const void* address) const {
    return dynamic_.Contains(reinterpret_cast<uintptr_t>(address)) ||
           static_.Contains(reinterpret_cast<uintptr_t>(address));
  }

  Order order;
  DeviceMemory device_memory;

 private:
  void CheckShared(SharedShadow* shadow, const char* which, const MemoryAccess& access);
  void CheckDevice(DeviceBufferShadow* buffer, const MemoryAccess& access);
  void CheckElsewhere(const MemoryAccess& access);
  bool IsStaticData(uintptr_t address);

  struct Range {
    uintptr_t begin;
    uintptr_t end;
  };

  Machine* const machine_;
  char* const dynamic_shared_;
  SharedShadow dynamic_;
  SharedShadow static_;  // of all kernels in the program
  uintptr_t parameters_ = 0;
  size_t parameter_bytes_ = 0;
  std::vector<Range> images_;  // of the program and its libraries
};

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_CHECKER_H_
