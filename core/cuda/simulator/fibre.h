// Implements fibres, on which CUDA threads run: their stacks, and the switch from one to another.
// It tells the address sanitizer of switches, but not the thread sanitizer (see BUILD).
#ifndef TFB_CORE_CUDA_SIMULATOR_FIBRE_H_
#define TFB_CORE_CUDA_SIMULATOR_FIBRE_H_

#include <signal.h>

#include <boost/context/detail/fcontext.hpp>
#include <cstddef>
#include <cstdint>

#include "core/sanitizers.h"

#if TFB_ADDRESS_SANITIZER
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_simulator {

class Fibre {
 public:
  Fibre() = default;
  Fibre(const Fibre&) = delete;
  Fibre& operator=(const Fibre&) = delete;

  // Makes a fibre on the given stack, whose first switch calls `entry`, which must not return. A
  // fibre that does not run may be made anew, which discards its earlier state.
  void Make(char* stack, size_t bytes, void (*entry)());
  // Switches to another fibre and returns when a fibre switches back. Call it on this fibre, or on
  // a host thread with a fibre that was not made and that stands for the thread from then on.
  //
  // It is inlined, as is what calls it for a thread: after a switch the processor mispredicts every
  // return from a function that was called before.
  void SwitchTo(Fibre* next) {
    const Switch jump{this, next};
#if TFB_ADDRESS_SANITIZER
    __sanitizer_start_switch_fiber(&asan_stack_, next->stack_, next->stack_bytes_);
#endif
    const boost::context::detail::transfer_t back =
        boost::context::detail::jump_fcontext(next->context_, const_cast<Switch*>(&jump));
    Arrive(back.fctx, *static_cast<const Switch*>(back.data));
  }

 private:
  struct Switch {
    Fibre* from;
    Fibre* to;
  };
  // Arrives on the fibre `jump.to`: the fibre that switched resumes at `from_context`.
  static void Arrive(void* from_context, const Switch& jump) {
    jump.from->context_ = from_context;
#if TFB_ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(jump.to->asan_stack_, &jump.from->stack_,
                                    &jump.from->stack_bytes_);
#endif
  }
  friend struct FibreEntry;

  void* context_ = nullptr;  // context where the fibre resumes
  void (*entry_)() = nullptr;
  const void* stack_ = nullptr;
  size_t stack_bytes_ = 0;
  void* asan_stack_ = nullptr;  // the address sanitizer's
};

// Stacks in one piece of memory, each with an inaccessible page below it.
class Stacks {
 public:
  // Reserves `count` stacks of `bytes`; the contents of earlier ones are lost. Returns false, and
  // does nothing, where there are such stacks already.
  bool Reserve(int count, size_t bytes);

  char* stack(int index) const { return begin_ + index * stride_ + kPageBytes; }
  // Returns a size slightly below the requested one, different for each stack, so that the tops of
  // the stacks do not share cache sets.
  size_t bytes(int index) const { return stride_ - kPageBytes - index % 16 * 256; }
  // Tells whether the address is in a stack, or below one.
  bool Contains(uintptr_t address) const {
    return address - reinterpret_cast<uintptr_t>(begin_) < total_bytes_;
  }
  // Returns the stack below which the address is, or -1.
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

// While an OverflowTrap exists, a fibre that touches the page below its stack continues in
// on_overflow(where), which must not return, on the emptied stack. Other faults go to the previous
// handler, as all faults do on processors other than x86-64 and AArch64.
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
