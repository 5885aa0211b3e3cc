// Numbers that know their derivatives by elements of parameters.
//
// A technique computes a table, such as a bias for every distance, from its parameters:
//
//   [m = job.parameters.at("slopes").span<float>()](int64_t h, int64_t distance) {
//     return -Trace(m[h]) * std::abs(distance);
//   }
//
// and the engine, which knows the gradients of the table, takes them on to the parameters. A number
// names an element by its address in the parameter.
#ifndef TFB_CORE_TRACED_H_
#define TFB_CORE_TRACED_H_

#include <algorithm>
#include <cmath>

#include "absl/container/inlined_vector.h"

namespace tfb {

class Traced {
 public:
  struct Derivative {
    const void* element;
    double value;
  };
  // Holds the derivatives of what techniques compute without allocating.
  using Derivatives = absl::InlinedVector<Derivative, 4>;

  Traced(double value) : value_(value) {}  // NOLINT: a constant is a number, too

  double value() const { return value_; }
  const Derivatives& derivatives() const { return derivatives_; }

  // Returns f(x) of a function with f(x.value()) = value and f'(x.value()) = slope.
  static Traced Through(const Traced& x, double value, double slope) {
    Traced result(value);
    result.Add(x, slope);
    return result;
  }

  friend Traced Trace(const float& element);

  Traced operator-() const { return Through(*this, -value_, -1); }
  friend Traced operator+(const Traced& a, const Traced& b) {
    Traced sum = Through(a, a.value_ + b.value_, 1);
    sum.Add(b, 1);
    return sum;
  }
  friend Traced operator-(const Traced& a, const Traced& b) { return a + -b; }
  friend Traced operator*(const Traced& a, const Traced& b) {
    Traced product = Through(a, a.value_ * b.value_, b.value_);
    product.Add(b, a.value_);
    return product;
  }

 private:
  void Add(const Traced& x, double factor) {
    for (const Derivative& d : x.derivatives_)
      derivatives_.push_back({d.element, d.value * factor});
  }

  double value_;
  Derivatives derivatives_;  // an element may occur several times: its derivatives add up
};

// Returns the element of a parameter, f32, with a derivative of 1.
inline Traced Trace(const float& element) {
  Traced number(element);
  number.derivatives_.push_back({&element, 1});
  return number;
}

inline Traced exp(const Traced& x) {
  const double value = std::exp(x.value());
  return Traced::Through(x, value, value);
}
// Returns log(1 + e^x), without overflow.
inline Traced Softplus(const Traced& x) {
  const double value = std::max(x.value(), 0.0) + std::log1p(std::exp(-std::abs(x.value())));
  return Traced::Through(x, value, 1 / (1 + std::exp(-x.value())));
}
// Returns x cut to [low, high]; the derivative is 0 beyond.
inline Traced Clamp(const Traced& x, double low, double high) {
  if (x.value() < low) return low;
  if (x.value() > high) return high;
  return x;
}

}  // namespace tfb

#endif  // TFB_CORE_TRACED_H_
