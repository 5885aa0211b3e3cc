#include "core/cuda/simulator/device_memory.h"

#include <iterator>

namespace cuda_simulator {

void DeviceBufferShadow::MarkWritten(size_t offset, size_t bytes) {
  if (bytes == bytes_) {
    written_.clear();
  } else {
    std::memset(written_.data() + offset, 1, bytes);
  }
}

void DeviceMemory::Add(uintptr_t begin, size_t bytes, bool written) {
  recent_.fill(nullptr);
  buffers_[begin] = DeviceBufferShadow(begin, bytes, written);
}

bool DeviceMemory::Remove(uintptr_t begin) {
  recent_.fill(nullptr);
  return buffers_.erase(begin) > 0;
}

void DeviceMemory::ForgetAccesses() {
  for (auto& [begin, buffer] : buffers_) buffer.ForgetAccesses();
}

DeviceBufferShadow* DeviceMemory::Find(uintptr_t address) {
  auto next = buffers_.upper_bound(address);
  if (next == buffers_.begin()) return nullptr;
  DeviceBufferShadow& buffer = std::prev(next)->second;
  if (!buffer.Contains(address)) return nullptr;
  return recent_[address / kLine % recent_.size()] = &buffer;
}

std::string DeviceMemory::DescribeNearest(uintptr_t address) const {
  if (address == 0) return "a null pointer";
  if (address < 4096) return "an offset from a null pointer";
  const DeviceBufferShadow* nearest = nullptr;
  uintptr_t distance = ~uintptr_t{0};
  bool behind = false;
  const auto next = buffers_.upper_bound(address);
  if (next != buffers_.end()) {
    nearest = &next->second;
    distance = next->first - address;
  }
  if (next != buffers_.begin()) {
    const DeviceBufferShadow& before = std::prev(next)->second;
    const uintptr_t gap = address - (before.begin() + before.bytes());
    if (gap < distance) {
      nearest = &before;
      distance = gap;
      behind = true;
    }
  }
  if (nearest == nullptr) return "no device memory has been allocated";
  return std::to_string(distance) + " bytes " + (behind ? "behind" : "before") + " a buffer of " +
         std::to_string(nearest->bytes()) + " bytes";
}

}  // namespace cuda_simulator
