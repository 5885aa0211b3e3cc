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
  at_barrier_ = 0;
  barriers_differ_ = false;
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
  threads_[running_].state = State::kFinished;
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

void Block::SwitchAway() {
  const int self = running_;
  const int next = PickNext();
  if (next == self) return;
  threads_[self].fibre.SwitchTo(next < 0 ? &caller_ : &threads_[next].fibre);
}

int Block::PickNext() {
  if (ready_.empty() && !ReleaseBarrier()) return -1;
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

void Block::WaitAtBarrier(const void* site, const char* file, int line) {
  Thread& self = threads_[running_];
  self.state = State::kAtBarrier;
  self.barrier = {site, file, line};
  barriers_differ_ |= at_barrier_ > 0 && (site != barrier_.site || line != barrier_.line);
  barrier_ = self.barrier;
  ++at_barrier_;
  SwitchAway();
}

// Resumes the threads at the block's barrier when every thread has finished or waits; returns false
// where none can resume.
bool Block::ReleaseBarrier() {
  if (finished_ == count_) return false;
  if (at_barrier_ + finished_ < count_) {
    ReportStuckWarp();
    abandoned_ = true;
    return false;
  }
  if (finished_ > 0) {
    int waiting = 0, missing = 0;
    while (threads_[waiting].state != State::kAtBarrier) ++waiting;
    while (threads_[missing].state != State::kFinished) ++missing;
    machine_->ReportOf(
        waiting, FindingKind::kDivergentBarrier, threads_[waiting].barrier.site, [&] {
          return Format(
              "waits at __syncthreads, which %d of %d threads reach; thread %s has finished",
              at_barrier_, count_, Text(index_of(missing)).c_str());
        });
  }
  if (barriers_differ_) ReportDifferentBarriers();
  barriers_differ_ = false;
  ++machine_->counts.barriers;
  machine_->checker.order.PassBarrier();
  MeetAtBanks();
  at_barrier_ = 0;
  for (int t = 0; t < count_; ++t) {
    if (threads_[t].state == State::kAtBarrier) MakeReady(t);
  }
  return true;
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

void Block::MeetInWarp(const Meeting& meeting) {
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
  SwitchAway();
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
      return who + ", which waits at __syncthreads";
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
