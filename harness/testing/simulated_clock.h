// Clocks for tests.
#ifndef TFB_HARNESS_TESTING_SIMULATED_CLOCK_H_
#define TFB_HARNESS_TESTING_SIMULATED_CLOCK_H_

#include <algorithm>
#include <atomic>
#include <functional>
#include <utility>

#include "harness/measure/clock.h"

namespace tfb {

// A clock that stands still until somebody waits by it or advances it. Threads share it, and so do processes that are forked while it exists: who waits in one of them
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

// A clock by which each reading is `tick` seconds later than the one before, for code under test
// that waits for time to pass but waits by no clock.
class TickingClock : public Clock {
 public:
  explicit TickingClock(double tick) : tick_(tick) {}
  double Seconds() override { return seconds_ += tick_; }
  void WaitUntil(double seconds) override { seconds_ = std::max(seconds_, seconds); }

 private:
  const double tick_;
  double seconds_ = 0;
};

// A clock by which the time before a reading depends on how many readings there were before.
class CountingClock : public Clock {
 public:
  explicit CountingClock(std::function<double(int reading)> tick) : tick_(std::move(tick)) {}
  double Seconds() override { return seconds_ += tick_(readings_++); }
  void WaitUntil(double seconds) override { seconds_ = std::max(seconds_, seconds); }

 private:
  const std::function<double(int)> tick_;
  double seconds_ = 0;
  int readings_ = 0;
};

}  // namespace tfb

#endif  // TFB_HARNESS_TESTING_SIMULATED_CLOCK_H_
