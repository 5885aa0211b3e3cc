// What the simulator knows of each byte of a block's shared memory: who wrote it, who read it since.
#ifndef TFB_CORE_CUDA_SIMULATOR_SHARED_SHADOW_H_
#define TFB_CORE_CUDA_SIMULATOR_SHARED_SHADOW_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/cuda/simulator/order.h"

namespace cuda_simulator {

// An asynchronous copy writes its place at any time between its begin and its end.
enum class AccessKind : uint8_t { kRead, kWrite, kAtomic, kCopyBegin, kCopyEnd };

// A cell stands for 4 aligned bytes, until an access touches some of them only: from then on, until
// the next launch, for one byte. So threads may use neighbouring bytes as they like.
//
// A cell remembers its last write (of concurrent atomic ones, that there are several) and the reads
// since. Where two lanes of a warp that has synced in parts read the same cell, it remembers the
// earlier time of both: it may then miss a race, and never invents one.
class SharedShadow {
 public:
  SharedShadow(uintptr_t begin, size_t capacity_bytes, const Order* order);

  // Forgets what it knows, and stands for the first `bytes` bytes from now on. Blocks of the launch
  // are told apart by `order`.
  void StartLaunch(size_t bytes);
  // Forgets times, too: `order` has been reset.
  void Reset();

  uintptr_t begin() const { return begin_; }
  size_t bytes() const { return bytes_; }
  bool Contains(uintptr_t address) const { return address - begin_ < bytes_; }

  enum class Verdict {
    kFine,
    kUnwritten,      // a read, and nothing in this block has written all of it
    kInFlight,       // an asynchronous copy that has begun may not have come to its end
    kRaceWithRead,   // of `*other`
    kRaceWithWrite,  // of `*other`
  };
  // Of the worst byte. `other` receives a thread, or kSeveral; the access lies within bytes().
  Verdict Access(uintptr_t address, size_t bytes, AccessKind kind, int thread, int* other);
  static constexpr int kSeveral = -1;

 private:
  static constexpr uint16_t kLanes = 0x8000;
  static constexpr uint16_t kWarps = 0xffff;
  // All zeros at first.
  struct Cell {
    Stamp write = 0;        // when; before the block's start: it has not been written
    Stamp read = 0;         // when, since that write; before the last barrier: no matter
    uint32_t lanes = 0;     // that read, of `warp`
    uint16_t writer = 0;    // the thread, or kLanes + warp, or kWarps
    uint16_t stranger = 0;  // 1 + a reader of another warp; 0: there is none
    uint8_t warp = 0;
    bool atomic = false;
    bool in_flight = false;
  };
  struct Granule {
    Cell cell;
    uint32_t split = 0;  // where in splits_ its bytes have cells of their own; 0: they have not
  };

  Verdict Touch(Cell* cell, AccessKind kind, int thread, int* other);
  bool WriteIsBefore(const Cell& cell, int thread) const;
  void NoteRead(Cell* cell, int thread);
  void NoteWrite(Cell* cell, AccessKind kind, int thread);
  int ReaderNotBefore(const Cell& cell, int thread) const;  // or -1
  Cell* Split(size_t granule);

  const uintptr_t begin_;
  size_t bytes_ = 0;
  const Order& order_;
  // Zeros from the operating system, which gives memory only to what is touched: there may be much
  // shared memory that no kernel uses.
  const std::unique_ptr<Granule[], void (*)(void*)> granules_;
  const size_t capacity_bytes_;
  std::vector<std::array<Cell, 4>> splits_;
  std::vector<size_t> split_granules_;
};

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_SHARED_SHADOW_H_
