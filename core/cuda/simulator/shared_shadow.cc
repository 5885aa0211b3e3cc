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
                                           int* other, const Agent* agent) {
  if (order_.tracks_all() && block_of_readers_ != order_.block_start()) {
    block_of_readers_ = order_.block_start();
    readers_.resize(1);
    free_readers_ = 0;
  }
  Verdict worst = Verdict::kFine;
  const auto touch = [&](Cell* cell) {
    int whose = kSeveral;
    const Verdict verdict = Touch(cell, kind, agent, &whose);
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
    const Cell& cell = granules_[granule].cell;
    splits_.back().fill(cell);
    split_granules_.push_back(granule);
    if (cell.lists) {
      for (Cell& copy : splits_.back()) CopyList(cell, &copy);
    }
  }
  return splits_[split].data();
}

SharedShadow::Verdict SharedShadow::Touch(Cell* cell, AccessKind kind, const Agent* agent,
                                          int* other) {
  const bool reads = kind == AccessKind::kRead || kind == AccessKind::kProductRead;
  Verdict verdict = Verdict::kFine;
  if (cell->write < order_.block_start()) {
    if (reads || kind == AccessKind::kAtomic) verdict = Verdict::kUnwritten;
  } else if (!(kind == AccessKind::kAtomic && cell->atomic) && !WriteIsBefore(*cell)) {
    verdict = Verdict::kRaceWithWrite;
    *other = cell->writer < kLanes ? cell->writer : kSeveral;
  } else if (cell->in_flight && kind != AccessKind::kCopyEnd) {
    verdict = Verdict::kInFlight;
  } else if (IsUnfenced(*cell, kind)) {
    verdict = Verdict::kUnfenced;
    *other = cell->writer;
  }
  if (order_.tracks_all()) {
    MakeList(cell);
  } else if (cell->lists) {  // of an earlier launch
    cell->lists = false;
    cell->read = 0;
  }
  if (reads) {
    if (cell->lists) {
      NoteInList(cell, agent);
    } else {
      NoteRead(cell);
    }
    return verdict;
  }
  // A list may have reads before the block's last barrier, of agents.
  if (verdict < Verdict::kRaceWithRead && (cell->lists || cell->read >= order_.barrier())) {
    const int reader = ReaderNotBefore(*cell);
    if (reader >= 0) {
      verdict = Verdict::kRaceWithRead;
      *other = reader;
    }
  }
  NoteWrite(cell, kind, agent);
  return verdict;
}

bool SharedShadow::IsUnfenced(const Cell& cell, AccessKind kind) const {
  if (kind != AccessKind::kProductRead && kind != AccessKind::kBulkWrite) return false;
  return cell.writer < kMaxThreads && !order_.IsFenced(cell.write, cell.writer);
}

// ---- Lists of readers ----

// Gives a cell a list, of what it has recorded until now in this block.
void SharedShadow::MakeList(Cell* cell) {
  const bool is_current = cell->read >= order_.block_start();
  if (cell->lists && is_current) return;
  const Cell old = *cell;
  cell->lists = true;
  cell->read = order_.now();
  cell->lanes = 0;
  if (old.lists || !is_current) return;
  AddReaders(cell, old.read, old.lanes, old.warp * kWarp);
  if (old.stranger == 0) return;
  const int stranger = old.stranger - 1;
  AddReaders(cell, old.read, 1u << stranger % kWarp, stranger / kWarp * kWarp);
}

// Gives the copy of a cell a list of its own.
void SharedShadow::CopyList(const Cell& cell, Cell* copy) {
  copy->lanes = 0;
  if (cell.read < order_.block_start()) return;  // of an earlier block
  for (uint32_t place = cell.lanes; place != 0; place = readers_[place].next) {
    const Readers readers = readers_[place];
    AddReaders(copy, readers.when, readers.lanes, readers.first);
  }
}

void SharedShadow::AddReaders(Cell* cell, Stamp when, uint32_t lanes, int first) {
  uint32_t place = free_readers_;
  if (place == 0) {
    place = static_cast<uint32_t>(readers_.size());
    readers_.emplace_back();
  } else {
    free_readers_ = readers_[place].next;
  }
  readers_[place] = {when, lanes, first, cell->lanes};
  cell->lanes = place;
}

// Notes a read, of the running thread or of an agent, in place of its earlier ones.
void SharedShadow::NoteInList(Cell* cell, const Agent* agent) {
  const int reader = agent == nullptr ? order_.thread() : agent->number;
  const bool is_thread = reader < kMaxThreads;
  const int first = is_thread ? reader / kWarp * kWarp : reader;
  const uint32_t lane = is_thread ? 1u << reader % kWarp : 1;
  const Stamp when = agent == nullptr ? order_.now() : agent->when;
  bool is_noted = false;
  for (uint32_t* link = &cell->lanes; *link != 0;) {
    Readers& readers = readers_[*link];
    if (readers.first == first && readers.when == when) {
      readers.lanes |= lane;
      is_noted = true;
    } else if (readers.first == first) {
      readers.lanes &= ~lane;
    }
    const bool is_past = readers.first < kMaxThreads && readers.when < order_.barrier();
    if (readers.lanes != 0 && !is_past) {
      link = &readers.next;
      continue;
    }
    const uint32_t unused = *link;
    *link = readers.next;
    readers.next = free_readers_;
    free_readers_ = unused;
  }
  if (!is_noted) AddReaders(cell, when, lane, first);
}

bool SharedShadow::WriteIsBefore(const Cell& cell) const {
  if (cell.writer < kLanes) return order_.IsBefore(cell.write, cell.writer);
  if (cell.write < order_.barrier()) return true;
  // Where several lanes wrote concurrently, a thread that has not synced since is unordered with
  // one of them.
  if (cell.writer != kWarps && cell.writer - kLanes == order_.warp() && cell.write < order_.now()) {
    return true;
  }
  return order_.tracks_all() && (cell.write < order_.barrier() || cell.write < order_.acquired());
}

int SharedShadow::ReaderNotBefore(const Cell& cell) const {
  if (cell.lists) {
    for (uint32_t place = cell.lanes; place != 0; place = readers_[place].next) {
      const Readers& readers = readers_[place];
      for (uint32_t lanes = readers.lanes; lanes != 0; lanes &= lanes - 1) {
        const int reader = readers.first + __builtin_ctz(lanes);
        if (!order_.IsBefore(readers.when, reader)) return reader;
      }
    }
    return -1;
  }
  const int warp = order_.warp();
  if (cell.warp != warp) return cell.warp * kWarp + __builtin_ctz(cell.lanes);
  if (cell.stranger != 0) return cell.stranger - 1;
  for (uint32_t lanes = cell.lanes; lanes != 0; lanes &= lanes - 1) {
    const int reader = warp * kWarp + __builtin_ctz(lanes);
    if (!order_.IsBefore(cell.read, reader)) return reader;
  }
  return -1;
}

void SharedShadow::NoteWrite(Cell* cell, AccessKind kind, const Agent* agent) {
  uint16_t writer = static_cast<uint16_t>(agent == nullptr ? order_.thread() : agent->number);
  Stamp now = agent == nullptr ? order_.now() : agent->when;
  bool atomic = false;
  if (kind != AccessKind::kAtomic) {
    // A thread that is ordered after this write is ordered after those reads.
    while (cell->lists && cell->lanes != 0) {
      const uint32_t unused = cell->lanes;
      cell->lanes = readers_[unused].next;
      readers_[unused].next = free_readers_;
      free_readers_ = unused;
    }
    if (!cell->lists) cell->read = 0;
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
