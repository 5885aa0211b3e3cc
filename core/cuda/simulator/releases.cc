#include "core/cuda/simulator/releases.h"

#include <algorithm>

namespace cuda_simulator {

void Releases::StartLaunch() {
  releases_.clear();
  places_.clear();
  StartBlock();
}

void Releases::StartBlock() {
  known_.clear();
  any_fence_ = false;
}

void Releases::Join(const Numbers& from, Numbers* to) {
  if (to->size() < from.size()) to->resize(from.size());
  for (size_t n = 0; n < from.size(); ++n) {
    if (from[n]) (*to)[n] = true;
  }
}

void Releases::PassOn(uintptr_t address) {
  const auto place = places_.find(address);
  if (place != places_.end()) Join(place->second, &known_);
  const Order::Horizon& fence = fences_[order_.thread()];
  if (fence.block_start != order_.block_start()) return;
  Numbers& numbers = places_[address];
  Join(known_, &numbers);
  numbers.resize(releases_.size() + 1);
  numbers.back() = true;
  releases_.push_back(fence);
}

// Tells whether there is a release of that access's block that comes before the running thread, and
// that `accept` accepts.
template <class Accept>
bool Releases::FindOf(Stamp then, const Accept& accept) const {
  if (known_.empty()) return false;
  const Stamp start = order_.start_of_block(order_.BlockAt(then));
  const auto before = [](const Order::Horizon& release, Stamp start) {
    return release.block_start < start;
  };
  auto release = std::lower_bound(releases_.begin(), releases_.end(), start, before);
  for (; release != releases_.end() && release->block_start == start; ++release) {
    const size_t number = static_cast<size_t>(release - releases_.begin());
    if (number < known_.size() && known_[number] && accept(*release)) return true;
  }
  return false;
}

bool Releases::IsBefore(Stamp then, int thread) const {
  return FindOf(then, [&](const Order::Horizon& release) { return release.Covers(then, thread); });
}

bool Releases::KnowsBlockOf(Stamp then) const {
  return FindOf(then, [](const Order::Horizon&) { return true; });
}

}  // namespace cuda_simulator
