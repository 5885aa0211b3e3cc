// Checks the accesses of a running kernel, one by one.
#ifndef TFB_CORE_CUDA_SIMULATOR_CHECKER_H_
#define TFB_CORE_CUDA_SIMULATOR_CHECKER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/cuda/simulator/device_memory.h"
#include "core/cuda/simulator/images.h"
#include "core/cuda/simulator/order.h"
#include "core/cuda/simulator/shared_shadow.h"
#include "core/cuda/simulator/simulator.h"

namespace cuda_simulator {

struct Machine;

struct MemoryAccess {
  uintptr_t address;
  size_t bytes;
  AccessKind kind;
  const void* site;  // where in the kernel: a return address
};

class Checker {
 public:
  // Dynamic shared memory that can be at all. What follows a block's own is never anybody's.
  static constexpr size_t kDynamicCapacity = 512 << 10;

  explicit Checker(Machine* machine);

  // Kernels may read their parameters' bytes.
  void StartLaunch(size_t dynamic_shared_bytes, const void* parameters, size_t parameter_bytes);
  void StartBlock() { order.StartBlock(); }
  // Of the running thread, not to its stack. Returns if the kernel is to go on.
  void Check(const MemoryAccess& access);
  // True if it is in order, which most are. Otherwise Check tells.
  template <AccessKind kKind, size_t kBytes>
  bool CheckQuickly(uintptr_t address) {
    SharedShadow* shared = dynamic_.Contains(address) ? &dynamic_ : recent_static_;
    if (shared->Contains(address)) {
      if (!shared->AccessQuickly<kKind, kBytes>(address)) return false;
    } else {
      DeviceBufferShadow* buffer = device_memory.FindRecent(address);
      if (buffer == nullptr || !buffer->ContainsAll(address, kBytes)) return false;
      if (kKind == AccessKind::kWrite) buffer->SetWritten(address, kBytes);
      if (kKind == AccessKind::kRead && !buffer->IsWritten(address, kBytes)) return false;
    }
    ++accesses_;
    return true;
  }
  int64_t accesses() const { return accesses_; }  // checked so far
  // An address in words: "at byte 4 of a buffer of 256 bytes".
  std::string Describe(uintptr_t address);

  void* dynamic_shared() { return dynamic_shared_; }
  bool IsShared(const void* address);

  Order order;
  DeviceMemory device_memory;

 private:
  void CheckShared(SharedShadow* shadow, const MemoryAccess& access);
  void CheckDevice(DeviceBufferShadow* buffer, const MemoryAccess& access);
  void CheckElsewhere(const MemoryAccess& access);
  [[noreturn]] void Leave(const MemoryAccess& access);
  void Report(FindingKind kind, const MemoryAccess& access, const char* rest);
  void ReportShared(SharedShadow::Verdict verdict, int other, const MemoryAccess& access);
  // Of the static variables that the address is among; null: it is not.
  SharedShadow* StaticShared(uintptr_t address);
  const Segment* SegmentOf(uintptr_t address);

  Machine* const machine_;
  char* const dynamic_shared_;
  SharedShadow dynamic_;
  // Of the variables of the program, and of each library with kernels: __shared__ ones are among
  // them, and kernels can have no others.
  std::vector<std::unique_ptr<SharedShadow>> static_;
  SharedShadow* recent_static_;  // the one of those used last; before that dynamic_
  int64_t accesses_ = 0;
  uintptr_t parameters_ = 0;
  size_t parameter_bytes_ = 0;
  std::vector<Segment> segments_;
};

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_CHECKER_H_
