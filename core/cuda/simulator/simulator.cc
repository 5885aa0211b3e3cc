#include "core/cuda/simulator/simulator.h"

#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <boost/context/detail/fcontext.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "core/cuda/simulator/cuda_runtime.h"
#include "core/cuda/simulator/hooks.h"
#include "core/cuda/simulator/memory.h"

// The linker's: where the __shared__ variables of the program lie. Null in a program without any.
extern "C" {
extern char __start_cuda_simulator_shared[] __attribute__((weak));
extern char __stop_cuda_simulator_shared[] __attribute__((weak));
}

namespace cuda_simulator {

dim3 threadIdx;
dim3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace {

namespace fibre = boost::context::detail;

constexpr int kWarp = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr size_t kDynamicAlignment = 128;

// Splitmix64: a stream of numbers that is the same on every machine.
class Shuffler {
 public:
  explicit Shuffler(uint64_t seed) : state_(seed) {}
  uint64_t Below(uint64_t limit) {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return (z ^ (z >> 31)) % limit;
  }

 private:
  uint64_t state_;
};

// Static data of the program and its libraries: constants that kernels read.
struct Image {
  uintptr_t begin;
  uintptr_t end;
};
std::vector<Image> LoadedImages() {
  std::vector<Image> images;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* result) {
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& segment = info->dlpi_phdr[i];
          if (segment.p_type != PT_LOAD) continue;
          const uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
          static_cast<std::vector<Image>*>(result)->push_back({begin, begin + segment.p_memsz});
        }
        return 0;
      },
      &images);
  return images;
}

enum class ThreadState : uint8_t { kReady, kAtBarrier, kInWarp, kFinished };

struct PendingCopy {
  void* to;
  const void* from;
  size_t bytes;
  size_t zero_bytes;  // at the end, of those
};

struct Thread {
  fibre::fcontext_t context = nullptr;
  ThreadState state = ThreadState::kFinished;
  Index3 index;
  // Where it waits in its warp.
  const char* meeting = nullptr;
  unsigned mask = 0;
  void* argument = nullptr;
  // Asynchronous copies that it has begun: the committed groups, then the group that is open.
  std::vector<std::vector<PendingCopy>> copies;
};

std::string Text(const Index3& index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
         std::to_string(index.z) + ")";
}
Index3 ToIndex(const dim3& index) { return {index.x, index.y, index.z}; }

}  // namespace

// All of it: one launch at a time, on the thread that launches.
class Simulator {
 public:
  static Simulator& Get() {
    static Simulator* simulator = new Simulator;
    return *simulator;
  }

  cudaError_t Launch(const char* name, const LaunchShape& shape, void (*body)(void*), void* context,
                     size_t context_bytes);

  // ---- Of the running thread ----
  void Barrier() {
    threads_[running_].state = ThreadState::kAtBarrier;
    SwitchToScheduler();
  }
  void MeetInWarp(const char* name, unsigned mask, void* argument, Collective complete);
  void NoteAccess(uintptr_t address, size_t bytes, AccessKind kind, bool aligned, const void* site);
  void NoteFinding(FindingKind kind, const std::string& what, const void* site = nullptr);
  int lane() const { return running_ % kWarp; }
  bool is_running() const { return running_ >= 0; }
  void AdvanceWarp() { ++warp_interval_[running_ / kWarp]; }
  // Lanes of the running thread's warp that have not finished.
  unsigned LiveLanes() const;

  // Asynchronous copies of the running thread.
  void CopyLater(void* to, const void* from, size_t bytes, size_t zero_bytes);
  void CommitCopies();
  void FinishCopies(size_t groups_that_may_remain);

  void* dynamic_shared() { return dynamic_shared_; }

  Settings settings;
  BufferMap buffers;
  std::vector<Finding> findings;
  std::string error;
  cudaError_t last_error = cudaSuccess;
  bool broken = false;  // by a kernel, where errors are deferred
  Counts counts;

 private:
  Simulator();
  std::string CheckShape(const LaunchShape& shape) const;
  void PrepareThreads(unsigned count);
  bool RunBlock(const Index3& block);  // false: the launch is over
  bool ReleaseBarrier();
  void ReportStuckWarps();
  void SwitchToScheduler();
  static void ThreadMain(fibre::transfer_t from);
  [[noreturn]] void Abandon();  // the running thread, and the launch

  std::vector<Thread> threads_;
  std::vector<int> ready_;
  int running_ = -1;
  int thread_count_ = 0;
  int finished_ = 0;
  bool abandoned_ = false;
  fibre::fcontext_t scheduler_ = nullptr;
  std::unique_ptr<Shuffler> shuffler_;

  const char* kernel_ = "";
  void (*body_)(void*) = nullptr;
  void* context_ = nullptr;
  size_t context_bytes_ = 0;
  uint32_t block_interval_ = 0;
  uint16_t warp_interval_[kMaxThreads / kWarp] = {};

  char* stacks_ = nullptr;
  size_t stacks_bytes_ = 0;
  char* dynamic_shared_ = nullptr;
  size_t dynamic_bytes_ = 0;
  std::unique_ptr<SharedShadow> dynamic_shadow_;
  std::unique_ptr<SharedShadow> static_shadow_;  // of all kernels in the program
  std::vector<Image> images_;
  std::vector<const void*> finding_sites_;  // of each of `findings`
};

Simulator::Simulator() {
  // 256 KiB: what follows a block's own bytes is never anybody's.
  dynamic_shared_ = static_cast<char*>(
      mmap(nullptr, 256 << 10, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  const size_t bytes =
      static_cast<size_t>(__stop_cuda_simulator_shared - __start_cuda_simulator_shared);
  static_shadow_ = std::make_unique<SharedShadow>(
      reinterpret_cast<uintptr_t>(__start_cuda_simulator_shared), bytes);
}

std::string Simulator::CheckShape(const LaunchShape& shape) const {
  const auto limit = [](const char* what, uint64_t value, uint64_t most) -> std::string {
    if (value >= 1 && value <= most) return "";
    return std::string(what) + " is " + std::to_string(value) + "; allowed is 1 to " +
           std::to_string(most);
  };
  for (const std::string& wrong :
       {limit("gridDim.x", shape.grid.x, 0x7fffffff), limit("gridDim.y", shape.grid.y, 65535),
        limit("gridDim.z", shape.grid.z, 65535), limit("blockDim.x", shape.block.x, 1024),
        limit("blockDim.y", shape.block.y, 1024), limit("blockDim.z", shape.block.z, 64),
        limit("the number of threads in a block",
              uint64_t{shape.block.x} * shape.block.y * shape.block.z, kMaxThreads)}) {
    if (!wrong.empty()) return wrong;
  }
  if (shape.shared_bytes > settings.max_shared_bytes_per_block) {
    return "dynamic shared memory is " + std::to_string(shape.shared_bytes) +
           " bytes a block; allowed are " + std::to_string(settings.max_shared_bytes_per_block);
  }
  return "";
}

cudaError_t Simulator::Launch(const char* name, const LaunchShape& shape, void (*body)(void*),
                              void* context, size_t context_bytes) {
  kernel_ = name;
  findings.clear();
  finding_sites_.clear();
  abandoned_ = false;
  ++counts.launches;
  if (const std::string wrong = CheckShape(shape); !wrong.empty()) {
    findings.push_back(
        {FindingKind::kBadLaunch, name, {}, {}, 1, std::string(name) + ": " + wrong});
    error = findings[0].message;
    return last_error = cudaErrorInvalidConfiguration;
  }
  body_ = body;
  context_ = context;
  context_bytes_ = context_bytes;
  gridDim = shape.grid;
  blockDim = shape.block;
  dynamic_bytes_ = shape.shared_bytes;
  dynamic_shadow_ =
      std::make_unique<SharedShadow>(reinterpret_cast<uintptr_t>(dynamic_shared_), dynamic_bytes_);
  images_ = LoadedImages();
  shuffler_ = std::make_unique<Shuffler>(settings.seed);
  block_interval_ = 0;
  PrepareThreads(shape.block.x * shape.block.y * shape.block.z);

  // Blocks in the order n -> (n * step + first) mod count, step coprime to count: any block may be
  // first.
  const uint64_t count = uint64_t{shape.grid.x} * shape.grid.y * shape.grid.z;
  const uint64_t first = shuffler_->Below(count);
  uint64_t step = shuffler_->Below(count) | 1;
  const auto gcd = [](uint64_t a, uint64_t b) {
    while (b != 0) std::swap(a %= b, b);
    return a;
  };
  while (gcd(count, step) != 1) step += 2;
  bool going = true;
  for (uint64_t n = 0; n < count && going; ++n) {
    const uint64_t block =
        static_cast<uint64_t>((static_cast<unsigned __int128>(n) * step + first) % count);
    going = RunBlock({static_cast<unsigned>(block % shape.grid.x),
                      static_cast<unsigned>(block / shape.grid.x % shape.grid.y),
                      static_cast<unsigned>(block / shape.grid.x / shape.grid.y)});
  }
  running_ = -1;
  if (findings.empty()) return cudaSuccess;
  error = "simulated kernel: " + findings[0].message;
  if (findings.size() > 1) {
    error += " (and " + std::to_string(findings.size() - 1) + " more)";
  }
  return last_error = cudaErrorLaunchFailure;
}

void Simulator::PrepareThreads(unsigned count) {
  thread_count_ = static_cast<int>(count);
  const size_t bytes = count * settings.stack_bytes;
  if (bytes > stacks_bytes_) {
    if (stacks_ != nullptr) munmap(stacks_, stacks_bytes_);
    stacks_ = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks_ == MAP_FAILED) {
      std::fprintf(stderr, "cuda_simulator: no memory for %zu bytes of stacks\n", bytes);
      std::abort();
    }
    stacks_bytes_ = bytes;
  }
  threads_.assign(count, Thread{});
  for (unsigned t = 0; t < count; ++t) {
    threads_[t].index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
    threads_[t].context = fibre::make_fcontext(stacks_ + (t + 1) * settings.stack_bytes,
                                               settings.stack_bytes, &Simulator::ThreadMain);
  }
}

// A thread's fibre runs it in one block after the other.
void Simulator::ThreadMain(fibre::transfer_t from) {
  Simulator& simulator = Get();
  simulator.scheduler_ = from.fctx;
  for (;;) {
    simulator.body_(simulator.context_);
    simulator.threads_[simulator.running_].state = ThreadState::kFinished;
    ++simulator.finished_;
    simulator.SwitchToScheduler();
  }
}

void Simulator::SwitchToScheduler() {
  const int self = running_;
  const fibre::transfer_t from = fibre::jump_fcontext(scheduler_, nullptr);
  scheduler_ = from.fctx;
  running_ = self;
  const Index3& index = threads_[self].index;
  threadIdx = dim3(index.x, index.y, index.z);
}

void Simulator::Abandon() {
  abandoned_ = true;
  SwitchToScheduler();
  std::abort();  // nobody resumes a thread of a launch that is over
}

bool Simulator::RunBlock(const Index3& block) {
  ++counts.blocks;
  counts.threads += thread_count_;
  blockIdx = dim3(block.x, block.y, block.z);
  ++block_interval_;
  std::fill(std::begin(warp_interval_), std::end(warp_interval_), 0);
  // As a GPU leaves it: not zero. 0xFF bytes are a NaN.
  std::memset(dynamic_shared_, 0xff, dynamic_bytes_);
  dynamic_shadow_->Clear();
  std::memset(reinterpret_cast<void*>(static_shadow_->begin()), 0xff, static_shadow_->bytes());
  static_shadow_->Clear();
  finished_ = 0;
  ready_.clear();
  for (int t = 0; t < thread_count_; ++t) {
    threads_[t].state = ThreadState::kReady;
    threads_[t].copies.clear();
    ready_.push_back(t);
  }
  while (finished_ < thread_count_) {
    if (ready_.empty() && !ReleaseBarrier()) return false;
    const size_t next = shuffler_->Below(ready_.size());
    std::swap(ready_[next], ready_.back());
    const int t = ready_.back();
    ready_.pop_back();
    running_ = t;
    const Index3& index = threads_[t].index;
    threadIdx = dim3(index.x, index.y, index.z);
    threads_[t].context = fibre::jump_fcontext(threads_[t].context, nullptr).fctx;
    running_ = -1;
    if (abandoned_) return false;
  }
  return static_cast<int>(findings.size()) < settings.max_findings;
}

// Every thread has finished or waits. Lets those at the block's barrier go on.
bool Simulator::ReleaseBarrier() {
  int at_barrier = 0, in_warp = 0, missing = -1, waiting = -1;
  for (int t = 0; t < thread_count_; ++t) {
    const ThreadState state = threads_[t].state;
    at_barrier += state == ThreadState::kAtBarrier;
    in_warp += state == ThreadState::kInWarp;
    (state == ThreadState::kAtBarrier ? waiting : missing) = t;
  }
  if (in_warp > 0) {
    ReportStuckWarps();
    return false;
  }
  if (at_barrier < thread_count_) {
    running_ = waiting;
    NoteFinding(FindingKind::kDivergentBarrier,
                "waits at __syncthreads, which " + std::to_string(at_barrier) + " of " +
                    std::to_string(thread_count_) + " threads reach; thread " +
                    Text(threads_[missing].index) + " has finished");
    running_ = -1;
  }
  ++counts.barriers;
  ++block_interval_;
  for (int t = 0; t < thread_count_; ++t) {
    if (threads_[t].state != ThreadState::kAtBarrier) continue;
    threads_[t].state = ThreadState::kReady;
    ready_.push_back(t);
  }
  return true;
}

void Simulator::ReportStuckWarps() {
  for (int t = 0; t < thread_count_; ++t) {
    if (threads_[t].state != ThreadState::kInWarp) continue;
    const int warp = t / kWarp * kWarp;
    for (int lane = 0; lane < kWarp && warp + lane < thread_count_; ++lane) {
      if ((threads_[t].mask >> lane & 1) == 0) continue;
      const Thread& other = threads_[warp + lane];
      std::string where;
      if (other.state == ThreadState::kFinished) where = "has finished";
      if (other.state == ThreadState::kAtBarrier) where = "waits at __syncthreads";
      if (other.state == ThreadState::kInWarp &&
          (other.meeting != threads_[t].meeting || other.mask != threads_[t].mask)) {
        char text[64];
        std::snprintf(text, sizeof(text), "(mask %08x)", other.mask);
        where = std::string("waits at ") + other.meeting + " " + text;
      }
      if (where.empty()) continue;
      char mask[64];
      std::snprintf(mask, sizeof(mask), "(mask %08x)", threads_[t].mask);
      running_ = t;
      NoteFinding(FindingKind::kDivergentBarrier, std::string("waits at ") + threads_[t].meeting +
                                                      " " + mask + " for thread " +
                                                      Text(other.index) + ", which " + where);
      running_ = -1;
      return;
    }
  }
}

unsigned Simulator::LiveLanes() const {
  unsigned live = 0;
  const int warp = running_ / kWarp * kWarp;
  for (int lane = 0; lane < kWarp && warp + lane < thread_count_; ++lane) {
    if (threads_[warp + lane].state != ThreadState::kFinished) live |= 1u << lane;
  }
  return live;
}

void Simulator::MeetInWarp(const char* name, unsigned mask, void* argument, Collective complete) {
  const int warp = running_ / kWarp * kWarp;
  if ((mask >> lane() & 1) == 0) {
    char text[16];
    std::snprintf(text, sizeof(text), "%08x", mask);
    NoteFinding(FindingKind::kLaneOutsideMask,
                std::string("calls ") + name + " with mask " + text + ", which does not name it");
    Abandon();
  }
  if (warp + kWarp > thread_count_ && mask >> (thread_count_ - warp) != 0) {
    NoteFinding(FindingKind::kDivergentBarrier,
                std::string("calls ") + name + " with a mask that names lanes from " +
                    std::to_string(thread_count_ - warp) + " on, which the block has not");
    Abandon();
  }
  Thread& self = threads_[running_];
  self.meeting = name;
  self.mask = mask;
  self.argument = argument;
  self.state = ThreadState::kInWarp;
  void* arguments[kWarp] = {};
  for (int other = 0; other < kWarp; ++other) {
    if ((mask >> other & 1) == 0) continue;
    const int t = warp + other;
    const bool here = t < thread_count_ && threads_[t].state == ThreadState::kInWarp &&
                      threads_[t].mask == mask && std::strcmp(threads_[t].meeting, name) == 0;
    if (!here) return SwitchToScheduler();
    arguments[other] = threads_[t].argument;
  }
  ++counts.warp_collectives;
  complete(arguments, mask);
  for (int other = 0; other < kWarp; ++other) {
    if ((mask >> other & 1) == 0) continue;
    threads_[warp + other].state = ThreadState::kReady;
    if (warp + other != running_) ready_.push_back(warp + other);
  }
}

void Simulator::CopyLater(void* to, const void* from, size_t bytes, size_t zero_bytes) {
  NoteAccess(reinterpret_cast<uintptr_t>(from), bytes - zero_bytes, AccessKind::kRead,
             /*aligned=*/false, nullptr);
  const uintptr_t address = reinterpret_cast<uintptr_t>(to);
  if (address % bytes != 0 ||
      (zero_bytes < bytes && reinterpret_cast<uintptr_t>(from) % bytes != 0)) {
    NoteFinding(FindingKind::kMisaligned,
                "copies " + std::to_string(bytes) + " bytes asynchronously, misaligned");
  }
  // It may happen at any time from now on: nobody may use the place, and what was there is gone.
  NoteAccess(address, bytes, AccessKind::kWrite, /*aligned=*/false, nullptr);
  dynamic_shadow_->Forget(address, bytes);
  static_shadow_->Forget(address, bytes);
  auto& copies = threads_[running_].copies;
  if (copies.empty()) copies.emplace_back();
  copies.back().push_back({to, from, bytes, zero_bytes});
}

void Simulator::CommitCopies() {
  auto& copies = threads_[running_].copies;
  if (copies.empty()) copies.emplace_back();
  copies.emplace_back();
}

void Simulator::FinishCopies(size_t groups_that_may_remain) {
  auto& copies = threads_[running_].copies;
  const size_t committed = copies.empty() ? 0 : copies.size() - 1;
  if (committed <= groups_that_may_remain) return;
  const size_t done = committed - groups_that_may_remain;
  for (size_t group = 0; group < done; ++group) {
    for (const PendingCopy& copy : copies[group]) {
      NoteAccess(reinterpret_cast<uintptr_t>(copy.to), copy.bytes, AccessKind::kWrite,
                 /*aligned=*/false, nullptr);
      char* to = static_cast<char*>(copy.to);
      std::memcpy(to, copy.from, copy.bytes - copy.zero_bytes);
      std::memset(to + copy.bytes - copy.zero_bytes, 0, copy.zero_bytes);
    }
  }
  copies.erase(copies.begin(), copies.begin() + static_cast<int64_t>(done));
}

void Simulator::NoteFinding(FindingKind kind, const std::string& what, const void* site) {
  for (size_t f = 0; site != nullptr && f < findings.size(); ++f) {
    if (findings[f].kind == kind && finding_sites_[f] == site) {
      ++findings[f].times;
      return;
    }
  }
  if (static_cast<int>(findings.size()) >= settings.max_findings) return;
  Finding finding;
  finding.kind = kind;
  finding.kernel = kernel_;
  finding.block = ToIndex(blockIdx);
  finding.thread = threads_[running_].index;
  finding.message = finding.kernel + ", block " + Text(finding.block) + ", thread " +
                    Text(finding.thread) + ": " + what;
  findings.push_back(std::move(finding));
  finding_sites_.push_back(site);
}

void Simulator::NoteAccess(uintptr_t address, size_t bytes, AccessKind kind, bool aligned,
                           const void* site) {
  if (running_ < 0 || bytes == 0) return;
  if (address - reinterpret_cast<uintptr_t>(stacks_) < stacks_bytes_) return;
  if (address - reinterpret_cast<uintptr_t>(context_) < context_bytes_) return;
  const auto doing = [&] {
    const char* verb = kind == AccessKind::kRead    ? "reads "
                       : kind == AccessKind::kWrite ? "writes "
                                                    : "changes atomically ";
    return verb + std::to_string(bytes) + " bytes ";
  };
  const bool misaligned = aligned && address % bytes != 0;

  SharedShadow* shared = nullptr;
  const char* kind_of_shared = "dynamic";
  if (dynamic_shadow_->Contains(address)) {
    shared = dynamic_shadow_.get();
  } else if (static_shadow_->Contains(address)) {
    shared = static_shadow_.get();
    kind_of_shared = "static";
  }
  if (shared != nullptr) {
    ++counts.accesses;
    const std::string at = std::string("at byte ") + std::to_string(address - shared->begin()) +
                           " of the block's " + kind_of_shared + " shared memory";
    if (address + bytes > shared->begin() + shared->bytes()) {
      NoteFinding(FindingKind::kOutOfBounds,
                  doing() + at + ", which ends at byte " + std::to_string(shared->bytes()), site);
      Abandon();
    }
    if (misaligned) NoteFinding(FindingKind::kMisaligned, doing() + at + ", misaligned", site);
    int other = -1;
    const Moment now{block_interval_, warp_interval_[running_ / kWarp],
                     static_cast<uint16_t>(running_)};
    const auto verdict = shared->Access(address, bytes, kind, now, &other);
    if (verdict == SharedShadow::Verdict::kFine) return;
    if (verdict == SharedShadow::Verdict::kUnwritten) {
      return NoteFinding(FindingKind::kUnwrittenRead, doing() + at + ", which nothing wrote", site);
    }
    const std::string who =
        other == SharedShadow::kSeveral ? "other threads" : "thread " + Text(threads_[other].index);
    const bool wrote = verdict == SharedShadow::Verdict::kRaceWithWrite;
    return NoteFinding(
        FindingKind::kRace,
        doing() + at + ", which " + who + (wrote ? " wrote" : " read") + " with no barrier between",
        site);
  }

  if (BufferMap::Buffer* buffer = buffers.Find(address)) {
    ++counts.accesses;
    const size_t offset = address - buffer->begin;
    const auto at = [&] {
      return "at byte " + std::to_string(offset) + " of a buffer of " +
             std::to_string(buffer->bytes) + " bytes";
    };
    if (bytes > buffer->bytes - offset) {
      NoteFinding(FindingKind::kOutOfBounds, doing() + at(), site);
      Abandon();
    }
    if (misaligned) NoteFinding(FindingKind::kMisaligned, doing() + at() + ", misaligned", site);
    if (buffer->written.empty()) return;
    uint8_t* written = buffer->written.data() + offset;
    if (kind != AccessKind::kWrite &&
        std::find(written, written + bytes, uint8_t{0}) != written + bytes) {
      NoteFinding(FindingKind::kUnwrittenRead, doing() + at() + ", which nothing wrote", site);
    }
    if (kind != AccessKind::kRead) std::memset(written, 1, bytes);
    return;
  }

  if (kind == AccessKind::kRead) {
    for (const Image& image : images_) {
      if (address - image.begin < image.end - image.begin) return;
    }
  }
  const uintptr_t after = address - reinterpret_cast<uintptr_t>(dynamic_shared_);
  NoteFinding(FindingKind::kOutOfBounds,
              doing() + (after < (256u << 10)
                             ? "at byte " + std::to_string(after) + " of " +
                                   std::to_string(dynamic_bytes_) + " of dynamic shared memory"
                             : "at an address that is no device memory: " +
                                   buffers.DescribeNearest(address)),
              site);
  Abandon();
}

// ---- The device side ----

void __syncthreads() { Simulator::Get().Barrier(); }

void __syncwarp(unsigned mask) {
  struct Nothing {
    static void Complete(void* const*, unsigned mask) {
      // A part of a warp that syncs orders nothing for the others.
      Simulator& simulator = Simulator::Get();
      if ((mask & simulator.LiveLanes()) == simulator.LiveLanes()) simulator.AdvanceWarp();
    }
  };
  char nothing = 0;
  Simulator::Get().MeetInWarp("__syncwarp", mask, &nothing, &Nothing::Complete);
}

void MeetInWarp(const char* name, unsigned mask, void* argument, Collective complete) {
  Simulator::Get().MeetInWarp(name, mask, argument, complete);
}

int LaneId() { return Simulator::Get().lane(); }

namespace {

struct ShuffleExchange {
  uint64_t value;
  int source;
  uint64_t result;
  bool from_outside;
  static void Complete(void* const arguments[kWarp], unsigned mask) {
    for (int lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1) == 0) continue;
      auto* self = static_cast<ShuffleExchange*>(arguments[lane]);
      self->from_outside = (mask >> self->source & 1) == 0;
      self->result = self->from_outside
                         ? ~uint64_t{0}
                         : static_cast<ShuffleExchange*>(arguments[self->source])->value;
    }
  }
};

struct Vote {
  bool predicate;
  unsigned result;
  static void Complete(void* const arguments[kWarp], unsigned mask) {
    unsigned result = 0;
    for (int lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1) == 0) continue;
      result |= unsigned{static_cast<Vote*>(arguments[lane])->predicate} << lane;
    }
    for (int lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1) != 0) static_cast<Vote*>(arguments[lane])->result = result;
    }
  }
};

}  // namespace

uint64_t Shuffle(unsigned mask, uint64_t value, int source_lane) {
  ShuffleExchange exchange{value, source_lane & (kWarp - 1), 0, false};
  Simulator::Get().MeetInWarp("a shuffle", mask, &exchange, &ShuffleExchange::Complete);
  if (exchange.from_outside) {
    Simulator::Get().NoteFinding(
        FindingKind::kLaneOutsideMask,
        "shuffles from lane " + std::to_string(exchange.source) + ", which the mask does not name");
  }
  return exchange.result;
}

unsigned __ballot_sync(unsigned mask, int predicate) {
  Vote vote{predicate != 0, 0};
  Simulator::Get().MeetInWarp("a vote", mask, &vote, &Vote::Complete);
  return vote.result;
}

void __pipeline_memcpy_async(void* to, const void* from, size_t bytes, size_t zero_bytes) {
  Simulator::Get().CopyLater(to, from, bytes, zero_bytes);
}
void __pipeline_commit() { Simulator::Get().CommitCopies(); }
void __pipeline_wait_prior(size_t groups) { Simulator::Get().FinishCopies(groups); }

void NoteAtomic(void* address, size_t bytes, const void* site) {
  Simulator::Get().NoteAccess(reinterpret_cast<uintptr_t>(address), bytes, AccessKind::kAtomic,
                              /*aligned=*/true, site);
}

void* DynamicSharedBytes() { return Simulator::Get().dynamic_shared(); }

// ---- The runtime ----

cudaError_t LaunchBody(const char* kernel_name, const LaunchShape& shape, void (*body)(void*),
                       void* context, size_t context_bytes) {
  Simulator& simulator = Simulator::Get();
  const Settings settings = simulator.settings;
  if (simulator.broken) return simulator.last_error = cudaErrorLaunchFailure;
  if (settings.on_launch != nullptr) settings.on_launch(true);
  cudaError_t error = simulator.Launch(kernel_name, shape, body, context, context_bytes);
  if (settings.on_launch != nullptr) settings.on_launch(false);
  if (settings.errors_are_deferred && error == cudaErrorLaunchFailure) {
    simulator.broken = true;
    error = simulator.last_error = cudaSuccess;
  }
  return error;
}

namespace {

// What a call returns that waits for, or needs, what ran before.
cudaError_t Deferred() {
  Simulator& simulator = Simulator::Get();
  return simulator.broken ? simulator.last_error = cudaErrorLaunchFailure : cudaSuccess;
}

}  // namespace

cudaError_t cudaStreamSynchronize(cudaStream_t) { return Deferred(); }
cudaError_t cudaDeviceSynchronize() { return Deferred(); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return Deferred(); }

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (const cudaError_t error = Deferred(); error != cudaSuccess) return error;
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*memory == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*memory, 0xff, bytes);
  RegisterBuffer(*memory, bytes, /*written=*/false);
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  if (memory == nullptr) return cudaSuccess;
  if (!Simulator::Get().buffers.Remove(reinterpret_cast<uintptr_t>(memory))) {
    return cudaErrorInvalidValue;
  }
  std::free(memory);
  return cudaSuccess;
}

namespace {

// Copies and fills are bound to buffers as kernels are.
bool IsWithin(const void* memory, size_t bytes, bool writes) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
  BufferMap::Buffer* buffer = Simulator::Get().buffers.Find(address);
  if (bytes == 0) return true;
  if (buffer == nullptr || bytes > buffer->bytes - (address - buffer->begin)) return false;
  if (writes && !buffer->written.empty()) {
    std::memset(buffer->written.data() + (address - buffer->begin), 1, bytes);
  }
  return true;
}

}  // namespace

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t) {
  if (const cudaError_t error = Deferred(); error != cudaSuccess) return error;
  if (kind != cudaMemcpyHostToDevice && !IsWithin(from, bytes, false)) return cudaErrorInvalidValue;
  if (kind != cudaMemcpyDeviceToHost && !IsWithin(to, bytes, true)) return cudaErrorInvalidValue;
  if (bytes > 0) std::memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  if (const cudaError_t error = Deferred(); error != cudaSuccess) return error;
  if (!IsWithin(memory, bytes, true)) return cudaErrorInvalidValue;
  if (bytes > 0) std::memset(memory, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *total_bytes = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  *free_bytes = static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  return cudaSuccess;
}

struct CUevent_st {
  std::chrono::steady_clock::time_point when;
};
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  event->when = std::chrono::steady_clock::now();
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  *ms = std::chrono::duration<float, std::milli>(to->when - from->when).count();
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(Simulator::Get().last_error, cudaSuccess); }

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "simulator: a copy or fill leaves its buffer, or memory is freed that is none";
    case cudaErrorMemoryAllocation:
      return "simulator: out of memory";
    default:
      return Simulator::Get().error.c_str();
  }
}

// ---- The program's side ----

const char* Name(FindingKind kind) {
  switch (kind) {
    case FindingKind::kOutOfBounds:
      return "out of bounds";
    case FindingKind::kMisaligned:
      return "misaligned";
    case FindingKind::kUnwrittenRead:
      return "unwritten read";
    case FindingKind::kRace:
      return "race";
    case FindingKind::kDivergentBarrier:
      return "divergent barrier";
    case FindingKind::kLaneOutsideMask:
      return "lane outside mask";
    case FindingKind::kBadLaunch:
      return "bad launch";
    case FindingKind::kStackOverflow:
      return "stack overflow";
  }
  return "unknown";
}

void Configure(const Settings& settings) {
  Simulator::Get().settings = settings;
  Simulator::Get().broken = false;
}
const Settings& CurrentSettings() { return Simulator::Get().settings; }
const std::vector<Finding>& Findings() { return Simulator::Get().findings; }
Counts TotalCounts() { return Simulator::Get().counts; }

void RegisterBuffer(const void* begin, size_t bytes, bool written) {
  Simulator::Get().buffers.Add(reinterpret_cast<uintptr_t>(begin), bytes, written);
}
void UnregisterBuffer(const void* begin) {
  Simulator::Get().buffers.Remove(reinterpret_cast<uintptr_t>(begin));
}

void OnRead(const void* address, size_t bytes, bool aligned, const void* site) {
  Simulator::Get().NoteAccess(reinterpret_cast<uintptr_t>(address), bytes, AccessKind::kRead,
                              aligned, site);
}
void OnWrite(void* address, size_t bytes, bool aligned, const void* site) {
  Simulator::Get().NoteAccess(reinterpret_cast<uintptr_t>(address), bytes, AccessKind::kWrite,
                              aligned, site);
}

}  // namespace cuda_simulator
