// Fibres, on which CUDA threads run: their stacks, and the switch from one to another. What the
// address sanitizer and the operating system must be told of them, they are told here. (The thread
// sanitizer is not told: see BUILD.)
#ifndef TFB_CORE_CUDA_SIMULATOR_FIBRE_H_
#define TFB_CORE_CUDA_SIMULATOR_FIBRE_H_

#include <signal.h>

#include <cstddef>
#include <cstdint>

namespace cuda_simulator {

class Fibre {
 public:
  Fibre() = default;
  Fibre(const Fibre&) = delete;
  Fibre& operator=(const Fibre&) = delete;

  // The first switch to it calls `entry`, which must not return, on the given stack. A fibre may be
  // made anew at any time when it does not run: what it was doing is forgotten.
  void Make(char* stack, size_t bytes, void (*entry)());
  // To be called on this fibre, or by a host thread on a fibre that was not made and stands for it
  // from then on. Returns when another one switches to it.
  void SwitchTo(Fibre* next);

 private:
  struct Switch {
    Fibre* from;
    Fibre* to;
  };
  static void Arrive(void* from_context, const Switch& jump);
  friend struct FibreEntry;

  void* context_ = nullptr;  // where it goes on
  void (*entry_)() = nullptr;
  const void* stack_ = nullptr;
  size_t stack_bytes_ = 0;
  void* asan_stack_ = nullptr;  // the address sanitizer's
};

// Stacks in one piece of memory, each with a page below it that nobody may touch.
class Stacks {
 public:
  // `count` stacks of `bytes`; what was on earlier ones is lost. False, and nothing happens, where
  // there are such stacks already.
  bool Reserve(int count, size_t bytes);

  char* stack(int index) const { return begin_ + index * stride_ + kPageBytes; }
  // Less than was asked for, and a little different for each, so that the tops of all stacks do not
  // lie in the same lines of a cache.
  size_t bytes(int index) const { return stride_ - kPageBytes - index % 16 * 256; }
  // In a stack, or below one.
  bool Contains(uintptr_t address) const {
    return address - reinterpret_cast<uintptr_t>(begin_) < total_bytes_;
  }
  // Below which one it is; -1: below none.
  int IndexBelow(uintptr_t address) const {
    const uintptr_t offset = address - reinterpret_cast<uintptr_t>(begin_);
    const bool is_below = offset < total_bytes_ && offset % stride_ < kPageBytes;
    return is_below ? static_cast<int>(offset / stride_) : -1;
  }

 private:
  static constexpr size_t kPageBytes = 4096;
  char* begin_ = nullptr;
  size_t total_bytes_ = 0;
  size_t stride_ = 0;
};

// While it lives, a fibre that touches the page below its stack goes on, on the stack as it was at
// first, with on_overflow(where), which must not return. Faults elsewhere are left to whoever
// handled them before. On other processors than x86-64 and AArch64 all are.
class OverflowTrap {
 public:
  OverflowTrap(const Stacks* stacks, void (*on_overflow)(const void*));
  ~OverflowTrap();
  OverflowTrap(const OverflowTrap&) = delete;
  OverflowTrap& operator=(const OverflowTrap&) = delete;

 private:
  static void Handle(int signal, siginfo_t* info, void* context);

  const Stacks* stacks_;
  void (*on_overflow_)(const void*);
  struct sigaction previous_action_;
  stack_t previous_stack_;
};

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_FIBRE_H_
