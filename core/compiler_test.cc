// Tests constants that g++ 12 stores wrongly with AVX-512 unless tools/bazelrc/gcc12.bazelrc turns
// off the optimization at fault.
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace tfb {
namespace {

template <class T>
__attribute__((noinline)) std::vector<T> HalfOnes() {
  return {1, 1, 0, 0};
}
__attribute__((noinline)) std::vector<int32_t> HalfThrees() { return {3, 3, 3, 3, 0, 0, 0, 0}; }
__attribute__((noinline)) std::vector<double> FiveOfEight() { return {1, 1, 1, 1, 1, 0, 0, 0}; }

template <class T>
void ExpectLeading(const std::vector<T>& values, size_t count, T leading) {
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], i < count ? leading : T(0)) << i;
}

TEST(Compiler, StoresConstantsAsTheyAreWritten) {
  ExpectLeading<double>(HalfOnes<double>(), 2, 1);
  ExpectLeading<int64_t>(HalfOnes<int64_t>(), 2, 1);
  ExpectLeading<int32_t>(HalfThrees(), 4, 3);
  ExpectLeading<double>(FiveOfEight(), 5, 1);
}

}  // namespace
}  // namespace tfb
