// What a sweep tells while it runs: one line that is redrawn on a terminal, a line a case
// elsewhere.
#ifndef TFB_HARNESS_PROGRESS_H_
#define TFB_HARNESS_PROGRESS_H_

#include <cstddef>
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "harness/cases.h"

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

// How long cases take, from those that are done: the same technique's at another length by its
// expected growth, or else the mean of the others'. Before there are any, kGuessSeconds.
class CaseTimes {
 public:
  static constexpr double kGuessSeconds = 1;

  void Add(const SweepCase& sweep_case, double seconds);
  double Expected(const SweepCase& sweep_case) const;

 private:
  struct Seen {
    int64_t tokens;
    double seconds;
  };
  std::map<std::string, Seen> last_;  // by technique, options, device and purpose
  double sum_seconds_ = 0, sum_weights_ = 0;
};

}  // namespace tfb

#endif  // TFB_HARNESS_PROGRESS_H_
