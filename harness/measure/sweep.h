// Runs the cases of a sweep and writes their records to a result file.
//
// The process that calls it keeps the file; a worker process measures (harness/measure/worker.h). A
// worker that crashes, hangs or is killed for memory costs the case that it was at, which gets a
// record that says so, and the next worker goes on.
#ifndef TFB_HARNESS_MEASURE_SWEEP_H_
#define TFB_HARNESS_MEASURE_SWEEP_H_

#include <cstdio>
#include <string>
#include <vector>

#include "harness/measure/measure.h"
#include "harness/plan/cases.h"

namespace tfb {

struct SweepOptions {
  MeasureOptions measure;
  // Seconds for everything; 0: no limit. harness/plan/sweep_plan.h says how it is spent.
  double time_budget = 300;
  std::string output;   // path of the result file
  bool resume = false;  // go on with `output`: cases with a record there are not run again, unless
                        // they were skipped
  // `output` may have cases of another machine, build or version, which then count as this one's.
  bool allow_different_environment = false;
  std::string program;  // begins messages: "sweep"
  std::string
      command;  // what to type to run the same sweep, for the message that says how to resume
  std::vector<std::string> command_line;
  std::string workspace;  // of the git commit

  // The samples of a case are spread over at least so many visits to its group. Between two visits
  // everything is created anew, in other memory, so that what is particular to one place of a
  // tensor does not count for all samples. The first visit holds the case against float64.
  int rounds = 1;
  // A sweep of another build that takes turns with this one, group by group and round by round
  // (harness/measure/turns.h), and what it is told besides --output. None where the program is
  // empty.
  struct Other {
    std::string program;
    std::vector<std::string> arguments;
    std::string output;
  };
  Other other;
  // This sweep is the other: the value of --turns. It prints no progress and no tables.
  std::string turns;
  bool quiet = false;  // no progress and no tables
};

// Runs them, prints progress to stderr and, at the end, tables and the file's path to stdout; with
// another build's sweep, also the comparison of both (results/comparison.h).
//
// Returns the exit status: 0 done; 1 a case failed (an error beyond its bound, or a technique's
// failure); 2 the file cannot be written, or no case could run; 128 + signal where SIGINT or
// SIGTERM stopped it, with a message on how to go on. The first signal lets the samples at hand be
// recorded, a second one stops at once. Needs a process with a single thread.
int RunSweep(const SweepOptions& options, const std::vector<Job>& cases);

// results/runs/<time>-<host>.pb in the repository, a name that is not taken.
std::string DefaultResultPath();

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_SWEEP_H_
