// The clock that the harness reads and waits by. Whatever measures, times out or keeps to a budget
// takes a Clock, so that a test can give it a simulated one (harness/testing/simulated_clock.h) and
// its verdict depends on no real time.
#ifndef TFB_HARNESS_MEASURE_CLOCK_H_
#define TFB_HARNESS_MEASURE_CLOCK_H_

namespace tfb {

class Clock {
 public:
  virtual ~Clock() = default;

  // Returns the seconds since some fixed point. They never decrease, and they are the same in a
  // process and in those that it forks.
  virtual double Seconds() = 0;

  // Returns as soon as Seconds() is not below `seconds`.
  virtual void WaitUntil(double seconds) = 0;

  // Returns after so many seconds.
  void Wait(double seconds) { WaitUntil(Seconds() + seconds); }
};

// Returns the system's monotonic clock. Its waits sleep, but spend their last milliseconds reading
// the clock, so that they end on time where the core is not taken away.
Clock* RealClock();

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_CLOCK_H_
