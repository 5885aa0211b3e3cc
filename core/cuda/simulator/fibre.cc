#include "core/cuda/simulator/fibre.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <boost/context/detail/fcontext.hpp>
#include <cstdio>
#include <cstdlib>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace cuda_simulator {

namespace fcontext = boost::context::detail;

namespace {

// Of functions that were never left: what the address sanitizer knows of a stack.
void ForgetFrames(void* stack, size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(stack, bytes);
#else
  (void)stack, (void)bytes;
#endif
}

}  // namespace

struct FibreEntry {
  static void Enter(fcontext::transfer_t from) {
    const auto& jump = *static_cast<const Fibre::Switch*>(from.data);
    Fibre* self = jump.to;
    Fibre::Arrive(from.fctx, jump);
    self->entry_();
    std::abort();
  }
};

Fibre::~Fibre() {
#ifdef __SANITIZE_THREAD__
  if (tsan_fibre_ != nullptr && !is_callers_) __tsan_destroy_fiber(tsan_fibre_);
#endif
}

void Fibre::Make(char* stack, size_t bytes, void (*entry)()) {
  entry_ = entry;
  stack_ = stack;
  stack_bytes_ = bytes;
  asan_stack_ = nullptr;
  context_ = fcontext::make_fcontext(stack + bytes, bytes, &FibreEntry::Enter);
  ForgetFrames(stack, bytes);
#ifdef __SANITIZE_THREAD__
  if (tsan_fibre_ != nullptr) __tsan_destroy_fiber(tsan_fibre_);
  tsan_fibre_ = __tsan_create_fiber(0);
#endif
}

void Fibre::MakeOfCaller() {
  is_callers_ = true;
#ifdef __SANITIZE_THREAD__
  tsan_fibre_ = __tsan_get_current_fiber();
#endif
}

void Fibre::SwitchTo(Fibre* next) {
  const Switch jump{this, next};
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&asan_stack_, next->stack_, next->stack_bytes_);
#endif
#ifdef __SANITIZE_THREAD__
  __tsan_switch_to_fiber(next->tsan_fibre_, 0);
#endif
  const fcontext::transfer_t back =
      fcontext::jump_fcontext(next->context_, const_cast<Switch*>(&jump));
  Arrive(back.fctx, *static_cast<const Switch*>(back.data));
}

// On the fibre `jump.to`: the one that it came from goes on at `from_context`.
void Fibre::Arrive(void* from_context, const Switch& jump) {
  jump.from->context_ = from_context;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(jump.to->asan_stack_, &jump.from->stack_,
                                  &jump.from->stack_bytes_);
#endif
}

bool Stacks::Reserve(int count, size_t bytes) {
  const size_t stride = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes + kPageBytes;
  if (stride == stride_ && total_bytes_ >= stride * count) return false;
  if (begin_ != nullptr) munmap(begin_, total_bytes_);
  stride_ = stride;
  total_bytes_ = stride * count;
  void* memory = mmap(nullptr, total_bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::fprintf(stderr, "cuda_simulator: no %zu bytes for the stacks of threads\n", total_bytes_);
    std::abort();
  }
  begin_ = static_cast<char*>(memory);
  for (int index = 0; index < count; ++index) {
    mprotect(begin_ + index * stride_, kPageBytes, PROT_NONE);
  }
  return true;
}

namespace {

const OverflowTrap* armed_trap = nullptr;  // one launch runs at a time

// As if the instruction that faulted were a call; null where the processor is not known.
const void* ReturnAddressOf(const ucontext_t& context) {
#if defined(__x86_64__)
  return reinterpret_cast<const char*>(context.uc_mcontext.gregs[REG_RIP]) + 1;
#elif defined(__aarch64__)
  return reinterpret_cast<const char*>(context.uc_mcontext.pc) + 1;
#else
  (void)context;
  return nullptr;
#endif
}

}  // namespace

OverflowTrap::OverflowTrap(const Stacks* stacks, void (*on_overflow)(const void*))
    : stacks_(stacks), on_overflow_(on_overflow) {
  armed_trap = this;
  alignas(16) static char handler_stack[64 << 10];  // the fibre's is full
  ForgetFrames(handler_stack, sizeof(handler_stack));
  stack_t stack = {};
  stack.ss_sp = handler_stack;
  stack.ss_size = sizeof(handler_stack);
  sigaltstack(&stack, &previous_stack_);
  struct sigaction action = {};
  action.sa_sigaction = &OverflowTrap::Handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous_action_);
}

OverflowTrap::~OverflowTrap() {
  sigaction(SIGSEGV, &previous_action_, nullptr);
  sigaltstack(&previous_stack_, nullptr);
  armed_trap = nullptr;
}

void OverflowTrap::Handle(int, siginfo_t* info, void* context) {
  const OverflowTrap& trap = *armed_trap;
  if (trap.stacks_->IsGuard(reinterpret_cast<uintptr_t>(info->si_addr))) {
    const ucontext_t& where = *static_cast<const ucontext_t*>(context);
    pthread_sigmask(SIG_SETMASK, &where.uc_sigmask, nullptr);  // what a return would do
    trap.on_overflow_(ReturnAddressOf(where));
  }
  sigaction(SIGSEGV, &trap.previous_action_, nullptr);  // the access faults again
}

}  // namespace cuda_simulator
