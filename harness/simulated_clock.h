// A clock for tests, which stands still until somebody waits by it or advances it.
#ifndef TFB_HARNESS_SIMULATED_CLOCK_H_
#define TFB_HARNESS_SIMULATED_CLOCK_H_

#include <atomic>

#include "harness/clock.h"

namespace tfb {

// Threads share it, and so do processes that are forked while it exists: who waits in one of them
// advances the clock of all. Waiting takes no real time.
class SimulatedClock : public Clock {
 public:
  SimulatedClock();
  ~SimulatedClock() override;
  SimulatedClock(const SimulatedClock&) = delete;
  SimulatedClock& operator=(const SimulatedClock&) = delete;

  double Seconds() override { return *seconds_; }
  void WaitUntil(double seconds) override;
  void Advance(double seconds);

 private:
  std::atomic<double>* seconds_;  // in shared memory
};

}  // namespace tfb

#endif  // TFB_HARNESS_SIMULATED_CLOCK_H_
