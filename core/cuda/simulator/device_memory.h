// Records the buffers of device memory by address, which of their bytes have been written, and the
// accesses of the running launch.
#ifndef TFB_CORE_CUDA_SIMULATOR_DEVICE_MEMORY_H_
#define TFB_CORE_CUDA_SIMULATOR_DEVICE_MEMORY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "core/cuda/simulator/device_shadow.h"
#include "core/cuda/simulator/order.h"
#include "core/cuda/simulator/releases.h"

namespace cuda_simulator {

class DeviceBufferShadow {
 public:
  DeviceBufferShadow() = default;
  DeviceBufferShadow(uintptr_t begin, size_t bytes, bool written)
      : begin_(begin), bytes_(bytes), written_(written ? 0 : bytes) {}

  uintptr_t begin() const { return begin_; }
  size_t bytes() const { return bytes_; }
  bool Contains(uintptr_t address) const { return address - begin_ < bytes_; }
  // Tells whether the buffer contains all `bytes` bytes from `address`, which is in it.
  bool ContainsAll(uintptr_t address, size_t bytes) const {
    return bytes <= bytes_ - (address - begin_);
  }
  bool IsWritten(uintptr_t address, size_t bytes) const {
    if (written_.empty()) return true;
    const uint8_t* written = written_.data() + (address - begin_);
    if (bytes != 4) return std::memchr(written, 0, bytes) == nullptr;
    uint32_t all;  // by far the most common size
    std::memcpy(&all, written, 4);
    return all == 0x01010101;
  }
  void SetWritten(uintptr_t address, size_t bytes) {
    if (!written_.empty()) MarkWritten(address - begin_, bytes);
  }
  // Check and record an access of the running thread, see DeviceShadow.
  DeviceShadow::Conflict Access(const Order& order, const Releases& releases, uintptr_t address,
                                size_t bytes, AccessKind kind) {
    return accesses_.Access(order, releases, address - begin_, bytes, bytes_, kind);
  }
  template <AccessKind kKind, size_t kBytes>
  bool AccessQuickly(const Order& order, uintptr_t address) {
    return accesses_.AccessQuickly<kKind, kBytes>(order, address - begin_);
  }
  void ForgetAccesses() { accesses_.Reset(); }

 private:
  void MarkWritten(size_t offset, size_t bytes);

  uintptr_t begin_ = 0;
  size_t bytes_ = 0;
  std::vector<uint8_t> written_;  // one per byte; empty where all are written
  DeviceShadow accesses_;
};

class DeviceMemory {
 public:
  void Add(uintptr_t begin, size_t bytes, bool written);
  bool Remove(uintptr_t begin);  // returns false where there is no such buffer
  void ForgetAccesses();         // after a reset of the order

  // Returns the buffer that contains the address if it was found recently, else null.
  DeviceBufferShadow* FindRecent(uintptr_t address) const {
    DeviceBufferShadow* recent = recent_[address / kLine % recent_.size()];
    return recent != nullptr && recent->Contains(address) ? recent : nullptr;
  }
  // Returns the buffer that contains the address, or null.
  DeviceBufferShadow* Find(uintptr_t address);
  // Describes the nearest buffer, for messages: "12 bytes behind a buffer of 1024 bytes".
  std::string DescribeNearest(uintptr_t address) const;

 private:
  static constexpr size_t kLine = 1024;

  std::map<uintptr_t, DeviceBufferShadow> buffers_;  // by begin
  // The buffers found last, by address: neighbouring addresses are mostly in the same buffer.
  std::array<DeviceBufferShadow*, 256> recent_ = {};
};

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_DEVICE_MEMORY_H_
