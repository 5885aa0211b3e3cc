#include "harness/testing/simulated_clock.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <new>

namespace tfb {
namespace {

// Not 0, since a deadline of 0 is none. Readings are exact to 2^-42 s at first, a quarter of a
// picosecond.
constexpr double kFirstReading = 1024;

}  // namespace

SimulatedClock::SimulatedClock() {
  static_assert(std::atomic<double>::is_always_lock_free, "processes cannot share a lock");
  void* shared =
      mmap(nullptr, sizeof(*seconds_), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) {
    std::perror("SimulatedClock: mmap");
    std::abort();
  }
  seconds_ = new (shared) std::atomic<double>(kFirstReading);
}

SimulatedClock::~SimulatedClock() { munmap(seconds_, sizeof(*seconds_)); }

void SimulatedClock::WaitUntil(double seconds) {
  double now = *seconds_;
  while (now < seconds && !seconds_->compare_exchange_weak(now, seconds)) {
  }
}

void SimulatedClock::Advance(double seconds) {
  double now = *seconds_;
  while (!seconds_->compare_exchange_weak(now, now + seconds)) {
  }
}

}  // namespace tfb
