// A sweep over devices, in this process: the program takes no simulator, whose times mean nothing.
#include <unistd.h>

#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/cuda/simulator/simulator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/measure/sweep.h"
#include "harness/testing/toys.h"
#include "results/reader.h"

namespace tfb {
namespace {

using ::testing::HasSubstr;

class SweepOnDevices : public ::testing::Test {
 protected:
  SweepOnDevices() {
    AddToys(registry_);
    AddDenseToy(registry_);
    cuda_simulator::Settings settings;
    settings.errors_are_deferred = true;  // as a GPU has it
    cuda_simulator::Configure(settings);
  }
  ~SweepOnDevices() override { cuda_simulator::Configure({}); }

  // Returns the outcomes by "technique option=value tokens".
  std::map<std::string, Outcome> Sweep(const std::string& techniques, const std::string& lengths,
                                       int* exit_status) {
    CaseFlags flags;
    flags.techniques = techniques;
    flags.devices = "simulator";
    flags.simulator = true;
    flags.lengths = lengths;
    flags.inputs = "gaussian";
    flags.heads = "2";
    flags.head_dims = "8";
    flags.threads = "1";
    flags.counterparts = false;
    const std::vector<Job> cases = MakeCases(flags, registry_, "").value();
    SweepOptions options;
    options.measure.repetitions = 3;
    options.measure.min_time = 1e-4;
    options.measure.registry = &registry_;
    options.output = absl::StrCat(::testing::TempDir(), "/sweep_device_", getpid(), ".pb");
    unlink(options.output.c_str());
    options.program = "sweep";
    *exit_status = RunSweep(options, cases);
    std::map<std::string, Outcome> outcomes;
    const absl::StatusOr<ResultFile> file = ReadResultFile(options.output);
    EXPECT_TRUE(file.ok()) << file.status();
    if (!file.ok()) return outcomes;
    for (const Case& record : file->results.cases()) {
      if (record.outcome().unfinished()) continue;
      const std::string name = absl::StrCat(record.technique().display_name(), " ",
                                            record.key().problem().query_tokens());
      EXPECT_TRUE(outcomes.emplace(name, record.outcome()).second) << name << " is there twice";
    }
    return outcomes;
  }

  Registry registry_;
};

TEST_F(SweepOnDevices, ACaseThatLosesTheDeviceDoesNotPoisonTheNext) {
  int exit_status = -1;
  auto outcomes = Sweep("toy_bad_kernel,toy_bad_launch,toy_device", "8,16", &exit_status);
  EXPECT_EQ(exit_status, 1);
  EXPECT_EQ(outcomes.size(), 6u);
  for (const std::string tokens : {" 8", " 16"}) {
    EXPECT_EQ(outcomes["toy_bad_kernel" + tokens].status(), Outcome::STATUS_FAILED);
    EXPECT_THAT(outcomes["toy_bad_kernel" + tokens].reason(), HasSubstr("TinyMeans, block"));
    EXPECT_EQ(outcomes["toy_bad_launch" + tokens].status(), Outcome::STATUS_FAILED);
    EXPECT_THAT(outcomes["toy_bad_launch" + tokens].reason(),
                HasSubstr("more tasks than a grid has blocks"));
    const Outcome& right = outcomes["toy_device" + tokens];
    EXPECT_EQ(right.status(), Outcome::STATUS_OK) << right.reason();
    EXPECT_EQ(right.timing().run_ns_size(), 3);
  }
}

TEST_F(SweepOnDevices, ManyThatLoseTheDeviceAreManyRows) {
  int exit_status = -1;
  const auto outcomes = Sweep("toy_bad_kernel:rounds=*,toy_device", "4,6,8", &exit_status);
  EXPECT_EQ(exit_status, 1);
  EXPECT_EQ(outcomes.size(), 4u * 3);
  for (const auto& [name, outcome] : outcomes) {
    const bool bad = name.find("toy_bad_kernel") == 0;
    EXPECT_EQ(outcome.status(), bad ? Outcome::STATUS_FAILED : Outcome::STATUS_OK) << name;
  }
}

}  // namespace
}  // namespace tfb
