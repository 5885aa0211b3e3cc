#include "core/cuda/simulator/memory.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace cuda_simulator {
namespace {

constexpr int kWarp = 32;

// Whether nothing orders an access at `now` after one of another thread at `then`.
bool Unordered(const Moment& then, int then_warp, const Moment& now) {
  if (then.block_interval != now.block_interval) return false;
  return then_warp != now.thread / kWarp || then.warp_interval == now.warp_interval;
}

}  // namespace

SharedShadow::SharedShadow(uintptr_t begin, size_t bytes)
    : begin_(begin), bytes_(bytes), granules_((bytes + 3) / 4 + 1) {}

void SharedShadow::Clear() { std::fill(granules_.begin(), granules_.end(), Granule{}); }

void SharedShadow::Forget(uintptr_t address, size_t bytes) {
  for (size_t byte = 0; byte < bytes; ++byte) {
    if (!Contains(address + byte)) continue;
    const size_t offset = address + byte - begin_;
    granules_[offset / 4].written &= static_cast<uint8_t>(~(1u << offset % 4));
  }
}

SharedShadow::Verdict SharedShadow::Access(uintptr_t address, size_t bytes, AccessKind kind,
                                           const Moment& now, int* other) {
  const size_t offset = address - begin_, end = offset + bytes;
  Verdict verdict = Verdict::kFine;
  for (size_t g = offset / 4; g * 4 < end; ++g) {
    Granule& granule = granules_[g];
    const int first = offset > g * 4 ? static_cast<int>(offset - g * 4) : 0;
    const int last = end < g * 4 + 4 ? static_cast<int>(end - g * 4) : 4;
    const uint8_t mask = static_cast<uint8_t>((1 << last) - (1 << first));
    const Write& write = granule.write;
    if ((write.bytes & mask) != 0 && write.when.thread != now.thread &&
        !(write.atomic && kind == AccessKind::kAtomic) &&
        Unordered(write.when, write.when.thread / kWarp, now)) {
      verdict = Verdict::kRaceWithWrite;
      *other = write.when.thread;
    }
    Reads& reads = granule.reads;
    if (kind != AccessKind::kRead) {
      if ((reads.bytes & mask) != 0 && reads.when.thread != now.thread &&
          Unordered(reads.when, reads.warp, now) && verdict == Verdict::kFine) {
        verdict = Verdict::kRaceWithRead;
        *other = reads.when.thread;
      }
      const bool same = write.bytes != 0 && write.when.thread == now.thread &&
                        write.when.block_interval == now.block_interval &&
                        write.when.warp_interval == now.warp_interval;
      granule.write = {now, static_cast<uint8_t>(same ? write.bytes | mask : mask),
                       kind == AccessKind::kAtomic};
    }
    if (kind != AccessKind::kWrite) {
      if ((granule.written & mask) != mask && verdict == Verdict::kFine) {
        verdict = Verdict::kUnwritten;
      }
    }
    if (kind == AccessKind::kRead) {
      const uint16_t warp = now.thread / kWarp;
      const bool fresh = reads.bytes == 0 || reads.when.block_interval != now.block_interval;
      if (fresh) {
        reads = {now, warp, mask};
      } else if (reads.when.thread != now.thread) {
        reads.warp = reads.warp == warp ? warp : static_cast<uint16_t>(kSeveral);
        reads.when = now;
        reads.when.thread = kSeveral;
        reads.bytes |= mask;
      } else {
        reads.when = now;
        reads.bytes |= mask;
      }
    } else {
      granule.written |= mask;
    }
  }
  return verdict;
}

void BufferMap::Add(uintptr_t begin, size_t bytes, bool written) {
  Buffer buffer{begin, bytes, {}};
  if (!written) buffer.written.assign(bytes, 0);
  buffers_[begin] = std::move(buffer);
  last_ = nullptr;
}

bool BufferMap::Remove(uintptr_t begin) {
  last_ = nullptr;
  return buffers_.erase(begin) > 0;
}

BufferMap::Buffer* BufferMap::Find(uintptr_t address) {
  if (last_ != nullptr && address - last_->begin < last_->bytes) return last_;
  auto next = buffers_.upper_bound(address);
  if (next == buffers_.begin()) return nullptr;
  Buffer& buffer = std::prev(next)->second;
  if (address - buffer.begin >= buffer.bytes) return nullptr;
  last_ = &buffer;
  return last_;
}

std::string BufferMap::DescribeNearest(uintptr_t address) const {
  if (address == 0) return "a null pointer";
  if (address < 4096) return "an offset from a null pointer";
  const Buffer* nearest = nullptr;
  uintptr_t distance = ~uintptr_t{0};
  bool behind = false;
  const auto next = buffers_.upper_bound(address);
  if (next != buffers_.end()) {
    nearest = &next->second;
    distance = next->first - address;
  }
  if (next != buffers_.begin()) {
    const Buffer& before = std::prev(next)->second;
    const uintptr_t gap = address - (before.begin + before.bytes);
    if (gap < distance) {
      nearest = &before;
      distance = gap;
      behind = true;
    }
  }
  if (nearest == nullptr) return "no device memory has been allocated";
  return std::to_string(distance) + " bytes " + (behind ? "behind" : "before") + " a buffer of " +
         std::to_string(nearest->bytes) + " bytes";
}

}  // namespace cuda_simulator
