#include "core/cuda/simulator/shared_shadow.h"

#include <algorithm>
#include <cstdlib>

namespace cuda_simulator {

SharedShadow::SharedShadow(uintptr_t begin, size_t capacity_bytes, const Order* order)
    : begin_(begin),
      order_(*order),
      granules_(static_cast<Granule*>(std::calloc(capacity_bytes / 4 + 1, sizeof(Granule))),
                &std::free),
      capacity_bytes_(capacity_bytes) {
  StartLaunch(capacity_bytes);
}

void SharedShadow::StartLaunch(size_t bytes, bool admits_quick_accesses) {
  bytes_ = bytes;
  quick_bytes_ = admits_quick_accesses ? bytes : 0;
  for (const size_t granule : split_granules_) granules_[granule].split = 0;
  split_granules_.clear();
  splits_.resize(1);  // place 0 means that there is no split
}

void SharedShadow::Reset() {
  std::fill_n(granules_.get(), capacity_bytes_ / 4 + 1, Granule{});
  StartLaunch(bytes_);
}

SharedShadow::Verdict SharedShadow::Access(uintptr_t address, size_t bytes, AccessKind kind,
                                           int* other) {
  Verdict worst = Verdict::kFine;
  const auto touch = [&](Cell* cell) {
    int whose = kSeveral;
    const Verdict verdict = Touch(cell, kind, &whose);
    if (verdict <= worst) return;
    worst = verdict;
    *other = whose;
  };
  size_t at = address - begin_;
  const size_t end = at + bytes;
  while (at < end) {
    Granule& granule = granules_[at / 4];
    const size_t next = std::min(end, at / 4 * 4 + 4);
    if (granule.split == 0 && next - at == 4) {
      touch(&granule.cell);
      at = next;
      continue;
    }
    Cell* cells = Split(at / 4);
    for (; at < next; ++at) touch(&cells[at % 4]);
  }
  return worst;
}

SharedShadow::Cell* SharedShadow::Split(size_t granule) {
  uint32_t& split = granules_[granule].split;
  if (split == 0) {
    split = static_cast<uint32_t>(splits_.size());
    splits_.emplace_back();
    splits_.back().fill(granules_[granule].cell);
    split_granules_.push_back(granule);
  }
  return splits_[split].data();
}

SharedShadow::Verdict SharedShadow::Touch(Cell* cell, AccessKind kind, int* other) {
  Verdict verdict = Verdict::kFine;
  if (cell->write < order_.block_start()) {
    if (kind == AccessKind::kRead || kind == AccessKind::kAtomic) verdict = Verdict::kUnwritten;
  } else if (!(kind == AccessKind::kAtomic && cell->atomic) && !WriteIsBefore(*cell)) {
    verdict = Verdict::kRaceWithWrite;
    *other = cell->writer < kLanes ? cell->writer : kSeveral;
  } else if (cell->in_flight && kind != AccessKind::kCopyEnd) {
    verdict = Verdict::kInFlight;
  }
  if (kind == AccessKind::kRead) {
    NoteRead(cell);
    return verdict;
  }
  if (verdict < Verdict::kRaceWithRead && cell->read >= order_.barrier()) {
    const int reader = ReaderNotBefore(*cell);
    if (reader >= 0) {
      verdict = Verdict::kRaceWithRead;
      *other = reader;
    }
  }
  NoteWrite(cell, kind);
  return verdict;
}

bool SharedShadow::WriteIsBefore(const Cell& cell) const {
  if (cell.writer < kLanes) return order_.IsBefore(cell.write, cell.writer);
  if (cell.write < order_.barrier()) return true;
  // Where several lanes wrote concurrently, a thread that has not synced since is unordered with
  // one of them.
  return cell.writer != kWarps && cell.writer - kLanes == order_.warp() &&
         cell.write < order_.now();
}

int SharedShadow::ReaderNotBefore(const Cell& cell) const {
  const int warp = order_.warp();
  if (cell.warp != warp) return cell.warp * kWarp + __builtin_ctz(cell.lanes);
  if (cell.stranger != 0) return cell.stranger - 1;
  for (uint32_t lanes = cell.lanes; lanes != 0; lanes &= lanes - 1) {
    const int reader = warp * kWarp + __builtin_ctz(lanes);
    if (!order_.IsBefore(cell.read, reader)) return reader;
  }
  return -1;
}

void SharedShadow::NoteWrite(Cell* cell, AccessKind kind) {
  uint16_t writer = static_cast<uint16_t>(order_.thread());
  Stamp now = order_.now();
  bool atomic = false;
  if (kind != AccessKind::kAtomic) {
    cell->read = 0;  // a thread that is ordered after this write is ordered after those reads
  } else if (cell->write < order_.block_start()) {
    atomic = true;
  } else if (!cell->atomic) {
    // The thread's own plain write still counts.
    atomic = cell->writer != writer || cell->write < now;
  } else {
    atomic = true;
    if (!WriteIsBefore(*cell)) {
      const int warp = order_.warp();
      const bool same_warp =
          cell->writer < kLanes ? cell->writer / kWarp == warp : cell->writer == kLanes + warp;
      writer = same_warp ? static_cast<uint16_t>(kLanes + warp) : kWarps;
      now = std::max(now, cell->write);
    }
  }
  cell->write = now;
  cell->writer = writer;
  cell->atomic = atomic;
  cell->in_flight = kind == AccessKind::kCopyBegin;
}

}  // namespace cuda_simulator
