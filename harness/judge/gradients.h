// Computes directional derivatives of a technique's float64 definition, and the bound of the error
// of a layer's own.
//
// Let f = sum over outputs of <g, output>, with the gradients g of the outputs, as a function of
// the inputs and parameters. Its derivative along d, a unit vector in the space of one of them, x,
// is
//
//   D = (f(x + h d) - f(x - h d)) / 2h,   h = 1e-6 |x|,
//
// of which the differences are taken output by output. What h leaves out is of the order of
// (h / |x|)^2 = 1e-12, and what rounding adds is at most
//
//   e = 2^-52 |g| |output| / h.
//
// An h that is larger by 10 has an e that is smaller, but so many more of a network's ReLUs change
// sides between the two points, each of which moves D by a part of its own.
//
// The definition is evaluated as for fp32, whatever the precision of the problem, since a
// definition rounds what a layer stores in 16 bits, and a rounded function has no derivative.
//
// The bound of |<gradient, d> - D|, where the layer computed the gradient. It is the bound of the
// forward pass, times the norm of what is summed:
//
// A backward pass sums products of factors z_k: inputs, parameters and g, and what both passes make
// of them. For attention, with the direction's part s'_ij of the score and v'_j of the value,
//
//   D = sum_i g_i . y'_i = sum_ij p_ij (g_i . v'_j + s'_ij (g_i . v_j - g_i . y_i)).
//
// AbsoluteBound has the relative error B of a term p_ij v_j of the forward pass: of the score,
// which is an absolute one of log p, of exp and of accumulation; and what a problem of 16 bits
// rounds. The terms of D have the same factors p_ij, and products of up to 256 channels in the
// place of v_j, whose 256 roundings are sqrt(256) u = 16 u, as those of a score: so every factor
// has at most the relative error B. Where the errors of factors are independent with deviation B,
// that of D is
//
//   s = B |(z_k dD/dz_k)_k|,
//
// whose k-th element is the sum of the terms that z_k is in. This is the norm of what is summed:
// |g| |d|, the sizes of the other factors, and the condition of the softmax row, since it stays as
// it is where terms of both signs leave a small D. No formula of the technique is needed for it: it
// is the deviation of D where each number z that the definition is given becomes z (1 + B n) with a
// normal n. It is estimated from kPoints such points, and over directions that are drawn alike.
//
// Two factors are no numbers which a definition is given, and no function of these that shows it:
//
// - y_i, where a layer has formed it apart from the sum over g_i . v_j: a query that sees one key
// has
//   g_i . v_j - g_i . y_i = 0 in each of those points, and a rounding in a layer. Its terms,
//   g_ic y_ic sum_j p_ij s'_ij, are known by sum_j p_ij s'_ij, the derivative of log_sum_exp. The
//   error of y_i is B too, of which 16 bits round an output once; Point may say that a layer knows
//   what rounding took.
// - The log_sum_exp l_i, which a layer keeps to form p_ij = exp(s_ij - l_i) again: an absolute
// error
//   of it is a relative one of all p_ij of the row, whose sum so is not 1 any more. LogSumExpBound
//   has that error; the row's terms are g_i . y'_i.
//
// Both are added, in squares, to s^2 for definitions that have the output log_sum_exp.
//
// A network has neither among its outputs, and terms that a softmax inside it cancels do not show:
// those of a weight that multiplies a coordinate which is nearly the same for all keys, as the
// slowest cosine of a position. Along a random direction the other terms outweigh them. Along the
// further directions by a variable, as by a coordinate, s is at least that along the first ones.
//
// A gradient may be a sum that vanishes at every point, as that of a bias of all keys, which
// softmax does not see: no term of it shows in the definition. Its terms are of the size of those
// of the other gradients, into which the same factors go, so that its s is the largest of these.
//
// The bound is 3 s + e: three deviations. In fp32 a layer has a few roundings where B allows
// hundreds, so that errors are a twentieth of s or less; an estimate from three points is below a
// twentieth of s once in 6000 cases. In 16 bits B is a few roundings, and errors come near to s: an
// estimate there needs the six that two directions give, which are below a sixth of s once in
// 10000.
#ifndef TFB_HARNESS_JUDGE_GRADIENTS_H_
#define TFB_HARNESS_JUDGE_GRADIENTS_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/thread_pool.h"
#include "harness/inputs/job.h"

namespace tfb {

// An input or a parameter of a layer, by which a derivative is taken.
struct Variable {
  bool is_parameter = false;
  std::string name;

  std::string ToString() const {
    return absl::StrCat(is_parameter ? "parameter " : "input ", name);
  }
};

// A direction in the space of inputs and parameters: for each an f64 tensor of its shape, all of
// them together of length 1.
using Direction = std::vector<std::pair<Variable, Tensor>>;

// A directional derivative of a definition, and the bound of a layer's error.
struct Slope {
  double value = 0;
  double bound = 0;
  // The norm of what is summed, s / B: the unit in which errors of all gradients compare.
  double terms = 0;
};

// The derivatives of the definition of a job at one point. What it holds (StoppedValues) is constant.
class DefinitionGradient {
 public:
  static constexpr int kPoints = 3;

  // The point: the tensors that a layer read, its parameters, and the gradients of its outputs, by
  // the outputs' names. Those that are missing are 0.
  struct Point {
    const NamedTensors* inputs = nullptr;
    const NamedTensors* parameters = nullptr;
    const NamedTensors* output_gradients = nullptr;
    // The layer's outputs there, for a definition that chooses (DefinitionRequest::computed).
    const NamedTensors* computed = nullptr;
    // The query tokens whose rows have output gradients that are not 0, ascending; empty for all.
    // The definition is then evaluated at these alone, where it can be.
    absl::Span<const int64_t> rows = {};
    // Whether the layer's backward pass may form y_i from the output as it was rounded to 16 bits.
    // If not, it knows what rounding took, to 16 bits again: u^2 beside the error of fp32.
    bool reads_rounded_output = true;
  };
  // Copies the point. The job and the pool, which may be null, must outlive the result.
  static absl::StatusOr<DefinitionGradient> At(const Job& job, const Point& point,
                                               ThreadPool* pool);

  // Returns the slopes along directions in the space of the variable, which are drawn alike. They
  // are f64, of its shape, and of length 1. Variables whose slopes may vanish come behind others,
  // and coordinates of a variable behind random directions.
  absl::StatusOr<std::vector<Slope>> Along(const Variable& variable,
                                           const std::vector<Tensor>& directions);
  // The same along directions in the space of several variables.
  absl::StatusOr<std::vector<Slope>> Along(const std::vector<Direction>& directions);
  // Returns a random direction that changes each of the variables by the same share of its length,
  // so that none is lost beside another.
  Direction RandomDirection(const std::vector<Variable>& variables, uint64_t seed,
                            absl::string_view name);
  // Returns all partial derivatives by the variable, f64 of its shape.
  absl::StatusOr<Tensor> Partial(const Variable& variable);

 private:
  // Tensors at which the definition is evaluated; all floating-point numbers are f64.
  struct Numbers {
    NamedTensors inputs, parameters, output_gradients;
    StoppedValues stopped = {};  // as they are at the point itself
    bool is_stopped = false;     // whether they are there
    Tensor& at(const Variable& variable) {
      return (variable.is_parameter ? parameters : inputs).at(variable.name);
    }
  };
  // A derivative along one direction at one point.
  struct Derivative {
    double value = 0;
    double variance = 0;    // of y_i and l_i: what they add to s^2
    double resolution = 0;  // e
  };
  absl::StatusOr<Derivative> DerivativeAt(Numbers* numbers, const Direction& direction) const;
  // Evaluates the definition, near the point at which it first did with these numbers.
  absl::StatusOr<NamedTensors> Define(Numbers* numbers,
                                      const NamedTensors* computed = nullptr) const;

  const Job* job_ = nullptr;
  ThreadPool* pool_ = nullptr;
  std::vector<int64_t> rows_;
  int64_t keys_ = 0;                                // that a row can have
  double error_ = 0;                                // B
  double output_error_ = 0;                         // of y_i, where it is formed apart
  double largest_deviation_ = 0;                    // s, of the slopes until now
  bool is_network_ = false;                         // has no output log_sum_exp
  std::map<std::string, double> first_deviations_;  // s along a variable's first directions
  std::vector<Numbers> points_;                     // the point itself, and kPoints near it
};

// Returns `count` directions of a shape, f64: normal vectors of length 1.
std::vector<Tensor> RandomDirections(const Shape& shape, int count, uint64_t seed,
                                     absl::string_view name);
// Returns the direction of one coordinate.
Tensor CoordinateDirection(const Shape& shape, int64_t index);
// Returns sum_n a_n b_n of tensors of one shape, in float64.
double InnerProduct(const ConstTensorView& a, const ConstTensorView& b);

}  // namespace tfb

#endif  // TFB_HARNESS_JUDGE_GRADIENTS_H_
