// Techniques for tests of the harness: each has one behaviour that a sweep must handle.
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
// toy_unable       Create answers Unimplemented
// toy_refuses      Run answers Internal
// toy_slow         toy_mean; a Run waits ms milliseconds by the clock of the toys
// toy_hungry       asks for a workspace of mib MiB
// toy_hoarder      takes mib MiB in Setup, unannounced
// toy_crash        ends the process by a signal in Run
// toy_hang         lets an hour pass by the clock of the toys in Run, and never returns
// toy_gate         toy_mean; a Run of `from` query tokens or more waits as long as the file exists that
//                  the environment variable TFB_TOY_GATE names; a file with ".reached" behind that
//                  name says that it has come there
// toy_cuda         has an implementation for CUDA alone, which fails
// toy_device       toy_mean, on the CPU and on devices, there with a workspace of mib MiB or more
// toy_bad_launch   toy_mean on the CPU; on a device Run answers that a kernel cannot be launched
// toy_bad_kernel   toy_mean on the CPU; on a device its kernel touches memory that is nobody's,
//                  which loses a GPU to the process
//
// How long toys wait, beside what their work takes by the real clock.
struct ToyTime {
  Clock* clock = RealClock();
  // A Setup waits so long, an Append so long a token, and a Run so long a round.
  double seconds_per_round = 0;
};
void AddToys(Registry& registry, const ToyTime& time = {});
// A toy of the name that techniques are held against by default. For registries without the real
// one.
void AddDenseToy(Registry& registry, const ToyTime& time = {});

}  // namespace tfb

#endif  // TFB_HARNESS_TESTING_TOYS_H_
