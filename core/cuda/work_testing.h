// The work that a test makes the simulator do.
#ifndef TFB_CORE_CUDA_WORK_TESTING_H_
#define TFB_CORE_CUDA_WORK_TESTING_H_

#include <string>

#include "absl/strings/str_cat.h"
#include "core/cuda/simulator/simulator.h"

namespace tfb {

// Returns "2 launches, 8 blocks, 96 barriers, 384 collectives": what `run` makes the simulator do. A
// tile that is computed twice, or a product that nothing needs, changes no output, but these: barriers
// are those of blocks, and collectives the shuffles, votes and matrix products of warps. They depend
// on the kernels and the call alone. Accesses, which the compiler may merge, are left out.
template <class Run>
std::string WorkOf(const Run& run) {
  const cuda_simulator::Counts before = cuda_simulator::TotalCounts();
  run();
  const cuda_simulator::Counts after = cuda_simulator::TotalCounts();
  return absl::StrCat(after.launches - before.launches, " launches, ", after.blocks - before.blocks,
                      " blocks, ", after.barriers - before.barriers, " barriers, ",
                      after.warp_collectives - before.warp_collectives, " collectives");
}

}  // namespace tfb

#endif  // TFB_CORE_CUDA_WORK_TESTING_H_
