// Counts the instructions that this process retires in user mode, by the kernel's counters. They
// vary by a few in a million where times vary by a few in a hundred, so they show smaller changes.
#ifndef TFB_HARNESS_MEASURE_INSTRUCTION_COUNTER_H_
#define TFB_HARNESS_MEASURE_INSTRUCTION_COUNTER_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

namespace tfb {

// Counts for the calling thread and all threads that descend from it after Open, so open the
// counter before the thread pool is made.
class InstructionCounter {
 public:
  // Returns Unavailable, with the reason, where the kernel grants no counter: on a virtual machine
  // without one, or with perf_event_paranoid above 2.
  static absl::StatusOr<std::unique_ptr<InstructionCounter>> Open();
  // Counts another event of perf_event_open(2), for tests.
  static absl::StatusOr<std::unique_ptr<InstructionCounter>> Open(uint32_t type, uint64_t config);
  // Makes a counter for tests that reads `file`, 8 bytes at a time as from perf_event_open, and
  // closes it.
  static std::unique_ptr<InstructionCounter> OfFile(int file);
  ~InstructionCounter();
  InstructionCounter(const InstructionCounter&) = delete;
  InstructionCounter& operator=(const InstructionCounter&) = delete;

  int64_t Read() const;  // returns the count since Open

 private:
  explicit InstructionCounter(int file) : file_(file) {}

  int file_;
};

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_INSTRUCTION_COUNTER_H_
