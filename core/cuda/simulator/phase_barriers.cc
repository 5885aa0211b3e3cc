#include "core/cuda/simulator/phase_barriers.h"

#include <algorithm>
#include <cstring>

#include "core/cuda/simulator/hooks.h"
#include "core/cuda/simulator/machine.h"

namespace cuda_simulator {
namespace {

// An mbarrier has this in memory here, so that stores over it are noticed.
constexpr uint64_t kContent = 0x7265697272616270;
constexpr int64_t kMost = (1 << 20) - 1;  // arrivals, and bytes, by the PTX ISA

std::string Place(Machine* machine, const void* place) {
  return "the mbarrier " + machine->checker.Describe(reinterpret_cast<uintptr_t>(place));
}

}  // namespace

// The end of a barrier's phase of some parity.
class PhaseBarriers::PhaseEnd : public Condition {
 public:
  PhaseEnd(Machine* machine, const void* place, const PhaseBarrier* barrier, unsigned parity)
      : machine_(machine), place_(place), barrier_(barrier), parity_(parity) {}
  bool Holds() const override { return barrier_->phase % 2 != parity_; }
  std::string Text() const override {
    return Format("waits for the end of phase %u of ", barrier_->phase) + Place(machine_, place_) +
           Format(", in which %d of %d arrivals and %lld bytes are missing", barrier_->pending,
                  barrier_->count, static_cast<long long>(barrier_->bytes));
  }

 private:
  Machine* const machine_;
  const void* const place_;
  const PhaseBarrier* const barrier_;
  const unsigned parity_;
};

void PhaseBarriers::Init(void* place, unsigned count, const void* site) {
  CheckAlignment(place, "an mbarrier", sizeof(kContent), site);
  const auto report = [&](auto why) {  // makes texts within: an abandoned thread destroys nothing
    machine_->Report(FindingKind::kBadBarrier, site,
                     [&] { return "sets up " + Place(machine_, place) + why(); });
    machine_->block.Abandon();
  };
  if (count < 1 || count > kMost) report([&] { return Format(" for %u arrivals", count); });
  Note(AccessKind::kWrite, place, sizeof(kContent), site);
  std::memcpy(place, &kContent, sizeof(kContent));
  const size_t number = barriers_.size();
  const auto [entry, is_new] = barriers_.try_emplace(place);
  if (!is_new) report([] { return ", which is one already"; });
  Order& order = machine_->checker.order;
  PhaseBarrier& barrier = entry->second;
  barrier.count = barrier.pending = static_cast<int>(count);
  barrier.maker = order.thread();
  barrier.made = order.now();
  barrier.agent = kProductAgents + static_cast<int>(number % kCopyAgents);
}

PhaseBarrier* PhaseBarriers::Find(void* place, const char* instruction, const void* site) {
  const auto entry = barriers_.find(place);
  uint64_t content = 0;
  if (entry != barriers_.end()) std::memcpy(&content, place, sizeof(content));
  if (content != kContent) {
    machine_->Report(FindingKind::kBadBarrier, site, [&] {
      return Format("%s of ", instruction) + Place(machine_, place) +
             (entry == barriers_.end() ? ", which no thread has set up"
                                       : ", over which something was stored");
    });
    machine_->block.Abandon();
  }
  PhaseBarrier& barrier = entry->second;
  if (!machine_->checker.order.IsBefore(barrier.made, barrier.maker)) {
    machine_->Report(FindingKind::kRace, site, [&] {
      return Format("%s of ", instruction) + Place(machine_, place) + ", which thread " +
             Text(machine_->block.index_of(barrier.maker)) + " set up with no barrier between";
    });
  }
  return &barrier;
}

void PhaseBarriers::Expect(PhaseBarrier* barrier, int64_t bytes, const void* site) {
  barrier->bytes += bytes;
  if (barrier->bytes <= kMost && barrier->bytes >= -kMost) return;
  machine_->Report(FindingKind::kBadBarrier, site, [&] {
    return Format("makes %lld bytes missing in a phase, of which the most are %lld",
                  static_cast<long long>(barrier->bytes), static_cast<long long>(kMost));
  });
  machine_->block.Abandon();
}

void PhaseBarriers::EndPhaseIfComplete(PhaseBarrier* barrier) {
  if (barrier->pending > 0 || barrier->bytes != 0) return;
  ++barrier->phase;
  barrier->pending = barrier->count;
  Order::Knowledge& before = barrier->before_phase;
  before.resize(std::max(before.size(), barrier->in_phase.size()));
  for (size_t n = 0; n < barrier->in_phase.size(); ++n) {
    before[n] = std::max(before[n], barrier->in_phase[n]);
  }
  barrier->in_phase.clear();
}

void PhaseBarriers::Arrive(void* place, unsigned bytes, const void* site) {
  PhaseBarrier* barrier = Find(place, "an arrival", site);
  if (barrier->pending == 0) {
    machine_->Report(FindingKind::kBadBarrier, site, [&] {
      return "arrives at " + Place(machine_, place) +
             Format(", where all %d arrivals of the phase have come", barrier->count);
    });
    machine_->block.Abandon();
  }
  Order& order = machine_->checker.order;
  order.Release(order.thread(), &barrier->in_phase);
  --barrier->pending;
  Expect(barrier, bytes, site);
  EndPhaseIfComplete(barrier);
  machine_->block.Wake();
}

bool PhaseBarriers::Wait(void* place, unsigned parity, const void* site) {
  PhaseBarrier* barrier = Find(place, "a wait", site);
  const PhaseEnd end(machine_, place, barrier, parity & 1);
  if (!machine_->block.WaitFor(end, site)) return false;
  Order& order = machine_->checker.order;
  order.Acquire(order.thread(), barrier->before_phase);
  return true;
}

void PhaseBarriers::Fence() {
  const int thread = machine_->checker.order.thread();
  for (auto& [place, barrier] : barriers_) barrier.is_fenced |= barrier.maker == thread;
}

PhaseBarrier* PhaseBarriers::BeginCopy(void* place, const void* site) {
  PhaseBarrier* barrier = Find(place, "a bulk copy", site);
  if (!barrier->is_fenced) {
    machine_->Report(FindingKind::kMissingFence, site, [&] {
      return "copies with " + Place(machine_, place) + ", which thread " +
             Text(machine_->block.index_of(barrier->maker)) +
             " set up with no fence.mbarrier_init or fence.proxy.async of its own between";
    });
  }
  barrier->last_copy = machine_->checker.order.Next();
  barrier->copier = machine_->checker.order.thread();
  barrier->copy_site = site;
  return barrier;
}

void PhaseBarriers::EndCopy(PhaseBarrier* barrier, int64_t bytes, const void* site) {
  Order::AddAgent(barrier->agent, barrier->last_copy, &barrier->in_phase);
  Expect(barrier, -bytes, site);
  EndPhaseIfComplete(barrier);
  machine_->block.Wake();
}

void PhaseBarriers::FinishBlock() {
  for (const auto& [place, barrier] : barriers_) {
    if (barrier.last_copy == 0) continue;
    if (machine_->checker.order.IsKnown(barrier.agent, barrier.last_copy)) continue;
    machine_->ReportOf(
        barrier.copier, FindingKind::kUnfinishedWork, barrier.copy_site, [&, &place = place] {
          return "starts a bulk copy for which no thread has waited at " + Place(machine_, place);
        });
  }
}

}  // namespace cuda_simulator
