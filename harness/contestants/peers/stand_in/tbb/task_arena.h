// tbb::task_arena for onednn_sdpa_test, which runs everything on the calling thread.
#ifndef TFB_HARNESS_CONTESTANTS_PEERS_STAND_IN_TBB_TASK_ARENA_H_
#define TFB_HARNESS_CONTESTANTS_PEERS_STAND_IN_TBB_TASK_ARENA_H_

#include <utility>

namespace tbb {

class task_arena {
 public:
  static constexpr int automatic = -1;
  // The threads of the arena that the calling thread is in; 0 outside of arenas.
  static inline thread_local int current = 0;

  explicit task_arena(int threads) : threads_(threads == automatic ? 3 : threads) {}
  int max_concurrency() const { return threads_; }

  template <class Function>
  void execute(const Function& function) {
    struct Restore {
      ~Restore() { current = before; }
      int before;
    } const restore = {std::exchange(current, threads_)};
    function();
  }

 private:
  int threads_;
};

}  // namespace tbb

#endif  // TFB_HARNESS_CONTESTANTS_PEERS_STAND_IN_TBB_TASK_ARENA_H_
