#include "harness/measure/machine.h"

#include <limits.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/cpu/kernels.h"
#include "core/cuda/device_probe.h"
#include "core/cuda/dynamic_library.h"
#include "core/tensor.h"
#include "core/thread_pool.h"
#include "harness/measure/build_flags.h"
#include "harness/measure/device_monitor.h"
#include "results/wire.h"

namespace tfb {
namespace {

// Returns a small file's contents without white space at the ends; empty where it does not exist.
std::string ReadText(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return std::string(absl::StripAsciiWhitespace(text.str()));
}

// Returns the value of the first line "key<separator>value".
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
  if (!absl::SimpleAtoi(absl::StripAsciiWhitespace(text), &value)) return std::nullopt;
  return value;
}

// Returns the bytes of "MemTotal:  24579 kB" in /proc/meminfo.
std::optional<int64_t> MemoryInfo(absl::string_view key) {
  const std::string value = ValueOf(ReadText("/proc/meminfo"), key, ':');
  const std::optional<int64_t> kib = ParseInt(absl::StripSuffix(value, " kB"));
  if (!kib.has_value()) return std::nullopt;
  return *kib * 1024;
}

// Returns the first number in these files: control groups have two generations of names.
std::optional<int64_t> ReadInt(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    if (const auto value = ParseInt(ReadText(path)); value.has_value()) return value;
  }
  return std::nullopt;
}

std::optional<int64_t> MemoryQuota() {
  return ReadInt({"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"});
}

std::optional<double> CoreQuota() {
  const std::vector<std::string> parts = absl::StrSplit(ReadText("/sys/fs/cgroup/cpu.max"), ' ');
  if (parts.size() == 2 && parts[0] != "max") {
    const auto quota = ParseInt(parts[0]), period = ParseInt(parts[1]);
    if (quota.has_value() && period.value_or(0) > 0) {
      return static_cast<double>(*quota) / static_cast<double>(*period);
    }
  }
  const auto quota = ReadInt({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us"});
  const auto period = ReadInt({"/sys/fs/cgroup/cpu/cpu.cfs_period_us"});
  if (quota.value_or(-1) > 0 && period.value_or(0) > 0) {
    return static_cast<double>(*quota) / static_cast<double>(*period);
  }
  return std::nullopt;
}

std::vector<int> AllowedCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

int PhysicalCores() {
  std::set<std::pair<std::string, std::string>> cores;
  for (const int core : AllowedCores()) {
    const std::string topology = absl::StrCat("/sys/devices/system/cpu/cpu", core, "/topology/");
    const std::string id = ReadText(topology + "core_id");
    if (id.empty()) return 0;
    cores.emplace(ReadText(topology + "physical_package_id"), id);
  }
  return static_cast<int>(cores.size());
}

// Returns the number of cores in a list: 5 for "0-3,8".
int CountOfList(absl::string_view list) {
  int count = 0;
  for (absl::string_view range : absl::StrSplit(list, ',')) {
    const std::vector<absl::string_view> ends = absl::StrSplit(range, '-');
    const auto first = ParseInt(ends.front()), last = ParseInt(ends.back());
    if (!first.has_value() || !last.has_value()) return 0;
    count += static_cast<int>(*last - *first) + 1;
  }
  return count;
}

std::vector<Cache> Caches() {
  std::vector<Cache> caches;
  for (int index = 0;; ++index) {
    const std::string folder = absl::StrCat("/sys/devices/system/cpu/cpu0/cache/index", index, "/");
    const auto level = ReadInt({folder + "level"});
    if (!level.has_value()) return caches;
    Cache cache;
    cache.set_level(static_cast<int>(*level));
    std::string kind = ReadText(folder + "type");
    absl::AsciiStrToLower(&kind);
    cache.set_kind(kind);
    const std::string size = ReadText(folder + "size");  // "1024K"
    cache.set_bytes(ParseInt(absl::StripSuffix(size, "K")).value_or(0) * 1024);
    cache.set_shared_by_logical_cores(CountOfList(ReadText(folder + "shared_cpu_list")));
    caches.push_back(cache);
  }
}

// Returns the usual name of the instruction set.
std::string SimdName(absl::string_view kernels) {
  if (kernels == "avx512") return "AVX-512";
  if (kernels == "avx2") return "AVX2";
  return std::string(kernels);
}

std::string OperatingSystem() {
  struct utsname names;
  const std::string release = ValueOf(ReadText("/etc/os-release"), "PRETTY_NAME", '=');
  if (uname(&names) != 0) return release;
  return absl::StrCat(release, release.empty() ? "" : ", ", names.sysname, " ", names.release, " ",
                      names.machine);
}

std::string Compiler() {
#if defined(__clang__)
  return __VERSION__;
#else
  return absl::StrCat("g++ ", __VERSION__);
#endif
}

// Returns "12.4" for CUDA's 12040.
std::string CudaVersion(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

// Returns "cuBLAS 13.1.0, cuDNN 9.12.0": those of the libraries opened at run time that exist.
std::string RuntimeLibraries() {
  std::vector<std::string> texts;
  int (*cublas_property)(int property, int* value) = nullptr;
  const auto cublas = DynamicLibrary::Open({"libcublas.so.13", "libcublas.so.12"});
  if (cublas.ok() && cublas->Resolve("cublasGetProperty", &cublas_property).ok()) {
    int version[3] = {};  // the properties 0, 1 and 2: major, minor, patch
    for (int property = 0; property < 3; ++property) cublas_property(property, &version[property]);
    texts.push_back(absl::StrCat("cuBLAS ", absl::StrJoin(version, ".")));
  }
  size_t (*cudnn_version)() = nullptr;
  const auto cudnn = DynamicLibrary::Open({"libcudnn.so.9"});
  if (cudnn.ok() && cudnn->Resolve("cudnnGetVersion", &cudnn_version).ok()) {
    const size_t version = cudnn_version();  // 91200 is 9.12.0
    texts.push_back(
        absl::StrCat("cuDNN ", version / 10000, ".", version / 100 % 100, ".", version % 100));
  }
  return absl::StrJoin(texts, ", ");
}

void DescribeGpus(Environment* environment) {
  const absl::StatusOr<CudaMachine> machine = ProbeCudaMachine();
  if (!machine.ok()) {
    environment->set_no_gpu_reason(std::string(machine.status().message()));
    return;
  }
  const std::string libraries = RuntimeLibraries();
  for (size_t i = 0; i < machine->devices.size(); ++i) {
    const CudaDevice& device = machine->devices[i];
    Gpu* gpu = environment->add_gpus();
    gpu->set_index(static_cast<int>(i));
    gpu->set_name(device.name);
    gpu->set_compute_capability(
        absl::StrCat(device.compute_capability_major, ".", device.compute_capability_minor));
    if (device.clock_khz > 0) gpu->set_clock_mhz(device.clock_khz / 1e3);
    if (device.memory_clock_khz > 0) gpu->set_memory_clock_mhz(device.memory_clock_khz / 1e3);
    gpu->set_memory_bytes(device.memory_bytes);
    gpu->set_multiprocessors(device.multiprocessors);
    gpu->set_driver(CudaVersion(machine->driver_version));
    gpu->set_toolkit(CudaVersion(machine->runtime_version));
    gpu->set_runtime_libraries(libraries);
    if (device.l2_cache_bytes > 0) gpu->set_l2_cache_bytes(device.l2_cache_bytes);
    if (const auto monitor = OpenNvml(device.pci_bus_id); monitor.ok()) {
      *gpu->mutable_state() = (*monitor)->Read();
    }
  }
}

// Returns what a program prints, or nothing where it cannot be started or fails.
std::optional<std::string> OutputOf(std::vector<std::string> command) {
  int ends[2];
  if (pipe(ends) != 0) return std::nullopt;
  const pid_t child = fork();
  if (child < 0) {
    close(ends[0]);
    close(ends[1]);
    return std::nullopt;
  }
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    close(STDERR_FILENO);
    std::vector<char*> arguments;
    for (std::string& argument : command) arguments.push_back(argument.data());
    arguments.push_back(nullptr);
    execvp(arguments[0], arguments.data());
    _exit(127);
  }
  close(ends[1]);
  std::string output;
  char buffer[4096];
  for (ssize_t size; (size = read(ends[0], buffer, sizeof(buffer))) > 0;)
    output.append(buffer, size);
  close(ends[0]);
  int status = 0;
  if (waitpid(child, &status, 0) != child || status != 0) return std::nullopt;
  return output;
}

void DescribeCommit(const std::string& workspace, Environment* environment) {
  if (workspace.empty()) return;
  const auto commit = OutputOf({"git", "-C", workspace, "rev-parse", "HEAD"});
  if (!commit.has_value()) return;
  environment->set_git_commit(std::string(absl::StripAsciiWhitespace(*commit)));
  const auto changes = OutputOf({"git", "-C", workspace, "status", "--porcelain"});
  if (changes.has_value()) environment->set_git_dirty(!changes->empty());
}

double SecondsOf(Clock* clock, absl::FunctionRef<void()> work) {
  const double begin = clock->Seconds();
  work();
  return clock->Seconds() - begin;
}

// Returns the best of many short passes, since a peak is the undisturbed rate, and a shared machine
// may be undisturbed only for a few milliseconds.
constexpr double kPassSeconds = 0.002;
constexpr double kMeasuringSeconds = 0.15;
constexpr int kFewestPasses = 5;

double BestRate(Clock* clock, absl::FunctionRef<double()> rate_of_a_pass) {
  double best = 0, spent = 0;
  for (int passes = 0; passes < kFewestPasses || spent < kMeasuringSeconds; ++passes) {
    spent += SecondsOf(clock, [&] { best = std::max(best, rate_of_a_pass()); });
  }
  return best;
}

double FmaRate(Clock* clock, int threads) {
  const CpuKernels& kernels = BestCpuKernels();
  ThreadPool pool(threads);
  std::vector<double> flops(threads);
  const auto pass = [&](int64_t iterations) {
    return SecondsOf(clock, [&] {
      pool.ParallelFor(threads,
                       [&](int64_t task, int) { flops[task] = kernels.fma_peak(iterations); });
    });
  };
  // A pass is long compared with starting the threads, and short compared with a time slice.
  int64_t iterations = 1 << 12;
  while (pass(iterations) < kPassSeconds) iterations *= 2;
  return BestRate(clock, [&] {
    const double seconds = pass(iterations);
    return std::accumulate(flops.begin(), flops.end(), 0.0) / seconds;
  });
}

double ReadRate(Clock* clock, int threads, int64_t bytes) {
  const absl::StatusOr<Tensor> memory = Tensor::Allocate(DType::kU8, {bytes});
  if (!memory.ok()) return 0;
  const uint64_t* words = static_cast<const uint64_t*>(memory->raw());
  ThreadPool pool(threads);
  constexpr int64_t kPiece = 1 << 20;
  const int64_t pieces = bytes / kPiece;
  // Each thread writes first what it reads later, so that pages are local to it (NUMA).
  pool.ParallelFor(pieces, [&](int64_t piece, int) {
    std::fill_n(const_cast<uint64_t*>(words) + piece * kPiece / 8, kPiece / 8, piece);
  });
  std::vector<uint64_t> sums(pieces);
  return BestRate(clock, [&] {
    const double seconds = SecondsOf(clock, [&] {
      pool.ParallelFor(pieces, [&](int64_t piece, int) {
        sums[piece] = ReadAll(words + piece * kPiece / 8, kPiece / 8);
      });
    });
    return static_cast<double>(pieces * kPiece) / seconds;
  });
}

void AddPeak(absl::string_view what, double value, absl::string_view unit, int threads,
             Peak::Kind kind, ElementType dtype, Environment* environment) {
  if (value <= 0) return;
  Peak* peak = environment->add_peaks();
  peak->set_name(absl::StrCat(what, ", ", threads, threads == 1 ? " thread" : " threads"));
  peak->set_value(value);
  peak->set_unit(std::string(unit));
  peak->set_threads(threads);
  peak->set_kind(kind);
  peak->set_device(DEVICE_TYPE_CPU);
  peak->set_dtype(dtype);
}

}  // namespace

uint64_t ReadAll(const uint64_t* words, int64_t count) {
  typedef uint64_t Vector __attribute__((vector_size(64)));
  typedef Vector UnalignedVector __attribute__((aligned(8), may_alias));
  constexpr int64_t kWide = 8, kInFlight = 4;
  Vector sums[kInFlight] = {};
  int64_t i = 0;
  for (; i + kInFlight * kWide <= count; i += kInFlight * kWide) {
    for (int64_t n = 0; n < kInFlight; ++n) {
      sums[n] += *reinterpret_cast<const UnalignedVector*>(words + i + n * kWide);
    }
  }
  uint64_t sum = 0;
  for (; i < count; ++i) sum += words[i];
  for (const Vector& partial : sums) {
    for (int64_t lane = 0; lane < kWide; ++lane) sum += partial[lane];
  }
  return sum;
}

int UsableCores() {
  const int allowed = std::max<int>(1, static_cast<int>(AllowedCores().size()));
  const std::optional<double> quota = CoreQuota();
  if (!quota.has_value()) return allowed;
  return std::clamp(static_cast<int>(std::ceil(*quota)), 1, allowed);
}

int64_t AvailableMemoryBytes() {
  int64_t available = MemoryInfo("MemAvailable").value_or(std::numeric_limits<int64_t>::max());
  const std::optional<int64_t> quota = MemoryQuota();
  const std::optional<int64_t> used =
      ReadInt({"/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes"});
  if (quota.has_value() && used.has_value()) available = std::min(available, *quota - *used);
  return std::max<int64_t>(available, 0);
}

int64_t LastLevelCacheBytes() {
  int64_t largest = 0;
  for (const Cache& cache : Caches()) largest = std::max<int64_t>(largest, cache.bytes());
  return largest > 0 ? largest : int64_t{32} << 20;
}

int64_t PeakResidentBytes() {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;  // Linux counts KiB
}

std::string WorkspaceFolder() {
  const char* folder = std::getenv("BUILD_WORKSPACE_DIRECTORY");
  return folder == nullptr ? "" : folder;
}

Environment DescribeMachine(int threads, const std::string& workspace) {
  Environment environment;
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  environment.set_host(host);
  environment.set_os(OperatingSystem());
  const std::string cpu_info = ReadText("/proc/cpuinfo");
  environment.set_cpu_model(ValueOf(cpu_info, "model name", ':'));
  environment.set_physical_cores(PhysicalCores());
  environment.set_logical_cores(UsableCores());
  environment.set_threads(threads);
  for (const Cache& cache : Caches()) *environment.add_caches() = cache;
  environment.add_simd(SimdName(BestCpuKernels().name));
  if (const auto total = MemoryInfo("MemTotal"); total.has_value()) {
    environment.set_memory_bytes(std::min(*total, MemoryQuota().value_or(*total)));
  }
  DescribeGpus(&environment);
  environment.set_compiler(Compiler());
  environment.set_cuda_compiler(CudaCompiler());
  environment.set_compile_flags(kCompileFlags);
  environment.set_compilation_mode(kCompilationMode);
  DescribeCommit(workspace, &environment);
  if (const std::string program = ReadText("/proc/self/exe"); !program.empty()) {
    environment.set_program_checksum(wire::Crc32c(program));
  }
  environment.set_start_unix_ns(absl::ToUnixNanos(absl::Now()));
  char folder[PATH_MAX];
  if (const char* callers = std::getenv("BUILD_WORKING_DIRECTORY"); callers != nullptr) {
    environment.set_working_directory(callers);
  } else if (getcwd(folder, sizeof(folder)) != nullptr) {
    environment.set_working_directory(folder);
  }
  return environment;
}

void MeasurePeaks(const std::vector<int>& threads, Environment* environment, Clock* clock) {
  // The size is four times the last-level cache, so that at least three quarters come from memory,
  // but at most 256 MiB, since one process gets only a part of a server's larger cache.
  const int64_t bytes = std::clamp<int64_t>(4 * LastLevelCacheBytes(), 64 << 20, 256 << 20);
  for (const int count : std::set<int>(threads.begin(), threads.end())) {
    AddPeak("f32 fma", FmaRate(clock, count), "FLOP/s", count, Peak::KIND_COMPUTE, ELEMENT_TYPE_F32,
            environment);
    AddPeak("read", ReadRate(clock, count, bytes), "B/s", count, Peak::KIND_READ_BANDWIDTH,
            ELEMENT_TYPE_UNSPECIFIED, environment);
  }
}

}  // namespace tfb
