// Tests the texts of core/cuda/ptx.cuh and hopper.cuh in the simulator, and that a changed text gives another
// result or a finding.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/cuda/hopper.cuh"
#include "core/cuda/simulator/cuda_runtime.h"
#include "core/cuda/simulator/simulator.h"
#include "core/cuda/simulator/warp_matrix.h"
#include "core/cuda/tensor_map.cuh"

namespace cuda_simulator {
namespace {

using ::testing::HasSubstr;

constexpr int kLanes = 32;

// The registers and memory after an instruction of a warp; empty where there was a finding.
using Result = std::vector<unsigned>;
using RunText = std::function<Result(const std::string& text)>;

// Runs `body` in a warp, whose dynamic shared memory are these 512 bytes.
template <class Body>
bool RunWarp(const std::vector<unsigned>& shared, const Body& body) {
  struct Context {
    const std::vector<unsigned>* shared;
    const Body* body;
  } context = {&shared, &body};
  RegisterBuffer(shared.data(), 512, /*written=*/true);
  const auto run = [](void* data) {
    const Context& context = *static_cast<Context*>(data);
    char* memory = static_cast<char*>(DynamicSharedBytes());
    const int lane = LaneId();
    __pipeline_memcpy_async(memory + 16 * lane, context.shared->data() + 4 * lane, 16);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncwarp();
    (*context.body)(lane, memory);
  };
  const cudaError_t error =
      LaunchBody("Warp", {dim3(1), dim3(kLanes), 512}, run, &context, sizeof(context));
  UnregisterBuffer(shared.data());
  return error == cudaSuccess;
}

// Returns the text at an address that no other text gets, as literals have.
const char* Literal(const std::string& text) {
  static auto* texts = new std::set<std::string>;
  return texts->insert(text).first->c_str();
}

std::vector<unsigned> RandomWords(int count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<unsigned> words(count);
  for (unsigned& word : words) word = random();
  return words;
}

// Returns pairs of 16-bit numbers of size 1 to 2 in both formats.
std::vector<unsigned> RandomPairs(int count, unsigned seed) {
  std::vector<unsigned> pairs = RandomWords(count, seed);
  for (unsigned& pair : pairs) pair = (pair & 0x803f803fu) | 0x3c003c00u | 0x03800380u;
  return pairs;
}

// Lane l gives row l of the shared memory. `load` takes its registers and the row.
template <class Load>
Result LdMatrixBy(const Load& load) {
  Result result(kLanes * 4);
  const bool ok = RunWarp(RandomWords(128, 1), [&](int lane, char* memory) {
    unsigned r[4] = {};
    load(r, memory + 16 * lane);
    for (int n = 0; n < 4; ++n) result[lane * 4 + n] = r[n];
  });
  return ok ? result : Result();
}

Result LdMatrix(const std::string& text) {
  return LdMatrixBy([&](unsigned r[4], const void* row) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
    ExecutePtx(Literal(text), PtxOperand("=r", r[0]), PtxOperand("=r", r[1]),
               PtxOperand("=r", r[2]), PtxOperand("=r", r[3]), PtxOperand("r", address));
  });
}

// `multiply` takes a lane's d, a and b.
template <class Multiply>
Result MmaBy(const Multiply& multiply) {
  const std::vector<unsigned> factors = RandomPairs(kLanes * 6, 2);
  Result result(kLanes * 4);
  const bool ok = RunWarp(RandomWords(128, 1), [&](int lane, char*) {
    float d[4];
    for (int n = 0; n < 4; ++n) d[n] = static_cast<float>(lane * 4 + n) / 3;
    multiply(d, &factors[lane * 6], &factors[lane * 6 + 4]);
    std::memcpy(&result[lane * 4], d, sizeof(d));
  });
  return ok ? result : Result();
}

Result Mma(const std::string& text) {
  return MmaBy([&](float d[4], const unsigned a[4], const unsigned b[2]) {
    ExecutePtx(Literal(text), PtxOperand("+f", d[0]), PtxOperand("+f", d[1]),
               PtxOperand("+f", d[2]), PtxOperand("+f", d[3]), PtxOperand("r", a[0]),
               PtxOperand("r", a[1]), PtxOperand("r", a[2]), PtxOperand("r", a[3]),
               PtxOperand("r", b[0]), PtxOperand("r", b[1]));
  });
}

// Lane l writes the shared memory of lane 31 - l. `copy` takes the lane, the destination and the
// lane's 16 bytes of the source.
template <class Copy>
Result CopyAsyncBy(const Copy& copy) {
  const std::vector<unsigned> source = RandomWords(128, 3);
  RegisterBuffer(source.data(), 512, /*written=*/true);
  Result result(128);
  const bool ok = RunWarp(RandomWords(128, 1), [&](int lane, char* memory) {
    char* to = memory + 16 * (31 - lane);
    __syncwarp();
    copy(lane, to, &source[lane * 4]);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    std::memcpy(&result[(31 - lane) * 4], to, 16);
  });
  UnregisterBuffer(source.data());
  return ok ? result : Result();
}

// Lane l copies l % 5 words.
Result CopyAsync(const std::string& text) {
  return CopyAsyncBy([&](int lane, void* to, const void* from) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    const unsigned bytes = static_cast<unsigned>(lane % 5 * 4);
    ExecutePtx(Literal(text), PtxOperand("r", address), PtxOperand("l", from),
               PtxOperand("r", bytes));
  });
}

Result Function(const std::string& text) {
  Result result(kLanes);
  const bool ok = RunWarp(RandomWords(128, 1), [&](int lane, char*) {
    const float x = 0.5f + 0.25f * static_cast<float>(lane);
    float y = 0;
    ExecutePtx(Literal(text), PtxOperand("=f", y), PtxOperand("f", x));
    std::memcpy(&result[lane], &y, sizeof(y));
  });
  return ok ? result : Result();
}

template <int kCount, size_t... kIndices>
auto AsOperands(float (&d)[kCount], std::index_sequence<kIndices...>) {
  return std::make_tuple(PtxOperand("+f", d[kIndices])...);
}

// ---- Instructions of warp groups: programs of several, of which one has another text ----

constexpr int kGroupThreads = 128;
constexpr size_t kGroupBytes = 24 << 10;

// Runs `body` in a warp group with dynamic shared memory, aligned as panels are.
template <class Body>
bool RunGroup(const Body& body) {
  const auto run = [](void* data) {
    (*static_cast<const Body*>(data))(static_cast<int>(threadIdx.x),
                                      static_cast<char*>(DynamicSharedBytes()));
  };
  const cudaError_t error = LaunchBody("Group", {dim3(1), dim3(kGroupThreads), kGroupBytes}, run,
                                       const_cast<Body*>(&body), sizeof(body));
  return error == cudaSuccess;
}

// Says which of a program's instructions has which text; the others are those of the header's
// functions.
class Replacement {
 public:
  Replacement(const char* place, const std::string& text)
      : place_(place), text_(text.empty() ? "" : Literal(text)) {}
  // Executes the text with these operands if it is of that place; otherwise calls the function.
  template <class Function, class... Operands>
  void Do(const char* place, const Function& function, const Operands&... operands) const {
    if (std::strcmp(place, place_) == 0) {
      ExecutePtx(text_, operands...);
    } else {
      function();
    }
  }

 private:
  const char* place_;
  const char* text_;
};

// A tensor of 16-bit numbers 0, 1, 2, ..., of sizes 72, 16, 3 and 4.
const std::vector<uint16_t>& TensorNumbers() {
  static const auto* numbers = [] {
    auto* filled = new std::vector<uint16_t>(72 * 16 * 3 * 4);
    for (size_t n = 0; n < filled->size(); ++n) (*filled)[n] = static_cast<uint16_t>(n);
    return filled;
  }();
  return *numbers;
}

// A barrier of three arrivals, and a box of 8 rows for which all threads wait: thread t reports its
// 4 numbers of 128 * 4.
Result CopyOnBarrier(const Replacement& replacement) {
  const std::vector<uint16_t>& numbers = TensorNumbers();
  RegisterBuffer(numbers.data(), numbers.size() * 2, /*written=*/true);
  const tfb::BoxedTensor tensor = {
      const_cast<uint16_t*>(numbers.data()), {72, 16, 3, 4}, {1, 72, 72 * 16, 72 * 16 * 3}, 8};
  tfb::TensorMap map;
  EXPECT_EQ(tfb::EncodeTensorMap(tensor, tfb::Element::kBf16, &map), nullptr);
  Result result(kGroupThreads * 2);
  const bool ok = RunGroup([&](int t, char* memory) {
    // The map is a parameter on a GPU; here, in the thread's memory.
    const tfb::TensorMap own_map = map;
    auto* barrier = reinterpret_cast<uint64_t*>(memory + 2048);
    const unsigned address = tfb::SharedAddress(barrier), to = tfb::SharedAddress(memory);
    const unsigned bytes = 8 * 128;
    if (t == 0) {
      replacement.Do(
          "init", [&] { tfb::InitBarrier(barrier, 3); }, PtxOperand("r", address),
          PtxOperand("r", 3));
      replacement.Do("fence", [] { tfb::FenceBarrierInit(); });
    }
    __syncthreads();
    if (t == 1 || t == 2) {
      replacement.Do(
          "arrive", [&] { tfb::Arrive(barrier); }, PtxOperand("r", address));
    }
    if (t == 3) {
      replacement.Do(
          "expect", [&] { tfb::ArriveAndExpect(barrier, bytes); }, PtxOperand("r", address),
          PtxOperand("r", bytes));
      replacement.Do(
          "copy", [&] { tfb::CopyBox(memory, own_map, 8, 3, 1, 2, barrier); }, PtxOperand("r", to),
          PtxOperand("l", &own_map), PtxOperand("r", 8), PtxOperand("r", 3), PtxOperand("r", 1),
          PtxOperand("r", 2), PtxOperand("r", address));
    }
    unsigned done = 0;
    const unsigned parity = 0;
    for (int n = 0; n < 100 && done == 0; ++n) {
      replacement.Do(
          "wait", [&] { tfb::Wait(barrier, 0), done = 1; }, PtxOperand("=r", done),
          PtxOperand("r", address), PtxOperand("r", parity));
    }
    result[t * 2] = done;
    std::memcpy(&result[t * 2 + 1], memory + t * 8, 4);
  });
  UnregisterBuffer(numbers.data());
  return ok ? result : Result();
}

// Two halves exchange numbers past a barrier; in the second, one warp arrives and the other waits.
Result NumberedBarriers(const Replacement& replacement) {
  Result result(kGroupThreads);
  const bool ok = RunGroup([&](int t, char* memory) {
    auto* numbers = reinterpret_cast<unsigned*>(memory);
    numbers[t] = static_cast<unsigned>(t);
    const unsigned own = t == 5 ? 4 : 0;
    unsigned any = 7;
    if (t < 64) {
      replacement.Do(
          "any", [&] { any = tfb::NamedAny(2, 64, own) ? 1 : 0; }, PtxOperand("=r", any),
          PtxOperand("r", 2), PtxOperand("r", 64), PtxOperand("r", own));
      numbers[t] += 100;
      replacement.Do(
          "sync", [&] { tfb::NamedSync(3, 64); }, PtxOperand("r", 3), PtxOperand("r", 64));
    } else if (t < 96) {
      replacement.Do(
          "arrive", [&] { tfb::NamedArrive(4, 64); }, PtxOperand("r", 4), PtxOperand("r", 64));
      __syncwarp();
    } else {
      tfb::NamedSync(4, 64);
    }
    result[t] = any * 1000 + numbers[t < 64 || t >= 96 ? t ^ 32 : t ^ 1];
  });
  return ok ? result : Result();
}

// Two products of 64 x 16 numbers by `columns` columns, of which the second adds to the first.
template <class T, int kColumns>
Result Products(const Replacement& replacement) {
  constexpr bool kFromMemory = kColumns == 0;  // a, too, and 128 columns
  constexpr int kSums = kFromMemory ? 64 : kColumns / 2;
  const std::vector<unsigned> pairs = RandomPairs(kGroupBytes / 4, 11);
  RegisterBuffer(pairs.data(), kGroupBytes, /*written=*/true);
  Result result(kGroupThreads * kSums);
  const bool ok = RunGroup([&](int t, char* memory) {
    for (size_t n = static_cast<size_t>(t) * 4; n < pairs.size(); n += kGroupThreads * 4) {
      __pipeline_memcpy_async(memory + n * 4, &pairs[n], 16);
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    tfb::FenceAsync();
    __syncthreads();
    float d[kSums];
    for (int n = 0; n < kSums; ++n) d[n] = static_cast<float>(t * kSums + n) / 3;
    const unsigned* a = &pairs[t * 4];
    const uint64_t rows = tfb::DescribeMatrix(memory + 16384, 4096);
    const uint64_t columns = tfb::DescribeMatrix(memory, 8192);
    replacement.Do("fence", [] { tfb::BeginProducts(); });
    for (int product = 0; product < 2; ++product) {
      if constexpr (kFromMemory) {
        const auto multiply = [&](auto... sums) {
          replacement.Do(
              "product", [&] { tfb::MultiplyN128<T, 1>(d, rows, columns); }, sums...,
              PtxOperand("l", rows), PtxOperand("l", columns), PtxOperand("n", 1));
        };
        std::apply(multiply, AsOperands(d, std::make_index_sequence<kSums>()));
      } else {
        const auto multiply = [&](auto... sums) {
          replacement.Do(
              "product", [&] { tfb::MultiplyTransposed<T>(d, a, columns); }, sums...,
              PtxOperand("r", a[0]), PtxOperand("r", a[1]), PtxOperand("r", a[2]),
              PtxOperand("r", a[3]), PtxOperand("l", columns), PtxOperand("n", 1));
        };
        std::apply(multiply, AsOperands(d, std::make_index_sequence<kSums>()));
      }
    }
    replacement.Do("commit", [] { tfb::EndProducts(); });
    replacement.Do(
        "wait", [] { tfb::WaitForProducts<0>(); }, PtxOperand("n", 0));
    std::memcpy(&result[t * kSums], d, sizeof(d));
  });
  UnregisterBuffer(pairs.data());
  return ok ? result : Result();
}

Result SetRegisters(const Replacement& replacement) {
  const bool ok = RunGroup([&](int, char*) {
    replacement.Do(
        "set", [] { tfb::FewerRegisters<24>(); }, PtxOperand("n", 24));
  });
  return ok ? Result{1} : Result();
}

struct Case {
  const char* text;
  RunText run;
  std::function<Result()> run_header = nullptr;  // gives the result of the header's function
};
template <class Program>
Case In(const Program& program, const char* place, const char* text) {
  return {text, [=](const std::string& other) { return program(Replacement(place, other)); },
          [=] { return program(Replacement("", "")); }};
}
const Case kCases[] = {
    {TFB_PTX_LDMATRIX, &LdMatrix},
    {TFB_PTX_LDMATRIX_TRANSPOSED, &LdMatrix},
    {TFB_PTX_MMA("bf16"), &Mma},
    {TFB_PTX_MMA("f16"), &Mma},
    {TFB_PTX_COPY_ASYNC, &CopyAsync},
    {TFB_PTX_EXP2, &Function},
    {TFB_PTX_LOG2, &Function},
    In(&CopyOnBarrier, "init", TFB_PTX_BARRIER_INIT),
    In(&CopyOnBarrier, "fence", TFB_PTX_FENCE_BARRIER_INIT),
    In(&CopyOnBarrier, "fence", TFB_PTX_FENCE_ASYNC),
    In(&CopyOnBarrier, "arrive", TFB_PTX_BARRIER_ARRIVE),
    In(&CopyOnBarrier, "expect", TFB_PTX_BARRIER_EXPECT),
    In(&CopyOnBarrier, "wait", TFB_PTX_BARRIER_TRY_WAIT),
    In(&CopyOnBarrier, "copy", TFB_PTX_TMA_LOAD_4D),
    In(&NumberedBarriers, "sync", TFB_PTX_NAMED_SYNC),
    In(&NumberedBarriers, "arrive", TFB_PTX_NAMED_ARRIVE),
    In(&NumberedBarriers, "any", TFB_PTX_NAMED_OR),
    In(&SetRegisters, "set", TFB_PTX_MORE_REGISTERS),
    In(&SetRegisters, "set", TFB_PTX_FEWER_REGISTERS),
    In(&Products<__half, 64>, "fence", TFB_PTX_WGMMA_FENCE),
    In(&Products<__half, 64>, "commit", TFB_PTX_WGMMA_COMMIT),
    In(&Products<__half, 64>, "wait", TFB_PTX_WGMMA_WAIT),
};
// With 64 sums, of which only those side by side are swapped.
const Case kProductCases[] = {
    In(&Products<__nv_bfloat16, 0>, "product",
       TFB_PTX_WGMMA("128", "bf16", TFB_PTX_REGISTERS_64, "%64, %65", "%66", "0, 0")),
    In(&Products<__half, 0>, "product",
       TFB_PTX_WGMMA("128", "f16", TFB_PTX_REGISTERS_64, "%64, %65", "%66", "0, 0")),
    In(&Products<__nv_bfloat16, 128>, "product",
       TFB_PTX_WGMMA("128", "bf16", TFB_PTX_REGISTERS_64, "{%64, %65, %66, %67}, %68", "%69", "1")),
    In(&Products<__half, 64>, "product",
       TFB_PTX_WGMMA("64", "f16", TFB_PTX_REGISTERS_32, "{%32, %33, %34, %35}, %36", "%37", "1")),
};

TEST(Ptx, MatricesAreDistributedAsPtxSays) {
  const std::vector<unsigned> shared = RandomWords(128, 1);
  const auto element = [&](int matrix, int row, int column) {
    return shared[matrix * 32 + row * 4 + column / 2] >> 16 * (column % 2) & 0xffff;
  };
  const Result result = LdMatrix(TFB_PTX_LDMATRIX);
  const Result transposed = LdMatrix(TFB_PTX_LDMATRIX_TRANSPOSED);
  ASSERT_FALSE(result.empty() || transposed.empty());
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int n = 0; n < 4; ++n) {
      EXPECT_EQ(result[lane * 4 + n], element(n, g, 2 * t) | element(n, g, 2 * t + 1) << 16);
      EXPECT_EQ(transposed[lane * 4 + n], element(n, 2 * t, g) | element(n, 2 * t + 1, g) << 16);
    }
  }
}

TEST(Ptx, ProductsAreAddedToTheAccumulators) {
  const std::vector<unsigned> factors = RandomPairs(kLanes * 6, 2);
  const auto bf16 = [&](int lane, int n, int half) {
    return __bfloat162float({static_cast<unsigned short>(factors[lane * 6 + n] >> 16 * half)});
  };
  const Result result = Mma(TFB_PTX_MMA("bf16"));
  ASSERT_FALSE(result.empty());
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int n = 0; n < 4; ++n) {
      const int row = lane / 4 + n / 2 * 8, column = lane % 4 * 2 + n % 2;
      double sum = static_cast<float>(lane * 4 + n) / 3;
      for (int k = 0; k < 16; ++k) {
        // Row g of a is in the lanes 4 g and on, as is column g of b; the lanes divide k in pairs.
        const int of_k = k % 8 / 2, half = k % 2;
        sum += static_cast<double>(bf16(row % 8 * 4 + of_k, row / 8 + k / 8 * 2, half)) *
               bf16(column * 4 + of_k, 4 + k / 8, half);
      }
      EXPECT_EQ(__uint_as_float(result[lane * 4 + n]), static_cast<float>(sum));
    }
  }
}

TEST(Ptx, CopiesTheFirstBytesAndFillsWithZeros) {
  const std::vector<unsigned> source = RandomWords(128, 3);
  const Result result = CopyAsync(TFB_PTX_COPY_ASYNC);
  ASSERT_FALSE(result.empty()) << cudaGetErrorString(cudaErrorLaunchFailure);
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int n = 0; n < 4; ++n) {
      EXPECT_EQ(result[(31 - lane) * 4 + n], n < lane % 5 ? source[lane * 4 + n] : 0u);
    }
  }
}

TEST(Ptx, FunctionsAreThoseOfTheirNames) {
  const Result exponentials = Function(TFB_PTX_EXP2), logarithms = Function(TFB_PTX_LOG2);
  ASSERT_FALSE(exponentials.empty() || logarithms.empty());
  for (int lane = 0; lane < kLanes; ++lane) {
    const float x = 0.5f + 0.25f * static_cast<float>(lane);
    EXPECT_EQ(__uint_as_float(exponentials[lane]), std::exp2(x));
    EXPECT_EQ(__uint_as_float(logarithms[lane]), std::log2(x));
  }
}

TEST(Ptx, FunctionsOfTheHeaderGiveTheTextsTheirOperands) {
  EXPECT_EQ(LdMatrixBy(&tfb::LdMatrixX4), LdMatrix(TFB_PTX_LDMATRIX));
  EXPECT_EQ(LdMatrixBy(&tfb::LdMatrixX4Transposed), LdMatrix(TFB_PTX_LDMATRIX_TRANSPOSED));
  EXPECT_EQ(MmaBy(&tfb::MmaM16N8K16Bf16), Mma(TFB_PTX_MMA("bf16")));
  EXPECT_EQ(MmaBy(&tfb::MmaM16N8K16F16), Mma(TFB_PTX_MMA("f16")));
  const std::vector<unsigned> source = RandomWords(128, 3);
  const Result copied = CopyAsyncBy([](int lane, void* to, const void* from) {
    // An address that is not to be read may be none of the kernel's.
    tfb::CopyAsync(to, lane % 3 == 0 ? from : nullptr, lane % 3 == 0);
  });
  ASSERT_FALSE(copied.empty()) << cudaGetErrorString(cudaErrorLaunchFailure);
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int n = 0; n < 4; ++n) {
      EXPECT_EQ(copied[(31 - lane) * 4 + n], lane % 3 == 0 ? source[lane * 4 + n] : 0u);
    }
  }
  EXPECT_EQ(tfb::Exp2(2.5f), std::exp2(2.5f));
  EXPECT_EQ(tfb::Log2(2.5f), std::log2(2.5f));
}

TEST(Ptx, FunctionsOfHopperGiveTheTextsTheirOperands) {
  int compared = 0;
  const auto compare = [&](const Case& c) {
    if (c.run_header == nullptr) return;
    const Result result = c.run(c.text);
    ASSERT_FALSE(result.empty()) << c.text << cudaGetErrorString(cudaErrorLaunchFailure);
    EXPECT_EQ(result, c.run_header()) << c.text;
    ++compared;
  };
  for (const Case& c : kCases) compare(c);
  for (const Case& c : kProductCases) compare(c);
  EXPECT_EQ(compared, 15 + 4);
}

TEST(Ptx, ABoxIsCopiedAndSwizzled) {
  const Result result = In(&CopyOnBarrier, "none", "").run_header();
  ASSERT_FALSE(result.empty()) << cudaGetErrorString(cudaErrorLaunchFailure);
  for (int t = 0; t < kGroupThreads; ++t) {
    EXPECT_EQ(result[t * 2], 1u);
    // Thread t has two numbers from 4 t on in the swizzled rows of 64.
    const int row = t / 16, chunk = (t / 2 % 8) ^ row, column = chunk * 8 + t % 2 * 4;
    const int number = 8 + column + 72 * (3 + row) + 72 * 16 * 1 + 72 * 16 * 3 * 2;
    EXPECT_EQ(result[t * 2 + 1] & 0xffff, static_cast<unsigned>(number) & 0xffff) << t;
    EXPECT_EQ(result[t * 2 + 1] >> 16, static_cast<unsigned>(number + 1) & 0xffff) << t;
  }
}

TEST(Ptx, NumberedBarriersExchangeNumbersAndPredicates) {
  const Result result = In(&NumberedBarriers, "none", "").run_header();
  ASSERT_FALSE(result.empty()) << cudaGetErrorString(cudaErrorLaunchFailure);
  for (int t = 0; t < kGroupThreads; ++t) {
    EXPECT_EQ(result[t], static_cast<unsigned>(t < 64   ? 1100 + (t ^ 32)
                                               : t < 96 ? 7000 + (t ^ 1)
                                                        : 7000 + (t ^ 32)));
  }
}

// Returns the places of "%0", "%1", ... in a text, each with its length.
std::vector<std::pair<size_t, size_t>> OperandsIn(const std::string& text) {
  std::vector<std::pair<size_t, size_t>> operands;
  for (size_t at = text.find('%'); at != std::string::npos; at = text.find('%', at + 1)) {
    operands.push_back({at, text.find_first_not_of("0123456789", at + 1) - at});
  }
  return operands;
}

std::string WithSwapped(const std::string& text, const std::pair<size_t, size_t>& a,
                        const std::pair<size_t, size_t>& b) {
  return text.substr(0, a.first) + text.substr(b.first, b.second) +
         text.substr(a.first + a.second, b.first - a.first - a.second) +
         text.substr(a.first, a.second) + text.substr(b.first + b.second);
}

TEST(Ptx, ATextWithTwoSwappedOperandsGivesAnotherResultOrAFinding) {
  int texts = 0;
  for (const Case& c : kCases) {
    const std::string text = c.text;
    const Result expected = c.run(text);
    ASSERT_FALSE(expected.empty()) << text << cudaGetErrorString(cudaErrorLaunchFailure);
    const auto operands = OperandsIn(text);
    for (size_t a = 0; a < operands.size(); ++a) {
      for (size_t b = a + 1; b < operands.size(); ++b) {
        const std::string mutant = WithSwapped(text, operands[a], operands[b]);
        if (mutant == text) continue;
        ++texts;
        EXPECT_NE(c.run(mutant), expected) << mutant;
      }
    }
  }
  EXPECT_EQ(texts, 10 + 10 + 87 + 87 + 3 + 1 + 1 + 1 + 1 + 3 + 21 + 1 + 1 + 6);
}

TEST(Ptx, AProductWithTwoSwappedOperandsGivesAnotherResultOrAFinding) {
  for (const Case& c : kProductCases) {
    const Result expected = c.run(c.text);
    ASSERT_FALSE(expected.empty()) << c.text << cudaGetErrorString(cudaErrorLaunchFailure);
    const auto operands = OperandsIn(c.text);
    ASSERT_GE(operands.size(), 38u);
    for (size_t n = 0; n + 1 < operands.size(); ++n) {
      const std::string mutant = WithSwapped(c.text, operands[n], operands[n + 1]);
      EXPECT_NE(c.run(mutant), expected) << mutant;
    }
  }
}

TEST(Ptx, ATextWithAnotherOpcodeOrNumberGivesAnotherResultOrAFinding) {
  const std::pair<const char*, const char*> changes[] = {
      {".trans", ""},
      {".x4.shared", ".x4.trans.shared"},
      {".x4", ".x2"},
      {"bf16", "f16"},
      {".f16", ".bf16"},
      {"row.col", "row.row"},
      {"16, %2", "%2, 16"},
      {"16, %2", "8, %2"},
      {".cg", ".ca"},
      {";", ""},
      {"[%4]", "%4"},
      {"{%8, %9}", "{%8}"},
      {"%3", "%13"},
      {"ex2", "lg2"},
      {"lg2", "ex2"},
      {"[%1]", "[%3]"},
      {".approx", ""},
      {"%0, %1;", "%0;"},
      {"shared::cta", "shared"},
      {"shared::cluster", "shared::cta"},
      {".parity", ""},
      {".expect_tx", ""},
      {"_, ", ""},
      {"p, [%1], %2", "p, [%1]"},
      {"setp.ne", "setp.eq"},
      {"1, 0, p", "0, 1, p"},
      {".or.pred", ".and.pred"},
      {"q, %1, %2, p", "p, %1, %2, q"},
      {".reg .pred p; ", ""},
      {"bar.sync", "bar.arrive"},
      {".4d", ".3d"},
      {"%2, %3, %4, %5", "%2, %3, %4"},
      {"commit_group", "commit"},
      {".async", ""},
      {"release", "acquire"},
      {"aligned.u32 %0", "aligned.u32 %1"},
      {"wait_group", "wait"},
      {"fence.sync", "fence"},
  };
  const std::pair<const char*, const char*> product_changes[] = {
      {"m64n128", "m64n64"},   {"m64n64", "m64n128"},  {"bf16", "f16"},
      {"p, 1, 1", "p, 1, -1"}, {"setp.ne", "setp.eq"}, {"; }", ";"},
      {"0, 0; }", "0, 1; }"},  {"0, 0; }", "1, 0; }"}, {"1, 1, 1; }", "1, 1, 0; }"},
      {"{ .reg", ".reg"},      {"{%0", "%0"},
  };
  int texts = 0;
  const auto change = [&](const Case& c, const auto& all_changes) {
    const Result expected = c.run(c.text);
    for (const auto& [from, to] : all_changes) {
      std::string mutant = c.text;
      size_t at = mutant.find(from);
      if (at == std::string::npos) continue;
      for (; at != std::string::npos; at = mutant.find(from, at + std::strlen(to) + 1)) {
        mutant.replace(at, std::strlen(from), to);
      }
      if (mutant == c.text) continue;
      ++texts;
      EXPECT_NE(c.run(mutant), expected) << mutant;
    }
  };
  for (const Case& c : kCases) change(c, changes);
  for (const Case& c : kProductCases) change(c, product_changes);
  EXPECT_GT(texts, 90);
}

TEST(Ptx, FindingsSayWhatIsWrong) {
  const auto message = [](const RunText& run, const std::string& text) {
    EXPECT_TRUE(run(text).empty()) << text;
    return Findings().empty() ? "" : Findings()[0].message;
  };
  EXPECT_THAT(message(&Function, "sin.approx.ftz.f32 %0, %1;"),
              HasSubstr("executes the instruction sin.approx.ftz.f32, which the simulator does not "
                        "know"));
  EXPECT_EQ(Findings()[0].kind, FindingKind::kBadInstruction);
  EXPECT_THAT(message(&Function, "ex2.approx.ftz.f32 %1, %0;"),
              HasSubstr("ex2.approx.ftz.f32 writes operand %1, which its constraint forbids"));
  EXPECT_THAT(message(&CopyAsync, "cp.async.cg.shared.global.L2::128B [%1], [%0], 16, %2;"),
              HasSubstr("with the operands [l],[r],16,r; it has [r],[l],16,r"));
  EXPECT_THAT(message(&CopyAsync, "cp.async.cg.shared.global.L2::128B [%2], [%1], 16, %0;"),
              HasSubstr("cp.async.cg.shared.global.L2::128B of "));
  const RunText sets = [](const std::string& text) {
    const bool ok = RunGroup([&](int, char*) { ExecutePtx(Literal(text), PtxOperand("n", 20)); });
    return ok ? Result{1} : Result();
  };
  EXPECT_THAT(message(sets, TFB_PTX_MORE_REGISTERS),
              HasSubstr("of 20 registers; allowed are multiples of 8 from 24 to 256"));
  EXPECT_THAT(
      message(sets, "{ .reg .pred p; bar.sync %0, 32; }"),
      HasSubstr("\"{ .reg .pred p; bar.sync %0, 32; }\", which the simulator does not know"));
}

// ---- Sums of mma ----

// Returns the sum of products of powers of two and others, where a product's exponent is that of its
// own significand from 1 to below 2.
double Truncated(const std::vector<double>& values, int fraction_bits) {
  std::vector<MmaTerm> terms;
  for (const double value : values) terms.push_back({value, std::ilogb(value)});
  return TruncatedSum(terms.data(), static_cast<int>(terms.size()), fraction_bits);
}

TEST(MmaSums, AStepCutsEachTermBelowTheLargestExponentAndTheSumToAFloat) {
  const double unit = std::ldexp(1, -24);
  EXPECT_EQ(Truncated({1.5, 0.25, 2}, 24), 3.75);
  EXPECT_EQ(Truncated({1, unit, unit}, 24), 1 + 2 * unit);
  EXPECT_EQ(Truncated({1, unit}, 24), 1);                                    // a float has 23 bits
  EXPECT_EQ(Truncated({1, unit / 2, unit / 2, unit / 2, unit / 2}, 24), 1);  // each cut by itself
  EXPECT_EQ(Truncated({1, unit / 2, unit / 2, unit / 2, unit / 2}, 25), 1 + 2 * unit);
  EXPECT_EQ(Truncated({-1, -unit, -unit * 1.99}, 24), -1 - 2 * unit);  // towards zero
  EXPECT_EQ(Truncated({1, -1, 0.75 * unit}, 24), 0);                   // lost beside what cancels
  EXPECT_EQ(Truncated({1, -1, 1.75 * unit}, 24), unit);
  EXPECT_EQ(Truncated({1, -1, -1.75 * unit}, 24), -unit);
  EXPECT_EQ(Truncated({3, 3, unit}, 24), 6);
  EXPECT_EQ(Truncated({INFINITY, 1}, 24), INFINITY);
  EXPECT_TRUE(std::isnan(Truncated({INFINITY, -INFINITY}, 24)));
  EXPECT_TRUE(std::isnan(Truncated({NAN, 1}, 24)));
}

// Returns c plus the sum of 16 products of numbers in bf16.
double MmaOn(const char* gpu, MmaSums sums, const std::array<float, 16>& a,
             const std::array<float, 16>& b, float c) {
  Settings settings;
  settings.gpu = *FindGpu(gpu);
  settings.mma_sums = sums;
  Configure(settings);
  const auto pair = [](const std::array<float, 16>& numbers, int k) {
    const unsigned low = __float2bfloat16_rn(numbers[k]).bits;
    const unsigned high = __float2bfloat16_rn(numbers[k + 1]).bits;
    return low | high << 16;
  };
  const Result result = MmaBy([&](float d[4], const unsigned*, const unsigned*) {
    const int t = LaneId() % 4 * 2;
    const unsigned rows[4] = {pair(a, t), pair(a, t), pair(a, t + 8), pair(a, t + 8)};
    const unsigned columns[2] = {pair(b, t), pair(b, t + 8)};
    for (int n = 0; n < 4; ++n) d[n] = c;
    tfb::MmaM16N8K16Bf16(d, rows, columns);
  });
  Configure({});
  EXPECT_FALSE(result.empty());
  for (const unsigned bits : result) EXPECT_EQ(bits, result[0]);
  return __uint_as_float(result[0]);
}

TEST(MmaSums, StepsAndBitsAreThoseOfTheGpu) {
  constexpr float kUnit = 0x1p-24f;
  std::array<float, 16> ones, apart = {}, small = {};
  ones.fill(1);
  apart[7] = apart[8] = kUnit;  // in both halves
  for (int k = 8; k < 16; ++k) small[k] = kUnit / 2;
  for (const char* gpu : {"sm_80", "sm_89"}) {
    EXPECT_EQ(MmaOn(gpu, MmaSums::kRounded, ones, apart, 1), 1 + 2 * kUnit);
    EXPECT_EQ(MmaOn(gpu, MmaSums::kTruncated, ones, apart, 1), 1);  // a sum after 8 products
    EXPECT_EQ(MmaOn(gpu, MmaSums::kTruncated, ones, small, 1), 1);
  }
  EXPECT_EQ(MmaOn("sm_90", MmaSums::kTruncated, ones, apart, 1), 1 + 2 * kUnit);
  EXPECT_EQ(MmaOn("sm_90", MmaSums::kTruncated, ones, small, 1), 1 + 4 * kUnit);
}

TEST(MmaSums, AProductHasTheSumOfItsFactorsExponents) {
  // 1.5 * 1.5 = 2.25 has the exponent 0 here, so that 2^-24 is kept beside it.
  const std::array<float, 16> a = {1.5f, 1.5f, 1}, b = {1.5f, -1.5f, 0x1p-24f};
  EXPECT_EQ(MmaOn("sm_80", MmaSums::kTruncated, a, b, 0), 0x1p-24);
  const std::array<float, 16> wide = {2, 2, 1};
  EXPECT_EQ(MmaOn("sm_80", MmaSums::kTruncated, wide, b, 0), 0);
}

// Two products of 64 x 16 numbers in registers and 16 x 64 in swizzled rows: Products above.
TEST(MmaSums, ProductsOfWarpGroupsHaveThem) {
  const std::vector<unsigned> pairs = RandomPairs(kGroupBytes / 4, 11);
  const auto half = [&](int n) {
    return __half2float({static_cast<unsigned short>(pairs[n / 2] >> 16 * (n % 2))});
  };
  for (const MmaSums sums : {MmaSums::kRounded, MmaSums::kTruncated}) {
    Settings settings;
    settings.gpu = *FindGpu("sm_90");
    settings.mma_sums = sums;
    Configure(settings);
    const Result result = In(&Products<__half, 64>, "none", "").run_header();
    Configure({});
    ASSERT_FALSE(result.empty()) << cudaGetErrorString(cudaErrorLaunchFailure);
    for (int i = 0; i < kGroupThreads * 32; ++i) {
      const int t = i / 32, n = i % 32;
      const int row = t % 32 / 4 + n / 2 % 2 * 8;  // of the warp's 16
      const int column = n / 4 * 8 + t % 4 * 2 + n % 2;
      float sum = static_cast<float>(i) / 3;
      for (int product = 0; product < 2; ++product) {
        MmaTerm terms[17];
        double exact = sum;
        for (int k = 0; k < 16; ++k) {
          const int holder = t / 32 * 32 + row % 8 * 4 + k % 8 / 2;
          const double a = half((holder * 4 + row / 8 + k / 8 * 2) * 2 + k % 2);
          const double b = half(k * 64 + ((column / 8) ^ (k % 8)) * 8 + column % 8);
          terms[k] = {a * b, std::ilogb(a) + std::ilogb(b)};
          exact += a * b;
        }
        terms[16] = {sum, sum == 0 ? -126 : std::ilogb(sum)};
        sum = sums == MmaSums::kRounded ? static_cast<float>(exact) : TruncatedSum(terms, 17, 25);
      }
      ASSERT_EQ(__uint_as_float(result[i]), sum) << t << ", " << n;
    }
  }
}

TEST(MmaSums, AreWithinTheirBoundOfTheRoundedOnes) {
  EXPECT_EQ(Settings().mma_sums, MmaSums::kRounded);
  for (const char* type : {TFB_PTX_MMA("bf16"), TFB_PTX_MMA("f16")}) {
    for (const Gpu& gpu : kGpus) {
      const Result rounded = Mma(type);
      Settings settings;
      settings.gpu = gpu;
      settings.mma_sums = MmaSums::kTruncated;
      Configure(settings);
      const Result truncated = Mma(type);
      Configure({});
      ASSERT_EQ(rounded.size(), truncated.size());
      int different = 0;
      for (size_t n = 0; n < rounded.size(); ++n) {
        const double exact = __uint_as_float(rounded[n]), cut = __uint_as_float(truncated[n]);
        different += exact != cut;
        // A step cuts each of its terms, and its sum; all are below 128.
        const int cuts = 16 / gpu.mma_step_products * (gpu.mma_step_products + 2);
        EXPECT_LE(std::abs(exact - cut), cuts * std::ldexp(64, -23));
      }
      EXPECT_GT(different, 0) << gpu.name;
    }
  }
}

}  // namespace
}  // namespace cuda_simulator
