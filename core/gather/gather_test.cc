// Tests the steps of engine gather against loops, on all devices of this machine.
#include "core/gather/gather.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/allocations.h"
#include "core/cpu/kernels.h"
#include "core/cuda/mirror.h"
#include "core/random.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class Gather : public testing::TestWithParam<Device> {
 protected:
  Device device() const { return GetParam(); }

  // Returns an execution with two threads and a workspace of `bytes`.
  Execution With(size_t bytes) {
    memory_ = DeviceArray<std::byte>::Allocate(device(), static_cast<int64_t>(bytes)).value();
    Execution execution;
    execution.pool = &pool_;
    execution.workspace = absl::MakeSpan(memory_.mutable_data(), bytes);
    return execution;
  }
  template <class T>
  DeviceArray<T> Upload(const std::vector<T>& values) {
    return DeviceArray<T>::Create(device(), values).value();
  }
  template <class T>
  std::vector<T> Download(const DeviceArray<T>& array) {
    std::vector<T> values(array.size());
    EXPECT_TRUE(array.Read(values.data()).ok());
    return values;
  }
  // Runs act(x, y) with the tensors' views on the device, and copies y back.
  template <class Act>
  void OnDevice(const Tensor& x, Tensor* y, const Act& act) {
    if (device() == Device::kCpu) return act(x.view(), y->view());
    DeviceMirror mirror(CudaRuntime::For(device()).value());
    const ConstTensorView from = mirror.Copy(x.view()).value();
    const TensorView to = mirror.CopyForWriting(y->view()).value();
    act(from, to);
    EXPECT_TRUE(mirror.CopyBack().ok());
  }

  // Does the same with two tensors that are read.
  template <class Act>
  void OnDevice(const Tensor& x, const Tensor& u, Tensor* y, const Act& act) {
    Tensor unused(DType::kF32, {1});
    OnDevice(u, &unused, [&](const ConstTensorView& of_u, const TensorView&) {
      OnDevice(x, y,
               [&](const ConstTensorView& of_x, const TensorView& to) { act(of_x, of_u, to); });
    });
  }

  ThreadPool pool_{2};
  DeviceArray<std::byte> memory_;
};
INSTANTIATE_TEST_SUITE_P(On, Gather, testing::ValuesIn(TestedDevices()),
                         [](const auto& device) { return std::string(Name(device.param)); });

TEST_P(Gather, RowsAreNormalized) {
  const RowNorm norms[] = {{false, false, 0}, {false, false, 1e-2}, {true, true, 1e-5}};
  for (const int64_t channels : {1, 7, 64, 256}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      Tensor x(dtype, {2, 2, 67, channels});
      FillNormal(&x, 3, "x", 0.5, 2);
      Fill(Slice(x.view(), 2, 5, 1), 0);
      for (const RowNorm& norm : norms) {
        Tensor y(DType::kF32, x.shape());
        OnDevice(x, &y, [&](const ConstTensorView& from, const TensorView& to) {
          EXPECT_TRUE(NormalizeRows(device(), norm, from, to, With(0)).ok());
        });
        for (int64_t row = 0; row < 2 * 2 * 67; ++row) {
          double mean = 0, squares = 0;
          const auto at = [&](int64_t c) { return x.view().Get(row * channels + c); };
          for (int64_t c = 0; c < channels && norm.centered; ++c) mean += at(c) / channels;
          for (int64_t c = 0; c < channels; ++c) squares += (at(c) - mean) * (at(c) - mean);
          if (norm.mean_square) squares /= channels;
          const double root = std::sqrt(squares + norm.epsilon);
          for (int64_t c = 0; c < channels; ++c) {
            const double expected = root == 0 ? 0 : (at(c) - mean) / root;
            EXPECT_NEAR(y.view().Get(row * channels + c), expected, 3e-6) << row << " " << c;
          }
        }
      }
    }
  }
}

TEST_P(Gather, RowsHaveAsManyChannelsAsAHeadMayHave) {
  for (const int64_t channels : {kMaxHeadDim, kMaxHeadDim + 1}) {
    Tensor x(DType::kF32, {1, 1, 2, channels}), y(DType::kF32, x.shape());
    Fill(x.view(), 3);
    OnDevice(x, &y, [&](const ConstTensorView& from, const TensorView& to) {
      EXPECT_EQ(NormalizeRows(device(), RowNorm{}, from, to, With(0)),
                channels == kMaxHeadDim ? absl::OkStatus()
                                        : absl::InternalError(absl::StrCat(
                                              "rows of ", channels, " channels to normalize")));
    });
  }
}

// y of a row in float64, by its formula.
std::vector<double> Normalized(const RowNorm& norm, const std::vector<double>& x) {
  const double count = static_cast<double>(x.size());
  const double mean = norm.centered ? std::accumulate(x.begin(), x.end(), 0.0) / count : 0;
  double squares = 0;
  for (const double value : x) squares += (value - mean) * (value - mean);
  const double root = std::sqrt(squares / (norm.mean_square ? count : 1) + norm.epsilon);
  std::vector<double> y;
  for (const double value : x) y.push_back((value - mean) / root);
  return y;
}

TEST_P(Gather, GradientsOfNormalizedRowsAreThoseOfTheFormula) {
  constexpr int64_t kTokens = 67, kChannels = 21;
  const Shape shape = {2, 3, kTokens, kChannels};
  Tensor x(DType::kF32, shape), u(DType::kF32, shape);
  FillNormal(&x, 1, "x");
  FillNormal(&u, 1, "u");
  // A row whose gradient is 0 may hold anything, and the gradient of a row of zeros is 0.
  Fill(Slice(x.view(), 2, 5, 1), kNan);
  Fill(Slice(u.view(), 2, 5, 1), 0);
  Fill(Slice(x.view(), 2, 66, 1), 0);
  const Execution execution = With(0);
  for (const RowNorm& norm : {RowNorm{}, RowNorm{false, false, 1e-3}, RowNorm{true, true, 1e-5},
                              RowNorm{true, false, 1}}) {
    Tensor gradient(DType::kF32, {2, 3, kChannels, kTokens});  // with strides
    Fill(gradient.view(), 0.5);
    const auto by_row_of = [&](void* data) {
      return TensorView(data, DType::kF32, shape,
                        {3 * kTokens * kChannels, kTokens * kChannels, 1, kTokens});
    };
    OnDevice(x, u, &gradient,
             [&](const ConstTensorView& rows, const ConstTensorView& of_y, const TensorView& of_x) {
               ASSERT_TRUE(AddNormalizedGradients(device(), norm, rows, of_y,
                                                  by_row_of(of_x.mutable_data()), execution)
                               .ok());
             });
    const TensorView by_row = by_row_of(gradient.raw());
    for (int64_t row = 0; row < 6 * kTokens; ++row) {
      const int64_t i = row % kTokens;
      std::vector<double> at, of_y;
      for (int64_t c = 0; c < kChannels; ++c) {
        at.push_back(x.view().Get(row * kChannels + c));
        of_y.push_back(u.view().Get(row * kChannels + c));
      }
      const double h = 1e-6;
      for (int64_t c = 0; c < kChannels; ++c) {
        double expected = 0;
        if (i != 5 && (i != 66 || norm.epsilon > 0)) {
          std::vector<double> above = at, below = at;
          above[c] += h;
          below[c] -= h;
          const std::vector<double> high = Normalized(norm, above), low = Normalized(norm, below);
          for (int64_t n = 0; n < kChannels; ++n)
            expected += of_y[n] * (high[n] - low[n]) / (2 * h);
        }
        // Numbers are of order 1, or for the row of zeros of order 1 / root(epsilon); differences
        // have an error of h^2 times a third derivative, 1 / root(epsilon)^3 at most.
        const double size = i == 66 && norm.epsilon > 0 ? 1 / std::sqrt(norm.epsilon) : 1;
        EXPECT_NEAR(*by_row.At<float>(row / kTokens / 3, row / kTokens % 3, i, c) - 0.5, expected,
                    4e-6 * size + 100 * h * h * size * size * size)
            << row << " " << c;
      }
    }
  }
}

TEST_P(Gather, ARotationsColumnsAreThoseOfItsFactors) {
  const Tensor rotations(DType::kF32, {2, 8, 3, 6});
  EXPECT_TRUE(AngularHash::Create(device(), rotations.view(), {2, 4}).ok());
  for (const int64_t more : {3, 5}) {
    EXPECT_EQ(AngularHash::Create(device(), rotations.view(), {2, more}).status(),
              absl::InternalError(absl::StrCat("rotations [2, 8, 3, 6] for factors of ", 2 + more,
                                               " columns in all")));
  }
}

TEST_P(Gather, RowsWhoseSquaresFloatsDoNotHoldAreNormalized) {
  Tensor x(DType::kF32, {1, 1, 4, 64});
  FillNormal(&x, 3, "x");
  // The elements themselves are normal numbers: denormal ones count as zero (core/denormals.h).
  const float lengths[] = {1e-33f, 1e-22f, 1e20f, 1e37f};
  for (int64_t n = 0; n < x.num_elements(); ++n) x.span<float>()[n] *= lengths[n / 64];
  Tensor y(DType::kF32, x.shape());
  OnDevice(x, &y, [&](const ConstTensorView& from, const TensorView& to) {
    EXPECT_TRUE(NormalizeRows(device(), {}, from, to, With(0)).ok());
  });
  for (int64_t row = 0; row < 4; ++row) {
    double squares = 0;
    for (int64_t c = 0; c < 64; ++c) squares += std::pow(x.view().Get(row * 64 + c), 2);
    for (int64_t c = 0; c < 64; ++c) {
      EXPECT_NEAR(y.view().Get(row * 64 + c), x.view().Get(row * 64 + c) / std::sqrt(squares),
                  1e-7);
    }
  }
}

TEST_P(Gather, AHashIsTheLargestOfProductsAndTheirNegatives) {
  for (const auto& [head_dim, heads] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {7, 1}, {64, 1}, {7, 3}, {64, 3}}) {
    Tensor x(DType::kF32, {2, 3, 100, head_dim}),
        rotations(DType::kF32, {heads, head_dim, 2, 3 + 5});
    FillNormal(&x, 1, "x");
    FillNormal(&rotations, 1, "r");
    // Without a dimension of heads, all heads have the same rotations.
    const ConstTensorView given =
        heads == 1 ? ConstTensorView(rotations.raw(), DType::kF32, {head_dim, 2, 3 + 5})
                   : ConstTensorView(rotations.view());
    const AngularHash hash = AngularHash::Create(device(), given, {3, 5}).value();
    DeviceArray<int32_t> buckets = DeviceArray<int32_t>::Allocate(device(), 2 * 600).value();
    Tensor unused(DType::kF32, {1});
    const size_t bytes = AngularHash::WorkspaceBytes(device(), head_dim, 2, 8, 2);
    OnDevice(x, &unused, [&](const ConstTensorView& from, const TensorView&) {
      EXPECT_TRUE(hash.Run(from, buckets.mutable_data(), With(bytes)).ok());
    });
    const std::vector<int32_t> found = Download(buckets);
    for (int64_t n = 0; n < 2 * 600; ++n) {
      const int64_t round = n / 100 % 2, row = n / 200 * 100 + n % 100;
      const int64_t of_head = n / 200 % heads * head_dim;
      // The sums are made in the same order as the engines make them, so that near ties fall the
      // same way.
      std::vector<float> products(16);
      for (int64_t m = 0; m < 8; ++m) {
        float sum = 0;
        for (int64_t c = 0; c < head_dim; ++c) {
          sum = std::fma(rotations.span<float>()[((of_head + c) * 2 + round) * 8 + m],
                         x.span<float>()[row * head_dim + c], sum);
        }
        const int64_t first = m < 3 ? 0 : 6, columns = m < 3 ? 3 : 5, in = m < 3 ? m : m - 3;
        products[first + in] = sum;
        products[first + columns + in] = -sum;
      }
      const auto argmax = [&](int64_t begin, int64_t end) {
        return std::max_element(products.begin() + begin, products.begin() + end) -
               products.begin() - begin;
      };
      EXPECT_EQ(found[n], argmax(0, 6) + 6 * argmax(6, 16)) << n;
    }
  }
}

TEST(SignedArgmax, PrefersTheLowestAndIgnoresNan) {
  for (const char* set : {"generic", "avx2", "avx512"}) {
    const CpuKernels* kernels = FindCpuKernels(set);
    if (kernels == nullptr) continue;
    std::vector<float> values(4 * 64, 0);
    // V has 3 at index 2, and -v has 3 at index 4 + 0.
    values[0 * 64 + 1] = -3, values[2 * 64 + 1] = 3;
    values[1 * 64 + 2] = -5, values[2 * 64 + 2] = 4;    // 5 at 4 + 1
    values[0 * 64 + 3] = kNan, values[3 * 64 + 3] = 1;  // 1 at 3
    for (int64_t r = 0; r < 4; ++r) values[r * 64 + 4] = kNan;
    std::vector<int32_t> index(64, -1);
    kernels->signed_argmax(4, values.data(), index.data());
    EXPECT_EQ(std::vector<int32_t>(index.begin(), index.begin() + 5),
              (std::vector<int32_t>{0, 2, 5, 3, 0}))
        << set;
  }
}

TEST_P(Gather, ScoresAreProductsWithAHeadsVectors) {
  constexpr int64_t kCount = 7, kTokens = 100, kHeadDim = 20;
  Tensor x(DType::kF32, {2, 2, kTokens, kHeadDim}), vectors(DType::kF32, {2, kCount, kHeadDim});
  FillNormal(&x, 1, "x");
  FillNormal(&vectors, 1, "vectors");
  const int64_t stride = ScoreStride(kTokens);
  ASSERT_GE(stride, kTokens);
  std::vector<uint8_t> is_token(2 * kTokens, 1);
  for (const int64_t n : {3, 99, 100, 164}) is_token[n] = 0;
  const DeviceArray<float> of_heads = CopyFloats(device(), vectors.view()).value();
  const DeviceArray<uint8_t> mask = Upload(is_token);
  DeviceArray<float> scores = DeviceArray<float>::Allocate(device(), 4 * kCount * stride).value();
  Tensor unused(DType::kF32, {1});
  OnDevice(x, &unused, [&](const ConstTensorView& from, const TensorView&) {
    const VectorScoreCall call = {from,
                                  of_heads.data(),
                                  kCount,
                                  ConstTensorView(mask.data(), DType::kU8, {2, kTokens}),
                                  scores.mutable_data(),
                                  stride};
    const size_t bytes = VectorScoreWorkspaceBytes(device(), kHeadDim, 2);
    EXPECT_TRUE(ScoreVectors(device(), call, With(bytes)).ok());
  });
  const std::vector<float> found = Download(scores);
  for (int64_t head = 0; head < 4; ++head) {
    for (int64_t n = 0; n < kCount; ++n) {
      for (int64_t i = 0; i < kTokens; ++i) {
        float sum = 0;
        for (int64_t c = 0; c < kHeadDim; ++c) {
          sum = std::fma(vectors.span<float>()[(head % 2 * kCount + n) * kHeadDim + c],
                         x.span<float>()[(head * kTokens + i) * kHeadDim + c], sum);
        }
        if (is_token[head / 2 * kTokens + i] == 0) sum = -std::numeric_limits<float>::infinity();
        EXPECT_EQ(found[(head * kCount + n) * stride + i], sum) << head << " " << n << " " << i;
      }
    }
  }
}

TEST_P(Gather, SortingIsStable) {
  constexpr int64_t kRows = 3;
  for (const int64_t tokens : {0, 1, 63, 300, 1000}) {
    for (const int64_t key_count : {1, 5, 700}) {
      std::vector<int32_t> keys;
      const RandomStream random(1, "keys");
      for (int64_t n = 0; n < kRows * tokens; ++n) {
        keys.push_back(static_cast<int32_t>(random.Bits(n) % key_count));
      }
      const int64_t stride = tokens + 2;
      const DeviceArray<int32_t> on_device = Upload(keys);
      const DeviceArray<int32_t> order = Upload(std::vector<int32_t>(kRows * stride, -7));
      const DeviceArray<int32_t> places = Upload(std::vector<int32_t>(kRows * tokens, -7));
      const TokenSortCall call = {
          on_device.data(),     kRows, tokens, key_count, order.mutable_data(), stride,
          places.mutable_data()};
      EXPECT_TRUE(
          SortTokens(device(), call, With(SortWorkspaceBytes(device(), kRows, key_count, 2))).ok());
      const std::vector<int32_t> found = Download(order), where = Download(places);
      for (int64_t row = 0; row < kRows; ++row) {
        std::vector<int32_t> expected(tokens);
        std::iota(expected.begin(), expected.end(), 0);
        std::stable_sort(expected.begin(), expected.end(), [&](int32_t a, int32_t b) {
          return keys[row * tokens + a] < keys[row * tokens + b];
        });
        expected.insert(expected.end(), 2, -7);
        EXPECT_EQ(
            std::vector<int32_t>(found.begin() + row * stride, found.begin() + (row + 1) * stride),
            expected);
        for (int64_t place = 0; place < tokens; ++place) {
          EXPECT_EQ(where[row * tokens + expected[place]], place);
        }
      }
    }
  }
}

TEST_P(Gather, TheLargestAreInOrderAndTiesAreTheFirst) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr int64_t kStride = 704;
  std::vector<std::vector<float>> rows;
  std::vector<float> drawn, coarse, special, close;
  const RandomStream random(1, "scores");
  for (int64_t n = 0; n < 700; ++n) {
    drawn.push_back(static_cast<float>(random.Normal(n)));
    coarse.push_back(std::floor(drawn.back()));
    close.push_back(1 + std::ldexp(static_cast<float>(n * 7 % 50), -23));  // neighbouring floats
    special.push_back(n % 5 == 0   ? kNan
                      : n % 7 == 0 ? -kInfinity
                      : n % 9 == 0 ? kInfinity
                      : n % 2 == 0 ? 0.0f
                                   : -0.0f);
  }
  rows = {
      drawn, coarse, special, close, std::vector<float>(700, 1.5f), std::vector<float>(700, kNan)};
  std::vector<float> scores;
  for (const auto& row : rows) {
    scores.insert(scores.end(), row.begin(), row.end());
    scores.insert(scores.end(), kStride - 700, kInfinity);  // no scores
  }
  const DeviceArray<float> on_device = Upload(scores);
  const int64_t count_of_rows = static_cast<int64_t>(rows.size());
  for (const int64_t count : {0, 1, 14, 64, 333, 699, 700}) {
    const DeviceArray<int32_t> members =
        Upload(std::vector<int32_t>(std::max<int64_t>(count_of_rows * count, 1), -1));
    const LargestCall call = {on_device.data(), count_of_rows, 700,
                              kStride,          count,         members.mutable_data()};
    EXPECT_TRUE(LargestTokens(device(), call, With(LargestWorkspaceBytes(device(), 700, 2))).ok());
    const std::vector<int32_t> found = Download(members);
    for (size_t r = 0; r < rows.size(); ++r) {
      std::vector<int32_t> expected(700);
      std::iota(expected.begin(), expected.end(), 0);
      std::stable_sort(expected.begin(), expected.end(), [&](int32_t a, int32_t b) {
        const float x = rows[r][a], y = rows[r][b];
        return std::isnan(y) ? !std::isnan(x) : x > y;
      });
      expected.resize(count);
      std::sort(expected.begin(), expected.end());
      EXPECT_EQ(std::vector<int32_t>(found.begin() + r * count, found.begin() + (r + 1) * count),
                expected)
          << count << " of row " << r;
    }
  }
  EXPECT_FALSE(LargestTokens(device(), {nullptr, 1, 5, 5, 6, nullptr}, With(0)).ok());
}

TEST_P(Gather, MeansAreOverTheGroupsThatHaveAToken) {
  constexpr int64_t kBatch = 2, kHeads = 2, kGroups = 40, kSize = 9, kTokens = 150, kChannels = 40;
  const RandomStream random(1, "members");
  std::vector<int32_t> members;
  for (int64_t g = 0; g < kBatch * kHeads * kGroups; ++g) {
    // The members are ascending and distinct; the last tokens are in no group.
    int32_t token = static_cast<int32_t>(random.Bits(g) % 50);
    for (int64_t r = 0; r < kSize; ++r) {
      members.push_back(token);
      token += 1 + static_cast<int32_t>(random.Bits(g * kSize + r + 1000) % 10);
    }
  }
  const DeviceArray<int32_t> on_device = Upload(members);
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    Tensor rows(DType::kF32, {kBatch, kHeads, kGroups * kSize, kChannels});
    FillNormal(&rows, 1, "rows");
    Tensor out(dtype, {kBatch, kHeads, kTokens, kChannels});
    Fill(out.view(), kNan);
    OnDevice(rows, &out, [&](const ConstTensorView& from, const TensorView& to) {
      const GroupMeanCall call = {on_device.data(), kGroups, kSize, from, to};
      const size_t bytes = GroupMeanWorkspaceBytes(device(), kChannels, 2);
      EXPECT_TRUE(MeanOfGroups(device(), call, With(bytes)).ok());
    });
    int64_t of_none = 0;
    for (int64_t n = 0; n < kBatch * kHeads * kTokens; ++n) {
      const int64_t head = n / kTokens;
      std::vector<double> sum(kChannels, 0);
      int64_t count = 0;
      for (int64_t m = 0; m < kGroups * kSize; ++m) {
        const int64_t place = head * kGroups * kSize + m;
        if (members[place] != n % kTokens) continue;
        ++count;
        for (int64_t c = 0; c < kChannels; ++c) sum[c] += rows.view().Get(place * kChannels + c);
      }
      of_none += count == 0;
      for (int64_t c = 0; c < kChannels; ++c) {
        EXPECT_NEAR(out.view().Get(n * kChannels + c), count == 0 ? 0 : sum[c] / count,
                    dtype == DType::kF32 ? 1e-6 : 2e-3);
      }
    }
    EXPECT_GT(of_none, 0);
  }
}

// A mean is linear: <g, mean of rows> is <gradient of rows by g, rows>.
TEST_P(Gather, GradientsOfGroupsRowsAreThoseOfTheirMeans) {
  constexpr int64_t kGroups = 5, kSize = 40, kTokens = 131, kChannels = 7;
  // Group n has every (n + 1)-th token from token n on, so that a token may be in several or in
  // none.
  std::vector<int32_t> members;
  for (int64_t head = 0; head < 4; ++head) {
    for (int64_t n = 0; n < kGroups; ++n) {
      for (int64_t r = 0; r < kSize; ++r) {
        members.push_back(static_cast<int32_t>(std::min(n + head + r * (n % 3 + 1), kTokens - 1)));
      }
    }
  }
  Tensor rows(DType::kF32, {2, 2, kGroups * kSize, kChannels}),
      out(DType::kF32, {2, 2, kTokens, kChannels});
  Tensor g(DType::kF32, out.shape()), gradient(DType::kF32, rows.shape());
  FillNormal(&rows, 1, "rows");
  FillNormal(&g, 1, "g");
  Fill(gradient.view(), 0);
  const DeviceArray<int32_t> on_device = Upload(members);
  const Execution execution = With(GroupMeanWorkspaceBytes(device(), kChannels, 2));
  OnDevice(rows, &out, [&](const ConstTensorView& of_rows, const TensorView& means) {
    const GroupMeanCall call = {on_device.data(), kGroups, kSize, of_rows, means};
    ASSERT_TRUE(MeanOfGroups(device(), call, execution).ok());
  });
  OnDevice(g, &gradient, [&](const ConstTensorView& of_out, const TensorView& of_rows) {
    const GroupMeanCall call = {on_device.data(), kGroups, kSize, {}, {}};
    ASSERT_TRUE(AddGroupGradients(device(), call, of_out, of_rows, execution).ok());
  });
  for (int64_t head = 0; head < 4; ++head) {
    const auto product = [&](const Tensor& a, const Tensor& b) {
      const int64_t count = a.num_elements() / 4;
      const float* x = a.span<float>().data() + head * count;
      return std::inner_product(x, x + count, b.span<float>().data() + head * count, 0.0);
    };
    // The 1400 products of order 1 have the errors of a few roundings, with random signs.
    EXPECT_NEAR(product(gradient, rows), product(g, out), 4 * 38 * 0x1p-24) << head;
  }
}

}  // namespace
}  // namespace tfb
