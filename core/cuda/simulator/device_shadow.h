// Defines the shadow of a buffer of device memory: for each byte, which threads of a launch wrote
// it and read it since.
#ifndef TFB_CORE_CUDA_SIMULATOR_DEVICE_SHADOW_H_
#define TFB_CORE_CUDA_SIMULATOR_DEVICE_SHADOW_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "core/cuda/simulator/order.h"
#include "core/cuda/simulator/releases.h"

namespace cuda_simulator {

// A cell stands for 4 aligned bytes, or for 2 or 1 in pages of which an access has touched less
// than a cell. It records the last write in the launch, two of the threads that read since, and one
// block that read earlier. Two readers are enough to find every race where whole warps sync; where
// parts of a warp do, and where several blocks change a place atomically and pass that on, a race
// may be missed, but none is invented.
//
// Cells are made when they are first touched, since most of a buffer may never be.
class DeviceShadow {
 public:
  DeviceShadow() = default;
  DeviceShadow(DeviceShadow&&) = default;
  DeviceShadow& operator=(DeviceShadow&&) = default;

  struct Conflict {
    bool found = false;
    bool with_write = false;  // or with a read
    Stamp when = 0;
    int thread = 0;  // of its block, or kSeveral
  };
  static constexpr int kSeveral = -1;

  // Checks and records an access of the running thread, within `capacity` bytes, the same in all
  // calls. Returns the conflict of the worst byte.
  Conflict Access(const Order& order, const Releases& releases, size_t offset, size_t bytes,
                  size_t capacity, AccessKind kind);
  // Records a common access and returns true: one of bytes that no thread but the running one has
  // accessed, in a conflicting way, since the block's last barrier, and no other block. It returns
  // false for others; Access then decides.
  template <AccessKind kKind, size_t kBytes>
  bool AccessQuickly(const Order& order, size_t offset) {
    if (pages_ == nullptr || offset % kBytes != 0) return false;
    const Page& page = pages_[offset / kPageBytes];
    size_t cells = kBytes >> page.shift;
    if (page.cells == nullptr || cells == 0) return false;
    for (Cell* cell = &page.cells[offset % kPageBytes >> page.shift]; cells > 0; --cells, ++cell) {
      if (!(kKind == AccessKind::kRead ? ReadQuickly(order, cell) : WriteQuickly(order, cell))) {
        return false;
      }
    }
    return true;
  }
  // Forgets all accesses, which is needed after a reset of the order.
  void Reset() {
    pages_.reset();
    cells_.clear();
  }

 private:
  static constexpr size_t kPageBytes = 1024;
  static constexpr uint16_t kLanes = 0x8000;
  static constexpr uint16_t kWarps = 0xfffe;
  static constexpr uint16_t kBlocks = 0xffff;
  // The state of a cell; all zeros at first. A stamp before the launch means never.
  struct Cell {
    Stamp write = 0;
    Stamp read = 0;          // that of `reader`, since when `second` read, if of the same warp
    Stamp earlier_read = 0;  // a read in an earlier block than that of `read`
    Stamp plain_write = 0;   // where the last write was atomic: the last one that was not
    uint16_t writer = 0;  // a thread, or after several atomic writes kLanes + warp, kWarps, kBlocks
    uint16_t plain_writer = 0;
    uint16_t reader = 0;
    uint16_t second : 15;  // 1 + another reader; 0 where there is none
    uint16_t atomic : 1;
    Cell() : second(0), atomic(0) {}
  };
  struct Page {
    Cell* cells;
    uint32_t shift;  // log2 of the bytes of a cell
  };

  bool ReadQuickly(const Order& order, Cell* cell) {
    if (!IsQuicklyBefore(order, cell->write, cell->writer)) return false;
    NoteRead(order, cell);
    return true;
  }
  bool WriteQuickly(const Order& order, Cell* cell) {
    if (!IsQuicklyBefore(order, cell->write, cell->writer) ||
        !IsQuicklyBefore(order, cell->read, cell->reader)) {
      return false;
    }
    if (cell->earlier_read >= order.launch_start()) return false;
    if (cell->second != 0 && cell->read >= order.barrier()) return false;
    NoteWrite(order, cell);
    return true;
  }
  // Tells whether an access came in an earlier launch, before the block's last barrier, or from
  // this thread.
  static bool IsQuicklyBefore(const Order& order, Stamp then, uint16_t thread) {
    if (then < order.launch_start()) return true;
    if (then < order.block_start()) return false;
    return then < order.barrier() || thread == order.thread();
  }
  static void NoteRead(const Order& order, Cell* cell) {
    const uint16_t thread = static_cast<uint16_t>(order.thread());
    if (cell->read < order.barrier()) {
      if (cell->read < order.block_start() && cell->read >= order.launch_start()) {
        cell->earlier_read = cell->read;
      }
      cell->read = order.now_on_device();
      cell->reader = thread;
      cell->second = 0;
    } else if (cell->reader != thread) {
      NoteFurtherRead(order, thread, cell);
    }
  }
  // Notes a read by another thread than `reader` since the last barrier. Readers of two warps
  // conflict with every writer before the next barrier; two of one warp do until it syncs.
  static void NoteFurtherRead(const Order& order, uint16_t thread, Cell* cell) {
    const int warp = thread / kWarp;
    if (cell->reader / kWarp != warp) {
      cell->second = (thread + 1) & 0x7fff;
    } else if (cell->read < order.warp_barrier()) {
      cell->read = order.now_on_device();
      cell->reader = thread;
      if (cell->second != 0 && (cell->second - 1) / kWarp == warp) cell->second = 0;
    } else if (cell->second == 0) {
      cell->second = (thread + 1) & 0x7fff;
      cell->read = std::min(cell->read, order.now_on_device());
    }
  }
  static void NoteWrite(const Order& order, Cell* cell) {
    cell->write = order.now_on_device();
    cell->writer = static_cast<uint16_t>(order.thread());
    cell->atomic = 0;
    // A thread that is ordered after this write is ordered after the reads before it.
    cell->read = cell->earlier_read = 0;
    cell->second = 0;
  }

  Page* PageOf(size_t offset, size_t bytes, size_t capacity);
  void Refine(Page* page, uint32_t shift);
  static Conflict Touch(const Order& order, const Releases& releases, AccessKind kind, Cell* cell);
  static bool IsBefore(const Order& order, const Releases& releases, Stamp then, uint16_t writer);
  static bool FindReader(const Order& order, const Releases& releases, const Cell& cell,
                         Conflict* conflict);
  static void NoteAtomic(const Order& order, bool write_is_before, Cell* cell);

  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  // The zeros come from the operating system, which provides only memory that is touched.
  std::unique_ptr<Page[], Free> pages_;
  std::vector<std::unique_ptr<Cell[]>> cells_;  // of the pages
};

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_DEVICE_SHADOW_H_
