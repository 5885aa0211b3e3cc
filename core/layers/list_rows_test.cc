// Compares work on lists of rows with the same work on all rows, bit by bit.
#include "core/layers/list_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "core/cuda/mirror.h"
#include "core/cuda/runtime.h"
#include "core/cuda/simulator/simulator.h"
#include "core/layers/feed_forward.h"
#include "core/layers/layer_norm.h"
#include "core/layers/layers_cuda.h"
#include "core/layers/listed_testing.h"
#include "core/layers/matmul.h"
#include "core/layers/matmul_gradient.h"
#include "core/random.h"
#include "core/tensor.h"
#include "core/tested_devices.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

#define ASSERT_OK(expression) ASSERT_EQ((expression), absl::OkStatus())

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Tensor Random(std::initializer_list<int64_t> shape, uint64_t seed) {
  Tensor tensor(DType::kF32, shape);
  FillNormal(&tensor, seed, "test");
  return tensor;
}

class ListRowsOn : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    const absl::StatusOr<CudaRuntime*> runtime = CudaRuntime::For(GetParam());
    ASSERT_TRUE(runtime.ok()) << runtime.status();
  }
  Device device() const { return GetParam(); }
};

// Blocks of the kernel have 1024 rows, its threads 4.
TEST_P(ListRowsOn, NamesTheRowsInTheirOrderAndWhereEachBatchRowBegins) {
  struct Case {
    int64_t batch, tokens;
    int one_in;
  };
  for (const Case& c : std::vector<Case>{{1, 1, 1},
                                         {3, 1, 2},
                                         {2, 7, 3},
                                         {1, 1024, 2},
                                         {5, 205, 1},
                                         {1, 1025, 1000},
                                         {7, 613, 5},
                                         {4, 600, 1 << 30}}) {
    const int64_t row_count = c.batch * c.tokens;
    Flags flags(static_cast<size_t>(row_count));
    std::vector<int32_t> expected, expected_begins;
    for (int64_t row = 0; row < row_count; ++row) {
      if (row % c.tokens == 0) expected_begins.push_back(static_cast<int32_t>(expected.size()));
      flags[row] = (row * 2654435761u >> 7) % static_cast<unsigned>(c.one_in) == 0 && row != 0;
      if (flags[row] != 0) expected.push_back(static_cast<int32_t>(row));
    }
    expected_begins.push_back(static_cast<int32_t>(expected.size()));

    // Seeds of the order of blocks and threads in the simulator.
    for (const uint64_t seed : {1, 2, 3}) {
      cuda_simulator::Settings settings;
      settings.seed = seed;
      cuda_simulator::Configure(settings);
      const Listed listed(device(), flags, c.batch);
      std::vector<int32_t> rows(flags.size()), begins(c.batch + 1);
      ASSERT_OK(listed.rows.Read(rows.data()));
      ASSERT_OK(listed.begins.Read(begins.data()));
      rows.resize(expected.size());
      EXPECT_EQ(rows, expected) << c.batch << " x " << c.tokens;
      EXPECT_EQ(begins, expected_begins) << c.batch << " x " << c.tokens;
    }
    cuda_simulator::Configure({});
  }
}

// Returns every second row of some, none and all of 2 x 75, whose products have tiles of 64 rows.
std::vector<Flags> SomeFlags() {
  Flags some(150, 0);
  for (size_t row = 0; row < some.size(); row += 2) some[row] = 1;
  return {some, Flags(150, 0), Flags(150, 1)};
}

// Checks that listed rows have the bits of `all`, and that the others are still NaN.
void ExpectRows(const Flags& flags, const Tensor& y, const Tensor& all) {
  const int64_t channels = y.shape().back();
  for (size_t row = 0; row < flags.size(); ++row) {
    const float* found = y.span<float>().data() + row * channels;
    const float* expected = all.span<float>().data() + row * channels;
    for (int64_t c = 0; c < channels; ++c) {
      if (flags[row] != 0) {
        ASSERT_EQ(found[c], expected[c]) << "row " << row << " channel " << c;
      } else {
        ASSERT_TRUE(std::isnan(found[c])) << "row " << row << " channel " << c;
      }
    }
  }
}

TEST_P(ListRowsOn, ListedRowsOfLayersHaveTheBitsThatTheyHaveAmongAll) {
  const Tensor x = Random({2, 75, 90}, 1), weights = Random({90, 90}, 2), row = Random({90}, 3);
  const PackedMatrix matrix = PackedMatrix::Create(device(), weights.view(), row.view()).value();
  const FeedForward feed_forward(PackedMatrix::Create(device(), weights.view(), row.view()).value(),
                                 PackedMatrix::Create(device(), weights.view(), row.view()).value(),
                                 Activation::kRelu);
  const LayerNorm norm = LayerNorm::Create(device(), row.view(), row.view()).value();
  const size_t bytes = FeedForward::workspace_bytes(device(), 150, {90, 90, 90}, 1);
  const DeviceBuffer memory = CudaRuntime::For(device()).value()->Allocate(bytes).value();
  Execution execution;
  execution.workspace = absl::MakeSpan(memory.As<std::byte>(), bytes);

  const Flags every(150, 1);
  const Listed all_rows(device(), every, 2);
  for (const Flags& flags : SomeFlags()) {
    const Listed listed(device(), flags, 2);
    // The products, the network and the norm, of the listed rows and of all.
    std::vector<Tensor> found, expected;
    for (int n = 0; n < 6; ++n) {
      Fill((n % 2 == 0 ? found : expected).emplace_back(DType::kF32, Shape{2, 75, 90}).view(),
           kNan);
    }
    DeviceMirror mirror(CudaRuntime::For(device()).value());
    const ConstTensorView input = mirror.Copy(x.view()).value();
    for (std::vector<Tensor>* results : {&found, &expected}) {
      const RowList& list = results == &found ? listed.list : all_rows.list;
      const auto out = [&](int n) { return mirror.CopyForWriting((*results)[n].view()).value(); };
      ASSERT_OK(MatMul(matrix, {input, input, out(0), Activation::kGelu, list}, execution));
      ASSERT_OK(feed_forward.Run(input, input, out(1), execution, list));
      ASSERT_OK(norm.Run(input, out(2), execution, results == &found ? list : RowList()));
    }
    ASSERT_OK(mirror.CopyBack());
    for (int n = 0; n < 3; ++n) ExpectRows(flags, found[n], expected[n]);
  }
}

// Returns the rows with the listed ones first.
std::vector<int64_t> ListedFirst(const Flags& flags) {
  std::vector<int64_t> rows(flags.size());
  std::iota(rows.begin(), rows.end(), 0);
  std::stable_partition(rows.begin(), rows.end(), [&](int64_t row) { return flags[row] != 0; });
  return rows;
}

// Copies row n to row to[n].
Tensor MoveRows(const Tensor& from, const std::vector<int64_t>& to) {
  Tensor moved(DType::kF32, from.shape());
  const int64_t channels = from.shape().back();
  for (size_t n = 0; n < to.size(); ++n) {
    std::copy_n(from.span<float>().data() + n * channels, channels,
                moved.span<float>().data() + to[n] * channels);
  }
  return moved;
}

// Compares them with all rows, where those beside the list have no gradient. The sums over rows of the
// network's products are in steps of listed rows, so that all rows have the listed ones first there.
TEST_P(ListRowsOn, BackwardPassesOfListedRowsHaveTheBitsThatTheyHaveAmongAll) {
  constexpr int64_t kRows = 150, kWidth = 90;
  const Shape shape = {2, 75, kWidth};
  const Tensor weights = Random({kWidth, kWidth}, 2), row = Random({kWidth}, 3);
  const auto packed = [&] {
    return PackedMatrix::Create(device(), weights.view(), row.view()).value();
  };
  FeedForward feed_forward(packed(), packed(), Activation::kRelu, Activation::kGelu);
  ASSERT_OK(feed_forward.SetUpBackward(weights.view(), weights.view()));
  const LayerNorm norm = LayerNorm::Create(device(), row.view(), row.view()).value();
  const FeedForward::Sizes sizes = {kWidth, kWidth, kWidth};
  const size_t bytes =
      std::max({FeedForward::workspace_bytes(device(), kRows, sizes, 1),
                FeedForward::backward_workspace_bytes(device(), kRows, sizes, 1, Activation::kGelu),
                LayerNorm::backward_workspace_bytes(device(), kRows, kWidth, 1)});
  const size_t kept_bytes = FeedForward::kept_bytes(kRows, sizes, Activation::kGelu);
  CudaRuntime* const runtime = CudaRuntime::For(device()).value();

  const Flags every(kRows, 1);
  const Listed all_rows(device(), every, 2);
  for (const Flags& flags : SomeFlags()) {
    const Listed listed(device(), flags, 2);
    const std::vector<int64_t> first = ListedFirst(flags);
    std::vector<int64_t> place(kRows);
    for (int64_t n = 0; n < kRows; ++n) place[first[n]] = n;
    // Returns x or dy, with `beside` in the rows beside the list.
    const auto with_beside = [&](uint64_t seed, double beside) {
      Tensor rows = Random({2, 75, kWidth}, seed);
      for (int64_t n = 0; n < rows.num_elements(); ++n) {
        if (flags[n / kWidth] == 0) rows.span<float>()[n] = static_cast<float>(beside);
      }
      return rows;
    };
    const Tensor x = with_beside(1, kNan), dy = with_beside(4, kNan);
    const Tensor finite_x = with_beside(1, 5), dy_or_0 = with_beside(4, 0);
    // dx of the network and of the norm, and the gradients of their parameters.
    std::vector<Tensor> found, expected;
    for (std::vector<Tensor>* results : {&found, &expected}) {
      for (int n = 0; n < 2; ++n) Fill(results->emplace_back(DType::kF32, shape).view(), kNan);
      for (int n = 0; n < 2; ++n) results->emplace_back(DType::kF32, Shape{kWidth, kWidth});
      for (int n = 0; n < 4; ++n) results->emplace_back(DType::kF32, Shape{kWidth});
    }
    for (std::vector<Tensor>* results : {&found, &expected}) {
      const bool is_listed = results == &found;
      const auto of_network = [&](const Tensor& rows) {
        return is_listed ? rows.Clone() : MoveRows(rows, place);
      };
      const Tensor network_x = of_network(is_listed ? x : finite_x),
                   network_dy = of_network(is_listed ? dy : dy_or_0);
      DeviceMirror mirror(runtime);
      const ConstTensorView input = mirror.Copy(network_x.view()).value(),
                            gradient = mirror.Copy(network_dy.view()).value(),
                            of_norm = mirror.Copy(x.view()).value(),
                            norm_dy = mirror.Copy((is_listed ? dy : dy_or_0).view()).value();
      std::vector<TensorView> to;
      for (Tensor& tensor : *results) {
        to.push_back(mirror.CopyForWriting(tensor.view()).value());
      }
      Tensor y(DType::kF32, shape);
      const TensorView output = mirror.CopyForWriting(y.view()).value();
      const DeviceBuffer memory = runtime->Allocate(bytes).value(),
                         kept = runtime->Allocate(kept_bytes).value();
      Execution execution;
      execution.workspace = absl::MakeSpan(memory.As<std::byte>(), bytes);
      execution.kept = absl::MakeSpan(kept.As<std::byte>(), kept_bytes);
      const RowList& list = is_listed ? listed.list : all_rows.list;
      ASSERT_OK(feed_forward.Run(input, {}, output, execution, list));
      ASSERT_OK(feed_forward.Backward({input, gradient, input, to[0], to[2], to[4], to[3], to[5],
                                       /*accumulate=*/false, list},
                                      execution));
      ASSERT_OK(norm.Backward({of_norm, norm_dy, of_norm, to[1], to[6], to[7],
                               /*accumulate=*/false, is_listed ? list : RowList()},
                              execution));
      ASSERT_OK(mirror.CopyBack());
    }
    expected[0] = MoveRows(expected[0], first);
    for (int n = 0; n < 2; ++n) ExpectRows(flags, found[n], expected[n]);
    for (int n = 2; n < 8; ++n) {
      EXPECT_EQ(std::memcmp(found[n].raw(), expected[n].raw(), found[n].bytes()), 0) << n;
    }
  }
}

TEST_P(ListRowsOn, ColumnsOfAMatrixGiveTheirPartOfTheProduct) {
  const Tensor x = Random({70, 40}, 1), weights = Random({40, 100}, 2), bias = Random({100}, 3);
  const PackedMatrix matrix = PackedMatrix::Create(device(), weights.view(), bias.view()).value();
  const size_t bytes = MatMulWorkspaceBytes(device(), 70, 40, 100, 1);
  const DeviceBuffer memory = CudaRuntime::For(device()).value()->Allocate(bytes).value();
  Execution execution;
  execution.workspace = absl::MakeSpan(memory.As<std::byte>(), bytes);
  for (const int64_t count : {67, 36}) {  // no multiple of four, and one
    const PackedMatrix part = PackedMatrix::Create(device(), Slice(weights.view(), 1, 30, count),
                                                   Slice(bias.view(), 0, 30, count))
                                  .value();
    Tensor of_columns(DType::kF32, {70, count}), of_part(DType::kF32, {70, count});
    Fill(of_columns.view(), kNan);
    DeviceMirror mirror(CudaRuntime::For(device()).value());
    const ConstTensorView input = mirror.Copy(x.view()).value();
    ASSERT_OK(MultiplyWithKernel(matrix,
                                 {input,
                                  {},
                                  mirror.CopyForWriting(of_columns.view()).value(),
                                  Activation::kRelu,
                                  {},
                                  {30, count}},
                                 execution));
    ASSERT_OK(MultiplyWithKernel(
        part, {input, {}, mirror.CopyForWriting(of_part.view()).value(), Activation::kRelu},
        execution));
    ASSERT_OK(mirror.CopyBack());
    EXPECT_EQ(std::memcmp(of_columns.raw(), of_part.raw(), of_part.bytes()), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(, ListRowsOn, ::testing::Values(KernelDevice()),
                         [](const auto& info) { return std::string(Name(info.param)); });

// The simulator counts each load and store of a kernel; a tile makes a fixed number of them.
TEST(ListRows, AccessesOfAProductFallWithTheRowsThatAreListed) {
  if (KernelDevice() != Device::kSimulator) GTEST_SKIP() << "the simulator alone counts accesses";
  const Device device = Device::kSimulator;
  const Tensor x = Random({512, 64}, 1), weights = Random({64, 64}, 2);
  const PackedMatrix matrix = PackedMatrix::Create(device, weights.view()).value();
  Tensor y(DType::kF32, {512, 64});
  DeviceMirror mirror(CudaRuntime::For(device).value());
  const ConstTensorView input = mirror.Copy(x.view()).value();
  const TensorView output = mirror.CopyForWriting(y.view()).value();
  const auto accesses = [&](int64_t one_in) {
    Flags flags(512);
    for (int64_t row = 0; row < 512; ++row) flags[row] = row % one_in == 0;
    const Listed listed(device, flags, 1);
    const int64_t before = cuda_simulator::TotalCounts().accesses;
    EXPECT_EQ(MatMul(matrix, {input, {}, output, Activation::kNone, listed.list}, {}),
              absl::OkStatus());
    return static_cast<double>(cuda_simulator::TotalCounts().accesses - before);
  };
  const double of_all = accesses(1);
  EXPECT_NEAR(accesses(2) / of_all, 1.0 / 2, 0.02);
  EXPECT_NEAR(accesses(8) / of_all, 1.0 / 8, 0.02);
}

TEST(ListRows, OnTheCpuTheyAreAnError) {
  const Tensor x = Random({4, 5}, 1), weights = Random({5, 3}, 2), row = Random({5}, 3);
  const PackedMatrix matrix = PackedMatrix::Create(Device::kCpu, weights.view()).value();
  const LayerNorm norm = LayerNorm::Create(Device::kCpu, row.view(), row.view()).value();
  Tensor y(DType::kF32, {4, 3}), z(DType::kF32, {4, 5}), of_weights(DType::kF32, {5, 3});
  const int32_t rows[4] = {};
  RowList list;
  list.rows = rows;
  EXPECT_EQ(MatMul(matrix, {x.view(), {}, y.view(), Activation::kNone, list}, {}).code(),
            absl::StatusCode::kInternal);
  EXPECT_EQ(MatMulGradient({x.view(), y.view(), of_weights.view(), {}, false, list}, {}).code(),
            absl::StatusCode::kInternal);
  EXPECT_EQ(norm.Run(x.view(), z.view(), {}, list).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(norm.Backward({x.view(), x.view(), {}, z.view(), {}, {}, false, list}, {}).code(),
            absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace tfb
