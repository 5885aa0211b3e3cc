// Runs programs in tests, and compares what they print with expected texts.
#ifndef TFB_CORE_PROGRAM_TESTING_H_
#define TFB_CORE_PROGRAM_TESTING_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tfb {

struct ProgramRun {
  int exit_status = -1;  // -1 where a signal ended it
  std::string out;
  std::string err;
};
// Runs a command line of the shell, such as "adaptive/calm/calibrate --risk=0.1", in the test's
// folder, where the programs among its data have their paths in the repository.
ProgramRun RunProgram(const std::string& command);

// Returns the text of a file beside the test, by its path in the repository: what a program printed
// when the file was made, with "?" for what its runs do not share. Aborts where it cannot be read.
std::string GoldenText(const std::string& path);

// Returns an empty text where `text` is `expected`; else the first lines that differ, and all of
// `text`.
//
// A number with decimals may differ by one in its last place, as processors add fp32 numbers in
// different orders. In `expected`, "?.??" stands for any number with two decimals, such as a time,
// and "?" for any whole number, after any number of spaces.
std::string TextDifference(absl::string_view text, absl::string_view expected);

// Returns the numbers of the first line that begins so, behind that beginning; none where there is
// no such line.
std::vector<double> NumbersBehind(absl::string_view beginning, absl::string_view text);

// What a program answers to arguments that it refuses, with the exit status 2 and nothing on its
// output.
struct Refusal {
  std::string arguments;
  std::string message;  // without the program's name and the end of the line
};
// Returns an empty text where the program answers each as expected; else what it answers.
std::string RefusalDifference(const std::string& program, const std::vector<Refusal>& refusals);

}  // namespace tfb

#endif  // TFB_CORE_PROGRAM_TESTING_H_
