#include "core/traced.h"

#include <cmath>
#include <functional>
#include <vector>

#include "gtest/gtest.h"

namespace tfb {
namespace {

// Returns the derivative by an element, whose terms add up.
double DerivativeBy(const Traced& number, const float& element) {
  double sum = 0;
  for (const Traced::Derivative& d : number.derivatives()) {
    if (d.element == &element) sum += d.value;
  }
  return sum;
}

TEST(Traced, DerivativesAreThoseOfCentralDifferences) {
  using Function = std::function<Traced(const Traced&, const Traced&)>;
  const std::vector<Function> functions = {
      [](const Traced& a, const Traced& b) { return a + b; },
      [](const Traced& a, const Traced& b) { return a - 3 * b; },
      [](const Traced& a, const Traced& b) { return a * b * a; },
      [](const Traced& a, const Traced& b) { return -exp(a * 0.5) * b; },
      [](const Traced& a, const Traced& b) { return Softplus(a - b) * Softplus(b * 30); },
      [](const Traced& a, const Traced& b) { return Clamp(a, -1, 0.25) * Clamp(b, -9, 9); }};
  for (const float a : {-1.5f, -0.5f, 0.125f, 0.75f}) {
    for (const float b : {-40.0f, -0.25f, 2.0f}) {
      for (const Function& f : functions) {
        const Traced result = f(Trace(a), Trace(b));
        constexpr double kStep = 1e-6;
        EXPECT_EQ(result.value(), f(a, b).value());
        const double by_a = (f(a + kStep, b).value() - f(a - kStep, b).value()) / (2 * kStep);
        const double by_b = (f(a, b + kStep).value() - f(a, b - kStep).value()) / (2 * kStep);
        EXPECT_NEAR(DerivativeBy(result, a), by_a, 1e-7 * (1 + std::abs(by_a)));
        EXPECT_NEAR(DerivativeBy(result, b), by_b, 1e-7 * (1 + std::abs(by_b)));
      }
    }
  }
}

TEST(Traced, AConstantHasNoDerivative) {
  EXPECT_TRUE(Traced(2.5).derivatives().empty());
  const float x = 3;
  EXPECT_TRUE(Clamp(Trace(x), 0, 2).derivatives().empty());
}

TEST(Traced, SoftplusDoesNotOverflow) {
  EXPECT_EQ(Softplus(Traced(2000)).value(), 2000);
  EXPECT_EQ(Softplus(Traced(-2000)).value(), 0);
}

}  // namespace
}  // namespace tfb
