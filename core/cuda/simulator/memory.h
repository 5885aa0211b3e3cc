// What the simulator knows of each byte that kernels may touch.
#ifndef TFB_CORE_CUDA_SIMULATOR_MEMORY_H_
#define TFB_CORE_CUDA_SIMULATOR_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace cuda_simulator {

// When an access happened: two accesses of different threads are ordered where a barrier of the
// block, or of their warp, lies between them.
struct Moment {
  uint32_t block_interval;  // barriers of any block before it, counted over the launch
  uint16_t warp_interval;   // __syncwarp's of the whole warp, within the block
  uint16_t thread;          // of the block
};

enum class AccessKind : uint8_t { kRead, kWrite, kAtomic };

// Memory of a block. Granules of 4 bytes remember their last write and their reads since.
class SharedShadow {
 public:
  SharedShadow(uintptr_t begin, size_t bytes);

  bool Contains(uintptr_t address) const { return address - begin_ < bytes_; }
  uintptr_t begin() const { return begin_; }
  size_t bytes() const { return bytes_; }
  // Nothing has been written or read: a new block.
  void Clear();

  // The bytes that lie in it count as unwritten from now on.
  void Forget(uintptr_t address, size_t bytes);

  enum class Verdict { kFine, kUnwritten, kRaceWithWrite, kRaceWithRead };
  // `other` receives the thread of the conflicting access, or kSeveral.
  Verdict Access(uintptr_t address, size_t bytes, AccessKind kind, const Moment& now, int* other);
  static constexpr int kSeveral = 0xffff;

 private:
  struct Write {
    Moment when;
    uint8_t bytes;  // bit b: byte b of the granule; 0 where there is none
    bool atomic;
  };
  // Of one thread, or of several: of one warp while they are in one.
  struct Reads {
    Moment when;    // the last one; thread kSeveral for threads of one warp
    uint16_t warp;  // kSeveral for several
    uint8_t bytes;
  };
  struct Granule {
    Write write = {};
    Reads reads = {};
    uint8_t written = 0;  // bit b: byte b has been
  };

  uintptr_t begin_;
  size_t bytes_;
  std::vector<Granule> granules_;
};

// Device memory: buffers by address.
class BufferMap {
 public:
  void Add(uintptr_t begin, size_t bytes, bool written);
  bool Remove(uintptr_t begin);

  struct Buffer {
    uintptr_t begin;
    size_t bytes;
    std::vector<uint8_t> written;  // one a byte; empty: all are
  };
  Buffer* Find(uintptr_t address);  // the one that contains it, or null
  // The nearest in words, for messages: "12 bytes behind a buffer of 1024 bytes".
  std::string DescribeNearest(uintptr_t address) const;

 private:
  std::map<uintptr_t, Buffer> buffers_;  // by begin
  Buffer* last_ = nullptr;
};

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_MEMORY_H_
