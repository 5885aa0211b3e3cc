// Command lines of this repository's programs: absl flags, with exit status 2 and one line that
// names the flag for bad usage, which absl::ParseCommandLine does not give.
#ifndef TFB_CORE_COMMAND_LINE_H_
#define TFB_CORE_COMMAND_LINE_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tfb {

// Exit statuses of every program here.
inline constexpr int kExitDone = 0;
inline constexpr int kExitCheckFailed = 1;
inline constexpr int kExitBadUsage = 2;

struct CommandLine {
  std::vector<std::string> arguments;  // what is no flag, in order
  bool help = false;                   // --help was given: print HelpText and exit with 0
};

// Sets the absl flags of the program from `argv` (the program's name first). Takes --name=value,
// --name value, and for truths --name and --noname; one dash does as well. Behind "--" nothing is a
// flag. InvalidArgument names an unknown flag with the nearest known one, or the flag whose value
// does not parse.
absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& argv);

// `usage` (first line: the program and its arguments), then every flag with its default.
std::string HelpText(absl::string_view usage);

// Returns the page that --help prints in place of HelpText, or "" where HelpText is to be printed.
using HelpPage = std::function<absl::StatusOr<std::string>()>;

// All that the main function of a program does: sets the flags from `argv`, prints what `help`
// returns, or HelpText, to stdout and returns kExitDone where --help is given, and else returns
// what `run` does. An error, of the flags or of `run`, is printed to stderr, and kExitBadUsage is
// returned; so it is where standard output could not be written. Standard streams that the caller
// has closed lead to /dev/null. The second form is that of a program without arguments: one is an
// error that names it.
int RunMain(absl::string_view program, absl::string_view usage,
            const std::vector<std::string>& argv,
            const std::function<absl::StatusOr<int>(const CommandLine&)>& run,
            const HelpPage& help = nullptr);
int RunMain(absl::string_view program, absl::string_view usage,
            const std::vector<std::string>& argv, const std::function<absl::StatusOr<int>()>& run,
            const HelpPage& help = nullptr);

// Prints "program: message" to stderr, in one line. Control characters become '?', and a message of
// more than 1600 bytes is cut in its middle.
void PrintError(absl::string_view program, absl::string_view message);

// The known text that `given` most likely stands for, or "" where none is near: at most a third of
// the characters differ.
std::string Nearest(absl::string_view given, const std::vector<std::string>& known);

}  // namespace tfb

#endif  // TFB_CORE_COMMAND_LINE_H_
