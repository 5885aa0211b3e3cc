// Merges result files of several machines or shards into one.

#include "results/merge.h"

#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/command_line.h"
#include "results/appender.h"
#include "results/files.h"

ABSL_FLAG(
    std::string, output, "",
    "File to write, relative to the caller's folder; it is written whole or not at all, and may "
    "be one of those that are read.");

ABSL_FLAG(bool, salvage, false,
          "Take what is whole in damaged files, and say how much is not; else they are an error.");

namespace tfb {
namespace {

constexpr char kProgram[] = "merge";
constexpr char kUsage[] =
    "merge FILE... --output=FILE\n"
    "Joins result files: of the shards of a sweep, or of several machines. Every environment is\n"
    "kept; of several cases with the same key and environment the last one counts, as within a\n"
    "file. A torn last record is left out and told.\n\n"
    "Exit status: 0 done, 2 bad usage, an unreadable file, or files that contradict each other.";

absl::StatusOr<int> MergeAll(const CommandLine& line) {
  const std::string output = absl::GetFlag(FLAGS_output);
  if (output.empty()) return absl::InvalidArgumentError("--output=FILE is wanted");
  if (line.arguments.empty()) return absl::InvalidArgumentError("name the files to merge");
  std::vector<std::string> paths;
  for (const std::string& argument : line.arguments) paths.push_back(CallerPath(argument));
  absl::StatusOr<Merged> merged =
      MergeResultFiles(paths, absl::GetFlag(FLAGS_salvage) ? Damage::kPassOver : Damage::kRefuse);
  if (!merged.ok()) return merged.status();
  for (const std::string& note : merged->notes) PrintError(kProgram, note);
  const std::string path = CallerPath(output);
  const absl::Status written = WriteResultFile(path, merged->results);
  if (!written.ok()) return written;
  std::cout << absl::StrCat(merged->results.cases_size(), " cases of ",
                            merged->results.environments_size(), " environments from ",
                            merged->files, " files",
                            merged->replaced_cases > 0
                                ? absl::StrCat(", ", merged->replaced_cases,
                                               " repeated cases left out for a later one")
                                : "",
                            ": ", path, "\n")
            << std::flush;
  return kExitDone;
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  return tfb::RunMain(tfb::kProgram, tfb::kUsage, {argv, argv + argc}, tfb::MergeAll);
}
