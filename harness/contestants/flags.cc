#include "harness/contestants/flags.h"

#include "absl/flags/flag.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "harness/contestants/contestants.h"
#include "harness/contestants/python_process.h"
#include "results/files.h"

ABSL_FLAG(
    std::string, contestants, "",
    "Somebody else's code, as in libmine.so,mine.py:attention: a shared library with the functions "
    "of harness/c/tfb.h, or functions of Python (tools/python/tfb/contestant.py), all of a file's "
    "where none is named; or a folder of such files. Each runs beside ours as NAME@mine, on the "
    "same tensors, and is judged by the definition that it names.");
ABSL_FLAG(std::string, python, "python3",
          "The interpreter of contestants in Python: a program on the PATH, or a path.");

namespace tfb {

absl::Status AddContestantsFromFlags(int64_t memory_limit, Registry* registry,
                                     std::string* techniques) {
  const std::string interpreter = absl::GetFlag(FLAGS_python);
  const bool is_path = absl::StrContains(interpreter, '/');
  const PythonSettings python = {is_path ? CallerPath(interpreter) : interpreter, memory_limit};
  const absl::Status status =
      AddContestantFiles(absl::GetFlag(FLAGS_contestants), python, registry, techniques);
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("--contestants: ", status.message()));
}

}  // namespace tfb
