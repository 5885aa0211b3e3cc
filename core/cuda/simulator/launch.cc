// Implements launches, and the functions that simulator.h declares.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <utility>
#include <vector>

#include "core/cuda/simulator/cuda_runtime.h"
#include "core/cuda/simulator/images.h"
#include "core/cuda/simulator/machine.h"
#include "core/cuda/simulator/runtime_error.h"
#include "core/cuda/simulator/streams.h"

namespace cuda_simulator {

uint3 current_grid_shape __asm__("cuda_simulator_gridDim");

__thread Machine* running_machine = nullptr;

namespace {

// Returns why a GPU does not run such a grid; empty where it does.
std::string CheckShape(const LaunchShape& shape, const Settings& settings) {
  const struct {
    const char* what;
    uint64_t value, most;
  } limits[] = {
      {"gridDim.x", shape.grid.x, 0x7fffffff},
      {"gridDim.y", shape.grid.y, settings.max_grid_yz},
      {"gridDim.z", shape.grid.z, settings.max_grid_yz},
      {"blockDim.x", shape.block.x, 1024},
      {"blockDim.y", shape.block.y, 1024},
      {"blockDim.z", shape.block.z, 64},
      {"the number of threads in a block", uint64_t{shape.block.x} * shape.block.y * shape.block.z,
       kMaxThreads},
  };
  for (const auto& limit : limits) {
    if (limit.value >= 1 && limit.value <= limit.most) continue;
    return Format("%s is %llu; allowed is 1 to %llu", limit.what,
                  static_cast<unsigned long long>(limit.value),
                  static_cast<unsigned long long>(limit.most));
  }
  return "";
}

// Returns the bytes of the kernel's own __shared__ variables.
size_t StaticSharedBytes(const void* kernel) {
  static auto* known = new std::map<const void*, size_t>;  // guarded by the machine's mutex
  const auto [place, is_new] = known->emplace(kernel, 0);
  if (is_new) place->second = BytesOfStaticVariablesIn(reinterpret_cast<uintptr_t>(kernel));
  return place->second;
}

// Returns why a GPU refuses a block's shared memory; empty where it does not.
std::string CheckShared(const LaunchShape& shape, const Machine& machine) {
  const Gpu& gpu = machine.settings.gpu;
  const size_t without_opt_in = 48 << 10;
  const size_t dynamic_bytes = shape.shared_bytes;
  // The compiler admits no more static memory than that.
  if (dynamic_bytes == 0) return "";
  const size_t static_bytes = StaticSharedBytes(shape.kernel);
  const size_t bytes = dynamic_bytes + static_bytes;
  const auto opted_in = machine.max_dynamic_shared.find(shape.kernel);
  const bool is_opted_in =
      opted_in != machine.max_dynamic_shared.end() && dynamic_bytes <= opted_in->second;
  const size_t most = is_opted_in || dynamic_bytes > gpu.max_shared_bytes_per_block
                          ? gpu.max_shared_bytes_per_block
                          : without_opt_in;
  if (bytes <= most && bytes <= Checker::kDynamicCapacity) return "";
  return Format("shared memory is %zu bytes a block, of which %zu are dynamic; %s allows %zu%s",
                bytes, dynamic_bytes, gpu.name, most,
                most == without_opt_in
                    ? " without cudaFuncAttributeMaxDynamicSharedMemorySize of as many"
                    : "");
}

// The blocks of a grid in the order n -> (n * step + first) mod count, step coprime to count: any
// block may be first.
class BlockOrder {
 public:
  BlockOrder(const dim3& grid, uint64_t seed)
      : grid_(grid), count_(uint64_t{grid.x} * grid.y * grid.z) {
    Shuffler shuffler(~seed);
    first_ = shuffler.Below(count_);
    step_ = shuffler.Below(count_) | 1;
    while (CommonDivisor(step_, count_) != 1) step_ += 2;
  }
  uint64_t count() const { return count_; }
  Index3 At(uint64_t n) const {
    const auto wide = static_cast<unsigned __int128>(n) * step_ + first_;
    const uint64_t block = static_cast<uint64_t>(wide % count_);
    return {static_cast<unsigned>(block % grid_.x),
            static_cast<unsigned>(block / grid_.x % grid_.y),
            static_cast<unsigned>(block / grid_.x / grid_.y)};
  }

 private:
  static uint64_t CommonDivisor(uint64_t a, uint64_t b) {
    while (b != 0) a = std::exchange(b, a % b);
    return a;
  }

  dim3 grid_;
  uint64_t count_;
  uint64_t first_;
  uint64_t step_;
};

void RunBlocks(Machine* machine, const LaunchShape& shape) {
  const BlockOrder order(shape.grid, machine->settings.seed);
  const OverflowTrap trap(&machine->block.stacks(), &Block::OnOverflow);
  running_machine = machine;
  for (uint64_t n = 0; n < order.count() && !machine->findings.is_full(); ++n) {
    ++machine->counts.blocks;
    machine->counts.threads += uint64_t{shape.block.x} * shape.block.y * shape.block.z;
    const Index3 index = order.At(n);
    machine->checker.StartBlock(index);
    if (!machine->block.Run(index)) break;
  }
  running_machine = nullptr;
}

}  // namespace

Machine& TheMachine() {
  static Machine* machine = new Machine;
  return *machine;
}

namespace {

// Makes a program that the environment asks for it print its counts at its end.
void PrintBankUsesAtEnd() {
  static const bool is_asked =
      BankConflictsOfEnvironment() &&
      std::atexit([] { std::fputs(Describe(TakeBankUses()).c_str(), stderr); }) == 0;
  (void)is_asked;
}

cudaError_t LaunchLocked(Machine* machine, const char* kernel_name, const LaunchShape& shape,
                         void (*body)(void*), void* context, size_t context_bytes) {
  if (!machine->failure.empty()) {
    SetLaunchMessage(machine->failure);
    return SetLastError(cudaErrorLaunchFailure);
  }
  FindingLog& findings = machine->findings;
  findings.StartLaunch(kernel_name, machine->settings.max_findings);
  ++machine->counts.launches;
  if (machine->settings.counts_bank_conflicts) PrintBankUsesAtEnd();
  std::string wrong = CheckShape(shape, machine->settings);
  if (wrong.empty()) wrong = CheckShared(shape, *machine);
  if (wrong.empty()) {
    current_grid_shape = {shape.grid.x, shape.grid.y, shape.grid.z};
    machine->banks.StartLaunch(machine->settings.counts_bank_conflicts, kernel_name);
    machine->checker.StartLaunch(shape.shared_bytes, context, context_bytes);
    machine->block.StartLaunch(shape.block, body, context);
    RunBlocks(machine, shape);
  } else {
    findings.Add(FindingKind::kBadLaunch, {}, {}, nullptr, wrong);
  }
  if (findings.findings().empty()) return cudaSuccess;
  findings.FinishLaunch();
  machine->counts.findings += static_cast<int64_t>(findings.findings().size());
  SetLaunchMessage(findings.Summary());
  if (!wrong.empty()) return SetLastError(cudaErrorInvalidConfiguration);
  if (!machine->settings.errors_are_deferred) return SetLastError(cudaErrorLaunchFailure);
  machine->failure = findings.Summary();
  return cudaSuccess;
}

cudaError_t LaunchNow(const char* kernel_name, const LaunchShape& shape, void (*body)(void*),
                      void* context, size_t context_bytes) {
  Machine& machine = TheMachine();
  const auto on_launch = CurrentSettings().on_launch;
  if (on_launch != nullptr) on_launch(true);
  cudaError_t error;
  {
    std::lock_guard<std::mutex> lock(machine.mutex);
    error = LaunchLocked(&machine, kernel_name, shape, body, context, context_bytes);
  }
  if (on_launch != nullptr) on_launch(false);
  return error;
}

// Returns the launch with a copy of its context, and with the shared memory that the kernel is
// allowed now.
Work WithItsArguments(const char* kernel_name, const LaunchShape& shape, void (*body)(void*),
                      const void* context, size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(context);
  std::vector<std::byte> copy(begin, begin + bytes);
  const int allowed = static_cast<int>(shape.shared_bytes);
  return [=]() mutable {
    if (allowed > 0) SetMaxDynamicShared(shape.kernel, allowed);
    return LaunchNow(kernel_name, shape, body, copy.data(), bytes);
  };
}

}  // namespace

cudaError_t LaunchBody(const char* kernel_name, const LaunchShape& shape, void (*body)(void*),
                       void* context, size_t context_bytes) {
  if (IsDoneAtOnce()) {
    return LaunchNow(kernel_name, shape, body, context, context_bytes);
  }
  return Keep(shape.stream, WithItsArguments(kernel_name, shape, body, context, context_bytes));
}

cudaError_t SetMaxDynamicShared(const void* kernel, int bytes) {
  std::lock_guard<std::mutex> lock(TheMachine().mutex);
  TheMachine().max_dynamic_shared[kernel] = static_cast<size_t>(bytes);
  return cudaSuccess;
}

const Gpu* FindGpu(const std::string& name) {
  for (const Gpu& gpu : kGpus) {
    if (name == gpu.name) return &gpu;
  }
  return nullptr;
}

Gpu GpuOfEnvironment() {
  const char* name = std::getenv("CUDA_SIMULATOR_GPU");
  const Gpu* gpu = FindGpu(name == nullptr ? "sm_90" : name);
  if (gpu == nullptr) {
    std::fprintf(stderr, "CUDA_SIMULATOR_GPU: unknown GPU \"%s\"; known are sm_80, sm_89, sm_90\n",
                 name);
    std::exit(EXIT_FAILURE);
  }
  return *gpu;
}

MmaSums MmaSumsOfEnvironment() {
  const char* text = std::getenv("CUDA_SIMULATOR_MMA");
  const std::string sums = text == nullptr ? "rounded" : text;
  if (sums == "truncated") return MmaSums::kTruncated;
  if (sums != "rounded") {
    std::fprintf(stderr, "CUDA_SIMULATOR_MMA: unknown sums \"%s\"; known are rounded, truncated\n",
                 text);
    std::exit(EXIT_FAILURE);
  }
  return MmaSums::kRounded;
}

bool BankConflictsOfEnvironment() {
  return std::getenv("CUDA_SIMULATOR_BANK_CONFLICTS") != nullptr;
}

uint64_t SeedOfEnvironment() {
  const char* text = std::getenv("CUDA_SIMULATOR_SEED");
  if (text == nullptr) return 1;
  char* end;
  const uint64_t seed = std::strtoull(text, &end, 10);
  return end != text && *end == '\0' ? seed : 1;
}

void Configure(const Settings& settings) {
  (void)FinishAll();  // findings remain
  std::lock_guard<std::mutex> lock(TheMachine().mutex);
  TheMachine().settings = settings;
  TheMachine().failure.clear();
}

Settings CurrentSettings() {
  std::lock_guard<std::mutex> lock(TheMachine().mutex);
  return TheMachine().settings;
}

const std::vector<Finding>& Findings() { return TheMachine().findings.findings(); }

Counts TotalCounts() {
  std::lock_guard<std::mutex> lock(TheMachine().mutex);
  Counts counts = TheMachine().counts;
  counts.accesses = TheMachine().checker.accesses();
  return counts;
}

std::string Describe(const Counts& counts) {
  const auto count = [](int64_t n) { return static_cast<long long>(n); };
  return Format(
      "%lld launches, %lld blocks, %lld threads, %lld barriers, %lld warp collectives, "
      "%lld accesses checked, %lld findings",
      count(counts.launches), count(counts.blocks), count(counts.threads), count(counts.barriers),
      count(counts.warp_collectives), count(counts.accesses), count(counts.findings));
}

std::vector<BankUse> TakeBankUses() {
  std::lock_guard<std::mutex> lock(TheMachine().mutex);
  return TheMachine().banks.Take();
}

std::string Describe(const std::vector<BankUse>& uses) {
  const auto count = [](int64_t n) { return static_cast<long long>(n); };
  struct Kernel {
    int64_t accesses = 0, wavefronts = 0, extra = 0;
    std::string lines;
  };
  std::map<std::string, Kernel> kernels;
  for (const BankUse& use : uses) {
    Kernel& kernel = kernels[use.kernel];
    kernel.accesses += use.accesses;
    kernel.wavefronts += use.wavefronts;
    kernel.extra += use.extra;
    if (use.extra == 0) continue;
    kernel.lines += Format("  %s, %s: %lld, %lld, %lld\n",
                           use.source.empty() ? "unknown line" : use.source.c_str(),
                           use.is_store ? "stores" : "loads", count(use.accesses),
                           count(use.wavefronts), count(use.extra));
  }
  std::string text;
  for (const auto& [name, kernel] : kernels) {
    text +=
        Format(
            "%s: %lld accesses of shared memory by warps, %lld wavefronts, of which bank "
            "conflicts add %lld\n",
            name.c_str(), count(kernel.accesses), count(kernel.wavefronts), count(kernel.extra)) +
        kernel.lines;
  }
  return text;
}

void RegisterBuffer(const void* begin, size_t bytes, bool written) {
  std::lock_guard<std::mutex> lock(TheMachine().mutex);
  TheMachine().checker.device_memory.Add(reinterpret_cast<uintptr_t>(begin), bytes, written);
}

void UnregisterBuffer(const void* begin) {
  std::lock_guard<std::mutex> lock(TheMachine().mutex);
  TheMachine().checker.device_memory.Remove(reinterpret_cast<uintptr_t>(begin));
}

}  // namespace cuda_simulator
