// Tests the gradients of a product's parameters on a CUDA device against their formula in float64.
// layer_gradients_test.cc tests them on the CPU.
#include "core/layers/matmul_gradient.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/cuda/device_array.h"
#include "core/cuda/mirror.h"
#include "core/cuda/simulator/simulator.h"
#include "core/layers/listed_testing.h"
#include "core/random.h"
#include "core/status.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Sizes {
  int64_t batch;
  int64_t tokens;
  int64_t in;
  int64_t out;
  DType x = DType::kF32;
  DType dy = DType::kF32;

  std::string text() const {
    return absl::StrCat(batch, " x ", tokens, " rows, ", in, " of ", Name(x), " to ", out, " of ",
                        Name(dy));
  }
};

// Views of a call in host memory. Tokens that are padding have NaN in x, and 0 in dy.
struct Tensors {
  explicit Tensors(const Sizes& s)
      // Batch rows lie apart, as those of a part of a list do, and channels of dy, as those of one
      // projection among several do.
      : x_memory(s.x, {s.batch, s.tokens + 1, s.in}),
        dy_memory(s.dy, {s.batch, s.tokens, 3 * s.out}),
        x(Slice(x_memory.view(), 1, 1, s.tokens)),
        dy(Slice(dy_memory.view(), 2, s.out, s.out)),
        weights(DType::kF32, {s.out, s.in}),
        bias(DType::kF32, {s.out}) {
    FillNormal(&x_memory, 1, "x");
    FillNormal(&dy_memory, 2, "dy");
    FillNormal(&weights, 3, "weights");
    FillNormal(&bias, 4, "bias");
    Fill(Slice(x_memory.view(), 1, 0, 1), kNan);
    // With 33 tokens these are rows 3, 17, 32 and so on: every pair of bits of an operand has some.
    for (const int64_t token : {3, 17, 32}) {
      if (token >= s.tokens) continue;
      Fill(Slice(x, 1, token, 1), kNan);
      Fill(Slice(dy, 1, token, 1), token == 17 ? -0.0 : 0.0);
    }
  }
  Tensors(const Tensors& other)
      : x_memory(other.x_memory.Clone()),
        dy_memory(other.dy_memory.Clone()),
        x(Slice(x_memory.view(), 1, 1, other.x.dim(1))),
        dy(Slice(dy_memory.view(), 2, other.dy.dim(2), other.dy.dim(2))),
        weights(other.weights.Clone()),
        bias(other.bias.Clone()) {}
  MatMulGradientCall call() {
    MatMulGradientCall call;
    call.x = x;
    call.dy = dy;
    call.weights = Transpose(weights.view(), 0, 1);
    call.bias = bias.view();
    return call;
  }
  Tensor x_memory, dy_memory;
  TensorView x, dy;
  Tensor weights, bias;
};

// [rows, channels] in float64
struct Rows {
  explicit Rows(const ConstTensorView& view)
      : channels(view.dim(view.rank - 1)),
        count(channels == 0 ? 0 : view.num_elements() / channels),
        values(view.num_elements()) {
    CopyElements(view, TensorView(values.data(), DType::kF64, view.shape()));
  }
  double at(int64_t r, int64_t c) const { return values[r * channels + c]; }
  int64_t channels;
  int64_t count;
  std::vector<double> values;
};

struct Gradients {
  std::vector<double> weights;  // [in, out]
  std::vector<double> bias;
};
Gradients Define(const MatMulGradientCall& call) {
  const Rows x(call.x), dy(call.dy);
  Gradients sums = {std::vector<double>(x.channels * dy.channels),
                    std::vector<double>(dy.channels)};
  for (int64_t r = 0; r < dy.count; ++r) {
    for (int64_t c = 0; c < dy.channels; ++c) sums.bias[c] += dy.at(r, c);
    const double* row = dy.values.data() + r * dy.channels;
    if (std::all_of(row, row + dy.channels, [](double value) { return value == 0; })) continue;
    for (int64_t k = 0; k < x.channels; ++k) {
      for (int64_t c = 0; c < dy.channels; ++c) {
        sums.weights[k * dy.channels + c] += x.at(r, k) * row[c];
      }
    }
  }
  for (double& sum : sums.bias) sum *= call.bias_sign;
  const auto add = [](const ConstTensorView& before, std::vector<double>* sums) {
    const Rows values(before);
    for (size_t n = 0; n < sums->size(); ++n) (*sums)[n] += values.values[n];
  };
  if (call.accumulate) {
    if (!call.weights.empty()) add(call.weights, &sums.weights);
    if (!call.bias.empty()) add(call.bias, &sums.bias);
  }
  return sums;
}

// Copies a view to memory that is as well aligned as its own, up to 16 bytes.
absl::StatusOr<ConstTensorView> CopyAsAligned(const ConstTensorView& host, DeviceMirror* mirror) {
  const auto bytes = static_cast<int64_t>(reinterpret_cast<uintptr_t>(host.data) % 16);
  Shape shape = host.shape(), strides(host.strides.begin(), host.strides.begin() + host.rank);
  shape.insert(shape.begin(), 2);
  strides.insert(strides.begin(), bytes / SizeOf(host.dtype));
  TFB_ASSIGN_OR_RETURN(
      const ConstTensorView from_16,
      mirror->Copy({static_cast<const std::byte*>(host.data) - bytes, host.dtype, shape, strides}));
  ConstTensorView copy = host;
  copy.data = static_cast<const std::byte*>(from_16.data) + bytes;
  return copy;
}

// Returns flags of each n-th of the rows.
Flags EveryNth(int64_t rows, int64_t n) {
  Flags flags(rows, 0);
  for (int64_t row = n - 1; row < rows; row += n) flags[row] = 1;
  return flags;
}

// Runs a call of all rows, or of those that the flags list.
absl::Status RunOnCuda(MatMulGradientCall call, const Flags& flags = {}) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(KernelDevice()));
  DeviceMirror mirror(runtime);
  const int64_t in = call.x.dim(call.x.rank - 1), out = call.dy.dim(call.dy.rank - 1);
  const int64_t rows = call.x.rank == 2 ? call.x.dim(0) : call.x.dim(0) * call.x.dim(1);
  TFB_ASSIGN_OR_RETURN(call.x, CopyAsAligned(call.x, &mirror));
  TFB_ASSIGN_OR_RETURN(call.dy, CopyAsAligned(call.dy, &mirror));
  TFB_ASSIGN_OR_RETURN(call.weights, mirror.CopyForWriting(call.weights));
  TFB_ASSIGN_OR_RETURN(call.bias, mirror.CopyForWriting(call.bias));
  const auto bytes =
      static_cast<int64_t>(MatMulGradientWorkspaceBytes(KernelDevice(), rows, in, out, 1));
  std::optional<Listed> listed;
  if (!flags.empty()) {
    listed.emplace(KernelDevice(), flags, call.x.rank == 2 ? 1 : call.x.dim(0));
    call.rows = listed->list;
  }
  TFB_ASSIGN_OR_RETURN(const DeviceArray<char> memory,
                       DeviceArray<char>::Allocate(KernelDevice(), bytes));
  Execution execution;
  execution.workspace = absl::MakeSpan(reinterpret_cast<std::byte*>(memory.mutable_data()), bytes);
  TFB_RETURN_IF_ERROR(MatMulGradient(KernelDevice(), call, execution));
  return mirror.CopyBack();
}

double LargestDifference(const ConstTensorView& found, const std::vector<double>& expected) {
  const Rows values(found);
  double largest = 0;
  for (size_t n = 0; n < expected.size(); ++n) {
    const double difference = std::abs(values.values[n] - expected[n]);
    if (std::isnan(difference)) return difference;
    largest = std::max(largest, difference);
  }
  return largest;
}

// The products of a step's 16 or 32 rows, of order 1, have a sum of order 4, which is rounded once or
// twice by 2^-24 of that. The sum over n rows is of order sqrt(n), and is rounded by as much of it for
// each of n / 16 steps. Planes of a number leave nothing out that counts beside these. The tensor cores
// of a GPU cut the sum of a step where the simulator rounds it, by twice as much, and up to four times.
double Bound(int64_t rows) {
  const bool is_cut =
      KernelDevice() == Device::kCuda ||
      cuda_simulator::CurrentSettings().mma_sums == cuda_simulator::MmaSums::kTruncated;
  const auto n = static_cast<double>(rows);
  return is_cut ? 0x1p-23 * (n + 32) : 0x1p-24 * (n + 16);
}

// Has the simulator do what it does by default again at its end.
class SimulatorAs {
 public:
  explicit SimulatorAs(const cuda_simulator::Settings& settings) {
    cuda_simulator::Configure(settings);
  }
  ~SimulatorAs() { cuda_simulator::Configure({}); }
};

void ExpectTheFormula(const MatMulGradientCall& call, int64_t rows) {
  const Gradients expected = Define(call);
  ASSERT_EQ(RunOnCuda(call), absl::OkStatus());
  if (!call.weights.empty()) {
    EXPECT_LE(LargestDifference(call.weights, expected.weights), Bound(rows));
  }
  if (!call.bias.empty()) {
    EXPECT_LE(LargestDifference(call.bias, expected.bias), Bound(rows));
  }
}

void ExpectTheFormula(const Sizes& s, bool accumulate, float bias_sign) {
  SCOPED_TRACE(s.text());
  Tensors tensors(s);
  MatMulGradientCall call = tensors.call();
  call.accumulate = accumulate;
  call.bias_sign = bias_sign;
  ExpectTheFormula(call, s.batch * s.tokens);
}

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

void ExpectTheFormulaInEveryDtype(Sizes s) {
  for (const DType x : kDTypes) {
    for (const DType dy : kDTypes) {
      s.x = x;
      s.dy = dy;
      ExpectTheFormula(s, /*accumulate=*/x == dy, x == dy ? -1 : 1);
    }
  }
}

// Tiles are 128 x 128, and 64 x 128 of operands that are split; steps have 32 and 16 rows. Channels of
// a multiple of 8 are read in vectors where the others are not.
TEST(MatMulGradientOnCuda, IsItsFormulaInEveryDtypeAcrossTiles) {
  for (const Sizes& s :
       {Sizes{1, 1, 1, 1}, Sizes{2, 5, 3, 2}, Sizes{1, 16, 64, 64}, Sizes{3, 11, 65, 5},
        Sizes{2, 17, 7, 130}, Sizes{1, 33, 136, 136}, Sizes{2, 49, 72, 264}, Sizes{1, 100, 200, 8},
        Sizes{3, 35, 8, 80}, Sizes{2, 33, 20, 12}}) {
    ExpectTheFormulaInEveryDtype(s);
  }
}

TEST(MatMulGradientOnCuda, IsItsFormulaWhereTensorCoresCutSums) {
  cuda_simulator::Settings settings;
  settings.mma_sums = cuda_simulator::MmaSums::kTruncated;
  const SimulatorAs cutting(settings);
  for (const Sizes& s : {Sizes{1, 33, 136, 136}, Sizes{3, 35, 8, 80}}) {
    ExpectTheFormulaInEveryDtype(s);
  }
}

TEST(MatMulGradientOnCuda, AddsChunksOfManyRows) {
  ExpectTheFormula({2, 1025, 5, 3}, /*accumulate=*/false, 1);
  ExpectTheFormula({1, 4097, 2, 1}, /*accumulate=*/true, -1);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    ExpectTheFormula({3, 417, 16, 8, dtype, dtype}, /*accumulate=*/false, 1);
  }
}

TEST(MatMulGradientOnCuda, WithoutRowsIsZero) {
  for (const DType dtype : kDTypes) {
    ExpectTheFormula({0, 5, 8, 16, dtype, dtype}, /*accumulate=*/false, 1);
    ExpectTheFormula({0, 5, 8, 16, dtype, dtype}, /*accumulate=*/true, 1);
  }
}

TEST(MatMulGradientOnCuda, WithoutRowsReadsNoList) {
  const auto unwritten = DeviceArray<int32_t>::Allocate(KernelDevice(), 2).value();
  Tensors tensors({0, 5, 8, 16});
  MatMulGradientCall call = tensors.call();
  call.rows.rows = unwritten.data();
  call.rows.count = unwritten.data() + 1;
  ExpectTheFormula(call, 0);
}

TEST(MatMulGradientOnCuda, OfWeightsOrBiasAlone) {
  for (const DType dtype : kDTypes) {
    for (const bool of_weights : {false, true}) {
      Tensors tensors({2, 300, 24, 40, dtype, dtype});
      MatMulGradientCall call = tensors.call();
      (of_weights ? call.bias : call.weights) = {};
      ExpectTheFormula(call, 600);
    }
  }
}

// Rows that are not whole vectors, or do not begin at one, are read one number at a time.
TEST(MatMulGradientOnCuda, ReadsRowsOfAnyStride) {
  constexpr int64_t kBatch = 2, kTokens = 20, kIn = 16, kOut = 24;
  struct Layout {
    int64_t first;
    int64_t of_batch, of_token, of_channel;
  };
  for (const DType dtype : kDTypes) {
    Tensor x(dtype, {4000}), dy(dtype, {4000});
    Tensor weights(DType::kF32, {kIn, kOut}), bias(DType::kF32, {kOut});
    FillNormal(&x, 1, "x");
    FillNormal(&dy, 2, "dy");
    const auto view = [](const Tensor& memory, const Layout& layout, int64_t channels) {
      return ConstTensorView(
          memory.view().At<std::byte>(0) + layout.first * SizeOf(memory.view().dtype),
          memory.view().dtype, {kBatch, kTokens, channels},
          {layout.of_batch, layout.of_token, layout.of_channel});
    };
    const Layout aligned = {8, 800, 40, 1};
    for (const Layout& layout :
         {Layout{1, 800, 40, 1}, Layout{2, 800, 40, 1}, Layout{4, 800, 40, 1},
          Layout{8, 804, 40, 1}, Layout{8, 801, 40, 1}, Layout{8, 840, 42, 1},
          Layout{8, 840, 33, 1}, Layout{8, 0, 40, 1}, Layout{8, 1600, 80, 2},
          Layout{8, 1600, 1, 40}}) {
      ExpectTheFormula({view(x, layout, kIn), view(dy, aligned, kOut), weights.view(), bias.view()},
                       40);
      ExpectTheFormula({view(x, aligned, kIn), view(dy, layout, kOut), weights.view(), bias.view()},
                       40);
    }
  }
}

// All places that a number of x can have in the registers of a lane: 16 or 32 rows, 32 or 64 channels.
TEST(MatMulGradientOnCuda, ANumberThatIsNotFiniteInARowWithoutGradientReachesNothing) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t row : {4, 12, 21, 29}) {
      for (const int64_t channel : {2, 10, 18, 26, 40, 48, 56}) {
        Tensors tensors({1, 32, 64, 8, dtype, dtype});
        Fill(tensors.x_memory.view(), 1);
        Fill(Slice(tensors.dy, 1, row, 1), 0);
        tensors.x.Set(tensors.x.Offset(0, row, channel), kNan);
        ExpectTheFormula(tensors.call(), 32);
      }
    }
  }
}

TEST(MatMulGradientOnCuda, AGradientInOneColumnIsEnough) {
  for (const DType dtype : kDTypes) {
    for (const int64_t column : {0, 63, 64, 127, 128}) {
      Tensors tensors({1, 5, 8, 136, dtype, dtype});
      tensors.dy.Set(tensors.dy.Offset(0, 3, column), 1);  // where all of x is NaN
      const MatMulGradientCall call = tensors.call();
      ASSERT_EQ(RunOnCuda(call), absl::OkStatus());
      const Rows found(call.weights);
      for (int64_t k = 0; k < 8; ++k) {
        EXPECT_TRUE(std::isnan(found.at(k, column))) << k << ", " << column;
        EXPECT_TRUE(std::isfinite(found.at(k, column < 128 ? 128 : 0))) << k;
      }
    }
  }
}

// A number of x that is not finite is in the sums of its channel, in columns in which its row has a
// gradient, and in no others.
TEST(MatMulGradientOnCuda, NumbersThatAreNotFiniteReachTheirChannelAlone) {
  for (const DType x : kDTypes) {
    for (const DType dy : kDTypes) {
      for (const double value : {kNan, kInfinity, -kInfinity}) {
        Tensors tensors({1, 40, 136, 136, x, dy});
        const MatMulGradientCall call = tensors.call();
        tensors.x.Set(tensors.x.Offset(0, 20, 70), value);
        ASSERT_EQ(RunOnCuda(call), absl::OkStatus());
        const Rows found(call.weights);
        for (int64_t k = 0; k < 136; ++k) {
          for (int64_t c = 0; c < 136; ++c) {
            ASSERT_EQ(std::isfinite(found.at(k, c)), k != 70) << k << ", " << c;
          }
        }
      }
    }
  }
}

void ExpectTheSameBits(const Tensors& first, const Tensors& second) {
  EXPECT_EQ(std::memcmp(first.weights.raw(), second.weights.raw(), first.weights.bytes()), 0);
  EXPECT_EQ(std::memcmp(first.bias.raw(), second.bias.raw(), first.bias.bytes()), 0);
}

TEST(MatMulGradientOnCuda, ItsBitsAreTheSameInEveryRun) {
  for (const DType dtype : kDTypes) {
    for (const bool is_listed : {false, true}) {
      const Sizes s = {2, 300, 136, 24, dtype, dtype};
      const Flags flags = is_listed ? EveryNth(600, 2) : Flags();
      Tensors first(s), second(first);
      ASSERT_EQ(RunOnCuda(first.call(), flags), absl::OkStatus());
      cuda_simulator::Settings settings;
      settings.seed = 77;  // blocks and threads run in another order
      const SimulatorAs shuffling(settings);
      ASSERT_EQ(RunOnCuda(second.call(), flags), absl::OkStatus());
      ExpectTheSameBits(first, second);
    }
  }
}

// ---- Listed rows ----

// Makes rows beside a list NaN, which nothing may read.
void FillBeside(const Sizes& s, const Flags& flags, Tensors* tensors) {
  for (int64_t row = 0; row < s.batch * s.tokens; ++row) {
    if (flags[row] != 0) continue;
    for (const TensorView& view : {tensors->x, tensors->dy}) {
      Fill(Slice(Slice(view, 0, row / s.tokens, 1), 1, row % s.tokens, 1), kNan);
    }
  }
}

// Returns a call on copies of the listed rows, [rows, in] and [rows, out], in their order, whose memory
// has `rows` rows; rows beyond the listed ones are 0.
struct Gathered {
  Gathered(const Sizes& s, const Flags& flags, int64_t rows, Tensors* from)
      : x(s.x, {rows, s.in}), dy(s.dy, {rows, s.out}), call(from->call()) {
    for (size_t row = 0; row < flags.size(); ++row) {
      if (flags[row] == 0) continue;
      const int64_t b = static_cast<int64_t>(row) / s.tokens,
                    t = static_cast<int64_t>(row) % s.tokens;
      for (const auto& [view, to] : {std::pair(from->x, &x), std::pair(from->dy, &dy)}) {
        const int64_t channels = view.dim(2);
        CopyElements(ConstTensorView(Slice(Slice(view, 0, b, 1), 1, t, 1)),
                     TensorView(Slice(to->view(), 0, count, 1).mutable_data(), view.dtype,
                                {1, 1, channels}));
      }
      ++count;
    }
    call.x = x.view();
    call.dy = dy.view();
  }
  Tensor x, dy;
  int64_t count = 0;
  MatMulGradientCall call;
};

int64_t CountOf(const Flags& flags) {
  return std::accumulate(flags.begin(), flags.end(), int64_t{0});
}

// Up to 256 rows are one chunk, and have the bits of the same rows side by side.
TEST(MatMulGradientOnCuda, ListedRowsHaveTheBitsOfAProductOfThemAlone) {
  for (Sizes s : {Sizes{2, 100, 24, 40}, Sizes{3, 27, 136, 136}, Sizes{2, 49, 7, 130}}) {
    const int64_t rows = s.batch * s.tokens;
    std::vector<Flags> lists = {Flags(rows, 0), Flags(rows, 1), EveryNth(rows, 2),
                                EveryNth(rows, 3)};
    for (const int64_t count : {1, 15, 16, 17, 31, 32, 33}) {
      Flags flags(rows, 0);
      for (int64_t n = 0; n < count; ++n) flags[rows - 1 - n * rows / count] = 1;
      lists.push_back(flags);
    }
    for (const DType x : kDTypes) {
      for (const DType dy : kDTypes) {
        if (s.in > 128 && x != dy) continue;  // rows of two dtypes are read alike in every tile
        s.x = x;
        s.dy = dy;
        const Tensors drawn(s);
        for (const Flags& flags : lists) {
          SCOPED_TRACE(absl::StrCat(s.text(), ", ", CountOf(flags), " listed"));
          Tensors listed(drawn), alone(drawn);
          FillBeside(s, flags, &listed);
          MatMulGradientCall call = listed.call();
          Gathered gathered(s, flags, CountOf(flags), &alone);
          for (MatMulGradientCall* each : {&call, &gathered.call}) {
            each->accumulate = x == dy;
            each->bias_sign = x == dy ? -1 : 1;
          }
          ASSERT_EQ(RunOnCuda(call, flags), absl::OkStatus());
          ASSERT_EQ(RunOnCuda(gathered.call), absl::OkStatus());
          ExpectTheSameBits(listed, alone);
        }
      }
    }
  }
}

TEST(MatMulGradientOnCuda, ListedRowsAreCutIntoChunksByTheirNumber) {
  const Sizes s = {3, 1025, 5, 3};  // 13 chunks
  const int64_t rows = s.batch * s.tokens;
  for (const Flags& flags :
       {Flags(rows, 1), EveryNth(rows, 2), EveryNth(rows, 50), EveryNth(rows, rows)}) {
    SCOPED_TRACE(CountOf(flags));
    Tensors listed(s), first(s), defined(s);
    FillBeside(s, flags, &listed);
    ASSERT_EQ(RunOnCuda(listed.call(), flags), absl::OkStatus());
    // It does not matter where the rows lie.
    const Gathered gathered(s, flags, rows, &first);
    Flags first_ones(rows, 0);
    std::fill_n(first_ones.begin(), gathered.count, 1);
    ASSERT_EQ(RunOnCuda(gathered.call, first_ones), absl::OkStatus());
    ExpectTheSameBits(listed, first);
    const Gradients expected = Define(Gathered(s, flags, gathered.count, &defined).call);
    EXPECT_LE(LargestDifference(listed.call().weights, expected.weights), Bound(gathered.count));
  }
}

TEST(MatMulGradientOnCuda, AListOfAllRowsHasTheBitsOfNone) {
  for (const DType dtype : kDTypes) {
    const Sizes s = {2, 300, 24, 40, dtype, dtype};  // 3 chunks
    Tensors listed(s), all(s);
    ASSERT_EQ(RunOnCuda(listed.call(), Flags(600, 1)), absl::OkStatus());
    ASSERT_EQ(RunOnCuda(all.call()), absl::OkStatus());
    ExpectTheSameBits(listed, all);
  }
}

// Beside the rows' loads and stores there are those of dW and db.
TEST(MatMulGradientOnCuda, AccessesFallWithTheRowsThatAreListed) {
  if (KernelDevice() != Device::kSimulator) GTEST_SKIP() << "the simulator alone counts accesses";
  for (const DType dtype : kDTypes) {
    const Sizes s = {1, 2048, 64, 64, dtype, dtype};
    const auto accesses = [&](const Flags& flags) {
      Tensors tensors(s);
      const int64_t before = cuda_simulator::TotalCounts().accesses;
      EXPECT_EQ(RunOnCuda(tensors.call(), flags), absl::OkStatus());
      return static_cast<double>(cuda_simulator::TotalCounts().accesses - before);
    };
    const double of_none = accesses(Flags(2048, 0)), of_all = accesses(Flags(2048, 1)) - of_none;
    EXPECT_LE(of_none / of_all, 0.22);
    EXPECT_NEAR((accesses(EveryNth(2048, 2)) - of_none) / of_all, 1.0 / 2, 0.01);
    EXPECT_NEAR((accesses(EveryNth(2048, 8)) - of_none) / of_all, 1.0 / 8, 0.01);
  }
}

// Tensor cores cut sums towards zero, which must not add up along the rows: sums of positive numbers
// are all cut one way. A step's sum is cut by half of 2^-23 of it on average, once or twice, or twice as
// often on sm_80, and its products by half of that together: by 6 times 2^-24 at most. Additions are
// rounded both ways. Sums of tensor cores over all rows of a chunk, 256, would be off by 20 times 2^-24.
TEST(MatMulGradientOnCuda, CutsOfTensorCoresDoNotAddUp) {
  cuda_simulator::Settings settings;
  settings.mma_sums = cuda_simulator::MmaSums::kTruncated;
  const SimulatorAs cutting(settings);
  for (const DType dtype : kDTypes) {
    constexpr int64_t kRows = 4096;
    Tensor x(dtype, {kRows, 8}), dy(dtype, {kRows, 8});
    FillUniform(&x, 1, "x", 1, 2);
    FillUniform(&dy, 2, "dy", 1, 2);
    Tensor weights(DType::kF32, {8, 8});
    const MatMulGradientCall call = {x.view(), dy.view(), weights.view(), {}};
    ASSERT_EQ(RunOnCuda(call), absl::OkStatus());
    const std::vector<double> expected = Define(call).weights;
    EXPECT_LE(LargestDifference(weights.view(), expected),
              8 * 0x1p-24 * *std::max_element(expected.begin(), expected.end()));
  }
}

TEST(MatMulGradientOnCuda, WarpsMeetNoBankTwice) {
  if (KernelDevice() != Device::kSimulator) GTEST_SKIP() << "the simulator counts bank conflicts";
  cuda_simulator::Settings settings;
  settings.counts_bank_conflicts = true;
  const SimulatorAs counting(settings);
  cuda_simulator::TakeBankUses();
  for (const DType dtype : kDTypes) {
    Tensors tensors({1, 64, 128, 128, dtype, dtype});
    ASSERT_EQ(RunOnCuda(tensors.call()), absl::OkStatus());
  }
  const std::vector<cuda_simulator::BankUse> uses = cuda_simulator::TakeBankUses();
  EXPECT_FALSE(uses.empty());
  for (const cuda_simulator::BankUse& use : uses) {
    EXPECT_EQ(use.extra, 0) << cuda_simulator::Describe(uses);
  }
}

TEST(MatMulGradientOnCuda, ItsWorkspaceIsThatOfFewChunksAndDoesNotShrinkWithMoreRows) {
  const auto chunks = [](int64_t rows, int64_t width) {
    const size_t bytes = MatMulGradientWorkspaceBytes(KernelDevice(), rows, width, width, 1);
    return bytes / ((width + 1) * width * sizeof(float));
  };
  EXPECT_EQ(chunks(256, 200), 1);
  EXPECT_EQ(chunks(257, 200), 2);
  EXPECT_EQ(chunks(1 << 20, 200), 1 << 9);   // of 2048 rows
  EXPECT_EQ(chunks(1 << 16, 1000), 1 << 5);  // of 2048 rows
  EXPECT_EQ(chunks(2048, 1000), 4);          // a GPU has 256 tiles
  for (const int64_t width : {1, 200, 1000}) {
    size_t before = 0;
    for (int64_t rows = 0; rows < 10000; ++rows) {
      const size_t bytes = MatMulGradientWorkspaceBytes(KernelDevice(), rows, width, width, 1);
      ASSERT_GE(bytes, before) << rows << " rows of " << width;
      before = bytes;
    }
  }
}

}  // namespace
}  // namespace tfb
