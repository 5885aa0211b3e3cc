// Simulates clocks for tests.
#ifndef TFB_HARNESS_TESTING_SIMULATED_CLOCK_H_
#define TFB_HARNESS_TESTING_SIMULATED_CLOCK_H_

#include <algorithm>
#include <atomic>
#include <functional>
#include <utility>

#include "harness/measure/clock.h"

namespace tfb {

// A clock that stands still until a thread waits by it or advances it. All threads share it, and so
// do processes that are forked while it exists. Waiting advances the clock, and takes no real time.
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

// A clock that advances by `tick` seconds at each reading, for code under test that polls a clock.
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
