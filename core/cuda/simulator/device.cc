// Implements the functions for kernels: barriers, shuffles, votes, asynchronous copies, atomics.
#include "core/cuda/simulator/device.h"

#include <cstring>

#include "core/cuda/simulator/cuda_runtime.h"
#include "core/cuda/simulator/hooks.h"
#include "core/cuda/simulator/machine.h"

namespace cuda_simulator {

int LaneId() { return running_machine->block.running() % kWarp; }

void* DynamicSharedBytes(size_t most) {
  Machine& machine = *running_machine;
  const size_t bytes = machine.checker.dynamic_shared_bytes();
  if (most > 0 && bytes > most) {
    machine.Report(FindingKind::kBadLaunch, __builtin_return_address(0), [&] {
      return Format(
          "%zu bytes of dynamic shared memory, of which the kernel says that it has at most %zu",
          bytes, most);
    });
  }
  return machine.checker.dynamic_shared();
}

void __syncthreads(const char* file, int line) {
  running_machine->block.SyncThreads(__builtin_return_address(0), file, line);
}

void __threadfence() { running_machine->checker.Fence(); }

void MeetInWarp(const char* name, unsigned mask, void* argument, Collective complete) {
  running_machine->block.MeetInWarp({name, mask, argument, complete, __builtin_return_address(0)});
}

void __syncwarp(unsigned mask) {
  struct Sync {
    static void Complete(void* const*, unsigned lanes) {
      Block& block = running_machine->block;
      running_machine->checker.order.SyncWarp(block.running() / kWarp, lanes, block.live_lanes());
    }
  };
  running_machine->block.MeetInWarp(
      {"__syncwarp", mask, nullptr, &Sync::Complete, __builtin_return_address(0)});
}

namespace {

struct ShuffleExchange {
  uint64_t value;
  int source;
  bool from_outside;
  uint64_t result;
  static void Complete(void* const arguments[kWarp], unsigned) {
    for (int lane = 0; lane < kWarp; ++lane) {
      auto* self = static_cast<ShuffleExchange*>(arguments[lane]);
      if (self == nullptr) continue;
      const auto* source = static_cast<ShuffleExchange*>(arguments[self->source]);
      self->from_outside = source == nullptr;
      self->result = source == nullptr ? ~uint64_t{0} : source->value;
    }
  }
};

struct Vote {
  bool predicate;
  unsigned result;
  static void Complete(void* const arguments[kWarp], unsigned) {
    unsigned result = 0;
    for (int lane = 0; lane < kWarp; ++lane) {
      const auto* vote = static_cast<Vote*>(arguments[lane]);
      if (vote != nullptr && vote->predicate) result |= 1u << lane;
    }
    for (int lane = 0; lane < kWarp; ++lane) {
      if (auto* vote = static_cast<Vote*>(arguments[lane])) vote->result = result;
    }
  }
};

}  // namespace

uint64_t Shuffle(unsigned mask, uint64_t value, int source_lane) {
  const void* site = __builtin_return_address(0);
  ShuffleExchange exchange{value, source_lane & (kWarp - 1), false, 0};
  running_machine->block.MeetInWarp(
      {"a shuffle", mask, &exchange, &ShuffleExchange::Complete, site});
  if (exchange.from_outside) {
    running_machine->Report(FindingKind::kLaneOutsideMask, site, [&] {
      const bool named = (mask >> exchange.source & 1) != 0;
      return Format("shuffles from lane %d, which %s", exchange.source,
                    named ? "has finished, or is not of the block" : "its mask does not name");
    });
  }
  return exchange.result;
}

unsigned __ballot_sync(unsigned mask, int predicate) {
  Vote vote{predicate != 0, 0};
  running_machine->block.MeetInWarp(
      {"a vote", mask, &vote, &Vote::Complete, __builtin_return_address(0)});
  return vote.result;
}

void NoteMisaligned(const void* address, const char* type, size_t alignment, const void* site) {
  if (running_machine == nullptr) return;
  running_machine->Report(FindingKind::kMisaligned, site, [&] {
    return Format("needs %zu-byte alignment of %s ", alignment, type) +
           running_machine->checker.Describe(reinterpret_cast<uintptr_t>(address));
  });
  running_machine->block.Abandon();  // such an access may crash the host, as it may crash a GPU
}

void NoteAtomic(void* address, size_t bytes, const void* site) {
  CheckAlignment(address, "an atomic", bytes, site);
  Note(AccessKind::kAtomic, address, bytes, site);
}

// ---- Asynchronous copies ----

// The simulator performs the copy when the thread waits for it; until then no thread may use the
// destination.
void __pipeline_memcpy_async(void* to, const void* from, size_t bytes, size_t zero_bytes) {
  StartCopy(to, from, bytes, zero_bytes, __builtin_return_address(0));
}

void StartCopy(void* to, const void* from, size_t bytes, size_t zero_bytes, const void* site) {
  Machine& machine = *running_machine;
  if (bytes != 4 && bytes != 8 && bytes != 16) {
    machine.Report(FindingKind::kMisaligned, site, [&] {
      return Format("copies %zu bytes asynchronously; 4, 8 and 16 can be", bytes);
    });
  }
  if (!machine.checker.IsShared(to)) {
    machine.Report(FindingKind::kOutOfBounds, site, [&] {
      return Format("copies %zu bytes asynchronously to what is no shared memory", bytes);
    });
    machine.block.Abandon();
  }
  CheckAlignment(to, "an asynchronous copy", bytes, site);
  if (zero_bytes < bytes) {
    CheckAlignment(from, "an asynchronous copy", bytes, site);
    Note(AccessKind::kRead, from, bytes - zero_bytes, site);
  }
  Note(AccessKind::kCopyBegin, to, bytes, site);
  PendingCopies& pending = machine.block.running_copies();
  pending.copies.push_back({to, from, bytes, zero_bytes, pending.open_group});
}

void __pipeline_commit() { ++running_machine->block.running_copies().open_group; }

void __pipeline_wait_prior(size_t groups) {
  PendingCopies& pending = running_machine->block.running_copies();
  size_t done = 0;
  for (const PendingCopy& copy : pending.copies) {
    if (copy.group + groups >= pending.open_group) break;
    Note(AccessKind::kCopyEnd, copy.to, copy.bytes, __builtin_return_address(0));
    char* to = static_cast<char*>(copy.to);
    const size_t copied = copy.bytes - copy.zero_bytes;
    if (copied > 0) std::memcpy(to, copy.from, copied);  // no source needs to exist for zeros
    std::memset(to + copied, 0, copy.zero_bytes);
    ++done;
  }
  pending.copies.erase(pending.copies.begin(), pending.copies.begin() + static_cast<long>(done));
}

}  // namespace cuda_simulator
