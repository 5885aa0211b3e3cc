// Defines the shadow of a block's shared memory: for each byte, which thread wrote it, and which
// threads have read it since.
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

// A cell stands for 4 aligned bytes until an access touches only some of them; from then on, until
// the next launch, each byte has a cell. So threads may use neighbouring bytes independently.
//
// A cell records its last write and the reads since; of several concurrent atomic writes, only that
// there are several. Where two lanes of a partly synced warp read the same cell, it records the
// earlier time of both, which may miss a race but never gives a false one. Where the order tracks all
// threads and agents, a cell lists its readers, each with its last read.
class SharedShadow {
 public:
  SharedShadow(uintptr_t begin, size_t capacity_bytes, const Order* order);

  // Forgets all accesses, and covers the first `bytes` bytes from now on. `order` distinguishes the
  // blocks of the launch. With `admits_quick_accesses` false, ContainsQuickly is, too.
  void StartLaunch(size_t bytes, bool admits_quick_accesses = true);
  // Makes ContainsQuickly false, as it must be where the order tracks all.
  void RefuseQuickAccesses() { quick_bytes_ = 0; }
  // Forgets stamps, too, after a reset of `order`.
  void Reset();

  uintptr_t begin() const { return begin_; }
  size_t bytes() const { return bytes_; }
  bool Contains(uintptr_t address) const { return address - begin_ < bytes_; }
  // Tells whether AccessQuickly may be called for an access that begins at this address.
  bool ContainsQuickly(uintptr_t address) const { return address - begin_ < quick_bytes_; }

  enum class Verdict {
    kFine,
    kUnwritten,      // a read of bytes that nothing in this block has written
    kInFlight,       // the bytes have an asynchronous copy that may not have ended
    kUnfenced,       // of an agent: `*other` wrote the bytes, and has not called FenceProxy since
    kRaceWithRead,   // of `*other`
    kRaceWithWrite,  // of `*other`
  };
  // Whose access it is, where it is not the running thread's: an agent's that the running thread set
  // to work, with the stamp of this work.
  struct Agent {
    int number;
    Stamp when;
  };
  // Checks and records an access of the running thread, or of an agent, within bytes(). Returns the
  // verdict on the worst byte; `other` receives a thread, an agent or kSeveral.
  Verdict Access(uintptr_t address, size_t bytes, AccessKind kind, int* other,
                 const Agent* agent = nullptr);
  // Records a common access and returns true: a read of bytes that were written in
  // this block before the last barrier, or the first write since. It returns false for others;
  // Access then decides.
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
  // The state of a cell; all zeros at first.
  struct Cell {
    Stamp write = 0;  // when it was written; a stamp before the block's start means never
    // When it was read since that write; a stamp before the last barrier does not matter.
    Stamp read = 0;
    uint32_t lanes = 0;     // the lanes of `warp` that read; where `lists`, the first of readers_
    uint16_t writer = 0;    // the writing thread or agent, or kLanes + warp, or kWarps
    uint16_t stranger = 0;  // 1 + a reader of another warp; 0 where there is none
    uint8_t warp = 0;
    bool atomic = false;
    bool in_flight = false;
    bool lists = false;
  };
  // Lanes of a warp that read at the same time, or an agent, in the list of a cell.
  struct Readers {
    Stamp when;
    uint32_t lanes;
    int first;      // the thread of lane 0, or an agent of which lanes is 1
    uint32_t next;  // index in readers_, or 0
  };
  struct Granule {
    Cell cell;
    uint32_t split = 0;  // index in splits_ of the cells of its bytes, or 0
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
      cell->lists = false;
    } else if (cell->warp == warp) {
      cell->lanes |= lane;
      cell->read = std::min(cell->read, order_.now());
    } else {
      cell->stranger = static_cast<uint16_t>(order_.thread() + 1);
    }
  }
  Verdict Touch(Cell* cell, AccessKind kind, const Agent* agent, int* other);
  bool WriteIsBefore(const Cell& cell) const;
  bool IsUnfenced(const Cell& cell, AccessKind kind) const;
  void NoteWrite(Cell* cell, AccessKind kind, const Agent* agent);
  void MakeList(Cell* cell);
  void CopyList(const Cell& cell, Cell* copy);
  void NoteInList(Cell* cell, const Agent* agent);
  void AddReaders(Cell* cell, Stamp when, uint32_t lanes, int first);
  int ReaderNotBefore(const Cell& cell) const;  // returns -1 where there is none
  Cell* Split(size_t granule);

  const uintptr_t begin_;
  size_t bytes_ = 0;
  size_t quick_bytes_ = 0;  // bytes_, or 0
  const Order& order_;
  // The zeros come from the operating system, which provides only memory that is touched: there may
  // be much shared memory that no kernel uses.
  const std::unique_ptr<Granule[], void (*)(void*)> granules_;
  const size_t capacity_bytes_;
  std::vector<Readers> readers_;  // of this block's cells; place 0 ends a list
  uint32_t free_readers_ = 0;     // a list
  Stamp block_of_readers_ = 0;
  std::vector<std::array<Cell, 4>> splits_;
  std::vector<size_t> split_granules_;
};

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_SHARED_SHADOW_H_
