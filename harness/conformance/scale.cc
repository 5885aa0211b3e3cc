// Tests addresses beyond 2^31 elements, many heads, and sizes that exceed any memory.
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "core/cuda/simulator/simulator.h"
#include "core/sanitizers.h"
#include "core/status.h"
#include "gtest/gtest.h"
#include "harness/conformance/trial.h"
#include "harness/judge/device_memory.h"

namespace tfb::conformance {
namespace {

// Four-dimensional tensors [2, 2, tokens, channels] have batch rows 2^31 + 8 elements apart and
// heads 2^30 + 8: a product of 32 bits anywhere between an index and an address reads or writes
// elsewhere.
constexpr int64_t kHeadStride = (int64_t{1} << 30) + 8;
constexpr int64_t kBatchStride = (int64_t{1} << 31) + 8;
constexpr size_t kSpreadBytes =
    (2 * size_t{kBatchStride} + 2 * size_t{kHeadStride}) * sizeof(float);

// Memory for one such tensor: tens of GiB of the GPU's, or else reserved address space, whose pages
// are allocated when they are touched.
class Spread {
 public:
  // Returns ResourceExhausted where there is not enough memory.
  static absl::StatusOr<std::unique_ptr<Spread>> Make(Device device) {
    std::unique_ptr<Spread> spread(new Spread);
    if (device == Device::kCuda) {
      TFB_ASSIGN_OR_RETURN(spread->runtime_, RuntimeOf(device));
      TFB_ASSIGN_OR_RETURN(spread->buffer_, spread->runtime_->Allocate(kSpreadBytes));
      spread->data_ = spread->buffer_.data();
      return spread;
    }
    void* const reserved = mmap(nullptr, kSpreadBytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) return absl::ResourceExhaustedError("no address space");
    spread->data_ = spread->reserved_ = reserved;
    spread->simulated_ = device == Device::kSimulator;
    if (spread->simulated_) cuda_simulator::RegisterBuffer(reserved, kSpreadBytes, true);
    return spread;
  }
  ~Spread() {
    if (simulated_) cuda_simulator::UnregisterBuffer(reserved_);
    if (reserved_ != nullptr) munmap(reserved_, kSpreadBytes);
  }
  Spread(const Spread&) = delete;

  // Lays out a contiguous tensor in this way.
  TensorView On(const ConstTensorView& tensor) const {
    return {data_, tensor.dtype, tensor.shape(), {kBatchStride, kHeadStride, tensor.dims[3], 1}};
  }
  // Copy to and from a contiguous tensor of the host.
  absl::Status Write(const ConstTensorView& from) {
    return ForEachHead(from, [this](std::byte* here, const std::byte* there, size_t bytes) {
      if (runtime_ != nullptr) return runtime_->CopyToDevice(here, there, bytes);
      std::memcpy(here, there, bytes);
      return absl::OkStatus();
    });
  }
  absl::Status Read(const TensorView& to) {
    return ForEachHead(to, [this](const std::byte* here, const std::byte* there, size_t bytes) {
      if (runtime_ != nullptr) {
        return runtime_->CopyToHost(const_cast<std::byte*>(there), here, bytes);
      }
      std::memcpy(const_cast<std::byte*>(there), here, bytes);
      return absl::OkStatus();
    });
  }

 private:
  Spread() = default;

  // The tokens of a head are contiguous, here and in the contiguous tensor.
  template <class Copy>
  absl::Status ForEachHead(const ConstTensorView& tensor, const Copy& copy) {
    const TensorView here = On(tensor);
    const int64_t size = SizeOf(tensor.dtype);
    const auto bytes = static_cast<size_t>(tensor.dim(2) * tensor.dim(3) * size);
    for (int64_t b = 0; b < tensor.dim(0); ++b) {
      for (int64_t h = 0; h < tensor.dim(1); ++h) {
        TFB_RETURN_IF_ERROR(
            copy(static_cast<std::byte*>(data_) + here.Offset(b, h) * size,
                 static_cast<const std::byte*>(tensor.data) + tensor.Offset(b, h) * size, bytes));
      }
    }
    return absl::OkStatus();
  }

  CudaRuntime* runtime_ = nullptr;  // of a GPU
  DeviceBuffer buffer_;
  void* reserved_ = nullptr;  // of the host
  bool simulated_ = false;
  void* data_ = nullptr;
};

void OffsetsBeyond31Bits(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr || !trial->RequireQkv()) return;
  const NamedTensors plain = trial->Run();
  ThreadPool pool(2);
  const auto bound = Bind(trial.get(), &pool);
  ASSERT_TRUE(bound.ok()) << bound.status();
  BoundLayer far = *bound;
  std::map<std::string, std::unique_ptr<Spread>> spreads;
  for (const auto& [name, view] : bound->inputs) {
    if (view.rank != 4) continue;
    auto spread = Spread::Make(job.device);
    if (!spread.ok()) return Skip(std::string(spread.status().message()));
    const Tensor& tensor = trial->inputs().at(name);
    ASSERT_TRUE((*spread)->Write(tensor.view()).ok());
    far.inputs.Set(name, (*spread)->On(tensor.view()));
    spreads[name] = *std::move(spread);
  }
  for (const auto& [name, view] : bound->outputs) {
    if (view.rank != 4) continue;
    auto spread = Spread::Make(job.device);
    if (!spread.ok()) return Skip(std::string(spread.status().message()));
    far.outputs.Set(name, (*spread)->On(view));
    spreads[name] = *std::move(spread);
  }
  absl::Status status = far.Setup();
  if (status.ok()) status = far.Run();
  if (status.ok()) status = far.Synchronize();
  ASSERT_TRUE(status.ok()) << status;
  auto results = bound->Results();
  ASSERT_TRUE(results.ok()) << results.status();
  for (auto& [name, tensor] : *results) {
    const auto spread = spreads.find(name);
    if (spread != spreads.end()) {
      ASSERT_TRUE(spread->second->Read(tensor.view()).ok());
    }
  }
  ExpectSameBits(plain, *results, "far apart and contiguous");
}

// Returns how many batches or heads a case of many has.
int64_t MostOf(Device device) {
  if (device == Device::kSimulator) return 20;
  return device == Device::kCpu && !IsExhaustive() ? 2'000 : 70'000;
}

// The sizes exceed a grid's y and z. In the simulator, where blocks are slow, the limit is lowered
// instead; on the CPU, which has no grids, fewer are enough.
void ManyBatchesAndHeads(Job job) {
  cuda_simulator::Settings settings = cuda_simulator::CurrentSettings();
  const cuda_simulator::Settings usual = settings;
  const auto restore = absl::MakeCleanup([usual] { cuda_simulator::Configure(usual); });
  if (job.device == Device::kSimulator) {
    settings.max_grid_yz = 8;
    cuda_simulator::Configure(settings);
  }
  for (int64_t* size : {&job.problem.batch, &job.problem.query_heads, &job.problem.kv_heads}) {
    *size = std::min(*size, MostOf(job.device));
  }
  if (job.problem.query_heads > 1000 && job.technique->info().input_kind != InputKind::kQkv) {
    return Skip("the projections of so many heads would fill the memory");
  }
  if (const auto trial = Trial::Make(job)) trial->ExpectRunMatchesDefinition();
}

// Runs in a child process with little memory and time: a layer of an impossible size is refused
// with a status, or made; it must not end the process, nor hang.
void ImpossibleSizesAreAStatus(const Job& job) {
  if (job.device == Device::kCuda) {
    return Skip("a forked process cannot use the GPU; the simulator's test stands for it");
  }
  // Without a limit the child would take all of the machine's memory first.
  if (kIsSanitized) {
    return Skip(
        "a sanitizer's own memory is beyond any limit, and it ends a process for want of it");
  }
  int report[2];
  ASSERT_EQ(pipe(report), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    close(report[0]);
    const rlimit memory = {size_t{2} << 30, size_t{2} << 30};
    setrlimit(RLIMIT_AS, &memory);
    const rlimit core = {0, 0};
    setrlimit(RLIMIT_CORE, &core);
    // A Create that never returns takes all of its own time, however busy the machine is.
    const rlimit processor_seconds = {60, 60};
    setrlimit(RLIMIT_CPU, &processor_seconds);
    const auto layer = job.CreateLayer();
    std::string text = layer.ok() ? "made" : layer.status().ToString();
    if (layer.ok()) text += " with a workspace of " + std::to_string((*layer)->workspace_bytes(2));
    const ssize_t written = write(report[1], text.data(), text.size());
    _exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  close(report[1]);
  char text[1024] = {};
  const ssize_t length = read(report[0], text, sizeof(text) - 1);
  close(report[0]);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
      << "Create of " << job.problem.ToString() << " ended its process: "
      << (WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "exit code");
  std::printf("  %s: %.*s\n", job.problem.ToString().c_str(), static_cast<int>(length), text);
}

// The layer works as before after a call that failed.
void AFailedCallDoesNotPoisonTheNext(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  const NamedTensors before = trial->Run();
  if (before.empty()) return;
  ThreadPool pool(2);
  const Execution no_workspace = {&pool, {}, nullptr};
  NamedTensors none;
  EXPECT_FALSE(trial->layer().Run(ViewsOf(none), MutableViewsOf(none), no_workspace).ok());
  EXPECT_FALSE(trial->layer().Setup(ViewsOf(none), no_workspace).ok());
  ExpectSameBits(before, trial->Run(), "before and after a failed call");
}

Problem Sized(int64_t batch, int64_t heads, int64_t tokens, int64_t head_dim) {
  return Problem::SelfAttention(batch, heads, tokens, head_dim, /*causal=*/true);
}

}  // namespace

std::vector<Case> ScaleCases() {
  std::vector<Case> cases = {
      {"OffsetsBeyond31Bits", "30", {Sized(2, 2, 70, 16)}, OffsetsBeyond31Bits},
      {"ManyBatchesAndHeads",
       "31",
       {Sized(70'000, 1, 1, 4), Sized(1, 70'000, 1, 1)},
       ManyBatchesAndHeads},
      {"ImpossibleSizesAreAStatus",
       "33",
       // Tensors of terabytes, which Validate (core/problem.h) still admits.
       {Sized(1, 8, int64_t{1} << 32, 64), Sized(int64_t{1} << 28, 8, 64, 64),
        Sized(1, int64_t{1} << 33, 64, 64)},
       ImpossibleSizesAreAStatus},
      {"AFailedCallDoesNotPoisonTheNext",
       "34",
       {Usual(true), Usual(false)},
       AFailedCallDoesNotPoisonTheNext},
  };
  for (Case& one : cases) {
    one.default_options_only = true;
    one.simulated_size = SimulatedSize::kSameSizes;
  }
  return cases;
}

}  // namespace tfb::conformance
