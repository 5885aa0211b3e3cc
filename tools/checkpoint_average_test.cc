#include "tools/checkpoint_average.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

SafetensorsFile Checkpoint(const std::vector<float>& weights, int32_t step) {
  SafetensorsFile file;
  file.tensors["w"] = Tensor(DType::kF32, {static_cast<int64_t>(weights.size())});
  std::copy(weights.begin(), weights.end(), file.tensors["w"].span<float>().begin());
  file.tensors["step"] = Tensor(DType::kI32, {1});
  file.tensors["step"].span<int32_t>()[0] = step;
  file.metadata["step"] = std::to_string(step);
  return file;
}

SafetensorsFile Mean(std::vector<SafetensorsFile> checkpoints) {
  CheckpointAverage average;
  for (SafetensorsFile& file : checkpoints) {
    EXPECT_TRUE(average.Add(std::move(file), "a file").ok());
  }
  return std::move(average).Finish().value();
}

std::vector<float> Weights(const SafetensorsFile& file) {
  const auto w = file.tensors.at("w").span<float>();
  return {w.begin(), w.end()};
}

template <class... Files>
std::vector<SafetensorsFile> List(Files... files) {
  std::vector<SafetensorsFile> list;
  (list.push_back(std::move(files)), ...);
  return list;
}

TEST(CheckpointAverage, ParametersAreMeansAndTheRestIsTheLastCheckpoints) {
  const SafetensorsFile mean = Mean(
      List(Checkpoint({1, -2, 0}, 10), Checkpoint({2, -2, 5}, 20), Checkpoint({6, -2, -2}, 30)));
  EXPECT_EQ(Weights(mean), (std::vector<float>{3, -2, 1}));
  EXPECT_EQ(mean.tensors.at("step").span<int32_t>()[0], 30);
  EXPECT_EQ(mean.metadata.at("step"), "30");
}

TEST(CheckpointAverage, TheMeanOfOneIsItself) {
  const std::vector<float> weights = {0.1f, 1e-38f, -3e38f};
  EXPECT_EQ(Weights(Mean(List(Checkpoint(weights, 1)))), weights);
}

TEST(CheckpointAverage, TheOrderDoesNotMatterNorDoSumsThatFp32CannotHold) {
  const std::vector<float> a = {3e38f, 1e8f}, b = {3e38f, 1}, c = {3e38f, -1e8f};
  const std::vector<float> mean =
      Weights(Mean(List(Checkpoint(a, 1), Checkpoint(b, 2), Checkpoint(c, 3))));
  EXPECT_EQ(mean, Weights(Mean(List(Checkpoint(c, 3), Checkpoint(a, 1), Checkpoint(b, 2)))));
  EXPECT_EQ(mean, (std::vector<float>{3e38f, 1.0f / 3}));
}

TEST(CheckpointAverage, SixteenBitParametersAreRoundedOnce) {
  std::vector<SafetensorsFile> checkpoints;
  for (const double value : {1.0, 1.0, 1.0 + 1.0 / 128}) {
    SafetensorsFile& file = checkpoints.emplace_back();
    Fill((file.tensors["w"] = Tensor(DType::kBF16, {1})).view(), value);
  }
  // 1 + 1/384 lies between 1 and 1 + 1/128, nearer to 1.
  EXPECT_EQ(Mean(std::move(checkpoints)).tensors.at("w").view().Get(0), 1);
}

TEST(CheckpointAverage, WhatDoesNotFitIsRefusedByName) {
  const auto refusal = [](SafetensorsFile second) {
    CheckpointAverage average;
    EXPECT_TRUE(average.Add(Checkpoint({1, 2}, 1), "one").ok());
    const absl::Status status = average.Add(std::move(second), "two");
    EXPECT_EQ(Weights(std::move(average).Finish().value()), (std::vector<float>{1, 2}));
    return std::string(status.message());
  };
  EXPECT_EQ(refusal(Checkpoint({1, 2, 3}, 2)),
            "two: tensor \"w\" is f32 [3]; in one it is f32 [2]");
  SafetensorsFile other = Checkpoint({1, 2}, 2);
  other.tensors["w"] = Tensor(DType::kF64, {2});
  Fill(other.tensors["w"].view(), 0);
  EXPECT_EQ(refusal(std::move(other)), "two: tensor \"w\" is f64 [2]; in one it is f32 [2]");
  SafetensorsFile more = Checkpoint({1, 2}, 2);
  Fill((more.tensors["b"] = Tensor(DType::kF32, {1})).view(), 0);
  EXPECT_EQ(refusal(std::move(more)), "two: tensor \"b\" is not in one");
  SafetensorsFile less = Checkpoint({1, 2}, 2);
  less.tensors.erase("step");
  EXPECT_EQ(refusal(std::move(less)), "two: tensor \"step\" of one is not there");
  EXPECT_FALSE(CheckpointAverage().Finish().ok());
}

// ---- The program ----

class Program : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) const {
    return absl::StrCat(::testing::TempDir(), "/", getpid(), ".", name);
  }
  void Write(const std::string& name, const SafetensorsFile& file) const {
    ASSERT_TRUE(WriteSafetensors(Path(name), file.tensors, file.metadata).ok());
  }
  // Runs the program, and returns its exit status and output.
  std::pair<int, std::string> Run(const std::string& arguments) const {
    const int status = system(
        absl::StrCat("tools/average_checkpoints ", arguments, " > ", Path("printed"), " 2>&1")
            .c_str());
    std::stringstream text;
    text << std::ifstream(Path("printed")).rdbuf();
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text.str()};
  }
};

TEST_F(Program, WritesTheMean) {
  Write("a.safetensors", Checkpoint({1, 2}, 1));
  Write("b.safetensors", Checkpoint({3, 5}, 2));
  const auto [status, text] = Run(absl::StrCat(Path("a.safetensors"), " ", Path("b.safetensors"),
                                               " --output=", Path("mean.safetensors")));
  EXPECT_EQ(status, 0) << text;
  EXPECT_TRUE(absl::StrContains(text, "the mean of 2 checkpoints of 2 tensors")) << text;
  const SafetensorsFile mean = ReadSafetensors(Path("mean.safetensors")).value();
  EXPECT_EQ(Weights(mean), (std::vector<float>{2, 3.5}));
}

TEST_F(Program, BadUsageIsSaidInOneLine) {
  Write("a.safetensors", Checkpoint({1, 2}, 1));
  Write("c.safetensors", Checkpoint({3}, 2));
  const std::string a = Path("a.safetensors"), output = " --output=" + Path("out");
  for (const auto& [arguments, part] : std::vector<std::pair<std::string, std::string>>{
           {a, "--output is missing"},
           {output, "no checkpoints"},
           {a + " " + Path("c.safetensors") + output, "tensor \"w\" is f32 [1]"},
           {a + " no_such_file" + output, "no_such_file"},
           {a + output + " --nonsense", "nonsense"}}) {
    const auto [status, text] = Run(arguments);
    EXPECT_EQ(status, 2) << text;
    EXPECT_TRUE(absl::StartsWith(text, "average_checkpoints: ")) << text;
    EXPECT_TRUE(absl::StrContains(text, part)) << text;
  }
  EXPECT_EQ(Run("--help").first, 0);
}

}  // namespace
}  // namespace tfb
