// The subcommand of //tools:history that finds the commit which changed a case.
#ifndef TFB_TOOLS_HISTORY_BISECT_H_
#define TFB_TOOLS_HISTORY_BISECT_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/command_line.h"

namespace tfb {

// What --help says of the subcommand, beside its flags.
extern const char kBisectUsage[];

// Returns the names of the subcommand's flags.
std::vector<std::string> BisectFlags();

// Bisects as the flags say, with progress on standard error and the answer on standard output.
// Returns kExitDone where one commit was found, kExitCheckFailed where good and bad do not differ
// clearly or the answer is several commits, and 130 where a signal stopped it. SIGINT, SIGTERM and
// SIGHUP stop it from then on.
absl::StatusOr<int> RunBisect(const CommandLine& line);

}  // namespace tfb

#endif  // TFB_TOOLS_HISTORY_BISECT_H_
