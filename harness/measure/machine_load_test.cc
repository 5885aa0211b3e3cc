#include "harness/measure/machine_load.h"

#include <fstream>
#include <string>
#include <utility>

#include "gtest/gtest.h"

namespace tfb {
namespace {

// Synthetic files of one moment.
class MachineLoadTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string folder = ::testing::TempDir() + "/" +
                               ::testing::UnitTest::GetInstance()->current_test_info()->name() +
                               "_";
    sources_.stat = folder + "stat";
    sources_.pressure = folder + "pressure";
    sources_.loadavg = folder + "loadavg";
    sources_.own_stats = {folder + "own"};
    sources_.ticks_per_second = 100;
  }

  static void Write(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }

  // Writes the files of a machine of two cores: ticks that its cores were busy and stolen, and
  // ticks of the own process.
  LoadReading ReadingOf(int busy, int stolen, int own, double at_seconds) {
    const std::string user = std::to_string(busy - 6);
    Write(sources_.stat, "cpu  " + user + " 1 2 5000 70 1 2 " + std::to_string(stolen) +
                             " 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\ncpu1 1 1 1 1 1 1 1 1 0 0\n"
                             "intr 1 2 3\nctxt 99\n");
    Write(sources_.pressure,
          "some avg10=98.12 avg60=96.02 avg300=91.61 total=" + std::to_string(busy) +
              "0000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n");
    Write(sources_.loadavg, "1.65 1.72 1.86 3/269 16053\n");
    Write(sources_.own_stats[0], "7 (a (bad) name) R 1 7 7 0 -1 4194304 100 0 0 0 " +
                                     std::to_string(own - 3) + " 3 900 900 20 0 1 0 100 1000\n");
    LoadReading reading = ReadMachineLoad(sources_);
    reading.at_seconds = at_seconds;
    return reading;
  }

  LoadSources sources_;
};

TEST_F(MachineLoadTest, ReadsEveryCounter) {
  const LoadReading reading = ReadingOf(1000, 40, 600, 0);
  EXPECT_EQ(reading.cores, 2);
  EXPECT_DOUBLE_EQ(*reading.busy_seconds, 10);
  EXPECT_DOUBLE_EQ(*reading.stolen_seconds, 0.4);
  EXPECT_DOUBLE_EQ(*reading.own_seconds, 6);  // not the 18 s of children that it waited for
  EXPECT_DOUBLE_EQ(*reading.stalled_seconds, 10);
  EXPECT_EQ(reading.runnable, 3);
}

TEST_F(MachineLoadTest, TellsOthersFromTheSweepItself) {
  const LoadReading before = ReadingOf(1000, 40, 600, 100);
  const LoadReading after = ReadingOf(2380, 80, 1600, 110);
  const MachineLoad load = LoadBetween(before, after, /*threads=*/2, /*usable_cores=*/2);
  EXPECT_DOUBLE_EQ(load.observed_seconds(), 10);
  EXPECT_EQ(load.cores(), 2);
  EXPECT_NEAR(load.other_core_seconds(), 3.8, 1e-9);  // 38 % of a core
  EXPECT_NEAR(load.stolen_core_seconds(), 0.4, 1e-9);
  EXPECT_NEAR(load.stalled_seconds(), 13.8, 1e-9);
  EXPECT_EQ(load.most_runnable(), 3);
  EXPECT_EQ(load.threads(), 2);
  EXPECT_EQ(load.usable_cores(), 2);
}

TEST_F(MachineLoadTest, CountsAllProcessesOfTheSweepAsItsOwn) {
  const std::string worker = sources_.own_stats[0] + "_worker";
  sources_.own_stats.push_back(worker);
  Write(worker, "8 (worker) R 1 7 7 0 -1 4194304 100 0 0 0 50 50 0 0 20 0 1 0 100 1000\n");
  EXPECT_DOUBLE_EQ(*ReadingOf(1000, 0, 600, 0).own_seconds, 7);
  sources_.own_stats.push_back("/no such process");
  EXPECT_FALSE(ReadingOf(1000, 0, 600, 0).own_seconds.has_value());
}

TEST_F(MachineLoadTest, MissingFilesLeaveNumbersAbsent) {
  const LoadReading nothing = ReadMachineLoad(sources_);
  EXPECT_EQ(nothing.cores, 0);
  EXPECT_FALSE(nothing.busy_seconds.has_value());
  EXPECT_FALSE(nothing.runnable.has_value());
  const MachineLoad load = LoadBetween(nothing, ReadingOf(2000, 80, 1200, 5), 2, 2);
  EXPECT_FALSE(load.has_other_core_seconds());
  EXPECT_FALSE(load.has_stolen_core_seconds());
  EXPECT_FALSE(load.has_stalled_seconds());
}

TEST_F(MachineLoadTest, MalformedFilesLeaveNumbersAbsent) {
  for (const char* text : {"", "\n\n", "cpu", "cpu 1 2 x", "cpu \x01\x02", "some", "some total=x",
                           "1 2 3 4", "1 2 3 x/4", "7 (name", "7 (name) R 1", "7 (name) "}) {
    for (const std::string& path :
         {sources_.stat, sources_.pressure, sources_.loadavg, sources_.own_stats[0]}) {
      Write(path, text);
    }
    const LoadReading reading = ReadMachineLoad(sources_);
    EXPECT_FALSE(reading.busy_seconds.has_value()) << text;
    EXPECT_FALSE(reading.stolen_seconds.has_value()) << text;
    EXPECT_FALSE(reading.stalled_seconds.has_value()) << text;
    EXPECT_FALSE(reading.runnable.has_value()) << text;
    EXPECT_FALSE(reading.own_seconds.has_value()) << text;
  }
}

TEST_F(MachineLoadTest, AnOldKernelWithoutStealTellsTheRest) {
  Write(sources_.stat, "cpu 100 0 0 5000 0 0 0\ncpu0 100 0 0 5000 0 0 0\n");
  const LoadReading reading = ReadMachineLoad(sources_);
  EXPECT_DOUBLE_EQ(*reading.busy_seconds, 1);
  EXPECT_FALSE(reading.stolen_seconds.has_value());
  EXPECT_EQ(reading.cores, 1);
}

TEST_F(MachineLoadTest, CountersThatGoBackLeaveTheirNumberAbsent) {
  const LoadReading before = ReadingOf(1000, 80, 600, 0);
  const LoadReading after = ReadingOf(2000, 40, 1200, 5);
  const MachineLoad load = LoadBetween(before, after, 2, 2);
  EXPECT_FALSE(load.has_stolen_core_seconds());
  EXPECT_NEAR(load.other_core_seconds(), 4, 1e-9);
  EXPECT_FALSE(LoadBetween(after, before, 2, 2).has_other_core_seconds());
  EXPECT_EQ(LoadBetween(after, before, 2, 2).observed_seconds(), 0);
}

TEST_F(MachineLoadTest, LoadsOfSeveralVisitsAddUp) {
  const LoadReading before = ReadingOf(1000, 40, 600, 0);
  const LoadReading after = ReadingOf(2380, 80, 1600, 10);
  const MachineLoad load = LoadBetween(before, after, 2, 2);
  MachineLoad sum;
  AddLoad(load, &sum);
  AddLoad(load, &sum);
  EXPECT_DOUBLE_EQ(sum.observed_seconds(), 20);
  EXPECT_NEAR(sum.other_core_seconds(), 7.6, 1e-9);
  EXPECT_NEAR(sum.stalled_seconds(), 27.6, 1e-9);
  EXPECT_EQ(sum.most_runnable(), 3);
  EXPECT_EQ(sum.cores(), 2);
  EXPECT_EQ(sum.threads(), 2);
  EXPECT_EQ(sum.usable_cores(), 2);
  MachineLoad larger = load;
  larger.set_cores(8);
  larger.set_threads(7);
  larger.set_usable_cores(6);
  larger.set_most_runnable(5);
  for (const bool is_first : {true, false}) {
    MachineLoad both = is_first ? larger : load;
    AddLoad(is_first ? load : larger, &both);
    EXPECT_EQ(both.cores(), 8);
    EXPECT_EQ(both.threads(), 7);
    EXPECT_EQ(both.usable_cores(), 6);
    EXPECT_EQ(both.most_runnable(), 5);
  }
  // What either lacks the sum lacks, and nothing else.
  const MachineLoad known = sum;
  const auto lacking = [&](auto clear) {
    std::string texts;
    for (const bool is_first : {true, false}) {
      MachineLoad blind = load, total = known;
      clear(is_first ? &total : &blind);
      AddLoad(blind, &total);
      for (const auto& [name, has] : {std::pair("other ", total.has_other_core_seconds()),
                                      {"stolen ", total.has_stolen_core_seconds()},
                                      {"stalled ", total.has_stalled_seconds()},
                                      {"runnable ", total.has_most_runnable()}}) {
        if (!has) texts += name;
      }
    }
    return texts;
  };
  EXPECT_EQ(lacking([](MachineLoad* one) { one->clear_other_core_seconds(); }), "other other ");
  EXPECT_EQ(lacking([](MachineLoad* one) { one->clear_stolen_core_seconds(); }), "stolen stolen ");
  EXPECT_EQ(lacking([](MachineLoad* one) { one->clear_stalled_seconds(); }), "stalled stalled ");
  EXPECT_EQ(lacking([](MachineLoad* one) { one->clear_most_runnable(); }), "runnable runnable ");
}

// On any machine the real counters exist and do not decrease.
TEST(MachineLoad, ReadsThisMachine) {
  const LoadReading before = ReadMachineLoad();
  const LoadReading after = ReadMachineLoad();
  EXPECT_GT(before.cores, 0);
  ASSERT_TRUE(before.own_seconds.has_value());
  ASSERT_TRUE(after.own_seconds.has_value());
  EXPECT_GE(*after.own_seconds, *before.own_seconds);
  EXPECT_TRUE(before.busy_seconds.has_value());
}

}  // namespace
}  // namespace tfb
