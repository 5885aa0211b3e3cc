// tbb::global_control for onednn_sdpa_test, which has no threads to limit.
#ifndef TFB_HARNESS_CONTESTANTS_PEERS_STAND_IN_TBB_GLOBAL_CONTROL_H_
#define TFB_HARNESS_CONTESTANTS_PEERS_STAND_IN_TBB_GLOBAL_CONTROL_H_

#include <cstddef>

namespace tbb {

struct global_control {
  enum parameter { max_allowed_parallelism };
  global_control(parameter, size_t) {}
};

}  // namespace tbb

#endif  // TFB_HARNESS_CONTESTANTS_PEERS_STAND_IN_TBB_GLOBAL_CONTROL_H_
