#include "adaptive/universal_transformer/adder.h"

#include <functional>
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

// A model of two channels that adds without looking: its states are never asked for.
SafetensorsFile TinyModel() {
  SafetensorsFile file;
  file.metadata = {{"technique", "universal_transformer:steps=3"}, {"heads", "2"}, {"data", "d"}};
  for (const auto& [name, shape] :
       std::vector<std::pair<const char*, Shape>>{{"embedding.first", {11, 2}},
                                                  {"embedding.second", {11, 2}},
                                                  {"output.w", {2, 10}},
                                                  {"output.b", {10}}}) {
    Tensor& tensor = file.tensors[name] = Tensor(DType::kF32, shape);
    for (int64_t n = 0; n < tensor.num_elements(); ++n) tensor.view().Set(n, 0.25 * (n % 23));
  }
  return file;
}

absl::StatusOr<Adder> ReadBack(const SafetensorsFile& file, std::string* path) {
  *path = ::testing::TempDir() + "/tiny_adder";
  EXPECT_TRUE(WriteSafetensors(*path, file.tensors, file.metadata).ok());
  return Adder::Read(*path);
}

TEST(Adder, WrongFilesAreRefusedWithTheReason) {
  using File = SafetensorsFile;
  struct Case {
    std::function<void(File*)> change;
    std::string answer;
  };
  for (const Case& c : std::vector<Case>{
           {[](File*) {}, ""},
           {[](File* f) { f->metadata.clear(); },
            "its technique is \"\", not a universal_transformer"},
           {[](File* f) { f->metadata["technique"] = "dense"; },
            "its technique is \"dense\", not a universal_transformer"},
           {[](File* f) { f->metadata["technique"] = "universal_transformer:steps=0"; },
            "its technique is \"universal_transformer:steps=0\", not a universal_transformer"},
           {[](File* f) { f->tensors.erase("output.w"); },
            "embedding.first has shape [11, 2]; expected is [11, 0]"},
           {[](File* f) { f->tensors.erase("embedding.second"); },
            "there is no tensor embedding.second"},
           {[](File* f) {
              f->tensors["embedding.first"] = Tensor(DType::kF32, {10, 2});
            },
            "embedding.first has shape [10, 2]; expected is [11, 2]"},
           {[](File* f) {
              f->tensors["output.w"] = Tensor(DType::kF32, {2, 11});
            },
            "output.w has shape [2, 11]; expected is [2, 10]"},
           {[](File* f) { f->tensors.erase("output.b"); }, "there is no tensor output.b"},
           {[](File* f) {
              f->tensors["output.b"] = Tensor(DType::kF32, {1, 10});
            },
            "output.b has shape [1, 10]; expected is [10]"},
           {[](File* f) { f->metadata["heads"] = "3"; }, "heads is \"3\", not a divisor of 2"},
           {[](File* f) { f->metadata["heads"] = "0"; }, "heads is \"0\", not a divisor of 2"},
           {[](File* f) { f->metadata.erase("heads"); }, "heads is \"\", not a divisor of 2"}}) {
    File file = TinyModel();
    c.change(&file);
    std::string path;
    const absl::Status status = ReadBack(file, &path).status();
    EXPECT_EQ(status.message(), c.answer.empty() ? "" : path + ": " + c.answer);
    EXPECT_EQ(status.code(),
              c.answer.empty() ? absl::StatusCode::kOk : absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(Adder::Read("/nowhere").status().code(), absl::StatusCode::kNotFound);
}

TEST(Adder, TellsWhatIsInTheFileAndEmbedsBothDigits) {
  std::string path;
  const SafetensorsFile file = TinyModel();
  const Adder adder = ReadBack(file, &path).value();
  EXPECT_EQ(adder.steps(), 3);
  EXPECT_EQ(adder.data(), "d");
  EXPECT_EQ(ToString(adder.technique()), "universal_transformer:steps=3");
  const Additions additions = DrawAdditions(2, 3, 0.5, 1);
  EXPECT_EQ(adder.ProblemOf(additions), Problem::SelfAttention(2, 2, 5, 1));
  const Tensor x = adder.Embed(additions);
  EXPECT_EQ(x.shape(), (Shape{2, 5, 2}));
  for (int64_t n = 0; n < x.num_elements(); ++n) {
    const int64_t row = n / 2, c = n % 2;
    EXPECT_EQ(x.span<float>()[n],
              *file.tensors.at("embedding.first").view().At<float>(additions.first[row], c) +
                  *file.tensors.at("embedding.second").view().At<float>(additions.second[row], c));
  }
  EXPECT_EQ(adder.LayerFor(additions, {}).status().message(),
            "the model has no tensor attention.w_k");
}

// With W = 0 every digit is the one with the largest bias, here 7, the first of two.
TEST(Adder, JudgesDigitsBehindTheMarkAndSumsThatAreRightAsAWhole) {
  SafetensorsFile file = TinyModel();
  Fill(file.tensors["output.w"].view(), 0);
  Fill(file.tensors["output.b"].view(), -4);
  file.tensors["output.b"].view().Set(7, -3);
  file.tensors["output.b"].view().Set(8, -3);
  std::string path;
  const Adder adder = ReadBack(file, &path).value();
  Additions additions;
  additions.count = 2;
  additions.digits = 1;
  additions.sum = {Additions::kMark, 7, 7, Additions::kMark, 7, 6};
  const Adder::Accuracy accuracy = adder.Judge(additions, Tensor(DType::kF32, {2, 3, 2}));
  EXPECT_EQ(accuracy.digits, 0.75);
  EXPECT_EQ(accuracy.sums, 0.5);
}

TEST(Adder, DrawsDigitsOfAllKindsAndAsManyNinesAsAsked) {
  const Additions additions = DrawAdditions(50, 40, 0.25, 9);
  int64_t seen[10] = {}, nines = 0;
  for (int64_t b = 0; b < 50; ++b) {
    for (int64_t t = 1; t <= 40; ++t) {
      const int64_t n = b * additions.tokens() + t;
      ++seen[additions.first[n]];
      nines += additions.first[n] + additions.second[n] == 9;
    }
    // The last digit is the carry's: both numbers have a 0 there.
    EXPECT_EQ(additions.first[b * 42 + 41] + additions.second[b * 42 + 41], 0);
  }
  // Counts of 2000 with probabilities 0.1 and 0.25 + 0.75 / 10, within five deviations.
  for (const int64_t count : seen) EXPECT_NEAR(count, 200, 67);
  EXPECT_NEAR(nines, 650, 105);
}

}  // namespace
}  // namespace tfb::universal_transformer
