// Runs the cases of a sweep and writes their records to a result file.
//
// The calling process writes the file; a worker process measures (harness/measure/worker.h). Where
// a worker crashes, hangs or is killed for memory, its current case gets a record that says so, and
// another worker measures the remaining cases.
#ifndef TFB_HARNESS_MEASURE_SWEEP_H_
#define TFB_HARNESS_MEASURE_SWEEP_H_

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "harness/measure/measure.h"
#include "harness/plan/cases.h"
#include "harness/plan/sweep_plan.h"

namespace tfb {

struct SweepOptions {
  MeasureOptions measure;
  // Seconds for the whole sweep; 0: no limit. harness/plan/sweep_plan.h says how they are spent.
  double time_budget = 300;
  std::string output;  // path of the result file
  // With `resume`: whether cases that failed, timed out or found no memory are run again.
  bool retry = false;
  bool resume = false;  // whether to append to `output`: cases with a record there are not run
                        // again, unless they were skipped
  // Whether `output` may have cases of another machine, build or version, which then count as this
  // one's.
  bool allow_different_environment = false;
  std::string program;  // begins messages: "sweep"
  std::string
      command;  // the shell command of the same sweep, for the message that says how to resume
  std::vector<std::string> command_line;
  std::string workspace;  // of the git commit

  // The least number of visits to a group over which the samples of a case are spread. Each visit
  // allocates everything anew, so that the effect of one memory layout does not affect all samples.
  // The first visit compares the case with float64.
  int rounds = 1;
  // A sweep of another build that takes turns with this one, group by group and round by round
  // (harness/measure/turns.h), and its arguments besides --output. There is none where the program
  // is empty.
  struct Other {
    std::string program;
    std::vector<std::string> arguments;
    std::string output;
  };
  Other other;
  // The value of --turns where this sweep is the follower. It prints no progress and no tables.
  std::string turns;
  bool quiet = false;  // no progress and no tables
};

// Returns how many bytes of host memory the process that measures the cases may allocate, 0 for any
// number: `memory_limit`, but no limit where a case is on a GPU, for whose sake CUDA maps more of the
// host's addresses than the tensors take. What a case needs is compared with memory_limit before.
int64_t HostMemoryLimit(int64_t memory_limit, const std::vector<Job>& cases);

// Returns what the plan of a sweep has to know of its options.
SweepPlanOptions PlanOptionsOf(const SweepOptions& options);

// Runs the cases, prints progress to stderr and, at the end, tables and the file's path to stdout;
// with another build's sweep, also the comparison of both (results/comparison.h).
//
// Returns the exit status: 0 done; 1 a case failed (an error beyond its bound, or a technique's
// failure); 2 the file cannot be written, or no case could run; 128 + signal where SIGINT or
// SIGTERM stopped the sweep, with a message on how to resume. After the first signal the current
// samples are recorded, a second one stops at once. Needs a process with a single thread.
int RunSweep(const SweepOptions& options, const std::vector<Job>& cases);

// Returns results/runs/<time>-<host>.pb in the repository, the path of a file that does not exist.
std::string DefaultResultPath();

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_SWEEP_H_
