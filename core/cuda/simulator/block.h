// Schedules the threads of the running block, one fibre each: which runs, and which waits for
// which.
#ifndef TFB_CORE_CUDA_SIMULATOR_BLOCK_H_
#define TFB_CORE_CUDA_SIMULATOR_BLOCK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/cuda/simulator/cuda_runtime.h"
#include "core/cuda/simulator/fibre.h"
#include "core/cuda/simulator/order.h"
#include "core/cuda/simulator/simulator.h"

namespace cuda_simulator {

struct Machine;

// Splitmix64, a generator whose numbers are the same on every machine.
class Shuffler {
 public:
  explicit Shuffler(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  uint64_t Below(uint64_t limit) {  // 1 at least
    return static_cast<uint64_t>(static_cast<unsigned __int128>(Next()) * limit >> 64);
  }

 private:
  uint64_t state_;
};

// A collective operation of lanes of a warp. The lanes meet where all that must take part give the
// same name and mask.
struct Meeting {
  const char* name;
  unsigned mask;
  void* argument;
  Collective complete;
  const void* site;
  // Whether all 32 lanes must take part, not only those of the mask that have not finished.
  bool needs_whole_warp = false;
};

// The place of a barrier of the block. `file` is null but for __syncthreads. The compiler may make
// several code addresses of one call, and one of several calls.
struct BarrierSite {
  const void* site;  // a return address
  const char* file;
  int line;
};

// A barrier of the block: PTX's barrier.cta. __syncthreads is barrier 0, for all threads.
enum class BarrierUse : uint8_t { kSync, kArrive, kAny };
constexpr int kBlockBarriers = 16;

// Something that a thread waits for, besides barriers of the block and lanes of its warp. Whoever
// makes it hold calls Block::Wake.
class Condition {
 public:
  virtual bool Holds() const = 0;
  virtual std::string Text() const = 0;  // returns "waits for ..." for findings

 protected:
  ~Condition() = default;
};

struct PendingCopy {
  void* to;
  const void* from;
  size_t bytes;
  size_t zero_bytes;  // bytes at the end that become zeros
  uint64_t group;
};

// The asynchronous copies of a thread that it has not yet waited for.
struct PendingCopies {
  std::vector<PendingCopy> copies;  // the oldest first
  uint64_t open_group = 0;          // the group that the next commit closes
};

class Block {
 public:
  explicit Block(Machine* machine);

  // Prepares for blocks of this shape, each of whose threads calls body(context).
  void StartLaunch(const dim3& shape, void (*body)(void*), void* context);
  // Runs a block from its beginning to its end. Returns false where the block was abandoned; its
  // launch is then abandoned, too.
  bool Run(const Index3& index);

  const Stacks& stacks() const { return stacks_; }
  Index3 index() const { return index_; }
  Index3 index_of(int thread) const { return threads_[thread].index; }

  // ---- The members below are for the running thread ----
  int running() const { return running_; }
  int count() const { return count_; }  // of threads
  PendingCopies& running_copies() { return threads_[running_].copies; }
  // Returns the lanes of the running thread's warp that have not finished.
  unsigned live_lanes() const { return warps_[running_ / kWarp].live; }
  void SyncThreads(const void* site, const char* file, int line);
  // Arrives at a barrier that is for that many threads, and waits for the others but where the use is
  // kArrive. Returns whether `any` was true of a thread that came.
  bool ArriveAt(int number, int threads, BarrierUse use, bool any, const void* site);
  // Waits until the condition holds. Returns false where nothing else can go on, as a wait that
  // times out does; where that happens again and again, it is a deadlock.
  bool WaitFor(const Condition& condition, const void* site);
  // Resumes threads whose conditions hold now; call it after every change that they depend on.
  void Wake();
  void MeetInWarp(const Meeting& meeting) {
    NoteMeeting(meeting);
    SwitchAway();
  }
  [[noreturn]] void Abandon();  // Ends the thread, and with it the block and the launch.
  // Handles a stack overflow of the calling thread.
  static void OnOverflow(const void* site);

 private:
  enum class State : uint8_t { kReady, kAtBarrier, kInWarp, kWaiting, kFinished };
  struct Thread {
    Fibre fibre;
    State state = State::kFinished;
    bool has_fibre = false;
    Index3 index;
    BarrierSite barrier = {};  // the barrier where it waits, or has waited
    int8_t barrier_number = 0;
    bool barrier_any = false;              // what the wait returns
    const Meeting* meeting = nullptr;      // the meeting where it waits
    const Condition* condition = nullptr;  // what it waits for
    const void* condition_site = nullptr;
    PendingCopies copies;
  };
  // The arrivals since a barrier was last complete.
  struct Barrier {
    int arrived = 0;
    int waiting = 0;  // of these, threads that wait
    int threads = 0;  // of the arrival that came last, as are the next two
    BarrierUse use = BarrierUse::kSync;
    BarrierSite place = {};
    bool places_differ = false;  // whether an earlier one waits elsewhere
    bool any = false;
    Order::Knowledge known;  // what came before arrivals that do not wait
  };
  struct Warp {
    unsigned live = 0;     // lanes that have not finished
    unsigned waiting = 0;  // lanes in a meeting
  };

  static void ThreadMain();
  void MeetAtBanks();
  void Finish();
  void SwitchAway() {
    const int self = running_, next = PickNext();
    if (next == self) return;
    threads_[self].fibre.SwitchTo(next < 0 ? &caller_ : &threads_[next].fibre);
  }
  // Makes the next thread the running one; returns -1 where there is none, or it was abandoned.
  int PickNext();
  bool GoOn();
  bool NoteArrival(int number, int threads, BarrierUse use, bool any, const void* site,
                   const char* file, int line);
  void CheckArrival(int number, int threads, BarrierUse use, const void* site);
  void CompleteBarrier(int number);
  void ReportDifferentBarriers();
  void ReportStuck();
  std::string WhereItWaits(int thread) const;
  void NoteMeeting(const Meeting& meeting);
  void MakeReady(int thread);
  bool IsComplete(int warp, const Meeting& meeting, unsigned* lanes) const;
  void Complete(int warp, const Meeting& meeting, unsigned lanes);
  void ReportStuckWarp();
  std::string WhyNotThere(int warp, int lane, const Meeting& meeting) const;

  Machine* const machine_;
  Stacks stacks_;
  Fibre caller_;
  std::unique_ptr<Thread[]> threads_;
  std::unique_ptr<Warp[]> warps_;
  std::vector<int> ready_;
  Index3 index_;
  int count_ = 0;  // of threads
  int running_ = -1;
  Barrier barriers_[kBlockBarriers];
  int waiting_ = 0;   // threads that wait for a condition
  int timeouts_ = 0;  // of all that wait, since something happened that conditions may depend on
  int finished_ = 0;
  bool abandoned_ = false;
  bool overflowed_ = false;
  const void* overflow_site_ = nullptr;
  Shuffler shuffler_{0};
  void (*body_)(void*) = nullptr;
  void* context_ = nullptr;
};

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_BLOCK_H_
