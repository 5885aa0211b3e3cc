#include "core/cuda/simulator/device_shadow.h"

#include <algorithm>
#include <cstdlib>

namespace cuda_simulator {

// Returns the page of an offset, with cells no larger than the part of the access in it.
DeviceShadow::Page* DeviceShadow::PageOf(size_t offset, size_t bytes, size_t capacity) {
  if (pages_ == nullptr) {
    const size_t count = (capacity + kPageBytes - 1) / kPageBytes;
    pages_.reset(static_cast<Page*>(std::calloc(count, sizeof(Page))));
  }
  Page* page = &pages_[offset / kPageBytes];
  const uint32_t shift = static_cast<uint32_t>(std::min(2, __builtin_ctzll(offset | bytes | 4)));
  if (page->cells == nullptr || shift < page->shift) Refine(page, shift);
  return page;
}

void DeviceShadow::Refine(Page* page, uint32_t shift) {
  const size_t count = kPageBytes >> shift;
  cells_.push_back(std::make_unique<Cell[]>(count));
  Cell* cells = cells_.back().get();
  if (page->cells != nullptr) {
    for (size_t n = 0; n < count; ++n) cells[n] = page->cells[n >> (page->shift - shift)];
  }
  *page = {cells, shift};
}

DeviceShadow::Conflict DeviceShadow::Access(const Order& order, const Releases& releases,
                                            size_t offset, size_t bytes, size_t capacity,
                                            AccessKind kind) {
  Conflict worst;
  const size_t end = offset + bytes;
  while (offset < end) {
    const size_t next = std::min(end, offset / kPageBytes * kPageBytes + kPageBytes);
    const Page* page = PageOf(offset, next - offset, capacity);
    for (; offset < next; offset += size_t{1} << page->shift) {
      Cell* cell = &page->cells[offset % kPageBytes >> page->shift];
      const Conflict conflict = Touch(order, releases, kind, cell);
      if (conflict.found && (!worst.found || (conflict.with_write && !worst.with_write))) {
        worst = conflict;
      }
    }
  }
  return worst;
}

DeviceShadow::Conflict DeviceShadow::Touch(const Order& order, const Releases& releases,
                                           AccessKind kind, Cell* cell) {
  Conflict conflict;
  const auto conflicts_with = [&](Stamp then, uint16_t writer) {
    conflict = {true, true, then, writer < kLanes ? writer : kSeveral};
  };
  const bool write_is_before = IsBefore(order, releases, cell->write, cell->writer);
  if (kind != AccessKind::kAtomic || cell->atomic == 0) {
    if (!write_is_before) conflicts_with(cell->write, cell->writer);
  } else if (!IsBefore(order, releases, cell->plain_write, cell->plain_writer)) {
    conflicts_with(cell->plain_write, cell->plain_writer);
  }
  if (kind == AccessKind::kRead) {
    NoteRead(order, cell);
    return conflict;
  }
  if (!conflict.found) FindReader(order, releases, *cell, &conflict);
  if (kind == AccessKind::kAtomic) {
    NoteAtomic(order, write_is_before, cell);
  } else {
    NoteWrite(order, cell);
  }
  return conflict;
}

// Tells whether a write at `then` by `writer`, as cells have it, comes before the running thread.
bool DeviceShadow::IsBefore(const Order& order, const Releases& releases, Stamp then,
                            uint16_t writer) {
  if (then < order.launch_start()) return true;
  if (writer == kBlocks) return releases.KnowsAny();
  if (then < order.block_start()) {
    return writer < kLanes ? releases.IsBefore(then, writer) : releases.KnowsBlockOf(then);
  }
  if (writer < kLanes) return order.IsBefore(then, writer) || releases.IsBefore(then, writer);
  if (then < order.barrier() || then < order.acquired() || releases.KnowsBlockOf(then)) return true;
  // Where several lanes wrote concurrently, a thread that has not synced since is unordered with
  // one of them.
  return writer != kWarps && writer - kLanes == order.warp() && then < order.now();
}

// Finds a read since the last write that does not come before the running thread.
bool DeviceShadow::FindReader(const Order& order, const Releases& releases, const Cell& cell,
                              Conflict* conflict) {
  if (cell.read < order.launch_start()) return false;
  const bool in_this_block = cell.read >= order.block_start();
  const int second = cell.second - 1;
  if (!(in_this_block && order.IsBefore(cell.read, cell.reader)) &&
      !releases.IsBefore(cell.read, cell.reader)) {
    *conflict = {true, false, cell.read, cell.reader};
  } else if (second >= 0 && !(in_this_block && order.IsBefore(cell.read, second)) &&
             !releases.KnowsBlockOf(cell.read)) {
    *conflict = {true, false, cell.read, second};
  } else if (cell.earlier_read >= order.launch_start() &&
             !releases.KnowsBlockOf(cell.earlier_read)) {
    *conflict = {true, false, cell.earlier_read, kSeveral};
  }
  return conflict->found;
}

void DeviceShadow::NoteAtomic(const Order& order, bool write_is_before, Cell* cell) {
  uint16_t writer = static_cast<uint16_t>(order.thread());
  Stamp now = order.now_on_device();
  if (cell->atomic == 0) {
    cell->plain_write = cell->write;
    cell->plain_writer = cell->writer;
  } else if (cell->write >= order.launch_start() && !write_is_before) {
    const int warp = order.warp();
    const bool same_block = cell->write >= order.block_start() && cell->writer != kBlocks;
    const bool same_warp =
        cell->writer < kLanes ? cell->writer / kWarp == warp : cell->writer == kLanes + warp;
    writer = !same_block ? kBlocks : same_warp ? static_cast<uint16_t>(kLanes + warp) : kWarps;
    now = std::max(now, cell->write);
  }
  cell->write = now;
  cell->writer = writer;
  cell->atomic = 1;
}

}  // namespace cuda_simulator
