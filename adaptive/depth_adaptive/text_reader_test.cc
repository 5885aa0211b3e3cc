#include "adaptive/depth_adaptive/text_reader.h"

#include "gtest/gtest.h"

namespace tfb::depth_adaptive {
namespace {

TEST(TextReader, TheShareOfTimeSavedIsOfMedians) {
  EXPECT_DOUBLE_EQ(TimeSaved({3, 1, 100}, {4, 4, 0}), 0.25);
  EXPECT_DOUBLE_EQ(TimeSaved({2, 4}, {2, 2}), -0.5);  // slower
}

TEST(TextReader, AReadingsBitsAreAMeanAndAgreementIsTheShareOfEqualBytes) {
  TextReading reading, other;
  reading.bits = {1, 2, 6};
  reading.best = {10, 20, 30, 40};
  other.best = {10, 21, 30, 40};
  EXPECT_DOUBLE_EQ(reading.BitsPerByte(), 3);
  EXPECT_DOUBLE_EQ(reading.Agreement(other), 0.75);
}

}  // namespace
}  // namespace tfb::depth_adaptive
