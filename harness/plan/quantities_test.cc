#include "harness/plan/quantities.h"

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
  EXPECT_EQ(*ParseBytes("f", "1048576"), 1 << 20);
  EXPECT_EQ(*ParseBytes("f", "512MiB"), 512 << 20);
  EXPECT_EQ(*ParseBytes("f", "2g"), int64_t{2} << 30);
  EXPECT_EQ(*ParseBytes("f", "1.5KB"), 1500);
  EXPECT_EQ(*ParseBytes("f", "7B"), 7);
}

TEST(Quantities, NonsenseNamesTheFlag) {
  for (const char* text : {"", "soon", "-1", "1x", "nan", "inf", "s"}) {
    EXPECT_EQ(ParseSeconds("case_timeout", text).status().message().find("--case_timeout: \""), 0u)
        << text;
    EXPECT_EQ(ParseBytes("memory_limit", text).status().message().find("--memory_limit: \""), 0u)
        << text;
  }
  EXPECT_FALSE(ParseBytes("f", "9999999TiB").ok());
}

TEST(Quantities, ClocksReadLikeClocks) {
  EXPECT_EQ(FormatClock(8.6), "9 s");
  EXPECT_EQ(FormatClock(65), "1:05");
  EXPECT_EQ(FormatClock(7269), "2:01:09");
  EXPECT_EQ(FormatClock(-1), "0 s");
}

}  // namespace
}  // namespace tfb
