#include "core/cuda/simulator/checker.h"

#include <sys/mman.h>

#include <string>

#include "core/cuda/simulator/machine.h"

namespace cuda_simulator {
namespace {

char* MapDynamicShared() {
  void* memory = mmap(nullptr, Checker::kDynamicCapacity, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
}

std::string Doing(const MemoryAccess& access) {
  switch (access.kind) {
    case AccessKind::kRead:
      return Format("reads %zu bytes", access.bytes);
    case AccessKind::kWrite:
      return Format("writes %zu bytes", access.bytes);
    case AccessKind::kAtomic:
      return Format("changes %zu bytes atomically", access.bytes);
    case AccessKind::kProductRead:
      return Format("multiplies by %zu bytes", access.bytes);
    case AccessKind::kCopyBegin:
    case AccessKind::kCopyEnd:
    case AccessKind::kBulkWrite:
      break;
  }
  return Format("copies %zu bytes asynchronously", access.bytes);
}

}  // namespace

Checker::Checker(Machine* machine)
    : machine_(machine),
      dynamic_shared_(MapDynamicShared()),
      dynamic_(reinterpret_cast<uintptr_t>(dynamic_shared_), kDynamicCapacity, &order),
      recent_static_(&dynamic_) {}

void Checker::StartLaunch(size_t dynamic_shared_bytes, const void* parameters,
                          size_t parameter_bytes) {
  if (order.NeedsReset()) {
    order.Reset();
    dynamic_.Reset();
    for (const auto& shadow : static_) shadow->Reset();
    device_memory.ForgetAccesses();
  }
  order.StartLaunch();
  releases.StartLaunch();
  blocks_.clear();
  // Accesses that are counted take the slow path, so that others need not ask.
  const bool is_quick = !machine_->banks.counts();
  dynamic_.StartLaunch(dynamic_shared_bytes, is_quick);
  for (const auto& shadow : static_) shadow->StartLaunch(shadow->bytes(), is_quick);
  parameters_ = reinterpret_cast<uintptr_t>(parameters);
  parameter_bytes_ = parameter_bytes;
}

void Checker::TrackAll(int threads) {
  if (order.tracks_all()) return;
  order.TrackAll(threads);
  dynamic_.RefuseQuickAccesses();
  for (const auto& shadow : static_) shadow->RefuseQuickAccesses();
}

std::string Checker::Describe(uintptr_t address) {
  if (StaticShared(address) != nullptr) {
    const Variable variable = StaticVariableAt(address);
    if (variable.name.empty()) return "in static shared memory";
    return Format("at byte %zu of the shared variable %s (%zu bytes)", address - variable.begin,
                  variable.name.c_str(), variable.bytes);
  }
  const size_t byte = address - dynamic_.begin();
  if (byte < dynamic_.bytes()) return Format("at byte %zu of dynamic shared memory", byte);
  if (byte < kDynamicCapacity) {
    return Format("at byte %zu of dynamic shared memory, which has %zu", byte, dynamic_.bytes());
  }
  if (const DeviceBufferShadow* buffer = device_memory.Find(address)) {
    return Format("at byte %zu of a buffer of %zu bytes", address - buffer->begin(),
                  buffer->bytes());
  }
  return "at an address that is no device memory: " + device_memory.DescribeNearest(address);
}

void Checker::Report(FindingKind kind, const MemoryAccess& access, const char* rest) {
  machine_->Report(kind, access.site,
                   [&] { return Doing(access) + " " + Describe(access.address) + rest; });
}

// Handles an access that ends beyond the buffer in which it begins, or that begins in none.
void Checker::Leave(const MemoryAccess& access) {
  Report(FindingKind::kOutOfBounds, access, "");
  machine_->block.Abandon();
}

void Checker::ReportShared(SharedShadow::Verdict verdict, int other, const MemoryAccess& access) {
  const auto report_race = [&](const char* did) {
    machine_->Report(FindingKind::kRace, access.site, [&] {
      const std::string what = Doing(access) + " " + Describe(access.address);
      if (other >= kMaxThreads + kProductAgents) {
        return what + ", to which a bulk copy is under way that the thread has not waited for";
      }
      if (other >= kMaxThreads) {
        return what + Format(
                          ", which a product of warps %d to %d reads that the thread has not "
                          "waited for",
                          (other - kMaxThreads) * 4, (other - kMaxThreads) * 4 + 3);
      }
      const bool several = other == SharedShadow::kSeveral;
      return what + ", which " +
             (several ? "another thread" : "thread " + Text(machine_->block.index_of(other))) +
             did + " with no barrier between";
    });
  };
  switch (verdict) {
    case SharedShadow::Verdict::kFine:
      break;
    case SharedShadow::Verdict::kUnwritten:
      Report(FindingKind::kUnwrittenRead, access, ", which nothing wrote");
      break;
    case SharedShadow::Verdict::kInFlight: {
      const bool reads =
          access.kind == AccessKind::kRead || access.kind == AccessKind::kProductRead;
      Report(reads ? FindingKind::kUnwrittenRead : FindingKind::kRace, access,
             ", to which an asynchronous copy is under way");
      break;
    }
    case SharedShadow::Verdict::kUnfenced:
      machine_->Report(FindingKind::kMissingFence, access.site, [&] {
        return Doing(access) + " " + Describe(access.address) + ", which thread " +
               Text(machine_->block.index_of(other)) +
               " wrote with no fence.proxy.async of its own between";
      });
      break;
    case SharedShadow::Verdict::kRaceWithRead:
      report_race(" read");
      break;
    case SharedShadow::Verdict::kRaceWithWrite:
      report_race(" wrote");
      break;
  }
}

void Checker::Check(const MemoryAccess& access) {
  if (dynamic_.Contains(access.address)) return CheckShared(&dynamic_, access);
  if (SharedShadow* shadow = StaticShared(access.address)) return CheckShared(shadow, access);
  const bool reads = access.kind == AccessKind::kRead;
  if (reads && access.address - parameters_ < parameter_bytes_) return;
  if (DeviceBufferShadow* buffer = device_memory.Find(access.address)) {
    return CheckDevice(buffer, access);
  }
  CheckElsewhere(access);
}

void Checker::CheckShared(SharedShadow* shadow, const MemoryAccess& access) {
  ++accesses_;
  if (access.bytes > shadow->begin() + shadow->bytes() - access.address) Leave(access);
  if (machine_->banks.counts() && access.agent == nullptr) {
    machine_->banks.Note(order.thread(), access.kind, access.address, access.bytes, access.site);
  }
  int other = SharedShadow::kSeveral;
  const auto verdict =
      shadow->Access(access.address, access.bytes, access.kind, &other, access.agent);
  if (verdict != SharedShadow::Verdict::kFine) ReportShared(verdict, other, access);
}

void Checker::CheckDevice(DeviceBufferShadow* buffer, const MemoryAccess& access) {
  ++accesses_;
  if (!buffer->ContainsAll(access.address, access.bytes)) Leave(access);
  if (access.kind != AccessKind::kWrite && !buffer->IsWritten(access.address, access.bytes)) {
    Report(FindingKind::kUnwrittenRead, access, ", which nothing wrote");
  }
  if (access.kind != AccessKind::kRead) buffer->SetWritten(access.address, access.bytes);
  if (access.kind == AccessKind::kAtomic) releases.Atomic(access.address);
  const DeviceShadow::Conflict conflict =
      buffer->Access(order, releases, access.address, access.bytes, access.kind);
  if (conflict.found) ReportDeviceConflict(conflict, access);
}

void Checker::ReportDeviceConflict(const DeviceShadow::Conflict& conflict,
                                   const MemoryAccess& access) {
  machine_->Report(FindingKind::kRace, access.site, [&] {
    const Index3& block = blocks_[order.BlockAt(conflict.when)];
    const bool is_this_block = conflict.when >= order.block_start();
    const bool several = conflict.thread == DeviceShadow::kSeveral;
    std::string who = "another thread";
    if (!several) who = "thread " + Text(machine_->block.index_of(conflict.thread));
    if (!is_this_block) who = (several ? "a thread" : who) + " of block " + Text(block);
    return Doing(access) + " " + Describe(access.address) + ", which " + who +
           (conflict.with_write ? " wrote" : " read") +
           (is_this_block ? " with no barrier between" : " in the same launch");
  });
}

void Checker::CheckElsewhere(const MemoryAccess& access) {
  const bool reads = access.kind == AccessKind::kRead;
  const Segment* segment = SegmentOf(access.address);
  if (segment == nullptr || (!reads && !segment->is_writable)) Leave(access);
  if (!segment->is_writable) return;  // constants
  // This is the first access to an image's shared memory.
  const size_t bytes = segment->end - segment->begin;
  static_.push_back(std::make_unique<SharedShadow>(segment->begin, bytes, &order));
  recent_static_ = static_.back().get();
  recent_static_->StartLaunch(bytes, !machine_->banks.counts() && !order.tracks_all());
  CheckShared(recent_static_, access);
}

SharedShadow* Checker::StaticShared(uintptr_t address) {
  for (const auto& shadow : static_) {
    if (shadow->Contains(address)) return recent_static_ = shadow.get();
  }
  return nullptr;
}

bool Checker::IsShared(const void* address) {
  const uintptr_t place = reinterpret_cast<uintptr_t>(address);
  if (dynamic_.Contains(place) || StaticShared(place) != nullptr) return true;
  const Segment* segment = SegmentOf(place);
  return segment != nullptr && segment->is_writable;
}

// Dynamic shared memory begins at 0, and the segments that may contain static variables follow.
uint32_t Checker::SharedAddress(const void* place) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(place);
  if (dynamic_.Contains(at)) return static_cast<uint32_t>(at - dynamic_.begin());
  const Segment* wanted = SegmentOf(at);
  size_t begin = kDynamicCapacity;
  for (const Segment& segment : segments_) {
    if (&segment == wanted) return static_cast<uint32_t>(begin + at - segment.begin);
    if (segment.is_writable) begin += segment.end - segment.begin;
  }
  return ~uint32_t{0};
}

void* Checker::SharedAt(uint32_t address) const {
  if (address < dynamic_.bytes()) return dynamic_shared_ + address;
  size_t begin = kDynamicCapacity;
  for (const Segment& segment : segments_) {
    if (!segment.is_writable) continue;
    const size_t bytes = segment.end - segment.begin;
    if (address >= begin && address - begin < bytes) {
      return reinterpret_cast<void*>(segment.begin + address - begin);
    }
    begin += bytes;
  }
  return nullptr;
}

const Segment* Checker::SegmentOf(uintptr_t address) {
  const auto find = [&]() -> const Segment* {
    for (const Segment& segment : segments_) {
      if (address - segment.begin < segment.end - segment.begin) return &segment;
    }
    return nullptr;
  };
  const Segment* segment = find();
  if (segment != nullptr) return segment;
  segments_ = LoadedSegments();  // a library may have been loaded since the last look
  return find();
}

}  // namespace cuda_simulator
