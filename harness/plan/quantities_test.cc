#include "harness/plan/quantities.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

TEST(Quantities, DurationsHaveUnitsOrAreSeconds) {
  EXPECT_EQ(*ParseSeconds("f", "90"), 90);
  EXPECT_EQ(*ParseSeconds("f", "90s"), 90);
  EXPECT_EQ(*ParseSeconds("f", "1.5m"), 90);
  EXPECT_EQ(*ParseSeconds("f", "2h"), 7200);
  EXPECT_EQ(*ParseSeconds("f", "250ms"), 0.25);
  EXPECT_EQ(*ParseSeconds("f", "0"), 0);
}

TEST(Quantities, SizesAreBinaryUnlessTheySayOtherwise) {
  const std::vector<std::pair<std::string, double>> units = {
      {"B", 1},        {"K", 1024},     {"M", 1048576}, {"G", 1073741824}, {"T", 0x1p40},
      {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},    {"TB", 1e12},      {"KiB", 1024},
      {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  for (const auto& [unit, size] : units) {
    EXPECT_EQ(*ParseBytes("f", "3" + unit), static_cast<int64_t>(3 * size)) << unit;
    EXPECT_EQ(*ParseBytes("f", "1.5 " + absl::AsciiStrToLower(unit)),
              static_cast<int64_t>(1.5 * size))
        << unit;
  }
  EXPECT_EQ(*ParseBytes("f", "0"), 0);
  EXPECT_EQ(*ParseBytes("f", "4194303TiB"), int64_t{4194303} << 40);
  EXPECT_EQ(ParseBytes("f", "4194304TiB").status().message(),
            "--f: \"4194304TiB\" is more than any machine has");
  EXPECT_EQ(ParseBytes("f", "16").status().message(),
            "--f: \"16\" has no unit; write a size like 512MiB, 16GiB");
}

TEST(Quantities, NonsenseNamesTheFlag) {
  for (const std::string text : {"", "soon", "-1", "1x", "nan", "inf", "s", "1 2"}) {
    EXPECT_EQ(ParseSeconds("case_timeout", text).status().message(),
              "--case_timeout: \"" + text + "\"; write a duration like 90s, 1.5m, 2h");
    EXPECT_EQ(ParseBytes("memory_limit", text).status().message(),
              "--memory_limit: \"" + text + "\"; write a size like 512MiB, 16GiB");
  }
}

TEST(Quantities, ClocksReadLikeClocks) {
  const std::vector<std::pair<double, std::string>> clocks = {
      {-1, "0 s"},     {0, "0 s"},        {0.5, "1 s"},      {8.6, "9 s"},
      {59.4, "59 s"},  {59.5, "1:00"},    {60, "1:00"},      {65, "1:05"},
      {3599, "59:59"}, {3600, "1:00:00"}, {7269, "2:01:09"}, {360000, "100:00:00"}};
  for (const auto& [seconds, clock] : clocks) EXPECT_EQ(FormatClock(seconds), clock);
}

}  // namespace
}  // namespace tfb
