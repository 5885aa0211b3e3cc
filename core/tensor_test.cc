#include "core/tensor.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace tfb {
namespace {

Tensor Counting(std::initializer_list<int64_t> shape) {
  Tensor tensor(DType::kF32, shape);
  std::iota(tensor.span<float>().begin(), tensor.span<float>().end(), 0.0f);
  return tensor;
}

TEST(TensorView, SliceWithAStepReadsEveryOtherElement) {
  const Tensor tensor = Counting({2, 5, 3});
  const ConstTensorView odd = Slice(tensor.view(), 1, 1, 2, 2);
  EXPECT_EQ(odd.shape(), (Shape{2, 2, 3}));
  EXPECT_EQ(*odd.At<float>(1, 1, 2), 15 + 9 + 2);
  EXPECT_FALSE(odd.is_contiguous());
}

TEST(TensorView, SplitAndTransposeTurnProjectionsIntoHeads) {
  const Tensor hidden = Counting({2, 4, 6});  // batch, tokens, heads * channels
  const ConstTensorView heads = Transpose(SplitAxis(hidden.view(), 2, 3), 1, 2);
  EXPECT_EQ(heads.shape(), (Shape{2, 3, 4, 2}));
  EXPECT_EQ(*heads.At<float>(1, 2, 3, 1), 24 + 3 * 6 + 2 * 2 + 1);
}

TEST(TensorView, BroadcastStridesReadOneElement) {
  const float value = 5;
  const ConstTensorView view(&value, DType::kF32, {3, 4}, {0, 0});
  EXPECT_EQ(*view.At<float>(2, 3), 5);
}

TEST(TensorView, SizeOneDimensionsMayHaveAnyStrideAndStayContiguous) {
  const Tensor tensor = Counting({4});
  EXPECT_TRUE(ConstTensorView(tensor.raw(), DType::kF32, {1, 4}, {999, 1}).is_contiguous());
}

TEST(TensorView, OffsetsBeyondTwoToTheThirtyOneAreExact) {
  const ConstTensorView view(nullptr, DType::kF32, {1, 8, int64_t{1} << 30, 64});
  EXPECT_EQ(view.Offset(0, 7, (int64_t{1} << 30) - 1, 63),
            7 * (int64_t{1} << 36) + ((int64_t{1} << 36) - 64) + 63);
}

TEST(Tensor, SizesThatOverflowAreAnErrorAndNotAnAllocation) {
  EXPECT_EQ(Tensor::Allocate(DType::kF32, {int64_t{1} << 40, int64_t{1} << 40}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Tensor::Allocate(DType::kF32, {-1}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Tensor::Allocate(DType::kF32, {1, 1, 1, 1, 1, 1}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Tensor, OneThatSharesKeepsTheOwnerAlive) {
  auto owner = std::make_shared<std::vector<float>>(6, 2.5f);
  const std::weak_ptr<std::vector<float>> watched = owner;
  const TensorView view(owner->data(), DType::kF32, {2, 3});
  Tensor tensor = Tensor::Sharing(std::move(owner), view);
  EXPECT_EQ(tensor.raw(), view.data);
  EXPECT_EQ(tensor.view().Get(5), 2.5);
  EXPECT_FALSE(watched.expired());
  tensor = Tensor();
  EXPECT_TRUE(watched.expired());
}

TEST(Tensor, ConversionRoundsToNearestEven) {
  Tensor tensor(DType::kF32, {2});
  tensor.span<float>()[0] = 1 + 1.0f / 256;  // halfway between two bf16; rounds to the even one, 1
  tensor.span<float>()[1] = 1 + 3.0f / 256;  // halfway; rounds to the even one, 1 + 4/256
  const Tensor rounded = tensor.CloneAs(DType::kBF16);
  EXPECT_EQ(rounded.view().Get(0), 1);
  EXPECT_EQ(rounded.view().Get(1), 1 + 4.0 / 256);
}

TEST(CopyElements, FloatsBecomeTheSameDoublesWithAndWithoutStrides) {
  const std::vector<float> floats = {0.1f, -0.0f, 1e-45f, 3.4e38f, -INFINITY, NAN};
  const ConstTensorView from(floats.data(), DType::kF32, {2, 3});
  Tensor contiguous(DType::kF64, {2, 3}), transposed(DType::kF64, {3, 2});
  CopyElements(from, contiguous.view());
  CopyElements(from, Transpose(transposed.view(), 0, 1));
  for (int64_t r = 0; r < 2; ++r) {
    for (int64_t c = 0; c < 3; ++c) {
      const double expected = floats[r * 3 + c];
      for (const double value :
           {*contiguous.view().At<double>(r, c), *transposed.view().At<double>(c, r)}) {
        EXPECT_EQ(std::memcmp(&value, &expected, sizeof(double)), 0) << r << ", " << c;
      }
    }
  }
}

TEST(CopyElements, ReadsAndWritesThroughStrides) {
  const Tensor from = Counting({2, 3});
  Tensor to(DType::kF64, {3, 2});
  CopyElements(from.view(), Transpose(to.view(), 0, 1));
  EXPECT_EQ(*to.view().At<double>(2, 1), 5);
  EXPECT_EQ(*to.view().At<double>(0, 1), 3);
}

}  // namespace
}  // namespace tfb
