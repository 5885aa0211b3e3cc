#include "core/cuda/simulator/checker.h"

#include <link.h>
#include <sys/mman.h>

#include <string>

#include "core/cuda/simulator/machine.h"

// The linker's: where the __shared__ variables of the program lie. Null in a program without any.
extern "C" {
extern char __start_cuda_simulator_shared[] __attribute__((weak));
extern char __stop_cuda_simulator_shared[] __attribute__((weak));
}

namespace cuda_simulator {
namespace {

// More than any block has: what follows its own bytes is never anybody's.
constexpr size_t kDynamicCapacity = 512 << 10;

char* MapDynamicShared() {
  void* memory =
      mmap(nullptr, kDynamicCapacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
}

uintptr_t StaticBegin() { return reinterpret_cast<uintptr_t>(__start_cuda_simulator_shared); }
uintptr_t StaticEnd() { return reinterpret_cast<uintptr_t>(__stop_cuda_simulator_shared); }

std::string Doing(const MemoryAccess& access) {
  switch (access.kind) {
    case AccessKind::kRead:
      return Format("reads %zu bytes", access.bytes);
    case AccessKind::kWrite:
      return Format("writes %zu bytes", access.bytes);
    case AccessKind::kAtomic:
      return Format("changes %zu bytes atomically", access.bytes);
    case AccessKind::kCopyBegin:
    case AccessKind::kCopyEnd:
      break;
  }
  return Format("copies %zu bytes asynchronously", access.bytes);
}

bool IsMisaligned(const MemoryAccess& access) {
  return access.aligned && (access.address & (access.bytes - 1)) != 0;
}

}  // namespace

Checker::Checker(Machine* machine)
    : machine_(machine),
      dynamic_shared_(MapDynamicShared()),
      dynamic_(reinterpret_cast<uintptr_t>(dynamic_shared_), kDynamicCapacity, &order),
      static_(StaticBegin(), StaticEnd() - StaticBegin(), &order) {}

void Checker::StartLaunch(size_t dynamic_shared_bytes, const void* parameters,
                          size_t parameter_bytes) {
  if (order.NeedsReset()) {
    order.Reset();
    dynamic_.Reset();
    static_.Reset();
  }
  dynamic_.StartLaunch(dynamic_shared_bytes);
  static_.StartLaunch(static_.bytes());
  parameters_ = reinterpret_cast<uintptr_t>(parameters);
  parameter_bytes_ = parameter_bytes;
}

void Checker::Check(const MemoryAccess& access) {
  if (machine_->block.stacks().Contains(access.address)) return;
  ++machine_->counts.accesses;
  if (dynamic_.Contains(access.address)) return CheckShared(&dynamic_, "dynamic", access);
  if (static_.Contains(access.address)) return CheckShared(&static_, "static", access);
  if (DeviceBufferShadow* buffer = device_memory.Find(access.address)) {
    return CheckDevice(buffer, access);
  }
  --machine_->counts.accesses;
  CheckElsewhere(access);
}

void Checker::CheckShared(SharedShadow* shadow, const char* which, const MemoryAccess& access) {
  const auto report = [&](FindingKind kind, const std::string& rest) {
    machine_->Report(kind, access.site, [&] {
      return Doing(access) +
             Format(" at byte %zu of %s shared memory", access.address - shadow->begin(), which) +
             rest;
    });
  };
  if (access.bytes > shadow->begin() + shadow->bytes() - access.address) {
    report(FindingKind::kOutOfBounds, Format(", which has %zu", shadow->bytes()));
    machine_->block.Abandon();
  }
  if (IsMisaligned(access)) report(FindingKind::kMisaligned, ", misaligned");
  int other = SharedShadow::kSeveral;
  const auto verdict =
      shadow->Access(access.address, access.bytes, access.kind, machine_->block.running(), &other);
  if (verdict == SharedShadow::Verdict::kFine) return;
  const auto who = [&] {
    return other == SharedShadow::kSeveral ? "another thread"
                                           : "thread " + Text(machine_->block.index_of(other));
  };
  switch (verdict) {
    case SharedShadow::Verdict::kFine:
      break;
    case SharedShadow::Verdict::kUnwritten:
      report(FindingKind::kUnwrittenRead, ", which nothing wrote");
      break;
    case SharedShadow::Verdict::kInFlight:
      report(access.kind == AccessKind::kRead ? FindingKind::kUnwrittenRead : FindingKind::kRace,
             ", to which an asynchronous copy is under way");
      break;
    case SharedShadow::Verdict::kRaceWithRead:
      report(FindingKind::kRace, ", which " + who() + " read with no barrier between");
      break;
    case SharedShadow::Verdict::kRaceWithWrite:
      report(FindingKind::kRace, ", which " + who() + " wrote with no barrier between");
      break;
  }
}

void Checker::CheckDevice(DeviceBufferShadow* buffer, const MemoryAccess& access) {
  const auto report = [&](FindingKind kind, const char* rest) {
    machine_->Report(kind, access.site, [&] {
      return Doing(access) +
             Format(" at byte %zu of a buffer of %zu bytes", access.address - buffer->begin(),
                    buffer->bytes()) +
             rest;
    });
  };
  if (!buffer->ContainsAll(access.address, access.bytes)) {
    report(FindingKind::kOutOfBounds, "");
    machine_->block.Abandon();
  }
  if (IsMisaligned(access)) report(FindingKind::kMisaligned, ", misaligned");
  if (access.kind != AccessKind::kWrite && !buffer->IsWritten(access.address, access.bytes)) {
    report(FindingKind::kUnwrittenRead, ", which nothing wrote");
  }
  if (access.kind != AccessKind::kRead) buffer->SetWritten(access.address, access.bytes);
}

void Checker::CheckElsewhere(const MemoryAccess& access) {
  if (access.kind == AccessKind::kRead) {
    if (access.address - parameters_ < parameter_bytes_ || IsStaticData(access.address)) return;
  }
  machine_->Report(FindingKind::kOutOfBounds, access.site, [&] {
    const size_t byte = access.address - reinterpret_cast<uintptr_t>(dynamic_shared_);
    if (byte < kDynamicCapacity) {
      return Doing(access) +
             Format(" at byte %zu of dynamic shared memory, which has %zu", byte, dynamic_.bytes());
    }
    return Doing(access) + " at an address that is no device memory: " +
           device_memory.DescribeNearest(access.address);
  });
  machine_->block.Abandon();
}

bool Checker::IsStaticData(uintptr_t address) {
  const auto is_known = [&] {
    for (const Range& image : images_) {
      if (address - image.begin < image.end - image.begin) return true;
    }
    return false;
  };
  if (is_known()) return true;
  images_.clear();  // a library may have been loaded since
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* images) {
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& segment = info->dlpi_phdr[i];
          const uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
          if (segment.p_type != PT_LOAD) continue;
          static_cast<std::vector<Range>*>(images)->push_back({begin, begin + segment.p_memsz});
        }
        return 0;
      },
      &images_);
  return is_known();
}

}  // namespace cuda_simulator
