// What a sweep tells while it runs: one line that is redrawn on a terminal, a line a case
// elsewhere.
#ifndef TFB_HARNESS_PROGRESS_H_
#define TFB_HARNESS_PROGRESS_H_

#include <cstddef>
#include <cstdio>

#include "absl/strings/string_view.h"

namespace tfb {

class Progress {
 public:
  // On a terminal, unless TERM is "dumb", lines are redrawn and cut to its width.
  Progress(std::FILE* out, size_t total);

  // What is going on: redrawn on a terminal, nothing elsewhere.
  void Show(absl::string_view activity, double elapsed_seconds, double left_seconds);
  // A case is finished. On a terminal it is only counted, unless it went wrong.
  void Finished(absl::string_view line, bool wrong);
  // A case is finished of which nothing is said: counted alone.
  void Count() { ++finished_; }
  // A line that stays.
  void Say(absl::string_view line);
  // Takes the redrawn line away.
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

#endif  // TFB_HARNESS_PROGRESS_H_
