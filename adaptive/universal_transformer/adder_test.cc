#include "adaptive/universal_transformer/adder.h"

#include <string>
#include <utility>
#include <vector>

#include "core/runfiles.h"
#include "core/safetensors.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb::universal_transformer {
namespace {

Adder Shipped() {
  return Adder::Read(RunfilePath("adaptive/universal_transformer/model/model.safetensors").value())
      .value();
}

// Returns digits as a number, the most significant first.
std::string NumberOf(const std::vector<int32_t>& digits, int64_t first, int64_t tokens) {
  std::string number;
  for (int64_t t = tokens - 1; t > 0; --t) number += static_cast<char>('0' + digits[first + t]);
  return number;
}

TEST(Adder, SumsAreThoseOfTheNumbers) {
  for (const double nines : {0.0, 0.7, 1.0}) {
    const Additions additions = DrawAdditions(20, 12, nines, 3);
    for (int64_t b = 0; b < additions.count; ++b) {
      const auto number = [&](const std::vector<int32_t>& digits) {
        return std::stoll(NumberOf(digits, b * additions.tokens(), additions.tokens()));
      };
      EXPECT_EQ(number(additions.first) + number(additions.second), number(additions.sum));
      EXPECT_EQ(additions.first[b * additions.tokens()], Additions::kMark);
    }
  }
}

TEST(Adder, TheReachCountsThePairsThatAddUpToNine) {
  const Additions nines = DrawAdditions(2, 5, 1, 3);
  for (int64_t t = 0; t < 7; ++t) {  // token 0, then the mark beside token 1 decides, ...
    EXPECT_EQ(nines.reach[7 + t], t);
  }
  const Additions additions = DrawAdditions(1, 200, 0.4, 3);
  for (int64_t t = 2; t < additions.tokens(); ++t) {
    const bool nine = additions.first[t - 1] + additions.second[t - 1] == 9;
    EXPECT_EQ(additions.reach[t], nine ? additions.reach[t - 1] + 1 : 1) << t;
  }
}

// The expected shares are those in PyTorch, for problems drawn in the same way: all digits right
// after 5 steps, 92.8 % after 2, and 99.8 % with halting after 3.4 on average (the model's
// metadata). The bounds are five standard errors of 6,400 digits, of which half depend on a
// neighbour, and of as many steps with a deviation of 0.6.
TEST(Adder, TheTrainedModelAddsAsWellAsInPyTorch) {
  const Adder adder = Shipped();
  const Additions additions = DrawAdditions(256, 24, 0.5, 11);
  const NamedTensors inputs = [&] {
    NamedTensors tensors;
    tensors["x"] = adder.Embed(additions);
    return tensors;
  }();
  const auto judged = [&](const Options& options, double* mean_steps) {
    auto layer = adder.LayerFor(additions, options).value();
    const NamedTensors outputs = RunLayer(*layer, ViewsOf(inputs)).value();
    *mean_steps = layer->statistics().at("mean_steps");
    return adder.Judge(additions, outputs.at("out"));
  };
  double mean_steps;
  EXPECT_NEAR(judged({{"halting", "none"}, {"steps", "2"}}, &mean_steps).digits, 0.9278, 0.025);
  EXPECT_GE(judged({{"halting", "none"}, {"steps", "5"}}, &mean_steps).digits, 0.9995);
  EXPECT_GE(judged({{"halting", "none"}}, &mean_steps).sums, 0.99);
  EXPECT_EQ(mean_steps, 8);
  EXPECT_NEAR(judged({}, &mean_steps).digits, 0.9978, 0.0045);
  EXPECT_NEAR(mean_steps, 3.39, 0.05);
}

TEST(Adder, WrongFilesAreRefusedWithTheReason) {
  EXPECT_EQ(Adder::Read("/nowhere").status().code(), absl::StatusCode::kNotFound);
  const std::string path = ::testing::TempDir() + "/not_an_adder";
  ASSERT_TRUE(WriteSafetensors(path, {}).ok());
  const absl::Status status = Adder::Read(path).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_NE(status.message().find("technique"), absl::string_view::npos) << status;
}

}  // namespace
}  // namespace tfb::universal_transformer
