#include "core/cuda/simulator/order.h"

namespace cuda_simulator {

void Order::SyncWarp(int warp, unsigned lanes, unsigned live_lanes) {
  const int first = warp * kWarp;
  if ((lanes & live_lanes) == live_lanes) {
    if (tracks_all_ && knows_more_[warp]) {
      ShareInWarp(first, lanes);
      knows_more_[warp] = false;
    }
    warp_[warp] = ++last_;
    return;
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    Stamp& own = seen_[At(first + lane, first + lane)];
    own = std::max({own, TimeOf(first + lane), fence_[first + lane]});
  }
  ShareInWarp(first, lanes);
  ++last_;
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((lanes >> lane & 1) != 0) own_[first + lane] = last_;
  }
}

// Gives the lanes of the warp from thread `first` on what any of them has in seen_.
void Order::ShareInWarp(int first, unsigned lanes) {
  const size_t width = tracks_all_ ? width_ : kWarp;
  if (tracks_all_ && threads_ - first < kWarp) lanes &= (1u << (threads_ - first)) - 1;
  std::vector<Stamp> joined(width);
  Stamp acquired = 0;
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    const Stamp* row = &seen_[(first + lane) * width];
    for (size_t n = 0; n < width; ++n) joined[n] = std::max(joined[n], row[n]);
    if (tracks_all_) acquired = std::max(acquired, acquired_[first + lane]);
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    std::copy(joined.begin(), joined.end(), &seen_[(first + lane) * width]);
    if (tracks_all_) acquired_[first + lane] = acquired;
  }
}

void Order::TrackAll(int threads) {
  if (tracks_all_) return;
  const std::vector<Stamp> of_lanes = std::move(seen_);
  threads_ = threads;
  width_ = static_cast<size_t>(kAgents + threads);
  seen_.assign(std::max(static_cast<size_t>(threads) * width_, size_t{kMaxThreads} * kWarp), 0);
  acquired_.assign(kMaxThreads, 0);
  proxy_fences_.resize(kMaxThreads);
  std::fill(std::begin(knows_more_), std::end(knows_more_), true);
  tracks_all_ = true;
  for (int t = 0; t < threads; ++t) {
    const int first = t / kWarp * kWarp;
    for (int other = first; other < std::min(first + kWarp, threads); ++other) {
      seen_[At(t, other)] = of_lanes[static_cast<size_t>(t) * kWarp + other % kWarp];
    }
  }
}

void Order::Release(int thread, Knowledge* to) {
  to->resize(width_);
  const Stamp* row = &seen_[thread * width_];
  for (size_t n = 0; n < width_; ++n) (*to)[n] = std::max((*to)[n], row[n]);
  const int first = thread / kWarp * kWarp;
  const Stamp of_warp = std::max(barrier_, warp_[thread / kWarp]) - 1;
  for (int t = first; t < std::min(first + kWarp, threads_); ++t) {
    (*to)[Column(t)] = std::max((*to)[Column(t)], of_warp);
  }
  Stamp& own = (*to)[Column(thread)];
  own = std::max({own, TimeOf(thread), fence_[thread]});
  own_[thread] = ++last_;
  if (thread == thread_) now_ = last_;
}

void Order::Acquire(int thread, const Knowledge& from) {
  Stamp* row = &seen_[thread * width_];
  for (size_t n = 0; n < from.size(); ++n) row[n] = std::max(row[n], from[n]);
  acquired_[thread] = ++last_;
  knows_more_[thread / kWarp] = true;
}

void Order::EndOf(int agent, Stamp last) {
  Stamp& known = seen_[thread_ * width_ + agent];
  known = std::max(known, last);
  knows_more_[warp()] = true;
}

bool Order::IsKnown(int agent, Stamp last) const {
  for (int t = 0; t < threads_; ++t) {
    if (seen_[t * width_ + agent] >= last) return true;
  }
  return false;
}

void Order::ShareAgents() {
  for (int agent = 0; agent < kAgents; ++agent) {
    Stamp most = 0;
    for (int t = 0; t < threads_; ++t) most = std::max(most, seen_[t * width_ + agent]);
    if (most < block_start_) continue;
    for (int t = 0; t < threads_; ++t) seen_[t * width_ + agent] = most;
  }
}

void Order::FenceProxy() {
  proxy_fences_[thread_].push_back(now_);
  now_ = own_[thread_] = ++last_;
}

bool Order::IsFenced(Stamp then, int writer) const {
  const std::vector<Stamp>& fences = proxy_fences_[writer];
  const auto fence = std::lower_bound(fences.begin(), fences.end(), then);
  return fence != fences.end() && IsBefore(*fence, writer);
}

Order::Horizon Order::HorizonNow() const {
  Horizon horizon{block_start_, barrier_, warp_barrier(), now_on_device(), thread_, 0, {}};
  const int first = thread_ / kWarp * kWarp;
  if (tracks_all_) {
    const Stamp* row = &seen_[At(thread_, 0)];
    horizon.seen.assign(row, row + threads_);
  } else {
    horizon.first = first;
    const Stamp* row = &seen_[static_cast<size_t>(thread_) * kWarp];
    horizon.seen.assign(row, row + kWarp);
  }
  return horizon;
}

}  // namespace cuda_simulator
