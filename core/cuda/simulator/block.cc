#include "core/cuda/simulator/block.h"

#include <cstdlib>
#include <cstring>

#include "core/cuda/simulator/machine.h"
#include "core/cuda/simulator/source_line.h"
#include "core/denormals.h"

namespace cuda_simulator {

// Kernels see these variables as constants, which they are while a thread runs.
uint3 current_thread __asm__("cuda_simulator_threadIdx");
uint3 current_block __asm__("cuda_simulator_blockIdx");
uint3 current_block_shape __asm__("cuda_simulator_blockDim");

Block::Block(Machine* machine)
    : machine_(machine), threads_(new Thread[kMaxThreads]), warps_(new Warp[kMaxThreads / kWarp]) {}

void Block::StartLaunch(const dim3& shape, void (*body)(void*), void* context) {
  if (stacks_.Reserve(kMaxThreads, machine_->settings.stack_bytes)) {
    for (int t = 0; t < kMaxThreads; ++t) threads_[t].has_fibre = false;
  }
  count_ = static_cast<int>(shape.x * shape.y * shape.z);
  current_block_shape = {shape.x, shape.y, shape.z};
  body_ = body;
  context_ = context;
  abandoned_ = overflowed_ = false;
  shuffler_ = Shuffler(machine_->settings.seed);
  for (int t = 0; t < count_; ++t) {
    Thread& thread = threads_[t];
    const unsigned n = static_cast<unsigned>(t);
    thread.index = {n % shape.x, n / shape.x % shape.y, n / shape.x / shape.y};
    // A fibre that has finished takes the next block's thread, also of another launch.
    if (thread.has_fibre && thread.state == State::kFinished) continue;
    thread.fibre.Make(stacks_.stack(t), stacks_.bytes(t), &Block::ThreadMain);
    thread.has_fibre = true;
  }
}

bool Block::Run(const Index3& index) {
  index_ = index;
  current_block = {index.x, index.y, index.z};
  for (Barrier& barrier : barriers_) barrier = {};
  machine_->phase_barriers.StartBlock();
  machine_->products.StartBlock();
  waiting_ = timeouts_ = 0;
  finished_ = 0;
  ready_.clear();
  for (int t = 0; t < count_; ++t) {
    if (t % kWarp == 0) warps_[t / kWarp] = {};
    warps_[t / kWarp].live |= 1u << t % kWarp;
    threads_[t].copies.copies.clear();
    MakeReady(t);
  }
  caller_.SwitchTo(&threads_[PickNext()].fibre);
  if (overflowed_) {
    machine_->Report(FindingKind::kStackOverflow, overflow_site_, [&] {
      return Format("needs more stack than %zu bytes (Settings::stack_bytes)",
                    machine_->settings.stack_bytes);
    });
  }
  if (!abandoned_) machine_->phase_barriers.FinishBlock();
  running_ = -1;
  MeetAtBanks();
  return !abandoned_;
}

// Tells the banks that all threads meet.
void Block::MeetAtBanks() {
  if (!machine_->banks.counts()) return;
  for (int warp = 0; warp < (count_ + kWarp - 1) / kWarp; ++warp) machine_->banks.Meet(warp, ~0u);
}

void Block::ThreadMain() {
  Block& block = running_machine->block;
  // Flushes denormals as a GPU does with nvcc's --ftz=true. The state is the fibre's own, whatever
  // that of the launching host thread.
  const tfb::ScopedFlushDenormals flush;
  for (;;) {
    block.body_(block.context_);
    block.Finish();
  }
}

void Block::Finish() {
  machine_->products.FinishThread();
  threads_[running_].state = State::kFinished;
  timeouts_ = 0;
  ++finished_;
  const int warp = running_ / kWarp;
  warps_[warp].live &= ~(1u << running_ % kWarp);
  // Other lanes may have waited for this lane alone.
  for (int lane = 0; lane < kWarp && warps_[warp].waiting != 0; ++lane) {
    if ((warps_[warp].waiting >> lane & 1) == 0) continue;
    const Meeting& meeting = *threads_[warp * kWarp + lane].meeting;
    unsigned lanes;
    if (IsComplete(warp, meeting, &lanes)) Complete(warp, meeting, lanes);
  }
  SwitchAway();
}

void Block::MakeReady(int thread) {
  threads_[thread].state = State::kReady;
  ready_.push_back(thread);
}

int Block::PickNext() {
  if (ready_.empty() && !GoOn()) return -1;
  int& chosen = ready_[shuffler_.Below(ready_.size())];
  running_ = chosen;
  chosen = ready_.back();
  ready_.pop_back();
  machine_->checker.order.Resume(running_);
  const Index3& index = threads_[running_].index;
  current_thread = {index.x, index.y, index.z};
  return running_;
}

void Block::Abandon() {
  abandoned_ = true;
  threads_[running_].fibre.SwitchTo(&caller_);
  std::abort();  // unreachable: nothing resumes a thread of a launch that is over
}

void Block::OnOverflow(const void* site) {
  Block& block = running_machine->block;
  block.overflow_site_ = site;
  block.overflowed_ = true;
  block.Abandon();
}

// Little of a thread's stack is in use while it waits, nor in the caches of those that run.
void Block::SyncThreads(const void* site, const char* file, int line) {
  if (NoteArrival(0, count_, BarrierUse::kSync, false, site, file, line)) SwitchAway();
}

bool Block::ArriveAt(int number, int threads, BarrierUse use, bool any, const void* site) {
  CheckArrival(number, threads, use, site);
  if (NoteArrival(number, threads, use, any, site, nullptr, 0)) SwitchAway();
  return threads_[running_].barrier_any;
}

// Returns whether the thread waits.
__attribute__((noinline)) bool Block::NoteArrival(int number, int threads, BarrierUse use, bool any,
                                                  const void* site, const char* file, int line) {
  Barrier& barrier = barriers_[number];
  if (barrier.threads != threads || barrier.use != use) CheckArrival(number, threads, use, site);
  const bool waits = use != BarrierUse::kArrive;
  if (threads != count_ || !waits) machine_->checker.TrackAll(count_);
  barrier.places_differ |=
      barrier.waiting > 0 && (site != barrier.place.site || line != barrier.place.line);
  barrier.threads = threads;
  barrier.use = use;
  barrier.place = {site, file, line};
  barrier.any |= any;
  ++barrier.arrived;
  timeouts_ = 0;
  if (waits) {
    Thread& self = threads_[running_];
    ++barrier.waiting;
    self.barrier = {site, file, line};
    self.barrier_number = static_cast<int8_t>(number);
    self.state = State::kAtBarrier;
  } else {
    machine_->checker.order.Release(running_, &barrier.known);
  }
  if (barrier.arrived == threads) CompleteBarrier(number);
  return waits;
}

// Finds arrivals that no barrier may have, or not beside those before.
void Block::CheckArrival(int number, int threads, BarrierUse use, const void* site) {
  // An abandoned thread destroys nothing, so texts are made within.
  const auto report = [&](auto why) {
    machine_->Report(FindingKind::kBadBarrier, site, [&] {
      return Format("arrives at barrier %d for %d threads", number, threads) + why();
    });
    Abandon();
  };
  if (number < 0 || number >= kBlockBarriers) report([] { return "; barriers are 0 to 15"; });
  if (threads != count_ && (threads <= 0 || threads > count_ || threads % kWarp != 0)) {
    report([&] { return Format(" of %d; a barrier is for a multiple of 32", count_); });
  }
  const Barrier& barrier = barriers_[number];
  if (barrier.arrived == 0) return;
  if (barrier.threads != threads) {
    report([&] { return Format(", at which others arrived for %d", barrier.threads); });
  }
  if ((barrier.use == BarrierUse::kAny) != (use == BarrierUse::kAny)) {
    report([] { return ", at which only some threads give a predicate"; });
  }
}

// Resumes the threads that wait at a barrier.
void Block::CompleteBarrier(int number) {
  Barrier& barrier = barriers_[number];
  const auto for_each_waiting = [&](auto&& call) {
    for (int t = 0; t < count_; ++t) {
      if (threads_[t].state == State::kAtBarrier && threads_[t].barrier_number == number) call(t);
    }
  };
  Order& order = machine_->checker.order;
  ++machine_->counts.barriers;
  if (barrier.threads == count_ && barrier.arrived == barrier.waiting) {
    if (barrier.places_differ && barrier.place.file != nullptr) ReportDifferentBarriers();
    order.PassBarrier();
    MeetAtBanks();
  } else {
    unsigned lanes[kMaxThreads / kWarp] = {};
    for_each_waiting([&](int t) {
      order.Release(t, &barrier.known);
      lanes[t / kWarp] |= 1u << t % kWarp;
    });
    for_each_waiting([&](int t) { order.Acquire(t, barrier.known); });
    for (int warp = 0; machine_->banks.counts() && warp < kMaxThreads / kWarp; ++warp) {
      if (lanes[warp] != 0) machine_->banks.Meet(warp, lanes[warp] | ~warps_[warp].live);
    }
  }
  for_each_waiting([&](int t) {
    threads_[t].barrier_any = barrier.any;
    MakeReady(t);
  });
  barrier = {};
}

bool Block::WaitFor(const Condition& condition, const void* site) {
  if (condition.Holds()) return true;
  Thread& self = threads_[running_];
  self.condition = &condition;
  self.condition_site = site;
  self.state = State::kWaiting;
  ++waiting_;
  SwitchAway();
  return condition.Holds();
}

void Block::Wake() {
  timeouts_ = 0;
  for (int t = 0; t < count_ && waiting_ > 0; ++t) {
    if (threads_[t].state != State::kWaiting || !threads_[t].condition->Holds()) continue;
    --waiting_;
    MakeReady(t);
  }
}

// Makes some threads ready where all that have not finished wait: those at __syncthreads when no
// other thread is left, or those whose waits time out. Returns false where none can go on.
bool Block::GoOn() {
  if (finished_ == count_) return false;
  const Barrier& all = barriers_[0];
  if (all.threads == count_ && all.waiting > 0 && all.waiting + finished_ == count_) {
    int waiting = 0, missing = 0;
    while (threads_[waiting].state != State::kAtBarrier) ++waiting;
    while (threads_[missing].state != State::kFinished) ++missing;
    machine_->ReportOf(
        waiting, FindingKind::kDivergentBarrier, threads_[waiting].barrier.site, [&] {
          return Format(
              "waits at __syncthreads, which %d of %d threads reach; thread %s has finished",
              all.waiting, count_, Text(index_of(missing)).c_str());
        });
    CompleteBarrier(0);
    return true;
  }
  constexpr int kTimeouts = 16;  // a wait may be followed by others, and by meetings of a warp
  if (waiting_ > 0 && timeouts_ < kTimeouts) {
    ++timeouts_;
    waiting_ = 0;
    for (int t = 0; t < count_; ++t) {
      if (threads_[t].state == State::kWaiting) MakeReady(t);
    }
    return true;
  }
  ReportStuck();
  abandoned_ = true;
  return false;
}

// Reports a deadlock: lanes that cannot meet, and each place of other waits.
void Block::ReportStuck() {
  bool in_warp = false;
  for (int t = 0; t < count_; ++t) in_warp |= threads_[t].state == State::kInWarp;
  if (in_warp) ReportStuckWarp();
  for (int t = 0; t < count_; ++t) {
    const Thread& thread = threads_[t];
    const bool at_numbered = thread.state == State::kAtBarrier && thread.barrier.file == nullptr;
    if (!at_numbered && thread.state != State::kWaiting) continue;
    const void* site = at_numbered ? thread.barrier.site : thread.condition_site;
    machine_->ReportOf(t, FindingKind::kDivergentBarrier, site,
                       [&] { return WhereItWaits(t) + ", and all other threads wait, too"; });
  }
}

// Returns "waits at __syncthreads" of a thread that does not run.
std::string Block::WhereItWaits(int thread) const {
  const Thread& waiting = threads_[thread];
  if (waiting.state == State::kWaiting) return waiting.condition->Text();
  if (waiting.state != State::kAtBarrier) return "waits";
  if (waiting.barrier.file != nullptr) return "waits at __syncthreads";
  const Barrier& barrier = barriers_[waiting.barrier_number];
  return Format("waits at barrier %d for %d threads, of which %d have come", waiting.barrier_number,
                barrier.threads, barrier.arrived);
}

namespace {

std::string PlaceOf(const BarrierSite& barrier) {
  const char* slash = std::strrchr(barrier.file, '/');
  return Format("%s:%d", slash == nullptr ? barrier.file : slash + 1, barrier.line);
}

}  // namespace

// Reports a thread that waits at another barrier than the first waiting thread. Two addresses may be
// one barrier of the source, since the compiler unrolls loops, for example; they are two where
// inlined calls differ.
void Block::ReportDifferentBarriers() {
  int first = 0;
  while (threads_[first].state != State::kAtBarrier) ++first;
  const BarrierSite& expected = threads_[first].barrier;
  const std::string expected_place = PlaceOf(expected);
  BarrierSite same = expected;
  for (int t = first; t < count_; ++t) {
    if (threads_[t].state != State::kAtBarrier) continue;
    const BarrierSite& barrier = threads_[t].barrier;
    if (barrier.site == same.site && barrier.line == same.line) continue;
    std::string place = PlaceOf(barrier), other_place = expected_place;
    if (place == other_place) {
      place = CallChain(barrier.site);
      other_place = CallChain(expected.site);
    }
    if (place == other_place || place.empty() || other_place.empty()) {
      same = barrier;
      continue;
    }
    machine_->ReportOf(t, FindingKind::kDivergentBarrier, barrier.site, [&] {
      return "waits at the __syncthreads of " + place + ", while thread " + Text(index_of(first)) +
             " waits at that of " + other_place;
    });
    return;
  }
}

void Block::NoteMeeting(const Meeting& meeting) {
  const int lane = running_ % kWarp, warp = running_ / kWarp;
  if ((meeting.mask >> lane & 1) == 0) {
    machine_->Report(FindingKind::kLaneOutsideMask, meeting.site, [&] {
      return Format("calls %s with mask %08x, which does not name its own lane %d", meeting.name,
                    meeting.mask, lane);
    });
    Abandon();
  }
  Thread& self = threads_[running_];
  self.meeting = &meeting;
  self.state = State::kInWarp;
  warps_[warp].waiting |= 1u << lane;
  unsigned lanes;
  if (IsComplete(warp, meeting, &lanes)) Complete(warp, meeting, lanes);
}

// Tells whether all lanes of the meeting have come; `lanes` receives these.
bool Block::IsComplete(int warp, const Meeting& meeting, unsigned* lanes) const {
  *lanes = meeting.needs_whole_warp ? meeting.mask : meeting.mask & warps_[warp].live;
  if ((warps_[warp].waiting & *lanes) != *lanes) return false;
  for (unsigned left = *lanes; left != 0; left &= left - 1) {
    const Meeting& other = *threads_[warp * kWarp + __builtin_ctz(left)].meeting;
    if (other.mask != meeting.mask) return false;
    if (other.name != meeting.name && std::strcmp(other.name, meeting.name) != 0) return false;
  }
  return true;
}

void Block::Complete(int warp, const Meeting& meeting, unsigned lanes) {
  ++machine_->counts.warp_collectives;
  void* arguments[kWarp] = {};
  for (unsigned left = lanes; left != 0; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    arguments[lane] = threads_[warp * kWarp + lane].meeting->argument;
  }
  // Lanes that have finished meet nobody any more.
  if (machine_->banks.counts()) machine_->banks.Meet(warp, lanes | ~warps_[warp].live);
  meeting.complete(arguments, lanes);
  warps_[warp].waiting &= ~lanes;
  for (unsigned left = lanes; left != 0; left &= left - 1) {
    MakeReady(warp * kWarp + __builtin_ctz(left));
  }
}

void Block::ReportStuckWarp() {
  int stuck = 0;
  std::string why;
  for (int t = 0; t < count_ && why.empty(); ++t) {
    if (threads_[t].state != State::kInWarp) continue;
    stuck = t;
    const Meeting& meeting = *threads_[t].meeting;
    for (unsigned left = meeting.mask; left != 0 && why.empty(); left &= left - 1) {
      why = WhyNotThere(t / kWarp, __builtin_ctz(left), meeting);
    }
  }
  const Meeting& meeting = *threads_[stuck].meeting;
  machine_->ReportOf(stuck, FindingKind::kDivergentBarrier, meeting.site, [&] {
    return Format("waits at %s (mask %08x) for ", meeting.name, meeting.mask) + why;
  });
}

std::string Block::WhyNotThere(int warp, int lane, const Meeting& meeting) const {
  const int t = warp * kWarp + lane;
  if (t >= count_) {
    return meeting.needs_whole_warp ? Format("lane %d, which the block has not", lane) : "";
  }
  const std::string who = "thread " + Text(index_of(t));
  switch (threads_[t].state) {
    case State::kAtBarrier:
    case State::kWaiting:
      return who + ", which " + WhereItWaits(t);
    case State::kFinished:
      return meeting.needs_whole_warp ? who + ", which has finished" : "";
    default:
      break;
  }
  const Meeting& other = *threads_[t].meeting;
  if (other.mask == meeting.mask && std::strcmp(other.name, meeting.name) == 0) return "";
  return who + Format(", which waits at %s (mask %08x)", other.name, other.mask);
}

}  // namespace cuda_simulator
