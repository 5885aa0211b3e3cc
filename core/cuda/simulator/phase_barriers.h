// Implements the barriers in shared memory that count arrivals and bytes: PTX's mbarrier.
#ifndef TFB_CORE_CUDA_SIMULATOR_PHASE_BARRIERS_H_
#define TFB_CORE_CUDA_SIMULATOR_PHASE_BARRIERS_H_

#include <cstdint>
#include <map>
#include <string>

#include "core/cuda/simulator/order.h"

namespace cuda_simulator {

struct Machine;

// A phase ends when `count` arrivals and all expected bytes have come, which may come before they
// are expected. What came before an arrival, and the copies that completed, come before what waits
// for the phase.
struct PhaseBarrier {
  int count = 0;
  int pending = 0;    // arrivals that are missing in this phase
  int64_t bytes = 0;  // that are missing
  unsigned phase = 0;
  Order::Knowledge before_phase;  // what came before the end of the last phase
  Order::Knowledge in_phase;
  int maker = 0;  // the thread that set it up, and when
  Stamp made = 0;
  bool is_fenced = false;  // whether copies see it
  int agent = 0;           // of copies that complete on it
  Stamp last_copy = 0;     // 0: none
  int copier = 0;          // the thread that started it, and where
  const void* copy_site = nullptr;
};

// The barriers of the running block, by their places in memory. The members are for the running thread.
class PhaseBarriers {
 public:
  explicit PhaseBarriers(Machine* machine) : machine_(machine) {}

  void StartBlock() { barriers_.clear(); }
  // Finds copies that no thread has waited for.
  void FinishBlock();

  void Init(void* place, unsigned count, const void* site);
  // Arrives; the phase expects so many more bytes.
  void Arrive(void* place, unsigned bytes, const void* site);
  // Waits for the end of the phase of that parity. Returns false where the wait timed out.
  bool Wait(void* place, unsigned parity, const void* site);
  // Makes those that the thread has set up visible to copies.
  void Fence();
  // Begins a copy that completes on the barrier, and ends it: it brings so many bytes. The thread
  // does not know of its end before it waits.
  PhaseBarrier* BeginCopy(void* place, const void* site);
  void EndCopy(PhaseBarrier* barrier, int64_t bytes, const void* site);

 private:
  class PhaseEnd;

  // Returns the barrier there, or ends the launch.
  PhaseBarrier* Find(void* place, const char* instruction, const void* site);
  void Expect(PhaseBarrier* barrier, int64_t bytes, const void* site);
  void EndPhaseIfComplete(PhaseBarrier* barrier);

  Machine* const machine_;
  std::map<void*, PhaseBarrier> barriers_;
};

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_PHASE_BARRIERS_H_
