// Averages the parameters of checkpoints: Vaswani et al. 2017, arXiv:1706.03762v7, section 6.1.
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/command_line.h"
#include "core/safetensors.h"
#include "core/status.h"
#include "results/files.h"
#include "tools/checkpoint_average.h"

ABSL_FLAG(std::string, output, "", "The file to write; required.");

namespace tfb {
namespace {

constexpr char kProgram[] = "average_checkpoints";
constexpr char kUsage[] =
    "average_checkpoints CHECKPOINT.safetensors... --output=FILE\n"
    "Writes the mean of each tensor over the checkpoints, summed in float64 and rounded once to "
    "the\n"
    "tensor's own type. All must have the same tensors, of the same shapes and types. Tensors of\n"
    "integers, which are no parameters, and metadata are the last checkpoint's.\n\n"
    "Exit status: 0 written, 2 bad usage or nothing written.";

absl::StatusOr<int> Average(const CommandLine& line) {
  const std::vector<std::string>& paths = line.arguments;
  if (paths.empty()) {
    return absl::InvalidArgumentError("no checkpoints; expected are one file or more");
  }
  const std::string output = CallerPath(absl::GetFlag(FLAGS_output));
  if (output.empty()) return absl::InvalidArgumentError("--output is missing");
  CheckpointAverage average;
  for (const std::string& path : paths) {
    TFB_ASSIGN_OR_RETURN(SafetensorsFile file, ReadSafetensors(CallerPath(path)));
    TFB_RETURN_IF_ERROR(average.Add(std::move(file), path));
  }
  TFB_ASSIGN_OR_RETURN(const SafetensorsFile mean, std::move(average).Finish());
  TFB_RETURN_IF_ERROR(WriteSafetensors(output, mean.tensors, mean.metadata));
  std::printf("wrote %s, the mean of %zu checkpoints of %zu tensors\n", output.c_str(),
              paths.size(), mean.tensors.size());
  return kExitDone;
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  return tfb::RunMain(tfb::kProgram, tfb::kUsage, {argv, argv + argc}, tfb::Average);
}
