// Writes a result file of made-up numbers, as a sweep would: for tests of the scripts in tools/ci.
#include <string>

#include "absl/flags/flag.h"
#include "absl/status/statusor.h"
#include "core/command_line.h"
#include "core/status.h"
#include "results/appender.h"
#include "results/synthetic.h"

ABSL_FLAG(std::string, output, "", "The result file.");
ABSL_FLAG(double, factor, 1, "By how much longer one technique takes.");
ABSL_FLAG(std::string, processor, "",
          "The processor's name. Empty: that of all synthetic results.");
ABSL_FLAG(std::string, commit, "", "The commit that was built.");

namespace tfb {
namespace {

absl::StatusOr<int> Write() {
  ResultSet results = synthetic::MakeSweep();
  Environment* environment = results.mutable_environments(0);
  environment->set_git_commit(absl::GetFlag(FLAGS_commit));
  environment->set_git_dirty(false);
  const std::string processor = absl::GetFlag(FLAGS_processor);
  if (!processor.empty()) environment->set_cpu_model(processor);
  for (Case& result : *results.mutable_cases()) {
    if (result.key().technique() != "near") continue;
    for (double& ns : *result.mutable_outcome()->mutable_timing()->mutable_run_ns()) {
      ns *= absl::GetFlag(FLAGS_factor);
    }
  }
  TFB_RETURN_IF_ERROR(WriteResultFile(absl::GetFlag(FLAGS_output), results));
  return kExitDone;
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  return tfb::RunMain("synthetic_results", "synthetic_results --output=FILE [flags]",
                      {argv, argv + argc}, [] { return tfb::Write(); });
}
