// Prints the registers and memory of every kernel that this build compiles.
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/command_line.h"
#include "core/runfiles.h"
#include "core/status.h"
#include "tools/cuda/kernel_resources.h"

namespace tfb {
namespace {

constexpr char kProgram[] = "kernel_resources";
constexpr char kUsage[] =
    "kernel_resources\n"
    "Prints for every kernel and architecture of this build, in the words of `ptxas -v`, the\n"
    "registers of a thread, the threads and blocks of its launch bounds (1024 threads where it "
    "has\n"
    "none), how many such blocks have room in a multiprocessor's registers, the bytes that it "
    "spills\n"
    "and has on its stack, its static shared memory, and the dynamic that a launch gives it at\n"
    "most (0 as well where the problem's sizes decide); and the blocks that have room in "
    "registers\n"
    "and in the shared memory of a multiprocessor of A100 (sm_80), RTX 4090 (sm_89) and H100\n"
    "(sm_90), 0 where the largest launch is refused. --//:cuda_archs=sm_80,sm_90a of the build\n"
    "chooses architectures.\n\n"
    "Exit status: 0 none has a fault, 1 some have (they follow the table), 2 bad usage.";

absl::StatusOr<int> Print() {
  TFB_ASSIGN_OR_RETURN(const std::string path, RunfilePath("harness/kernel_resources.txt"));
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  TFB_ASSIGN_OR_RETURN(const std::vector<KernelResources> kernels, ReadKernelResources(text.str()));
  std::fputs(KernelResourcesTable(kernels).c_str(), stdout);
  int status = kExitDone;
  for (const KernelResources& kernel : kernels) {
    for (const std::string& finding : Findings(kernel)) {
      std::printf("%s\n", finding.c_str());
      status = kExitCheckFailed;
    }
  }
  return status;
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  return tfb::RunMain(tfb::kProgram, tfb::kUsage, {argv, argv + argc}, tfb::Print);
}
