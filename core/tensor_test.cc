#include "core/tensor.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/status.h"
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

// Containers do so, too. An abort would end the program of a caller who could go on, such as Python.
TEST(Tensor, AConstructorWithoutMemoryThrows) {
  EXPECT_THROW(Tensor(DType::kF32, {int64_t{1} << 46}), std::bad_alloc);
  EXPECT_THROW(Tensor(DType::kF32, {int64_t{1} << 40, int64_t{1} << 40}), std::length_error);
  const auto copies = []() -> absl::Status {
    float one = 0;
    Tensor::Sharing(nullptr, TensorView(&one, DType::kF32, Shape{int64_t{1} << 46})).Clone();
    return absl::OkStatus();
  };
  EXPECT_TRUE(absl::IsResourceExhausted(WithMemory(copies))) << WithMemory(copies);
}

TEST(Tensor, AWriteBehindTheLastElementShows) {
  for (const int64_t size : {1, 7, 8, 16, 100}) {
    Tensor tensor(DType::kF64, {size});
    Fill(tensor.view(), 1);
    EXPECT_TRUE(tensor.PaddingIsIntact()) << size;
    tensor.span<double>().data()[size] = 1;
    EXPECT_FALSE(tensor.PaddingIsIntact()) << size;
  }
  EXPECT_TRUE(Tensor().PaddingIsIntact());
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

TEST(TensorView, AnyAxisSplitsIntoAnOuterAndAnInnerOne) {
  const Tensor tensor = Counting({4, 6, 10});
  const int64_t sizes[] = {4, 6, 10}, strides[] = {60, 10, 1};
  for (int axis = 0; axis < 3; ++axis) {
    const ConstTensorView split = SplitAxis(tensor.view(), axis, 2);
    ASSERT_EQ(split.rank, 4);
    for (int i = 0; i < 4; ++i) {
      const int from = i <= axis ? i : i - 1;
      const int64_t inner = sizes[axis] / 2;
      EXPECT_EQ(split.dim(i), i == axis ? 2 : i == axis + 1 ? inner : sizes[from]);
      EXPECT_EQ(split.stride(i), i == axis ? inner * strides[from] : strides[from]);
    }
  }
}

TEST(DType, NamesReadBackAndRoundingsAreHalfAnUnitInTheLastPlace) {
  struct Case {
    DType dtype;
    const char* name;
    double roundoff;  // 2^-p for p bits of precision; 0 for whole numbers
  };
  for (const Case& c :
       {Case{DType::kF64, "f64", 0x1p-53}, Case{DType::kF32, "f32", 0x1p-24},
        Case{DType::kF16, "f16", 0x1p-11}, Case{DType::kBF16, "bf16", 0x1p-8},
        Case{DType::kI32, "i32", 0}, Case{DType::kI64, "i64", 0}, Case{DType::kU8, "u8", 0}}) {
    EXPECT_EQ(Name(c.dtype), c.name);
    EXPECT_EQ(*ParseDType(c.name), c.dtype);
    EXPECT_EQ(UnitRoundoff(c.dtype), c.roundoff) << c.name;
  }
  EXPECT_EQ(ParseDType("f8").status(),
            absl::InvalidArgumentError(
                "unknown dtype \"f8\"; known are f32, f64, f16, bf16, i32, i64, u8"));
}

TEST(CanConvert, TellsWhetherEveryElementIsAWholeNumberOfTheRange) {
  const auto can = [](double value, DType dtype) {
    Tensor tensor(DType::kF64, {3});
    Fill(tensor.view(), 1);
    tensor.view().Set(1, value);
    return CanConvert(tensor.view(), dtype);
  };
  struct Range {
    DType dtype;
    double least, most;
  };
  for (const Range& range : {Range{DType::kU8, 0, 255}, Range{DType::kI32, -2147483648, 2147483647},
                             Range{DType::kI64, -0x1p53, 0x1p53}}) {
    EXPECT_TRUE(can(range.least, range.dtype));
    EXPECT_TRUE(can(range.most, range.dtype));
    EXPECT_FALSE(can(std::nextafter(range.least, -INFINITY), range.dtype));
    EXPECT_FALSE(can(std::nextafter(range.most, INFINITY), range.dtype));
    EXPECT_FALSE(can(range.least - 2, range.dtype));
    EXPECT_FALSE(can(range.most + 2, range.dtype));
    EXPECT_FALSE(can(0.5, range.dtype));
    EXPECT_FALSE(can(NAN, range.dtype));
  }
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    EXPECT_TRUE(can(0.1, dtype));
  }
  Tensor same(DType::kI64, {1});
  same.view().Set(0, 0x1p60);
  EXPECT_TRUE(CanConvert(same.view(), DType::kI64));
}

TEST(Tensor, EveryShapeOfUpToFiveDimensionsIsAlignedAndContiguous) {
  for (const Shape& shape : {Shape{}, Shape{0}, Shape{3, 0, 2}, Shape{16}, Shape{1, 2, 3, 4, 5}}) {
    const absl::StatusOr<Tensor> tensor = Tensor::Allocate(DType::kF32, shape);
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    EXPECT_EQ(tensor->shape(), shape);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor->raw()) % 64, 0u);
    EXPECT_TRUE(tensor->view().is_contiguous());
  }
  EXPECT_EQ(Tensor::Allocate(DType::kF32, {1, 1, 1, 1, 1, 1}).status(),
            absl::InvalidArgumentError("shape [1, 1, 1, 1, 1, 1] has more than 5 dimensions"));
  EXPECT_EQ(Tensor::Allocate(DType::kF32, {2, -1}).status(),
            absl::InvalidArgumentError("shape [2, -1] is negative or overflows 64 bits"));
}

}  // namespace
}  // namespace tfb
