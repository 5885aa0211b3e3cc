// Lets two sweeps of two builds take turns, so that load of the machine affects both alike.
//
// The leading sweep starts the other one and sends it a line for each group of cases to measure;
// the follower is idle while the leader measures, and the reverse. Each keeps its own result file,
// and needs to know nothing of the other's build but these lines:
//
//   leader    "measure <group>"   measures the remaining cases of the group, once
//             "rest"              measures the cases that were never asked for, then ends
//   follower  "done"              after each, and before the first to say that it is ready
//
// A follower that reads the end of the leader's pipe stops.
#ifndef TFB_HARNESS_MEASURE_TURNS_H_
#define TFB_HARNESS_MEASURE_TURNS_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tfb {

// Reads a line of at most a few kilobytes from a pipe; returns nothing at its end. Where a signal
// interrupts the wait, `stopped` says whether to end; where `stopped` is null, the wait continues.
std::optional<std::string> ReadLine(int file, const std::function<bool()>& stopped);

// The leader's end.
class OtherSweep {
 public:
  // Starts `program` with `arguments` and the flag --turns=IN,OUT, which names its ends of the two
  // pipes, and waits until it is ready. A signal during the wait calls `stopped`.
  static absl::StatusOr<std::unique_ptr<OtherSweep>> Start(
      const std::string& program, const std::vector<std::string>& arguments,
      std::function<bool()> stopped);
  ~OtherSweep();  // kills the process, where it has not ended
  OtherSweep(const OtherSweep&) = delete;
  OtherSweep& operator=(const OtherSweep&) = delete;

  // Waits until the other sweep has measured the group. Returns Unavailable, with the reason, where
  // that sweep has ended; Cancelled where `stopped` returns true.
  absl::Status Measure(absl::string_view group);
  // Lets the other sweep measure the rest, and waits for its end. Returns its exit status, as a
  // shell does.
  absl::StatusOr<int> Finish();

 private:
  OtherSweep() = default;
  absl::Status Ask(absl::string_view line);
  absl::Status AwaitDone();
  std::string HowItEnded();

  std::string program_;
  std::function<bool()> stopped_;
  pid_t pid_ = -1;
  int to_ = -1, from_ = -1;
};

// The follower's end.
class Turns {
 public:
  // `flag` is the value of --turns.
  static absl::StatusOr<std::unique_ptr<Turns>> FromFlag(absl::string_view flag,
                                                         std::function<bool()> stopped);

  struct Turn {
    bool rest = false;
    std::string group;  // set where the turn is not the rest
  };
  // Reports that all earlier work is done, and waits for the next turn. Returns nothing where the
  // leader has ended or `stopped` returns true.
  std::optional<Turn> Next();

 private:
  Turns(int in, int out, std::function<bool()> stopped)
      : in_(in), out_(out), stopped_(std::move(stopped)) {}

  int in_, out_;
  std::function<bool()> stopped_;
};

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_TURNS_H_
