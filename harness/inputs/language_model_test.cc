#include "harness/inputs/language_model.h"

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
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

// A stack whose output is x times the parameter "w", and whose context is the sum of all x so far. It
// reads three tokens at a time.
class SumLayer : public StreamingLayer {
 public:
  SumLayer(const Problem& p, const std::vector<TensorSpec>& parameters)
      : StreamingLayer(p, HiddenInputs(p), HiddenOutputs(p), {Segment(p, "x")},
                       {Segment(p, "out"), Segment(p, "context")}, /*max_segment_tokens=*/3),
        sum_(p.model_dim(), 0) {
    for (const TensorSpec& spec : parameters) {
      parameters_[spec.name] = Tensor(spec.dtype, spec.shape);
    }
  }
  size_t workspace_bytes(int) const override { return 16; }
  Cost cost() const override { return {}; }
  absl::Status Reset() override { return absl::UnimplementedError("is read once"); }

 protected:
  absl::Status DoRun(const Inputs&, const Outputs&, const Execution&) override {
    return absl::UnimplementedError("is appended to");
  }
  absl::Status DoAppend(int64_t tokens, const Inputs& segment, const Outputs& outputs,
                        const Execution&) override {
    for (int64_t t = 0; t < tokens; ++t) {
      const float* x = segment.Get("x").At<float>(0, t);
      for (int64_t c = 0; c < problem().model_dim(); ++c) {
        sum_[c] += x[c];
        outputs.Get("out").MutableAt<float>(0, t)[c] = x[c] * parameters_.at("w").span<float>()[c];
        outputs.Get("context").MutableAt<float>(0, t)[c] = sum_[c];
      }
    }
    return absl::OkStatus();
  }

 private:
  static TensorSpec Segment(const Problem& p, const std::string& name) {
    return {name, {1, kSegmentTokens, p.model_dim()}, DType::kF32};
  }
  std::vector<float> sum_;
};

struct NoOptions {
  void Describe(OptionBinder&) {}
};

class SumStack : public TechniqueOf<NoOptions> {
 public:
  explicit SumStack(int64_t* layers) : TechniqueOf(Info()), layers_(*layers) {}

 protected:
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem, const NoOptions&, Device,
                                                   uint64_t) const override {
    ++layers_;
    return std::make_unique<SumLayer>(problem, std::vector<TensorSpec>{{"w", {kWidth}}});
  }
  absl::Status Definition(const Problem&, const NoOptions&, const NamedTensors&, const Inputs&,
                          const DefinitionRequest&, NamedTensors*) const override {
    return absl::UnimplementedError("has no definition");
  }

 private:
  static TechniqueInfo Info() {
    TechniqueInfo info;
    info.name = "sum_stack";
    info.input_kind = InputKind::kHidden;
    return info;
  }
  int64_t& layers_;
};

// The small model with that stack, and other gains and shifts of its last norm than 1 and 0.
class ModelWithStack : public SmallModel {
 protected:
  ModelWithStack() {
    static int64_t layers = 0;
    static const bool registered = [] {
      Registry::Global().Add(std::make_unique<SumStack>(&layers));
      return true;
    }();
    EXPECT_TRUE(registered);
    layers_ = &layers;
    metadata_["technique"] = "sum_stack";
    for (const char* name : {"w", "final_norm.gamma", "final_norm.beta"}) {
      tensors_[name] = Tensor(DType::kF32, {kWidth});
      FillNormal(&tensors_[name], 1, name);
    }
    model_ = Read().value();
  }

  // Returns the stack's states for a text, a row a byte, and the sums of embeddings beside them.
  std::pair<std::vector<double>, std::vector<double>> StatesOf(absl::string_view text) const {
    const auto at = [this](const char* name, int64_t c) {
      return double{tensors_.at(name).span<float>()[c]};
    };
    std::vector<double> x, sums, sum(kWidth, 0);
    for (const char byte : text) {
      std::vector<double> h(kWidth);
      double mean = 0, variance = 0;
      for (int64_t c = 0; c < kWidth; ++c) {
        const double e = *tensors_.at("embedding").view().At<float>(static_cast<uint8_t>(byte), c);
        h[c] = e * at("w", c);
        mean += h[c] / kWidth;
        sums.push_back(sum[c] += e);
      }
      for (const double value : h) variance += std::pow(value - mean, 2) / kWidth;
      for (int64_t c = 0; c < kWidth; ++c) {
        x.push_back((h[c] - mean) / std::sqrt(variance + 1e-5) * at("final_norm.gamma", c) +
                    at("final_norm.beta", c));
      }
    }
    return {x, sums};
  }

  int64_t* layers_;
  std::shared_ptr<const LanguageModel> model_;
};

void ExpectNear(const ConstTensorView& view, const std::vector<double>& expected) {
  ASSERT_EQ(view.num_elements(), static_cast<int64_t>(expected.size()));
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(view.Get(static_cast<int64_t>(i)), expected[i], 1e-4) << i;
  }
}

TEST_F(ModelWithStack, TechniquesOnTokensReadTheStatesAndContextsOfEachSequence) {
  for (const int64_t tokens : {1, 3, 4, 8, 13}) {
    const Problem problem = model_->Fit(Tokens(tokens, 3));
    const Shape shape = {3, tokens, kWidth};
    const auto inputs = model_->MakeInputs(
        {{"x", shape}, {"context", shape}, {"key_mask", {3, tokens}, DType::kU8, true}}, problem);
    if (tokens == 13) {  // a third of the text has 13 bytes, and the byte behind each is needed
      EXPECT_EQ(inputs.status().message(),
                "3 x 13 tokens, and the byte behind each; the held-out text has 41 bytes");
      continue;
    }
    ASSERT_TRUE(inputs.ok()) << inputs.status();
    EXPECT_EQ(inputs->size(), 2u);
    for (int64_t b = 0; b < 3; ++b) {
      const auto [x, context] = StatesOf(absl::string_view(text_).substr(b * 13, tokens));
      ExpectNear(Slice(inputs->at("x").view(), 0, b, 1), x);
      ExpectNear(Slice(inputs->at("context").view(), 0, b, 1), context);
    }
  }
  // A context that need not be there does not make it a technique on tokens.
  const Problem one = model_->Fit(Tokens(2));
  const Shape shape = {1, 2, kWidth};
  EXPECT_EQ(model_->MakeInputs({{"x", shape}, {"context", shape, DType::kF32, true}}, one)->size(),
            1u);
  const auto refusal = [&](const std::vector<TensorSpec>& specs) {
    return std::string(model_->MakeInputs(specs, one).status().message());
  };
  EXPECT_EQ(refusal({{"x", shape}, {"v", shape}}),
            "text makes hidden states; the technique reads v");
  EXPECT_EQ(refusal({{"context", shape}}), "the technique reads no hidden states");
  EXPECT_EQ(refusal({}), "the technique reads no hidden states");
}

TEST_F(ModelWithStack, ALayersParametersAreTheModelsAndItsDatastoreIsMadeOnce) {
  setenv("XDG_CACHE_HOME", (folder_ + "/cache").c_str(), 1);
  std::filesystem::remove_all(folder_ + "/cache");
  const std::string text = "looked up";
  for (const int64_t entries : {1, 5, 8}) {
    for (const DType dtype : {DType::kF32, DType::kF16}) {
      const SumLayer layer(model_->Fit(Tokens(4)), {{"w", {kWidth}, dtype},
                                                    {"datastore.keys", {entries, kWidth}, dtype},
                                                    {"datastore.values", {entries}, DType::kU8}});
      const int64_t layers_before = *layers_;
      const auto parameters = model_->ParametersOf(layer);
      ASSERT_TRUE(parameters.ok()) << parameters.status();
      EXPECT_EQ(*layers_ - layers_before, dtype == DType::kF32 ? 1 : 0);  // then it is read
      EXPECT_EQ(parameters->size(), 3u);
      const absl::string_view last = absl::string_view(text).substr(8 - entries);
      const auto [x, sums] = StatesOf(last.substr(0, entries));
      const Tensor& keys = parameters->at("datastore.keys");
      EXPECT_EQ(keys.dtype(), dtype);
      for (int64_t n = 0; n < entries; ++n) {
        EXPECT_EQ(parameters->at("datastore.values").span<uint8_t>()[n], last[n + 1]);
        for (int64_t c = 0; c < kWidth; ++c) {
          const double sum = sums[n * kWidth + c];
          EXPECT_NEAR(keys.view().Get(n * kWidth + c), sum,
                      dtype == DType::kF16 ? 1e-3 * (1 + std::abs(sum)) : 1e-5);
        }
      }
      EXPECT_EQ(parameters->at("w").dtype(), dtype);
      EXPECT_NEAR(parameters->at("w").view().Get(3), tensors_["w"].view().Get(3), 1e-2);
    }
  }
  int files = 0;
  for (const auto& file :
       std::filesystem::directory_iterator(folder_ + "/cache/transformer-family-bench")) {
    files += file.path().filename().string().rfind("datastore-", 0) == 0 &&
             file.path().extension() == ".safetensors";
  }
  EXPECT_EQ(files, 3);
  const auto refusal = [this](const std::vector<TensorSpec>& parameters) {
    const SumLayer layer(model_->Fit(Tokens(4)), parameters);
    return std::string(model_->ParametersOf(layer).status().ToString());
  };
  const TensorSpec values = {"datastore.values", {9}, DType::kU8};
  EXPECT_EQ(refusal({values, {"datastore.keys", {9, kWidth}}}),
            "INVALID_ARGUMENT: 9 entries; the text of the datastore has 9 bytes, so that allowed "
            "are 1 to 8");
  EXPECT_EQ(refusal({{"w", {kWidth + 1}}}),
            "UNIMPLEMENTED: the language model has no parameter w [9]; its is [8]");
  EXPECT_EQ(refusal({{"loss", {2}}}),
            "UNIMPLEMENTED: the language model has no parameter loss [2]");
}

TEST_F(ModelWithStack, ADatastoreIsKeptBelowTheFirstFolderThatTheEnvironmentNames) {
  const auto make = [this] {
    const SumLayer layer(model_->Fit(Tokens(4)),
                         {{"datastore.keys", {2, kWidth}}, {"datastore.values", {2}, DType::kU8}});
    EXPECT_TRUE(model_->ParametersOf(layer).ok());
  };
  const auto is_kept = [](const std::string& folder) {
    return std::filesystem::exists(folder + "/transformer-family-bench");
  };
  const std::string home = folder_ + "/home", cache = folder_ + "/other_cache";
  std::filesystem::remove_all(home);
  std::filesystem::remove_all(cache);
  setenv("HOME", home.c_str(), 1);
  setenv("XDG_CACHE_HOME", "relative", 1);  // which the specification has one ignore
  make();
  EXPECT_TRUE(is_kept(home + "/.cache"));
  setenv("XDG_CACHE_HOME", cache.c_str(), 1);
  make();
  EXPECT_TRUE(is_kept(cache));
  // Where it cannot be kept it is made all the same, and a line says so.
  setenv("XDG_CACHE_HOME", "/proc/none", 1);
  ::testing::internal::CaptureStderr();
  make();
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              ::testing::StartsWith("the datastore is not kept for the next run: "));
}

TEST_F(SmallModel, BitsOfSeveralSequencesOfMoreThanAFewHundredTokensAreTheMean) {
  text_.clear();
  for (int n = 0; n < 1300; ++n) text_ += static_cast<char>(n * n % 251);
  const auto model = Read();
  ASSERT_TRUE(model.ok()) << model.status();
  constexpr int64_t kTokens = 600;
  const Problem problem = (*model)->Fit(Tokens(kTokens, 2));
  Tensor out(DType::kF32, {2, kTokens, 256});
  FillNormal(&out, 1, "out");
  double nats = 0;
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t t = 0; t < kTokens; ++t) {
      const float* scores = out.view().At<float>(b, t);
      double sum = 0;
      for (int64_t y = 0; y < 256; ++y) sum += std::exp(double{scores[y]});
      nats += std::log(sum) - double{scores[static_cast<uint8_t>(text_[b * 650 + t + 1])]};
    }
  }
  const auto bits = (*model)->BitsPerByte(InputKind::kTokens, problem, out.view());
  ASSERT_TRUE(bits.ok()) << bits.status();
  // Scores are of up to 4 or so, and their differences are rounded to f32.
  EXPECT_NEAR(*bits, nats / std::log(2.0) / (2 * kTokens), 8 * std::ldexp(1, -24));
  const Tensor none(DType::kF32, {0, 5, 256});
  EXPECT_EQ(
      (*model)->BitsPerByte(InputKind::kTokens, (*model)->Fit(Tokens(5, 0)), none.view()).value(),
      0);
}

TEST_F(SmallModel, WhatIsWrongIsNamed) {
  const auto model = Read();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_THAT(std::string((*model)->HeldOut(Tokens(41), 0).status().message()),
              HasSubstr("41 tokens, and the byte behind each; the held-out text has 41 bytes"));
  EXPECT_TRUE((*model)->HeldOut(Tokens(40), 0).ok());
  Problem no_keys = Tokens(40);
  no_keys.kv_tokens = 1000;  // of which nothing is read
  EXPECT_EQ((*model)->HeldOut(no_keys, 0).value(), text_.substr(0, 41));
  EXPECT_EQ((*model)->HeldOut(Tokens(3, 4), 2).value(), text_.substr(20, 4));
  EXPECT_FALSE((*model)->HeldOut(Tokens(20, 2), 1).ok());

  const std::string path = folder_ + "/model.safetensors";
  metadata_["technique"] = "none";
  EXPECT_EQ(
      (*Read())->MakeInputs({{"x", {1, 2, 8}}, {"context", {1, 2, 8}}}, Tokens(2)).status().code(),
      absl::StatusCode::kNotFound);
  metadata_["heads"] = "three";
  EXPECT_EQ(WhatIsWrong(),
            path + ": metadata \"heads\" is \"three\"; expected is a number of heads");
  metadata_["heads"] = "0";
  EXPECT_EQ(WhatIsWrong(), path + ": metadata \"heads\" is \"0\"; expected is a number of heads");
  metadata_["heads"] = "3";
  EXPECT_EQ(WhatIsWrong(), path + ": 3 heads do not divide 8 channels");
  metadata_["heads"] = "1";
  EXPECT_TRUE(Read().ok());
  metadata_["technique"] = ":";
  EXPECT_THAT(WhatIsWrong(), HasSubstr(path + ": metadata \"technique\" is \":\"; "));
  metadata_["technique"] = "stack";
  for (const char* name : {"output", "final_norm.gamma", "final_norm.beta", "embedding"}) {
    Tensor right = std::move(tensors_[name]);
    const Shape shape = right.shape();
    for (const Shape& other : {Shape{256, 4}, Shape{7}}) {
      tensors_[name] = Tensor(DType::kF32, other);
      const std::string of_wrong = ShapeString(other);
      // The other tensors are held against the width of the embedding.
      const bool is_first = std::string(name) != "embedding" || other.size() != 2;
      EXPECT_EQ(
          WhatIsWrong(),
          path + (is_first ? absl::StrCat(
                                 ": tensor \"", name, "\" is ", of_wrong, "; expected is ",
                                 std::string(name) == "embedding" ? "[256, 0]" : ShapeString(shape))
                           : ": tensor \"output\" is [256, 8]; expected is [256, 4]"));
    }
    tensors_.erase(name);
    EXPECT_THAT(WhatIsWrong(),
                HasSubstr(absl::StrCat(": tensor \"", name, "\" is not there; expected is [")));
    tensors_[name] = std::move(right);
  }
  EXPECT_TRUE(Read().ok());
  std::filesystem::remove(folder_ + "/held_out.txt");
  EXPECT_EQ(LanguageModel::Read(folder_).status().message(),
            folder_ + "/held_out.txt: cannot be read");
  ASSERT_TRUE(Read().ok());
  std::filesystem::remove(folder_ + "/datastore.txt");
  EXPECT_EQ(LanguageModel::Read(folder_).status().message(),
            folder_ + "/datastore.txt: cannot be read");
  EXPECT_FALSE(LanguageModel::Read(folder_ + "/nowhere").ok());
}

}  // namespace
}  // namespace tfb
