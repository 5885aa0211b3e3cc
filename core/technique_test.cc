// Tests what layers have in common: their parameters.
#include "core/technique.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "core/thread_pool.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

Tensor Filled(DType dtype, const Shape& shape, double value) {
  Tensor tensor(dtype, shape);
  Fill(tensor.view(), value);
  return tensor;
}

// A layer with a table of numbers, a bias and a table of whole numbers; it computes nothing.
class TablesLayer : public Layer {
 public:
  TablesLayer() : Layer(Problem(), {}, {}) {
    parameters_["w"] = Filled(DType::kF32, {2, 3}, 1);
    parameters_["bias"] = Filled(DType::kF32, {3}, 2);
    parameters_["order"] = Filled(DType::kI32, {2}, 3);
  }
  size_t workspace_bytes(int) const override { return 0; }
  Cost cost() const override { return {}; }

 private:
  absl::Status DoRun(const Inputs&, const Outputs&, const Execution&) override {
    return absl::OkStatus();
  }
};

// Replaces parameters by one of the two functions.
enum class Give { kCopied, kMoved };
constexpr Give kGives[] = {Give::kCopied, Give::kMoved};

absl::Status SetParameters(Give give, NamedTensors parameters, Layer* layer) {
  if (give == Give::kMoved) return layer->SetParameters(std::move(parameters));
  const NamedTensors& copied = parameters;
  return layer->SetParameters(copied);
}

// Tells whether a parameter has the dtype, and the value in every element.
bool Holds(const Layer& layer, const std::string& name, DType dtype, double value) {
  const Tensor& tensor = layer.parameters().at(name);
  for (int64_t n = 0; n < tensor.num_elements(); ++n) {
    if (tensor.view().Get(n) != value) return false;
  }
  return tensor.dtype() == dtype;
}

TEST(SetParameters, ReplacesThoseThatAreGivenInTheLayersDtypes) {
  for (const Give give : kGives) {
    TablesLayer layer;
    NamedTensors same;
    same["w"] = Filled(DType::kF32, {2, 3}, 0.5);
    ASSERT_TRUE(SetParameters(give, std::move(same), &layer).ok());
    EXPECT_TRUE(Holds(layer, "w", DType::kF32, 0.5));
    EXPECT_TRUE(Holds(layer, "bias", DType::kF32, 2));
    EXPECT_TRUE(Holds(layer, "order", DType::kI32, 3));
    NamedTensors others;
    others["bias"] = Filled(DType::kF64, {3}, 0.25);
    others["order"] = Filled(DType::kF32, {2}, 7);
    ASSERT_TRUE(SetParameters(give, std::move(others), &layer).ok());
    EXPECT_TRUE(Holds(layer, "w", DType::kF32, 0.5));
    EXPECT_TRUE(Holds(layer, "bias", DType::kF32, 0.25));
    EXPECT_TRUE(Holds(layer, "order", DType::kI32, 7));
  }
}

TEST(SetParameters, TakesTheMemoryOfTensorsThatAreMovedAndOfNoOthers) {
  for (const Give give : kGives) {
    TablesLayer layer;
    NamedTensors given;
    given["w"] = Filled(DType::kF32, {2, 3}, 0.5);
    given["bias"] = Filled(DType::kF64, {3}, 0.25);
    const void* w = given["w"].raw();
    const void* own_bias = layer.parameters().at("bias").raw();
    ASSERT_TRUE(SetParameters(give, std::move(given), &layer).ok());
    EXPECT_EQ(layer.parameters().at("w").raw() == w, give == Give::kMoved);
    EXPECT_EQ(layer.parameters().at("bias").raw(), own_bias);  // of another dtype: converted
  }
}

TEST(SetParameters, ReplacesNothingWhereOneTensorDoesNotFit) {
  for (const Give give : kGives) {
    const auto refused = [give](const char* name, Tensor tensor) {
      TablesLayer layer;
      NamedTensors given;
      given["bias"] = Filled(DType::kF32, {3}, 0.25);
      given[name] = std::move(tensor);
      const absl::Status status = SetParameters(give, std::move(given), &layer);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
      EXPECT_TRUE(Holds(layer, "w", DType::kF32, 1));
      EXPECT_TRUE(Holds(layer, "bias", DType::kF32, 2));
      EXPECT_TRUE(Holds(layer, "order", DType::kI32, 3));
      return std::string(status.message());
    };
    EXPECT_EQ(refused("x", Filled(DType::kF32, {1}, 0)),
              "there is no parameter \"x\"; the layer has bias, order, w");
    EXPECT_EQ(refused("w", Filled(DType::kF32, {3, 2}, 0)),
              "parameter w has shape [3, 2]; expected is [2, 3]");
    EXPECT_TRUE(absl::StrContains(refused("order", Filled(DType::kF32, {2}, 0.5)),
                                  "does not hold every element of the tensor given for it"));
  }
}

TEST(SetParameters, AsksForANewSetup) {
  ThreadPool pool(1);
  Execution execution;
  execution.pool = &pool;
  for (const Give give : kGives) {
    TablesLayer layer;
    EXPECT_EQ(layer.Run({}, {}, execution).code(), absl::StatusCode::kFailedPrecondition);
    ASSERT_TRUE(layer.Setup({}, execution).ok());
    EXPECT_TRUE(layer.Run({}, {}, execution).ok());
    NamedTensors given;
    given["w"] = Filled(DType::kF32, {2, 3}, 0.5);
    ASSERT_TRUE(SetParameters(give, std::move(given), &layer).ok());
    EXPECT_EQ(layer.Run({}, {}, execution).code(), absl::StatusCode::kFailedPrecondition);
    ASSERT_TRUE(layer.Setup({}, execution).ok());
    EXPECT_TRUE(layer.Run({}, {}, execution).ok());
  }
}

}  // namespace
}  // namespace tfb
