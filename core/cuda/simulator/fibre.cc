#include "core/cuda/simulator/fibre.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>

#if TFB_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#endif

namespace cuda_simulator {

namespace fcontext = boost::context::detail;

namespace {

// Clears the address sanitizer's marks on a stack whose functions did not return.
void ForgetFrames(void* stack, size_t bytes) {
#if TFB_ADDRESS_SANITIZER
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

void Fibre::Make(char* stack, size_t bytes, void (*entry)()) {
  entry_ = entry;
  stack_ = stack;
  stack_bytes_ = bytes;
  asan_stack_ = nullptr;
  context_ = fcontext::make_fcontext(stack + bytes, bytes, &FibreEntry::Enter);
  ForgetFrames(stack, bytes);
}

bool Stacks::Reserve(int count, size_t bytes) {
  const size_t stride = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes + kPageBytes;
  if (stride == stride_ && total_bytes_ >= stride * count) return false;
  if (begin_ != nullptr) {
    ForgetFrames(begin_, total_bytes_);  // something else may be there next
    munmap(begin_, total_bytes_);
  }
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

// Makes the interrupted thread continue in function(where), on an empty stack. `where` is its
// instruction, as if that had called the function. Returns false where the processor is not
// supported.
bool GoOnWith(void (*function)(const void*), char* stack_top, ucontext_t* context) {
  mcontext_t& machine = context->uc_mcontext;
  const uintptr_t top = reinterpret_cast<uintptr_t>(stack_top) / 16 * 16;
#if defined(__x86_64__)
  machine.gregs[REG_RDI] = machine.gregs[REG_RIP] + 1;
  machine.gregs[REG_RSP] = static_cast<greg_t>(top - 8);  // aligned as after a call instruction
  machine.gregs[REG_RIP] = static_cast<greg_t>(reinterpret_cast<uintptr_t>(function));
  return true;
#elif defined(__aarch64__)
  machine.regs[0] = machine.pc + 1;
  machine.sp = top;
  machine.pc = reinterpret_cast<uintptr_t>(function);
  return true;
#else
  (void)function, (void)machine, (void)top;
  return false;
#endif
}

}  // namespace

OverflowTrap::OverflowTrap(const Stacks* stacks, void (*on_overflow)(const void*))
    : stacks_(stacks), on_overflow_(on_overflow) {
  armed_trap = this;
  alignas(16) static char handler_stack[64 << 10];  // the fibre's own stack is full
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
  const int index = trap.stacks_->IndexBelow(reinterpret_cast<uintptr_t>(info->si_addr));
  if (index >= 0) {
    char* stack = trap.stacks_->stack(index);
    const size_t bytes = trap.stacks_->bytes(index);
    ForgetFrames(stack, bytes);
    if (GoOnWith(trap.on_overflow_, stack + bytes, static_cast<ucontext_t*>(context))) return;
  }
  // With the old handler back, the access faults again.
  sigaction(SIGSEGV, &trap.previous_action_, nullptr);
}

}  // namespace cuda_simulator
