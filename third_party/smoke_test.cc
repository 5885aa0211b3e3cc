// Each outside library is found, compiles and links under its label.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <Eigen/Core>
#include <boost/context/fiber.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

ABSL_FLAG(int, smoke_tokens, 128, "Read back by a test.");

namespace tfb {
namespace {

absl::StatusOr<int> ParseTokens(const std::string& text) {
  int tokens = 0;
  if (!absl::SimpleAtoi(text, &tokens)) {
    return absl::InvalidArgumentError(absl::StrCat("tokens: \"", text, "\" is not a number"));
  }
  return tokens;
}

TEST(ThirdParty, AbslStatusCarriesItsMessage) {
  EXPECT_EQ(*ParseTokens("256"), 256);
  EXPECT_EQ(ParseTokens("x").status(), absl::InvalidArgumentError("tokens: \"x\" is not a number"));
}

TEST(ThirdParty, AbslFlagIsFoundByNameAndParsed) {
  absl::FlagSaver restore;
  absl::CommandLineFlag* flag = absl::FindCommandLineFlag("smoke_tokens");
  ASSERT_NE(flag, nullptr);
  std::string error;
  EXPECT_TRUE(flag->ParseFrom("512", &error)) << error;
  EXPECT_EQ(absl::GetFlag(FLAGS_smoke_tokens), 512);
}

TEST(ThirdParty, AbslHashMapFindsEveryKey) {
  absl::flat_hash_map<std::string, int> map;
  for (int i = 0; i < 1000; ++i) map[absl::StrCat("head ", i)] = i;
  EXPECT_EQ(map.size(), 1000);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(map.at(absl::StrCat("head ", i)), i);
}

TEST(ThirdParty, EigenMultiplies) {
  Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> a(17, 5), b(5, 9);
  a.setConstant(2);
  b.setConstant(3);
  const Eigen::MatrixXf product = a * b;
  EXPECT_EQ(product, Eigen::MatrixXf::Constant(17, 9, 5 * 2 * 3));
}

TEST(ThirdParty, JsonRoundTrips) {
  const auto header = nlohmann::json::parse(R"({"q": {"dtype": "F32", "shape": [1, 8, 256, 64]}})");
  EXPECT_EQ(header["q"]["shape"][2], 256);
  EXPECT_EQ(nlohmann::json::parse(header.dump()), header);
}

TEST(ThirdParty, GmockMatches) {
  EXPECT_THAT((std::vector<int>{3, 1, 2}), testing::UnorderedElementsAre(1, 2, 3));
}

TEST(ThirdParty, BoostContextSwitchesBackAndForth) {
  namespace context = boost::context;
  std::string order;
  context::fiber fiber([&order](context::fiber&& caller) {
    order += "b";
    caller = std::move(caller).resume();
    order += "d";
    return std::move(caller);
  });
  order += "a";
  fiber = std::move(fiber).resume();
  order += "c";
  fiber = std::move(fiber).resume();
  EXPECT_EQ(order, "abcd");
  EXPECT_FALSE(fiber) << "it has returned";
}

}  // namespace
}  // namespace tfb
