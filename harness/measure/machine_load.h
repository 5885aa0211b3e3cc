// Measures the load that other processes, and other guests of the same host, put on the machine
// while a case was measured.
#ifndef TFB_HARNESS_MEASURE_MACHINE_LOAD_H_
#define TFB_HARNESS_MEASURE_MACHINE_LOAD_H_

#include <optional>
#include <string>
#include <vector>

#include "results/results.pb.h"

namespace tfb {

// The files that a reading comes from.
struct LoadSources {
  std::string stat = "/proc/stat";              // core time of everything on the machine
  std::string pressure = "/proc/pressure/cpu";  // time in which a task waited for a core
  std::string loadavg = "/proc/loadavg";        // tasks that can run
  // The stat files of the sweep's processes, whose core time is the sweep's own.
  std::vector<std::string> own_stats = {"/proc/self/stat"};
  double ticks_per_second = 0;  // of the counters; 0: the system's, by sysconf(3)
};

// The counters at one moment. A counter that its file lacks is absent.
struct LoadReading {
  double at_seconds = 0;                  // on the monotonic clock
  int cores = 0;                          // of the machine; 0 where unknown
  std::optional<double> busy_seconds;     // core time since boot, without idle and stolen time
  std::optional<double> stolen_seconds;   // core time that the hypervisor gave to other guests
  std::optional<double> own_seconds;      // core time of the sweep's processes
  std::optional<double> stalled_seconds;  // time in which at least one task waited for a core
  std::optional<int> runnable;            // tasks that run or could run, the reader included
};

// Takes a reading in about 0.1 ms. Files that are missing or malformed are no error.
LoadReading ReadMachineLoad(const LoadSources& sources = LoadSources());

// Returns the load between two readings of the same sources, for a case with `threads` threads in a
// process that may use `usable_cores` cores. A number is absent where a reading lacks its counter,
// or where the counter decreased, as those of a virtual machine may.
MachineLoad LoadBetween(const LoadReading& before, const LoadReading& after, int threads,
                        int usable_cores);

// Adds the load of another interval of time, e.g. of a second visit to the same case. A number that
// either lacks is absent in the sum, unless the sum was empty.
void AddLoad(const MachineLoad& more, MachineLoad* sum);

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_MACHINE_LOAD_H_
