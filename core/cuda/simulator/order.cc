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
    joined[lane] = std::max(joined[lane], TimeOf(first + lane));
  }
  ++last_;
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    std::copy(joined, joined + kWarp, &seen_[(first + lane) * kWarp]);
    own_[first + lane] = last_;
  }
}

}  // namespace cuda_simulator
