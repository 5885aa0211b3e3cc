// Writes a result file of made-up numbers, as a sweep would: for tests of scripts and programs.
#include <cstdint>
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
ABSL_FLAG(bool, without_processor, false, "Leave the processor's name out.");
ABSL_FLAG(int64_t, run, 0, "The run's number: it begins so many hours after the first one.");
ABSL_FLAG(double, memory_factor, 1, "By how much more memory the technique takes.");
ABSL_FLAG(bool, few_samples, false, "Keep two samples of each time, which are too few to judge.");
ABSL_FLAG(double, error_factor, 1, "By how much larger its error against dense is.");

namespace tfb {
namespace {

absl::StatusOr<int> Write() {
  ResultSet results = synthetic::MakeSweep();
  Environment* environment = results.mutable_environments(0);
  environment->set_git_commit(absl::GetFlag(FLAGS_commit));
  environment->set_git_dirty(false);
  const std::string processor = absl::GetFlag(FLAGS_processor);
  if (!processor.empty()) environment->set_cpu_model(processor);
  if (absl::GetFlag(FLAGS_without_processor)) environment->clear_cpu_model();
  if (const int64_t run = absl::GetFlag(FLAGS_run); run > 0) {
    environment->set_start_unix_ns(environment->start_unix_ns() + run * 3600 * 1'000'000'000);
  }
  for (Case& result : *results.mutable_cases()) {
    if (absl::GetFlag(FLAGS_few_samples)) {
      Timing* timing = result.mutable_outcome()->mutable_timing();
      for (auto* samples :
           {timing->mutable_run_ns(), timing->mutable_setup_ns(), timing->mutable_probe_ns()}) {
        if (samples->size() > 2) samples->Truncate(2);
      }
    }
    if (result.key().technique() != "near") continue;
    for (double& ns : *result.mutable_outcome()->mutable_timing()->mutable_run_ns()) {
      ns *= absl::GetFlag(FLAGS_factor);
    }
    Outcome* outcome = result.mutable_outcome();
    outcome->set_peak_workspace_bytes(static_cast<uint64_t>(
        static_cast<double>(outcome->peak_workspace_bytes()) * absl::GetFlag(FLAGS_memory_factor)));
    if (outcome->against_dense().has_relative_frobenius()) {
      outcome->mutable_against_dense()->set_relative_frobenius(
          outcome->against_dense().relative_frobenius() * absl::GetFlag(FLAGS_error_factor));
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
