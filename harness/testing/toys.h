// Defines techniques for tests of the harness, each with one behaviour that a sweep must handle.
#ifndef TFB_HARNESS_TESTING_TOYS_H_
#define TFB_HARNESS_TESTING_TOYS_H_

#include "core/technique.h"
#include "harness/measure/clock.h"

namespace tfb {

// toy_mean         the mean of the values that a row sees; options rounds (repeats the work), shade
// toy_causal       the same, causal only
// toy_full         the same, not causal only
// toy_hidden       copies hidden states
// toy_stream       copies hidden states, whole or in segments
// toy_wrong        toy_mean, off by 1
// toy_unable       Create returns Unimplemented
// toy_refuses      Run returns Internal
// toy_slow         toy_mean; a Run waits ms milliseconds by the clock of the toys
// toy_hungry       requests a workspace of mib MiB
// toy_hoarder      allocates mib MiB in Setup without declaring them
// toy_crash        ends the process by a signal in Run
// toy_hang         waits an hour by the clock of the toys in Run, and never returns
// toy_gate         toy_mean; a Run of `from` query tokens or more waits as long as the file exists
//                  that the environment variable TFB_TOY_GATE names, and writes a file of that name
//                  with ".reached" appended when it begins to wait
// toy_cuda         has an implementation only for CUDA, which fails
// toy_device       toy_mean, on the CPU and on devices, there with a workspace of mib MiB or more
// toy_bad_launch   toy_mean on the CPU; on a device Run returns that a kernel cannot be launched
// toy_bad_kernel   toy_mean on the CPU; on a device its kernel accesses unallocated memory, which
//                  makes a GPU unusable for the process
//
// How long toys wait, in addition to the real time of their work.
struct ToyTime {
  Clock* clock = RealClock();
  // The wait of a Setup, of an Append per token, and of a Run per round.
  double seconds_per_round = 0;
};
void AddToys(Registry& registry, const ToyTime& time = {});
// Adds a toy with the name of the default dense counterpart, for registries without the real one.
void AddDenseToy(Registry& registry, const ToyTime& time = {});

}  // namespace tfb

#endif  // TFB_HARNESS_TESTING_TOYS_H_
