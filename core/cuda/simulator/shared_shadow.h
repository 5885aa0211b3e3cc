// What is known of each byte of a block's shared memory: who wrote it, and who has read it since.
#ifndef TFB_CORE_CUDA_SIMULATOR_SHARED_SHADOW_H_
#define TFB_CORE_CUDA_SIMULATOR_SHARED_SHADOW_H_

#include <algorithm>
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
  // An access of the running thread, within bytes(). Tells of the worst byte; `other` receives a
  // thread, or kSeveral.
  Verdict Access(uintptr_t address, size_t bytes, AccessKind kind, int* other);
  // True if it is one of the most usual ones, and is noted: a read of what was written in this
  // block before the last barrier, or the first write since. Otherwise Access tells.
  template <AccessKind kKind, size_t kBytes>
  bool AccessQuickly(uintptr_t address) {
    const size_t at = address - begin_;
    if (at % kBytes != 0 || kBytes > bytes_ - at) return false;
    Granule* granule = &granules_[at / 4];
    if (kBytes < 4) return TouchBytesQuickly<kKind>(granule->split, at % 4, kBytes);
    for (size_t part = 0; part < kBytes / 4; ++part, ++granule) {
      if (granule->split != 0 || !TouchQuickly<kKind>(&granule->cell)) return false;
    }
    return true;
  }
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

  template <AccessKind kKind>
  bool TouchQuickly(Cell* cell) {
    if (cell->in_flight || cell->write >= order_.barrier()) return false;
    if (kKind == AccessKind::kRead) {
      if (cell->write < order_.block_start()) return false;
      NoteRead(cell);
      return true;
    }
    if (kKind != AccessKind::kWrite || cell->read >= order_.barrier()) return false;
    cell->write = order_.now();
    cell->writer = static_cast<uint16_t>(order_.thread());
    cell->atomic = false;
    return true;
  }
  template <AccessKind kKind>
  bool TouchBytesQuickly(uint32_t split, size_t first, size_t count) {
    if (split == 0) return false;
    Cell* cells = &splits_[split][first];
    for (size_t byte = 0; byte < count; ++byte) {
      if (!TouchQuickly<kKind>(&cells[byte])) return false;
    }
    return true;
  }
  void NoteRead(Cell* cell) {
    const int warp = order_.warp();
    const uint32_t lane = 1u << order_.thread() % kWarp;
    if (cell->read < order_.barrier() ||
        (cell->warp == warp && cell->stranger == 0 && cell->read < order_.warp_barrier())) {
      cell->read = order_.now();
      cell->lanes = lane;
      cell->warp = static_cast<uint8_t>(warp);
      cell->stranger = 0;
    } else if (cell->warp == warp) {
      cell->lanes |= lane;
      cell->read = std::min(cell->read, order_.now());
    } else {
      cell->stranger = static_cast<uint16_t>(order_.thread() + 1);
    }
  }
  Verdict Touch(Cell* cell, AccessKind kind, int* other);
  bool WriteIsBefore(const Cell& cell) const;
  void NoteWrite(Cell* cell, AccessKind kind);
  int ReaderNotBefore(const Cell& cell) const;  // or -1
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
