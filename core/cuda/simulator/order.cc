#include "core/cuda/simulator/order.h"

namespace cuda_simulator {

void Order::SyncWarp(int warp, unsigned lanes, unsigned live_lanes) {
  const int first = warp * kWarp;
  if ((lanes & live_lanes) == live_lanes) {
    warp_[warp] = ++last_;
    return;
  }
  Stamp joined[kWarp] = {};
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    for (int other = 0; other < kWarp; ++other) {
      joined[other] = std::max(joined[other], seen_[(first + lane) * kWarp + other]);
    }
    joined[lane] = std::max({joined[lane], TimeOf(first + lane), fence_[first + lane]});
  }
  ++last_;
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    std::copy(joined, joined + kWarp, &seen_[(first + lane) * kWarp]);
    own_[first + lane] = last_;
  }
}

Order::Horizon Order::HorizonNow() const {
  Horizon horizon{block_start_, barrier_, warp_barrier(), now_on_device(), thread_, {}};
  std::copy_n(&seen_[thread_ * kWarp], kWarp, horizon.seen.begin());
  return horizon;
}

}  // namespace cuda_simulator
