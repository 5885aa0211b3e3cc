// Tests the graph of attention without a GPU as far as possible: cuDNN also plans for device
// properties, up to the point where it loads the kernel that it compiled. Only execution needs a
// GPU.
#include "attention/dense/dense_cudnn.h"

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "attention/dense/dense.h"
#include "core/cuda/cudnn.h"
#include "core/cuda/device_probe.h"
#include "core/sanitizers.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#if TFB_ADDRESS_SANITIZER
#include <sanitizer/lsan_interface.h>
#endif

namespace tfb::dense {
namespace {

using ::testing::HasSubstr;

Problem Make(int64_t heads, int64_t kv_heads, int64_t query_tokens, int64_t kv_tokens,
             int64_t head_dim, int64_t value_dim, bool causal, DType dtype) {
  Problem problem = Problem::SelfAttention(2, heads, query_tokens, head_dim, causal, dtype);
  problem.kv_heads = kv_heads;
  problem.kv_tokens = kv_tokens;
  problem.value_dim = value_dim;
  return problem;
}

std::vector<Problem> Problems() {
  return {Make(8, 8, 512, 512, 64, 64, false, DType::kBF16),
          Make(8, 8, 512, 512, 64, 64, true, DType::kF16),
          Make(4, 4, 100, 100, 128, 128, true, DType::kBF16),
          Make(8, 2, 512, 512, 128, 128, false, DType::kF16),  // grouped heads
          Make(4, 4, 100, 200, 64, 64, true, DType::kBF16),    // the diagonal ends at the last key
          Make(4, 4, 100, 77, 64, 64, false, DType::kBF16),
          Make(4, 4, 1, 300, 64, 64, true, DType::kBF16),  // decoding
          Make(2, 2, 65, 65, 40, 24, true, DType::kF16)};
}

absl::Status Refusal(const Problem& problem, Device device) {
  return Dense().Create(problem, {{"backend", "cudnn"}}, device, 1).status();
}

TEST(DenseCudnn, OtherDevicesThanAGpuAreRefused) {
  const Problem problem = Problems()[0];
  for (const Device device : {Device::kCpu, Device::kSimulator}) {
    const absl::Status status = Refusal(problem, device);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    EXPECT_EQ(status.message(),
              absl::StrCat("dense: backend cudnn is for device cuda; this one is ", Name(device)));
  }
}

TEST(DenseCudnn, ProblemsThatItDoesNotDoAreRefusedWithTheReason) {
  const auto reason = [](const Problem& problem) {
    const absl::Status status = Refusal(problem, Device::kCuda);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    return std::string(status.message());
  };
  Problem problem = Problems()[0];
  problem.dtype = DType::kF32;
  EXPECT_EQ(reason(problem), "dense: backend cudnn is for bf16 and f16; dtype is f32");
  problem = Problems()[0];
  problem.value_dim = 7;
  EXPECT_EQ(reason(problem),
            "dense: backend cudnn has multiples of 8 as head_dim and value_dim; they are 64 and 7");
  problem = Problems()[0];
  problem.kv_tokens = 0;
  EXPECT_EQ(reason(problem), "dense: backend cudnn has at least one key; kv_tokens is 0");
  problem = Problems()[1];
  problem.kv_tokens = 511;
  EXPECT_EQ(reason(problem),
            "dense: backend cudnn has at most as many queries as keys where they are causal; there "
            "are 512 and 511");
}

TEST(DenseCudnn, TensorsAreContiguousAndAtMultiplesOfSixteenBytes) {
  alignas(64) static uint16_t memory[64];
  const auto check = [](const ConstTensorView& view) {
    return std::string(CheckCudnnTensor("k", view).message());
  };
  for (int elements = 0; elements <= 16; ++elements) {
    const ConstTensorView view(memory + elements, DType::kBF16, {1, 1, 2, 8});
    EXPECT_EQ(check(view), elements % 8 == 0 ? ""
                                             : "dense: backend cudnn wants tensors at multiples of "
                                               "16 bytes; k is not")
        << elements;
  }
  EXPECT_EQ(check(ConstTensorView(memory, DType::kBF16, {1, 1, 2, 8}, {32, 32, 16, 1})),
            "dense: backend cudnn wants contiguous tensors; k is not");
  EXPECT_EQ(CheckCudnnTensor("k", ConstTensorView(memory + 1, DType::kBF16, {8})).code(),
            absl::StatusCode::kUnimplemented);
}

TEST(DenseCudnn, CostsWhatTheOwnBackendCosts) {
  for (Problem problem : Problems()) {
    problem.batch = 3;
    const NamedTensors inputs = RandomInputs(QkvInputs(problem), 5);
    const auto own = Dense().Create(problem, {}, Device::kCpu, 1).value();
    ASSERT_TRUE(RunLayer(*own, ViewsOf(inputs)).ok());
    EXPECT_EQ(CudnnCost(problem).flops, own->cost().flops) << problem.ToString();
    EXPECT_EQ(CudnnCost(problem).bytes, own->cost().bytes) << problem.ToString();
  }
}

// Returns whether there is no cuDNN or no GPU, or the program was built without a CUDA toolkit.
bool IsAbsent(const absl::Status& status) {
  return absl::IsUnavailable(status) || status.message().rfind("no CUDA device: ", 0) == 0;
}

TEST(DenseCudnn, IsThereOrSaysWhyNot) {
  const absl::Status status = Refusal(Problems()[0], Device::kCuda);
  if (!status.ok()) {
    EXPECT_TRUE(IsAbsent(status)) << status;
    GTEST_SKIP() << status.message();
  }
}

// ---- Plans without a GPU ----

struct Gpu {
  const char* name;
  int major;  // of its compute capability
  const char* properties;
};
// The texts are in cuDNN's format.
constexpr Gpu kGpus[] = {
    {"H200", 9,
     R"({"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,
         "multiProcessorCount":132,"warpSize":32,"maxSharedMemoryPerBlock":49152,
         "maxSharedMemoryPerBlockOptin":232448,"reservedSharedMemoryPerBlock":1024,
         "maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,
         "maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,
         "smClockRateKHz":1980000,"memClockRateKHz":3201000,"l2CacheSize":62914560,
         "deviceName":"NVIDIA H200","deviceVer":900,"driverVer":13000,
         "totalGlobalMem":150000000000,"cudaDeviceId":0})"},
    {"A100", 8,
     R"({"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,
         "multiProcessorCount":108,"warpSize":32,"maxSharedMemoryPerBlock":49152,
         "maxSharedMemoryPerBlockOptin":166912,"reservedSharedMemoryPerBlock":1024,
         "maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,
         "maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,
         "smClockRateKHz":1410000,"memClockRateKHz":1215000,"l2CacheSize":41943040,
         "deviceName":"NVIDIA A100","deviceVer":800,"driverVer":13000,
         "totalGlobalMem":80000000000,"cudaDeviceId":0})"}};

// Returns null where graphs cannot be planned for device properties.
const Cudnn* CudnnThatPlans() {
  const absl::StatusOr<const Cudnn*> cudnn = Cudnn::Open();
  if (!cudnn.ok()) {
    std::printf("%s\n", std::string(cudnn.status().message()).c_str());
    return nullptr;
  }
  return (*cudnn)->version() >= 91100 ? *cudnn : nullptr;
}

// Turns off the leak sanitizer, which must not judge memory that cuDNN allocates and keeps.
class WithoutLeakChecks {
 public:
#if TFB_ADDRESS_SANITIZER
  WithoutLeakChecks() { __lsan_disable(); }
  ~WithoutLeakChecks() { __lsan_enable(); }
#endif
};

absl::Status PlanFor(const Gpu& gpu, CudnnGraph graph) {
  [[maybe_unused]] const WithoutLeakChecks plans;
  CudnnTarget target;
  target.device_properties = gpu.properties;
  return graph.Plan(target).status();
}

// Tells whether this machine has no GPU, or one of the generation of the GPU that is named.
bool MayBe(const Gpu& gpu) {
  const absl::StatusOr<CudaMachine> machine = ProbeCudaMachine();
  return !machine.ok() || machine->devices[0].compute_capability_major == gpu.major;
}

// Tells whether the graph was accepted for a GPU, and only a step failed that needs a driver or that
// GPU: where another one is installed, the driver has no image of the kernel for it.
bool LacksOnlyTheGpu(const Gpu& gpu, const absl::Status& status) {
  if (status.ok() || absl::StrContains(status.message(), "libcuda") ||
      absl::StrContains(status.message(), "cuLibraryLoadData")) {
    return true;
  }
  return !MayBe(gpu) && absl::StrContains(status.message(), "cuLibraryGetKernel") &&
         absl::StrContains(status.message(), "no kernel image is available");
}

TEST(DenseCudnn, TheGraphIsAcceptedForEveryProblem) {
  const Cudnn* cudnn = CudnnThatPlans();
  if (cudnn == nullptr) GTEST_SKIP() << "no cuDNN of 9.11 or later";
  for (const Gpu& gpu : kGpus) {
    for (const Problem& problem : Problems()) {
      const absl::Status status = PlanFor(gpu, CudnnAttentionGraph(cudnn, problem));
      EXPECT_TRUE(LacksOnlyTheGpu(gpu, status))
          << gpu.name << ", " << problem.ToString() << ": " << status;
    }
  }
}

// This shows that the check above can fail: products alone are not attention.
TEST(DenseCudnn, AnotherGraphIsNotAccepted) {
  const Cudnn* cudnn = CudnnThatPlans();
  if (cudnn == nullptr) GTEST_SKIP() << "no cuDNN of 9.11 or later";
  const auto memory = [](CudnnGraph& graph, int64_t id) {
    return graph.Memory(id, cudnn::kDataHalf, {1, 1, 64, 64}, {4096, 4096, 64, 1});
  };
  CudnnGraph products(cudnn);
  const CudnnGraph::Tensor square = products.MatMul(
      memory(products, 1), memory(products, 2), products.Virtual(cudnn::kDataHalf, {1, 1, 64, 64}));
  products.MatMul(square, memory(products, 3), memory(products, 4));
  absl::Status status = PlanFor(kGpus[0], std::move(products));
  EXPECT_FALSE(LacksOnlyTheGpu(kGpus[0], status)) << status;
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;

  CudnnGraph mismatched(cudnn);
  mismatched.MatMul(memory(mismatched, 1),
                    mismatched.Memory(2, cudnn::kDataHalf, {1, 1, 32, 64}, {2048, 2048, 64, 1}),
                    memory(mismatched, 3));
  status = PlanFor(kGpus[0], std::move(mismatched));
  EXPECT_FALSE(LacksOnlyTheGpu(kGpus[0], status)) << status;
}

TEST(DenseCudnn, AnErrorHasTheReasonOfTheInnermostCall) {
  EXPECT_EQ(CudnnReason("Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: head_dim > 256\n"
                        "Error: CUDNN_STATUS_BAD_PARAM; Reason: no engine\n"),
            "head_dim > 256");
  EXPECT_EQ(CudnnReason("CUDNN_STATUS_INTERNAL_ERROR\nat line 7"), "CUDNN_STATUS_INTERNAL_ERROR");
  EXPECT_EQ(CudnnReason(""), "");
}

// ---- On a GPU ----

TEST(DenseCudnn, EqualsTheDefinition) {
  for (const Problem& problem : Problems()) {
    const NamedTensors inputs = RandomInputs(QkvInputs(problem), 5);
    RunRequest request;
    request.options = {{"backend", "cudnn"}};
    request.device = Device::kCuda;
    const absl::StatusOr<NamedTensors> ours =
        RunTechnique(Dense(), problem, ViewsOf(inputs), request);
    if (IsAbsent(ours.status())) GTEST_SKIP() << ours.status().message();
    ASSERT_TRUE(ours.ok()) << problem.ToString() << ": " << ours.status();
    const NamedTensors expected = DefineTechnique(Dense(), problem, ViewsOf(inputs), {{}}).value();
    // The bounds are those of the harness for 16 bits: five roundings of a value; scores are fp32.
    EXPECT_LE(MaxDifference(ours->at("out").view(), expected.at("out").view()),
              5 * UnitRoundoff(problem.dtype) * MaxAbs(inputs.at("v").view()))
        << problem.ToString();
    EXPECT_LE(MaxDifference(ours->at("log_sum_exp").view(), expected.at("log_sum_exp").view()),
              1e-4)
        << problem.ToString();
  }
}

}  // namespace
}  // namespace tfb::dense
