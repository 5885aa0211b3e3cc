// How busy other processes, and other guests of the same host, kept the machine while a case was
// measured.
#ifndef TFB_HARNESS_MEASURE_MACHINE_LOAD_H_
#define TFB_HARNESS_MEASURE_MACHINE_LOAD_H_

#include <optional>
#include <string>
#include <vector>

#include "results/results.pb.h"

namespace tfb {

// The files that a reading is made of.
struct LoadSources {
  std::string stat = "/proc/stat";              // core time of everything on the machine
  std::string pressure = "/proc/pressure/cpu";  // time in which a task waited for a core
  std::string loadavg = "/proc/loadavg";        // tasks that can run
  // One for each process of the sweep: their core time is the sweep's own.
  std::vector<std::string> own_stats = {"/proc/self/stat"};
  double ticks_per_second = 0;  // of the counters; 0: the system's, by sysconf(3)
};

// The counters at one moment. A counter that its file does not tell is absent.
struct LoadReading {
  double at_seconds = 0;               // on the monotonic clock
  int cores = 0;                       // that the kernel counts; 0 where it does not tell
  std::optional<double> busy_seconds;  // core time since the machine started, idle and stolen apart
  std::optional<double> stolen_seconds;   // core time that the hypervisor gave to other guests
  std::optional<double> own_seconds;      // core time of the sweep's processes
  std::optional<double> stalled_seconds;  // time in which at least one task waited for a core
  std::optional<int> runnable;            // tasks that run or could run, the reader included
};

// Takes a reading: some 0.1 ms. Files that are missing or malformed are no error.
LoadReading ReadMachineLoad(const LoadSources& sources = LoadSources());

// The load between two readings of the same sources, for a case that runs `threads` threads where
// the process may use `usable_cores` cores. A counter that one of the readings lacks, or that went
// back between them, as those of a virtual machine may, leaves its number absent.
MachineLoad LoadBetween(const LoadReading& before, const LoadReading& after, int threads,
                        int usable_cores);

// Adds the load of another stretch of time, e.g. of a second visit to the same case. A number that
// either lacks is absent in the sum, except that an empty sum lacks nothing.
void AddLoad(const MachineLoad& more, MachineLoad* sum);

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_MACHINE_LOAD_H_
