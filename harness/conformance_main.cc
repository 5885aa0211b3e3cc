// The main function of every technique's conformance test: it runs every case of
// harness/conformance on --technique, or on every technique that is linked in. Cases that a
// technique does not support are skipped, with the reason.
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "core/cuda/simulator/simulator.h"
#include "core/technique.h"
#include "core/tested_devices.h"
#include "gtest/gtest.h"
#include "harness/conformance/case_table.h"
#include "harness/conformance/interface.h"
#include "harness/conformance/register.h"

ABSL_FLAG(std::string, technique, "", "the technique to test; empty for all that are linked in");
ABSL_FLAG(std::vector<std::string>, devices, {"cpu"},
          "of cpu, simulator, cuda: the simulator runs the sources for GPUs on the host. "
          "TFB_KERNEL_DEVICE in the environment leaves one of them");

ABSL_FLAG(std::string, table, "",
          "write which cases each technique runs or does not admit to this file, as Markdown");
ABSL_FLAG(std::string, interface, "",
          "compare the interface of --technique with this file (harness/conformance/interface.h)");
ABSL_FLAG(std::string, write_interface, "",
          "run nothing, and write the interface of each technique to testdata/interface.txt in its "
          "folder of this repository");

namespace {

// Returns the exit code.
int WriteInterfaces(const std::vector<const tfb::Technique*>& techniques, const std::string& root) {
  for (const tfb::Technique* technique : techniques) {
    const absl::Status status = tfb::conformance::WriteInterface(*technique, root);
    if (status.ok()) continue;
    std::fprintf(stderr, "--write_interface: %s\n", std::string(status.message()).c_str());
    return 2;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  absl::SetProgramUsageMessage(
      "holds techniques against their float64 definitions, case by case; --gtest_list_tests and "
      "--gtest_filter choose");
  absl::ParseCommandLine(argc, argv);
  std::vector<const tfb::Technique*> techniques = tfb::Registry::Global().All();
  if (const std::string name = absl::GetFlag(FLAGS_technique); !name.empty()) {
    const auto found = tfb::Registry::Global().Find(name);
    if (!found.ok()) {
      std::fprintf(stderr, "--technique: %s\n", std::string(found.status().message()).c_str());
      return 2;
    }
    techniques = {*found};
  }
  if (const std::string root = absl::GetFlag(FLAGS_write_interface); !root.empty()) {
    return WriteInterfaces(techniques, root);
  }
  std::vector<tfb::Device> devices;
  for (const std::string& name : absl::GetFlag(FLAGS_devices)) {
    const auto device = tfb::ParseDevice(name);
    if (!device.ok()) {
      std::fprintf(stderr, "--devices: %s\n", std::string(device.status().message()).c_str());
      return 2;
    }
    if (tfb::IsTested(*device)) devices.push_back(*device);
  }
  if (devices.empty()) {
    std::fprintf(stderr, "--devices: none is the one that TFB_KERNEL_DEVICE names\n");
    return 2;
  }
  if (tfb::conformance::RegisterTests(techniques, devices) == 0) {
    std::fprintf(stderr, "no technique is linked into this binary\n");
    return 2;
  }
  if (const std::string file = absl::GetFlag(FLAGS_interface); !file.empty()) {
    for (const tfb::Technique* technique : techniques) {
      tfb::conformance::RegisterInterfaceTest(technique, file);
    }
  }
  auto* table = new tfb::conformance::CaseTable();  // GoogleTest deletes it
  ::testing::UnitTest::GetInstance()->listeners().Append(table);
  const int result = RUN_ALL_TESTS();
  if (const std::string path = absl::GetFlag(FLAGS_table); !path.empty()) {
    std::ofstream file(path);
    if (!(file << table->ToMarkdown() << std::flush)) {
      std::fprintf(stderr, "--table: cannot write %s\n", path.c_str());
      return 2;
    }
  }
  if (const auto counts = cuda_simulator::TotalCounts(); counts.launches > 0) {
    std::printf("simulator of CUDA: %s\n", cuda_simulator::Describe(counts).c_str());
  }
  return result;
}
