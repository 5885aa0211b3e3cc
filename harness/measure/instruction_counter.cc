#include "harness/measure/instruction_counter.h"

#include <linux/perf_event.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tfb {

absl::StatusOr<std::unique_ptr<InstructionCounter>> InstructionCounter::Open() {
  return Open(PERF_TYPE_HARDWARE, PERF_COUNT_HW_INSTRUCTIONS);
}

absl::StatusOr<std::unique_ptr<InstructionCounter>> InstructionCounter::Open(uint32_t type,
                                                                             uint64_t config) {
  perf_event_attr event = {};
  event.size = sizeof(event);
  event.type = type;
  event.config = config;
  event.exclude_kernel = 1;
  event.exclude_hv = 1;
  event.inherit = 1;
  constexpr pid_t kThisThread = 0;
  constexpr int kAnyProcessor = -1, kNoGroup = -1;
  const long file = syscall(SYS_perf_event_open, &event, kThisThread, kAnyProcessor, kNoGroup,
                            PERF_FLAG_FD_CLOEXEC);
  if (file < 0) {
    return absl::UnavailableError(
        absl::StrCat("the kernel counts no instructions: ", std::strerror(errno)));
  }
  return OfFile(static_cast<int>(file));
}

std::unique_ptr<InstructionCounter> InstructionCounter::OfFile(int file) {
  return std::unique_ptr<InstructionCounter>(new InstructionCounter(file));
}

InstructionCounter::~InstructionCounter() { close(file_); }

int64_t InstructionCounter::Read() const {
  int64_t count = 0;
  return read(file_, &count, sizeof(count)) == sizeof(count) ? count : 0;
}

}  // namespace tfb
