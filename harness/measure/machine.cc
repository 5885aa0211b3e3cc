#include "harness/measure/machine.h"

#include <limits.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>

#include "absl/functional/function_ref.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/cpu/kernels.h"
#include "core/cuda/dynamic_library.h"
#include "core/tensor.h"
#include "core/thread_pool.h"
#include "harness/measure/affinity.h"
#include "harness/measure/build_flags.h"
#include "harness/measure/device_monitor.h"
#include "harness/measure/host_files.h"
#include "results/wire.h"

namespace tfb {
namespace {

// The instruction set's name as people write it.
std::string SimdName(absl::string_view kernels) {
  if (kernels == "avx512") return "AVX-512";
  if (kernels == "avx2") return "AVX2";
  return std::string(kernels);
}

// What the kernel says of itself and of the machine's name. uname(2) fails for no other reason than
// an invalid address.
struct utsname KernelNames() {
  struct utsname names = {};
  uname(&names);
  return names;
}

std::string OperatingSystem() {
  const struct utsname names = KernelNames();
  const std::string kernel = absl::StrCat(names.sysname, " ", names.release, " ", names.machine);
  const std::string distribution = HostFiles().Distribution();
  return distribution.empty() ? kernel : absl::StrCat(distribution, ", ", kernel);
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

}  // namespace

void DescribeGpus(const absl::StatusOr<CudaMachine>& machine, Environment* environment) {
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

namespace {

// Returns what git prints in the folder, or nothing where it cannot be started or fails.
std::optional<std::string> OutputOfGit(const std::string& folder, absl::string_view arguments) {
  const std::string quoted = absl::StrReplaceAll(folder, {{"'", "'\\''"}});
  std::FILE* const pipe =
      popen(absl::StrCat("git -C '", quoted, "' ", arguments, " 2> /dev/null").c_str(), "r");
  if (pipe == nullptr) return std::nullopt;
  std::string output;
  for (int c; (c = std::fgetc(pipe)) != EOF;) output.push_back(static_cast<char>(c));
  if (pclose(pipe) != 0) return std::nullopt;
  return output;
}

void DescribeCommit(const std::string& workspace, Environment* environment) {
  if (workspace.empty()) return;
  const auto commit = OutputOfGit(workspace, "rev-parse HEAD");
  if (!commit.has_value()) return;
  environment->set_git_commit(std::string(absl::StripAsciiWhitespace(*commit)));
  const auto changes = OutputOfGit(workspace, "status --porcelain");
  if (changes.has_value()) environment->set_git_dirty(!changes->empty());
}

uint32_t ProgramChecksum() {
  std::ifstream file("/proc/self/exe", std::ios::binary);
  std::stringstream program;
  program << file.rdbuf();
  return wire::Crc32c(program.str());
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
  absl::StatusOr<Tensor> memory = Tensor::Allocate(DType::kU8, {bytes});
  if (!memory.ok()) return 0;
  uint64_t* const words = static_cast<uint64_t*>(memory->raw());
  ThreadPool pool(threads);
  constexpr int64_t kPieceBytes = 1 << 20, kPieceWords = kPieceBytes / 8;
  const int64_t pieces = bytes / kPieceBytes;
  // Each thread writes what it reads, so that pages lie where they are used.
  pool.ParallelFor(pieces, [&](int64_t piece, int) {
    std::fill_n(words + piece * kPieceWords, kPieceWords, piece);
  });
  std::vector<uint64_t> sums(pieces);
  return BestRate(clock, [&] {
    const double seconds = SecondsOf(clock, [&] {
      pool.ParallelFor(pieces, [&](int64_t piece, int) {
        sums[piece] = ReadAll(words + piece * kPieceWords, kPieceWords);
      });
    });
    return static_cast<double>(pieces * kPieceBytes) / seconds;
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
  return HostFiles().UsableCores(std::max<int>(1, static_cast<int>(AllowedCpus().size())));
}

int64_t DefaultMemoryLimit() { return HostFiles().DefaultMemoryLimit(); }

int64_t LastLevelCacheBytes() { return HostFiles().LastLevelCacheBytes(); }

int64_t PeakResidentBytes() {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;  // Linux counts KiB
}

std::string WorkspaceFolder() {
  const char* folder = std::getenv("BUILD_WORKSPACE_DIRECTORY");
  return folder == nullptr ? "" : folder;
}

std::string HostName() { return KernelNames().nodename; }

Environment DescribeMachine(int threads, const std::string& workspace) {
  Environment environment;
  const HostFiles files;
  environment.set_host(HostName());
  environment.set_os(OperatingSystem());
  environment.set_cpu_model(files.CpuModel());
  environment.set_physical_cores(files.PhysicalCores(AllowedCpus()));
  environment.set_logical_cores(UsableCores());
  environment.set_threads(threads);
  for (const Cache& cache : files.Caches()) *environment.add_caches() = cache;
  environment.add_simd(SimdName(BestCpuKernels().name));
  if (const auto bytes = files.MemoryBytes(); bytes.has_value()) {
    environment.set_memory_bytes(*bytes);
  }
  DescribeGpus(ProbeCudaMachine(), &environment);
  environment.set_compiler(Compiler());
  environment.set_cuda_compiler(CudaCompiler());
  environment.set_compile_flags(kCompileFlags);
  environment.set_compilation_mode(kCompilationMode);
  DescribeCommit(workspace, &environment);
  environment.set_program_checksum(ProgramChecksum());
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
