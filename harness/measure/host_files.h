// What Linux tells in files of the machine that a program runs on: processor, caches, memory, and
// the limits that a control group sets.
#ifndef TFB_HARNESS_MEASURE_HOST_FILES_H_
#define TFB_HARNESS_MEASURE_HOST_FILES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "results/results.pb.h"

namespace tfb {

class HostFiles {
 public:
  // The files of this machine, or those of another one below the folder `root`.
  explicit HostFiles(std::string root = "") : root_(std::move(root)) {}

  // The distribution's name and release, by /etc/os-release; empty where it does not tell.
  std::string Distribution() const;
  // The processor's name, by /proc/cpuinfo; empty where it does not tell.
  std::string CpuModel() const;
  // How many cores the given logical cores are on; 0 where the system does not tell.
  int PhysicalCores(const std::vector<int>& logical_cores) const;
  // The caches of the first core.
  std::vector<Cache> Caches() const;
  // The bytes of the largest of them; 32 MiB where there is none.
  int64_t LastLevelCacheBytes() const;

  // How many of `allowed_cores`, at least one, a process may keep busy by the control group's quota
  // of processor time, rounded up.
  int UsableCores(int allowed_cores) const;
  // The machine's memory, or the control group's quota where that is less.
  std::optional<int64_t> MemoryBytes() const;
  // Bytes that a process can still take before the kernel swaps or kills.
  int64_t AvailableMemoryBytes() const;
  // 80 % of that, which is what a case may take where the caller does not say.
  int64_t DefaultMemoryLimit() const { return AvailableMemoryBytes() / 10 * 8; }

 private:
  std::string ReadText(const std::string& path) const;
  std::optional<int64_t> ReadInt(const std::vector<std::string>& paths) const;
  std::optional<int64_t> MemoryInfo(const std::string& key) const;
  std::optional<int64_t> MemoryQuota() const;
  std::optional<double> CoreQuota() const;

  std::string root_;
};

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_HOST_FILES_H_
