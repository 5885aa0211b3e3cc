#include "harness/measure/clock.h"

#include <chrono>
#include <thread>

namespace tfb {
namespace {

// The last milliseconds of a wait are spun: more than a thread oversleeps on an idle machine.
constexpr double kSpinSeconds = 0.01;

class SteadyClock : public Clock {
 public:
  double Seconds() override {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  void WaitUntil(double seconds) override {
    const double sleep = seconds - Seconds() - kSpinSeconds;
    if (sleep > 0) std::this_thread::sleep_for(std::chrono::duration<double>(sleep));
    while (Seconds() < seconds) {
    }
  }
};

}  // namespace

Clock* RealClock() {
  static Clock* const clock = new SteadyClock;
  return clock;
}

}  // namespace tfb
