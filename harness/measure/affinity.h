// Which processors threads run on.
#ifndef TFB_HARNESS_MEASURE_AFFINITY_H_
#define TFB_HARNESS_MEASURE_AFFINITY_H_

#include <sched.h>
#include <sys/types.h>

#include <utility>
#include <vector>

namespace tfb {

// Returns the processors that the calling thread may run on now, ascending.
std::vector<int> AllowedCpus();

// Returns the first `count` of the processors that this process was allowed when it first asked; all
// of them where they are fewer.
std::vector<int> FirstCpus(int count);

// Keeps all threads of this process on the processors while it exists.
class PinnedThreads {
 public:
  explicit PinnedThreads(const std::vector<int>& cpus);
  ~PinnedThreads();
  PinnedThreads(const PinnedThreads&) = delete;
  PinnedThreads& operator=(const PinnedThreads&) = delete;

 private:
  std::vector<std::pair<pid_t, cpu_set_t>> before_;
};

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_AFFINITY_H_
