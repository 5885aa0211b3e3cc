#include "harness/measure/clock.h"

#include <sys/wait.h>
#include <unistd.h>

#include "gtest/gtest.h"
#include "harness/testing/simulated_clock.h"

namespace tfb {
namespace {

TEST(RealClock, WaitsEndNoEarlierThanTheyShould) {
  Clock* const clock = RealClock();
  for (const double seconds : {-1.0, 0.0, 1e-5, 0.02}) {  // the last one sleeps first
    const double end = clock->Seconds() + seconds;
    clock->WaitUntil(end);
    EXPECT_GE(clock->Seconds(), end);
  }
}

TEST(SimulatedClock, StandsStillUntilItIsAdvancedOrWaitedBy) {
  SimulatedClock clock;
  const double begin = clock.Seconds();
  EXPECT_GT(begin, 0);
  EXPECT_EQ(clock.Seconds(), begin);
  clock.Advance(3600);
  EXPECT_EQ(clock.Seconds(), begin + 3600);
  clock.Wait(0.5);
  EXPECT_EQ(clock.Seconds(), begin + 3600.5);
  clock.WaitUntil(begin);  // that is past
  EXPECT_EQ(clock.Seconds(), begin + 3600.5);
}

TEST(SimulatedClock, ForkedProcessesShareIt) {
  SimulatedClock clock;
  const double begin = clock.Seconds();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    clock.Advance(7);
    _exit(0);
  }
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_EQ(clock.Seconds(), begin + 7);
}

}  // namespace
}  // namespace tfb
