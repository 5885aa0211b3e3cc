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
#include "core/cuda/simulator/releases.h"
#include "core/cuda/simulator/shared_shadow.h"
#include "core/cuda/simulator/simulator.h"

namespace cuda_simulator {

struct Machine;

struct MemoryAccess {
  uintptr_t address;
  size_t bytes;
  AccessKind kind;
  const void* site;                            // the code address in the kernel: a return address
  const SharedShadow::Agent* agent = nullptr;  // of accesses by one, to shared memory
};

class Checker {
 public:
  // The most dynamic shared memory that a block can have. Memory after a block's own is out of
  // bounds.
  static constexpr size_t kDynamicCapacity = 512 << 10;

  explicit Checker(Machine* machine);

  // Prepares for a launch, after Banks. Kernels may read their parameters' bytes.
  void StartLaunch(size_t dynamic_shared_bytes, const void* parameters, size_t parameter_bytes);
  void StartBlock(const Index3& index) {
    order.StartBlock();
    releases.StartBlock();
    blocks_.push_back(index);
  }
  // Checks an access of the running thread outside its stack. Returns if the kernel may continue.
  void Check(const MemoryAccess& access);
  // Return true if the access is in order, as most are: one of shared memory, and one of device
  // memory. Otherwise the next of the two, and at last Check, decides.
  template <AccessKind kKind, size_t kBytes>
  bool CheckSharedQuickly(uintptr_t address) {
    SharedShadow* shared = dynamic_.ContainsQuickly(address) ? &dynamic_ : recent_static_;
    if (!shared->ContainsQuickly(address)) return false;
    if (!shared->AccessQuickly<kKind, kBytes>(address)) return false;
    ++accesses_;
    return true;
  }
  template <AccessKind kKind, size_t kBytes>
  bool CheckDeviceQuickly(uintptr_t address) {
    DeviceBufferShadow* buffer = device_memory.FindRecent(address);
    if (buffer == nullptr || !buffer->ContainsAll(address, kBytes)) return false;
    if (kKind == AccessKind::kWrite) buffer->SetWritten(address, kBytes);
    if (kKind == AccessKind::kRead && !buffer->IsWritten(address, kBytes)) return false;
    if (!buffer->AccessQuickly<kKind, kBytes>(order, address)) return false;
    ++accesses_;
    return true;
  }
  int64_t accesses() const { return accesses_; }  // Returns the number of accesses checked so far.
  // Describes an address: "at byte 4 of a buffer of 256 bytes".
  std::string Describe(uintptr_t address);

  void* dynamic_shared() { return dynamic_shared_; }
  size_t dynamic_shared_bytes() const { return dynamic_.bytes(); }
  bool IsShared(const void* address);
  // Return the 32-bit address of a place in shared memory, and the place of an address, or null.
  uint32_t SharedAddress(const void* place);
  void* SharedAt(uint32_t address) const;

  // Makes the order track all threads, for instructions that order some of them: see Order.
  void TrackAll(int threads);
  // Does what __threadfence does for the running thread.
  void Fence() {
    releases.Fence();
    order.Fence();
  }

  Order order;
  Releases releases{&order};
  DeviceMemory device_memory;

 private:
  void CheckShared(SharedShadow* shadow, const MemoryAccess& access);
  void CheckDevice(DeviceBufferShadow* buffer, const MemoryAccess& access);
  void ReportDeviceConflict(const DeviceShadow::Conflict& conflict, const MemoryAccess& access);
  void CheckElsewhere(const MemoryAccess& access);
  [[noreturn]] void Leave(const MemoryAccess& access);
  void Report(FindingKind kind, const MemoryAccess& access, const char* rest);
  void ReportShared(SharedShadow::Verdict verdict, int other, const MemoryAccess& access);
  // Returns the static variables that contain the address, or null where none do.
  SharedShadow* StaticShared(uintptr_t address);
  const Segment* SegmentOf(uintptr_t address);

  Machine* const machine_;
  char* const dynamic_shared_;
  SharedShadow dynamic_;
  // Shadows of the variables of the program, and of each library with kernels: their __shared__
  // variables are among them, and kernels can have no others.
  std::vector<std::unique_ptr<SharedShadow>> static_;
  SharedShadow* recent_static_;  // the one that was used last; at first dynamic_
  int64_t accesses_ = 0;
  uintptr_t parameters_ = 0;
  size_t parameter_bytes_ = 0;
  std::vector<Segment> segments_;
  std::vector<Index3> blocks_;  // of this launch, in the order in which they run
};

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_CHECKER_H_
