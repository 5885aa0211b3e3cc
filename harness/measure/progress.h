// Prints the progress of a sweep: a terminal shows one line that is redrawn, any other output gets
// one line per case.
#ifndef TFB_HARNESS_MEASURE_PROGRESS_H_
#define TFB_HARNESS_MEASURE_PROGRESS_H_

#include <cstddef>
#include <cstdio>

#include "absl/strings/string_view.h"

namespace tfb {

class Progress {
 public:
  // On a terminal, unless TERM is "dumb", lines are redrawn and cut to its width.
  Progress(std::FILE* out, size_t total);

  // Shows the current activity, only on a terminal.
  void Show(absl::string_view activity, double elapsed_seconds, double left_seconds);
  // Reports a finished case. A terminal only counts it, unless it went wrong.
  void Finished(absl::string_view line, bool wrong);
  // Counts a finished case without printing.
  void Count() { ++finished_; }
  // Prints a line that is not erased.
  void Say(absl::string_view line);
  // Erases the redrawn line.
  void Clear();

  size_t finished() const { return finished_; }

 private:
  std::FILE* out_;
  bool terminal_;
  int width_;
  size_t total_;
  size_t finished_ = 0;
  bool drawn_ = false;
};

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_PROGRESS_H_
