#include "harness/measure/host_files.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace tfb {
namespace {

// Returns the value of the first line "key<separator>value", without quotes.
std::string ValueOf(absl::string_view text, absl::string_view key, char separator) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(line, absl::MaxSplits(separator, 1));
    if (absl::StripAsciiWhitespace(parts.first) == key) {
      return std::string(absl::StripPrefix(
          absl::StripSuffix(absl::StripAsciiWhitespace(parts.second), "\""), "\""));
    }
  }
  return "";
}

std::optional<int64_t> ParseInt(absl::string_view text) {
  int64_t value;
  if (!absl::SimpleAtoi(text, &value)) return std::nullopt;
  return value;
}

// "0-3,8" names 5; 0 where the text is no such list.
int CountOfList(absl::string_view list) {
  int64_t count = 0;
  for (absl::string_view range : absl::StrSplit(list, ',')) {
    const std::vector<absl::string_view> ends = absl::StrSplit(range, '-');
    const auto first = ParseInt(ends.front()), last = ParseInt(ends.back());
    if (!first.has_value() || !last.has_value()) return 0;
    count += *last - *first + 1;
  }
  return static_cast<int>(count);
}

}  // namespace

// The contents of a small file, without white space at the ends; empty where there is no such file.
std::string HostFiles::ReadText(const std::string& path) const {
  std::ifstream file(root_ + path);
  std::stringstream text;
  text << file.rdbuf();
  return std::string(absl::StripAsciiWhitespace(text.str()));
}

// The first of the files that holds a number: control groups have two generations of names.
std::optional<int64_t> HostFiles::ReadInt(const std::vector<std::string>& paths) const {
  for (const std::string& path : paths) {
    if (const auto value = ParseInt(ReadText(path)); value.has_value()) return value;
  }
  return std::nullopt;
}

std::string HostFiles::Distribution() const {
  return ValueOf(ReadText("/etc/os-release"), "PRETTY_NAME", '=');
}

std::string HostFiles::CpuModel() const {
  return ValueOf(ReadText("/proc/cpuinfo"), "model name", ':');
}

int HostFiles::PhysicalCores(const std::vector<int>& logical_cores) const {
  std::set<std::pair<std::string, std::string>> cores;
  for (const int core : logical_cores) {
    const std::string topology = absl::StrCat("/sys/devices/system/cpu/cpu", core, "/topology/");
    const std::string id = ReadText(topology + "core_id");
    if (id.empty()) return 0;
    cores.emplace(ReadText(topology + "physical_package_id"), id);
  }
  return static_cast<int>(cores.size());
}

std::vector<Cache> HostFiles::Caches() const {
  std::vector<Cache> caches;
  for (;;) {
    const std::string folder =
        absl::StrCat("/sys/devices/system/cpu/cpu0/cache/index", caches.size(), "/");
    const auto level = ReadInt({folder + "level"});
    if (!level.has_value()) return caches;
    Cache cache;
    cache.set_level(static_cast<int>(*level));
    cache.set_kind(absl::AsciiStrToLower(ReadText(folder + "type")));
    const std::string size = ReadText(folder + "size");  // "1024K"
    cache.set_bytes(ParseInt(absl::StripSuffix(size, "K")).value_or(0) * 1024);
    cache.set_shared_by_logical_cores(CountOfList(ReadText(folder + "shared_cpu_list")));
    caches.push_back(cache);
  }
}

int64_t HostFiles::LastLevelCacheBytes() const {
  uint64_t largest = 0;
  for (const Cache& cache : Caches()) largest = std::max<uint64_t>(largest, cache.bytes());
  return largest == 0 ? int64_t{32} << 20 : static_cast<int64_t>(largest);
}

// Cores' worth of time in each period. The first generation says -1 where there is no quota, and
// the second "max".
std::optional<double> HostFiles::CoreQuota() const {
  const std::pair<std::string, std::string> both =
      absl::StrSplit(ReadText("/sys/fs/cgroup/cpu.max"), absl::MaxSplits(' ', 1));
  auto quota = ParseInt(both.first), period = ParseInt(both.second);
  if (!quota.has_value()) {
    quota = ReadInt({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us"});
    period = ReadInt({"/sys/fs/cgroup/cpu/cpu.cfs_period_us"});
  }
  if (quota.value_or(-1) <= 0 || period.value_or(0) <= 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

int HostFiles::UsableCores(int allowed_cores) const {
  const double quota = CoreQuota().value_or(allowed_cores);
  return std::min(static_cast<int>(std::ceil(quota)), allowed_cores);
}

// "MemTotal:  24579 kB" of /proc/meminfo, in bytes.
std::optional<int64_t> HostFiles::MemoryInfo(const std::string& key) const {
  const std::string value = ValueOf(ReadText("/proc/meminfo"), key, ':');
  const std::optional<int64_t> kib = ParseInt(absl::StripSuffix(value, " kB"));
  if (!kib.has_value()) return std::nullopt;
  return *kib * 1024;
}

std::optional<int64_t> HostFiles::MemoryQuota() const {
  return ReadInt({"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"});
}

std::optional<int64_t> HostFiles::MemoryBytes() const {
  const std::optional<int64_t> total = MemoryInfo("MemTotal");
  if (!total.has_value()) return std::nullopt;
  return std::min(*total, MemoryQuota().value_or(*total));
}

int64_t HostFiles::AvailableMemoryBytes() const {
  int64_t available = MemoryInfo("MemAvailable").value_or(std::numeric_limits<int64_t>::max());
  const std::optional<int64_t> quota = MemoryQuota();
  const std::optional<int64_t> used =
      ReadInt({"/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes"});
  if (quota.has_value() && used.has_value()) available = std::min(available, *quota - *used);
  return std::max<int64_t>(available, 0);
}

}  // namespace tfb
