// Instructions that this process retires in user mode, as the kernel counts them. They repeat to a
// few in a million where times repeat to a few in a hundred, so that they find changes that times
// cannot.
#ifndef TFB_HARNESS_MEASURE_INSTRUCTION_COUNTER_H_
#define TFB_HARNESS_MEASURE_INSTRUCTION_COUNTER_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

namespace tfb {

// Counts for the calling thread, and for those that it and its like start from then on: open it
// before the thread pool is made.
class InstructionCounter {
 public:
  // Returns Unavailable, with the reason, where the kernel grants no counter: on a virtual machine
  // without one, or with perf_event_paranoid above 2.
  static absl::StatusOr<std::unique_ptr<InstructionCounter>> Open();
  // Counts another event of perf_event_open(2), for tests.
  static absl::StatusOr<std::unique_ptr<InstructionCounter>> Open(uint32_t type, uint64_t config);
  // Counts what can be read from the descriptor `file`, 8 bytes at a time as from those of
  // perf_event_open, for tests. The counter closes it.
  static std::unique_ptr<InstructionCounter> OfFile(int file);
  ~InstructionCounter();
  InstructionCounter(const InstructionCounter&) = delete;
  InstructionCounter& operator=(const InstructionCounter&) = delete;

  int64_t Read() const;  // since Open

 private:
  explicit InstructionCounter(int file) : file_(file) {}

  int file_;
};

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_INSTRUCTION_COUNTER_H_
