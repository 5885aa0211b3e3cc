#include "harness/inputs/language_model.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "core/random.h"
#include "core/safetensors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kWidth = 8;

// A model of 8 channels and 2 heads, in the test's own folder.
class SmallModel : public ::testing::Test {
 protected:
  SmallModel() : folder_(::testing::TempDir() + "/language_model") {
    std::filesystem::create_directories(folder_);
    for (const char* name : {"embedding", "output"}) {
      tensors_[name] = Tensor(DType::kF32, {256, kWidth});
      FillNormal(&tensors_[name], 1, name);
    }
    tensors_["final_norm.gamma"] = Tensor(DType::kF32, {kWidth});
    tensors_["final_norm.beta"] = Tensor(DType::kF32, {kWidth});
    Fill(tensors_["final_norm.gamma"].view(), 1);
    Fill(tensors_["final_norm.beta"].view(), 0);
    metadata_ = {{"technique", "stack:layers=3"}, {"heads", "2"}, {"data", "a text"}};
  }

  absl::StatusOr<std::shared_ptr<const LanguageModel>> Read() {
    EXPECT_TRUE(WriteSafetensors(folder_ + "/model.safetensors", tensors_, metadata_).ok());
    std::ofstream(folder_ + "/held_out.txt") << text_;
    std::ofstream(folder_ + "/datastore.txt") << "looked up";
    return LanguageModel::Read(folder_);
  }
  std::string WhatIsWrong() {
    const auto model = Read();
    EXPECT_FALSE(model.ok());
    return std::string(model.status().message());
  }

  std::string folder_;
  NamedTensors tensors_;
  std::map<std::string, std::string> metadata_;
  std::string text_ = "In the beginning was the Word, and so on.";
};

Problem Tokens(int64_t tokens, int64_t batch = 1) {
  return Problem::SelfAttention(batch, 4, tokens, 64, true);
}

TEST_F(SmallModel, AProblemTakesTheModelsHeadsAndItsOptionsFillTheGaps) {
  const auto model = Read();
  ASSERT_TRUE(model.ok()) << model.status();
  const Problem problem = (*model)->Fit(Tokens(7, 3));
  EXPECT_EQ(problem.query_heads, 2);
  EXPECT_EQ(problem.kv_heads, 2);
  EXPECT_EQ(problem.head_dim, 4);
  EXPECT_EQ(problem.value_dim, 4);
  EXPECT_EQ(problem.query_tokens, 7);
  EXPECT_EQ(problem.batch, 3);
  TechniqueInfo info;
  info.options = {{"layers", "int", "2", "", "", {}}, {"memory", "int", "128", "", "", {}}};
  EXPECT_EQ((*model)->FitOptions(info, {{"memory", "5"}}),
            (Options{{"layers", "3"}, {"memory", "5"}}));
  EXPECT_EQ((*model)->FitOptions(info, {{"layers", "1"}}), (Options{{"layers", "1"}}));
  info.options.clear();
  EXPECT_EQ((*model)->FitOptions(info, {}), Options());
}

TEST_F(SmallModel, HiddenTechniquesReadEmbeddedBytes) {
  const auto model = Read();
  ASSERT_TRUE(model.ok()) << model.status();
  // The two rows of a batch begin at the two halves of the text.
  const Problem problem = (*model)->Fit(Tokens(5, 2));
  const auto inputs = (*model)->MakeInputs({{"x", {2, 5, kWidth}, DType::kF32}}, problem);
  ASSERT_TRUE(inputs.ok()) << inputs.status();
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t t = 0; t < 5; ++t) {
      const uint8_t byte = static_cast<uint8_t>(text_[b * (text_.size() / 2) + t]);
      for (int64_t c = 0; c < kWidth; ++c) {
        EXPECT_EQ(inputs->at("x").view().At<float>(b, t)[c],
                  tensors_["embedding"].view().At<float>(byte)[c]);
      }
    }
  }
  EXPECT_THAT(
      std::string(
          (*model)->MakeInputs({{"q", {2, 5, kWidth}, DType::kF32}}, problem).status().message()),
      HasSubstr("reads q"));
}

TEST_F(SmallModel, EqualLogitsHaveEightBitsAByte) {
  Fill(tensors_["output"].view(), 0);
  const auto model = Read();
  ASSERT_TRUE(model.ok()) << model.status();
  Tensor h(DType::kF32, {1, 9, kWidth});
  FillNormal(&h, 1, "h");
  const auto bits = (*model)->BitsPerByte(InputKind::kHidden, (*model)->Fit(Tokens(9)), h.view());
  ASSERT_TRUE(bits.ok()) << bits.status();
  EXPECT_NEAR(*bits, 8, 1e-6);
}

TEST_F(SmallModel, BitsAreOfTheByteBehindEachTokenAndOfTheNormalisedState) {
  const auto model = Read();
  ASSERT_TRUE(model.ok()) << model.status();
  Tensor h(DType::kF32, {1, 2, kWidth});
  FillNormal(&h, 1, "h");
  double nats = 0;
  for (int64_t t = 0; t < 2; ++t) {
    const float* row = h.view().At<float>(0, t);
    double mean = 0, variance = 0, sum = 0, of_next = 0;
    for (int64_t c = 0; c < kWidth; ++c) mean += row[c] / kWidth;
    for (int64_t c = 0; c < kWidth; ++c) variance += std::pow(row[c] - mean, 2) / kWidth;
    for (int64_t y = 0; y < 256; ++y) {
      double logit = 0;
      for (int64_t c = 0; c < kWidth; ++c) {
        logit += (row[c] - mean) / std::sqrt(variance + 1e-5) *
                 tensors_["output"].view().At<float>(y)[c];
      }
      sum += std::exp(logit);
      if (y == text_[t + 1]) of_next = logit;
    }
    nats += std::log(sum) - of_next;
  }
  const auto bits = (*model)->BitsPerByte(InputKind::kHidden, (*model)->Fit(Tokens(2)), h.view());
  ASSERT_TRUE(bits.ok()) << bits.status();
  EXPECT_NEAR(*bits, nats / 2 / std::log(2), 1e-5);
}

TEST_F(SmallModel, ALayerThatHasTheFinalNormHasNormalisedItsStates) {
  const auto model = Read();
  ASSERT_TRUE(model.ok()) << model.status();
  Tensor h(DType::kF32, {1, 2, kWidth}), normalised(DType::kF32, {1, 2, kWidth});
  FillNormal(&h, 1, "h");
  for (int64_t t = 0; t < 2; ++t) {
    const float* row = h.view().At<float>(0, t);
    double mean = 0, variance = 0;
    for (int64_t c = 0; c < kWidth; ++c) mean += row[c] / kWidth;
    for (int64_t c = 0; c < kWidth; ++c) variance += std::pow(row[c] - mean, 2) / kWidth;
    for (int64_t c = 0; c < kWidth; ++c) {
      normalised.view().MutableAt<float>(0, t)[c] =
          static_cast<float>((row[c] - mean) / std::sqrt(variance + 1e-5));
    }
  }
  const Problem problem = (*model)->Fit(Tokens(2));
  const double of_states = (*model)->BitsPerByte(InputKind::kHidden, problem, h.view()).value();
  NamedTensors of_layer;
  of_layer["final_norm.gamma"] = tensors_["final_norm.gamma"].Clone();
  const double of_normalised =
      (*model)->BitsPerByte(InputKind::kHidden, problem, normalised.view(), of_layer).value();
  EXPECT_NEAR(of_normalised, of_states, 1e-5);
  EXPECT_GT(
      std::abs((*model)->BitsPerByte(InputKind::kHidden, problem, h.view(), of_layer).value() -
               of_states),
      1e-3);
}

TEST_F(SmallModel, MoreParametersAreReadFromAFileOfTheirOwn) {
  NamedTensors more;
  more["classifier.w"] = Tensor(DType::kF16, {3});
  Fill(more["classifier.w"].view(), 0.5);
  const std::string path = folder_ + "/exits.safetensors";
  EXPECT_EQ((*Read())->parameters().count("classifier.w"), 0u);
  const uint64_t fingerprint = (*Read())->fingerprint();
  ASSERT_TRUE(WriteSafetensors(path, more, {}).ok());
  const auto model = Read();
  std::ofstream(path) << "nothing";
  const std::string wrong = WhatIsWrong();
  std::filesystem::remove(path);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->parameters().at("classifier.w").dtype(), DType::kF32);
  EXPECT_EQ((*model)->parameters().at("classifier.w").view().Get(2), 0.5);
  EXPECT_EQ((*model)->fingerprint(), fingerprint);  // by which datastores of its states are kept
  EXPECT_THAT(wrong, HasSubstr("exits.safetensors"));
}

TEST_F(SmallModel, TechniquesOnTokensGiveLogarithmsOfProbabilities) {
  const auto model = Read();
  ASSERT_TRUE(model.ok()) << model.status();
  Tensor out(DType::kF32, {1, 3, 256});
  Fill(out.view(), -20);
  for (int64_t t = 0; t < 3; ++t) out.view().MutableAt<float>(0, t)[uint8_t(text_[t + 1])] = 0;
  const auto bits = (*model)->BitsPerByte(InputKind::kTokens, (*model)->Fit(Tokens(3)), out.view());
  ASSERT_TRUE(bits.ok()) << bits.status();
  EXPECT_NEAR(*bits, std::log2(1 + 255 * std::exp(-20.0)), 1e-7);
}

TEST_F(SmallModel, WhatIsWrongIsNamed) {
  const auto model = Read();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_THAT(std::string((*model)->HeldOut(Tokens(41), 0).status().message()),
              HasSubstr("41 tokens, and the byte behind each; the held-out text has 41 bytes"));
  EXPECT_TRUE((*model)->HeldOut(Tokens(40), 0).ok());
  EXPECT_FALSE((*model)->HeldOut(Tokens(20, 2), 1).ok());

  metadata_["heads"] = "three";
  EXPECT_THAT(WhatIsWrong(), HasSubstr("metadata \"heads\" is \"three\""));
  metadata_["heads"] = "3";
  EXPECT_THAT(WhatIsWrong(), HasSubstr("3 heads do not divide 8 channels"));
  metadata_["heads"] = "2";
  metadata_["technique"] = ":";
  EXPECT_THAT(WhatIsWrong(), HasSubstr("metadata \"technique\""));
  metadata_["technique"] = "stack";
  tensors_["output"] = Tensor(DType::kF32, {256, 4});
  Fill(tensors_["output"].view(), 0);
  EXPECT_THAT(WhatIsWrong(), HasSubstr("tensor \"output\" is [256, 4]; expected is [256, 8]"));
  tensors_.erase("embedding");
  EXPECT_THAT(WhatIsWrong(), HasSubstr("tensor \"embedding\" is not there"));
  EXPECT_FALSE(LanguageModel::Read(folder_ + "/nowhere").ok());
}

}  // namespace
}  // namespace tfb
