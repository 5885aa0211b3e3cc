#include "harness/measure/host_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using Texts = std::map<std::string, std::string>;  // by path

// Writes the files below a folder of their own, and returns the machine that they describe.
HostFiles Machine(const Texts& texts) {
  static int machines = 0;
  const std::string root = absl::StrCat(::testing::TempDir(), "/host_", getpid(), "_", ++machines);
  for (const auto& [path, text] : texts) {
    std::string folder = root;
    mkdir(folder.c_str(), 0777);
    std::vector<std::string> names = absl::StrSplit(path, '/', absl::SkipEmpty());
    names.pop_back();
    for (const std::string& name : names) mkdir((folder += "/" + name).c_str(), 0777);
    std::ofstream(root + path) << text;
  }
  return HostFiles(root);
}

constexpr char kMax[] = "/sys/fs/cgroup/memory.max", kCurrent[] = "/sys/fs/cgroup/memory.current";
constexpr char kOldMax[] = "/sys/fs/cgroup/memory/memory.limit_in_bytes";
constexpr char kOldCurrent[] = "/sys/fs/cgroup/memory/memory.usage_in_bytes";
constexpr char kCpuMax[] = "/sys/fs/cgroup/cpu.max";
constexpr char kOldQuota[] = "/sys/fs/cgroup/cpu/cpu.cfs_quota_us";
constexpr char kOldPeriod[] = "/sys/fs/cgroup/cpu/cpu.cfs_period_us";
constexpr char kMemory[] = "/proc/meminfo";
constexpr char kMemoryText[] =
    "MemTotal:       16000 kB\nMemFree:  2 kB\nMemAvailable:   9000 kB\n";

TEST(HostFiles, NothingIsKnownOfAMachineWithoutFiles) {
  const HostFiles files = Machine({});
  EXPECT_EQ(files.Distribution(), "");
  EXPECT_EQ(files.CpuModel(), "");
  EXPECT_EQ(files.PhysicalCores({0, 1}), 0);
  EXPECT_TRUE(files.Caches().empty());
  EXPECT_EQ(files.LastLevelCacheBytes(), 32 << 20);
  EXPECT_EQ(files.UsableCores(7), 7);
  EXPECT_FALSE(files.MemoryBytes().has_value());
  EXPECT_EQ(files.AvailableMemoryBytes(), INT64_MAX);
}

TEST(HostFiles, NamesAreTheFirstOfTheirKeyWithoutQuotes) {
  const HostFiles files = Machine(
      {{"/etc/os-release", "NAME=\"Debian\"\nPRETTY_NAME=\"Debian = 12\"\nPRETTY_NAME=other\n"},
       {"/proc/cpuinfo",
        "processor\t: 0\nmodel name\t: A: 3 GHz \n\nprocessor\t: 1\nmodel name\t: B\n"}});
  EXPECT_EQ(files.Distribution(), "Debian = 12");
  EXPECT_EQ(files.CpuModel(), "A: 3 GHz");
}

TEST(HostFiles, LogicalCoresOfOneCoreCountOnce) {
  Texts texts;
  const auto add = [&](int core, int package, int id) {
    const std::string folder = absl::StrCat("/sys/devices/system/cpu/cpu", core, "/topology/");
    texts[folder + "physical_package_id"] = absl::StrCat(package, "\n");
    texts[folder + "core_id"] = absl::StrCat(id, "\n");
  };
  add(0, 0, 0);
  add(1, 0, 1);
  add(2, 0, 0);
  add(3, 1, 0);
  const HostFiles files = Machine(texts);
  EXPECT_EQ(files.PhysicalCores({0, 1, 2, 3}), 3);
  EXPECT_EQ(files.PhysicalCores({0, 2}), 1);
  EXPECT_EQ(files.PhysicalCores({0, 3}), 2);
  EXPECT_EQ(files.PhysicalCores({}), 0);
  EXPECT_EQ(files.PhysicalCores({0, 4}), 0);  // nothing is known of the last
}

TEST(HostFiles, CachesAreListedUpToTheFirstWithoutALevel) {
  Texts texts;
  const auto add = [&](int index, const Texts& of_cache) {
    for (const auto& [name, text] : of_cache) {
      texts[absl::StrCat("/sys/devices/system/cpu/cpu0/cache/index", index, "/", name)] = text;
    }
  };
  add(0, {{"level", "1\n"}, {"type", "Data\n"}, {"size", "32K\n"}, {"shared_cpu_list", "0,4\n"}});
  add(1, {{"level", "2"}, {"type", "Unified"}, {"size", "512K"}, {"shared_cpu_list", "0-3,8"}});
  add(2, {{"level", "3"}, {"type", "Unified"}, {"size", "256K"}, {"shared_cpu_list", "0-x"}});
  add(3, {{"level", "4"}, {"type", "Unified"}, {"size", "many"}, {"shared_cpu_list", "x-3"}});
  add(5, {{"level", "5"}, {"size", "4096K"}});
  const HostFiles files = Machine(texts);
  std::string told;
  for (const Cache& cache : files.Caches()) {
    absl::StrAppend(&told, cache.level(), " ", cache.kind(), " ", cache.bytes(), " ",
                    cache.shared_by_logical_cores(), "\n");
  }
  EXPECT_EQ(told, "1 data 32768 2\n2 unified 524288 5\n3 unified 262144 0\n4 unified 0 0\n");
  EXPECT_EQ(files.LastLevelCacheBytes(), 524288);  // the largest
}

TEST(HostFiles, CoresAreBoundedByTheQuotaOfTheControlGroup) {
  const std::vector<std::pair<Texts, int>> machines = {
      {{{kCpuMax, "150000 100000\n"}}, 2},
      {{{kCpuMax, "100000 100000\n"}}, 1},
      {{{kCpuMax, "1000 100000\n"}}, 1},
      {{{kCpuMax, "900000 100000\n"}}, 4},  // more than are allowed
      {{{kCpuMax, "max 100000\n"}}, 4},
      {{{kCpuMax, "150000\n"}}, 4},
      {{{kCpuMax, "150000 0\n"}}, 4},
      {{{kCpuMax, "0 100000\n"}}, 4},
      {{{kOldQuota, "250000\n"}, {kOldPeriod, "100000\n"}}, 3},
      {{{kOldQuota, "-1\n"}, {kOldPeriod, "100000\n"}}, 4},
      {{{kOldQuota, "250000\n"}}, 4},
      {{{kOldPeriod, "100000\n"}}, 4},
      // Both generations are there: the newer is asked first, and the older where it has no number.
      {{{kCpuMax, "150000 100000"}, {kOldQuota, "50000"}, {kOldPeriod, "50000"}}, 2},
      {{{kCpuMax, "max 100000"}, {kOldQuota, "300000"}, {kOldPeriod, "100000"}}, 3},
  };
  for (size_t i = 0; i < machines.size(); ++i) {
    EXPECT_EQ(Machine(machines[i].first).UsableCores(4), machines[i].second) << "machine " << i;
  }
}

TEST(HostFiles, MemoryIsBoundedByTheQuotaOfTheControlGroup) {
  constexpr int64_t kTotal = 16000 * 1024, kAvailable = 9000 * 1024;
  struct Expected {
    Texts texts;
    std::optional<int64_t> total;
    int64_t available;
  };
  const std::vector<Expected> machines = {
      {{{kMemory, kMemoryText}}, kTotal, kAvailable},
      {{{kMemory, "MemTotal: 16000 MB\nMemAvailable: many kB\n"}}, std::nullopt, INT64_MAX},
      {{{kMax, "3000"}}, std::nullopt, INT64_MAX},
      {{{kMax, "3000"}, {kCurrent, "1000"}}, std::nullopt, 2000},
      {{{kMemory, kMemoryText}, {kMax, "3000\n"}, {kCurrent, "1000\n"}}, 3000, 2000},
      {{{kMemory, kMemoryText}, {kMax, "1000"}, {kCurrent, "3000"}}, 1000, 0},
      {{{kMemory, kMemoryText}, {kMax, "3000"}}, 3000, kAvailable},
      {{{kMemory, kMemoryText}, {kCurrent, "1000"}}, kTotal, kAvailable},
      {{{kMemory, kMemoryText}, {kMax, "max"}, {kCurrent, "1000"}}, kTotal, kAvailable},
      {{{kMemory, kMemoryText}, {kMax, "9000000000"}, {kCurrent, "10"}}, kTotal, kAvailable},
      {{{kMemory, kMemoryText}, {kOldMax, "5000"}, {kOldCurrent, "1500"}}, 5000, 3500},
      {{{kMax, "7000"}, {kCurrent, "1"}, {kOldMax, "5000"}, {kOldCurrent, "2"}},
       std::nullopt,
       6999},
  };
  for (size_t i = 0; i < machines.size(); ++i) {
    const HostFiles files = Machine(machines[i].texts);
    EXPECT_EQ(files.MemoryBytes(), machines[i].total) << "machine " << i;
    EXPECT_EQ(files.AvailableMemoryBytes(), machines[i].available) << "machine " << i;
    EXPECT_NEAR(static_cast<double>(files.DefaultMemoryLimit()),
                0.8 * static_cast<double>(machines[i].available), 8)
        << "machine " << i;
  }
}

}  // namespace
}  // namespace tfb
