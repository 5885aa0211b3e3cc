// Describes the machine of a result: its hardware, how the binary was built, and its peak rates,
// which the same process measures.
#ifndef TFB_HARNESS_MEASURE_MACHINE_H_
#define TFB_HARNESS_MEASURE_MACHINE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/cuda/device_probe.h"
#include "harness/measure/clock.h"
#include "results/results.pb.h"

namespace tfb {

// Returns host, processor, memory, GPUs (or why there are none), compiler, commit and start time.
// Takes milliseconds; where there is a GPU tenths of a second, for its libraries. Unknown fields
// are left as results.proto says. `threads` is the default size of the pool; `workspace` is the
// folder whose git commit is recorded, empty for none.
Environment DescribeMachine(int threads, const std::string& workspace);

// Adds the GPUs of the machine, each with the state that NVML tells; where it is an error, why there
// are none.
void DescribeGpus(const absl::StatusOr<CudaMachine>& machine, Environment* environment);

// The name of this machine in its network.
std::string HostName();

// Adds to `environment` the f32 FMA rate and the read bandwidth of a pool of each size, timed by
// `clock`. Takes about 0.3 s per size.
void MeasurePeaks(const std::vector<int>& threads, Environment* environment,
                  Clock* clock = RealClock());

// Returns the number of cores that this process may use: those of its CPU affinity, limited by the
// CPU quota of its control group.
int UsableCores();

// What a case may take where the caller does not say: 80 % of the bytes that a process can still take
// before the kernel swaps or kills, by /proc/meminfo and the control group.
int64_t DefaultMemoryLimit();

// Returns the size of the last-level cache; 32 MiB where the system does not report it.
int64_t LastLevelCacheBytes();

// Returns the peak resident set size of this process.
int64_t PeakResidentBytes();

// Returns the workspace whose binary `bazel run` started; empty where it was started another way.
std::string WorkspaceFolder();

// Reads 64-byte vectors of `words` in sequence, several in flight, and returns a number that
// depends on all of them. MeasurePeaks times this function.
uint64_t ReadAll(const uint64_t* words, int64_t count);

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_MACHINE_H_
