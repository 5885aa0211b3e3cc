// The option feed_forward_dim of the techniques with feed-forward networks: the inner width, in
// channels. The paper's networks have four times model_dim.
#ifndef TFB_CORE_LAYERS_FEED_FORWARD_DIM_H_
#define TFB_CORE_LAYERS_FEED_FORWARD_DIM_H_

#include <cstdint>

#include "core/options.h"

namespace tfb {

inline constexpr int64_t kMaxFeedForwardDim = int64_t{1} << 20;

inline void DescribeFeedForwardDim(OptionBinder& bind, int64_t* feed_forward_dim) {
  bind.Int("feed_forward_dim", feed_forward_dim, 0, kMaxFeedForwardDim,
           "inner width of the feed-forward networks, in channels; 0 means 4 model_dim");
}

// Returns the width that the option asks for.
inline int64_t FeedForwardDim(int64_t feed_forward_dim, int64_t model_dim) {
  return feed_forward_dim > 0 ? feed_forward_dim : 4 * model_dim;
}

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_FEED_FORWARD_DIM_H_
