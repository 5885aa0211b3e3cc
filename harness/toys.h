// Techniques for tests of the harness: each has one behaviour that a sweep must handle.
#ifndef TFB_HARNESS_TOYS_H_
#define TFB_HARNESS_TOYS_H_

#include "core/technique.h"

namespace tfb {

// toy_mean         the mean of the values that a row sees; options rounds (repeats the work), shade
// toy_causal       the same, causal only
// toy_full         the same, not causal only
// toy_hidden       copies hidden states
// toy_stream       copies hidden states, whole or in segments
// toy_wrong        toy_mean, off by 1
// toy_unable       Create answers Unimplemented
// toy_refuses      Run answers Internal
// toy_slow         toy_mean, sleeping ms milliseconds a Run
// toy_hungry       asks for a workspace of mib MiB
// toy_hoarder      takes mib MiB in Setup, unannounced
// toy_crash        ends the process by a signal in Run
// toy_cuda         has an implementation for CUDA alone, which fails
// toy_device       toy_mean, on the CPU and on devices, there with a workspace of mib MiB or more
// toy_bad_launch   toy_mean on the CPU; on a device Run answers that a kernel cannot be launched
// toy_bad_kernel   toy_mean on the CPU; on a device its kernel touches memory that is nobody's,
//                  which loses a GPU to the process
void AddToys(Registry& registry);
// Adds a toy with the name of the default baseline, for registries without the real one.
void AddDenseToy(Registry& registry);

}  // namespace tfb

#endif  // TFB_HARNESS_TOYS_H_
