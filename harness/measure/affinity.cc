#include "harness/measure/affinity.h"

#include <dirent.h>

#include <algorithm>
#include <cstddef>

#include "absl/strings/numbers.h"

namespace tfb {

std::vector<int> AllowedCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

std::vector<int> FirstCpus(int count) {
  static const std::vector<int> all = AllowedCpus();
  return {all.begin(),
          all.begin() + std::min<std::ptrdiff_t>(count, static_cast<std::ptrdiff_t>(all.size()))};
}

PinnedThreads::PinnedThreads(const std::vector<int>& cpus) {
  cpu_set_t wanted;
  CPU_ZERO(&wanted);
  for (const int cpu : cpus) CPU_SET(cpu, &wanted);
  DIR* folder = cpus.empty() ? nullptr : opendir("/proc/self/task");
  if (folder == nullptr) return;
  while (const dirent* entry = readdir(folder)) {
    pid_t thread;
    cpu_set_t set;
    if (!absl::SimpleAtoi(entry->d_name, &thread)) continue;
    if (sched_getaffinity(thread, sizeof(set), &set) != 0) continue;
    if (sched_setaffinity(thread, sizeof(wanted), &wanted) == 0) before_.emplace_back(thread, set);
  }
  closedir(folder);
}

PinnedThreads::~PinnedThreads() {
  // A thread may have ended since.
  for (const auto& [thread, set] : before_) sched_setaffinity(thread, sizeof(set), &set);
}

}  // namespace tfb
