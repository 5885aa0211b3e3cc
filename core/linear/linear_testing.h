// Utilities that tests of engine linear share: random cases, the formula of linear.h in float64,
// evaluated pair by pair, and the bound on the engines' error.
#ifndef TFB_CORE_LINEAR_LINEAR_TESTING_H_
#define TFB_CORE_LINEAR_LINEAR_TESTING_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "core/linear/linear.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/testing.h"

namespace tfb {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Feature kFeatures[] = {Feature::kExp, Feature::kExpPair, Feature::kRelu};

struct LinearCase {
  Problem problem;
  FeatureMap map;
  double magnitude = 1;  // standard deviation of queries and keys
  bool masked = false;
  uint64_t seed = 1;
};

// Returns one batch row of self-attention, except for the number of keys.
Problem LinearProblem(int64_t query_tokens, int64_t kv_tokens, bool causal, int64_t heads = 2,
                      int64_t head_dim = 16);
// Returns the map of softmax, with random features' c.
FeatureMap LinearMap(Feature feature, int64_t projections, int64_t head_dim, double epsilon = 0);
// Returns a map of unit vectors, for kSinCos and kRelu.
FeatureMap DirectionMap(Feature feature, int64_t projections, bool gated);
std::string Describe(const LinearCase& c);

// Memory full of NaN with a guard behind it.
class GuardedMemory {
 public:
  explicit GuardedMemory(size_t bytes);
  ~GuardedMemory();  // expects the guard as it was
  absl::Span<std::byte> span() {
    return absl::MakeSpan(static_cast<std::byte*>(tensor_.raw()), bytes_);
  }

 private:
  static constexpr int64_t kGuard = 256;
  size_t bytes_;
  Tensor tensor_;
};

// Tensors drawn from the case's seed.
struct LinearTensors {
  explicit LinearTensors(const LinearCase& c);
  LinearCall Call(const LinearCase& c) const;
  Tensor q, k, v, w, gate, key_mask;
};

struct LinearResults {
  Tensor out, log_sum_exp;
};
// Returns results full of NaN.
LinearResults EmptyResults(const Problem& problem);
// Evaluates the formula, with every feature of every pair as the header defines it.
LinearResults DefineLinear(const LinearCase& c, const LinearTensors& tensors);

// A call in which keys of NaN, which some rows see, are the first of all keys or the only ones, and
// the same call with other numbers in these keys.
struct NaNKeys {
  LinearCase c;
  LinearTensors tensors, clean;
};
// Numbers of keys of a head that the CPU, and the CUDA kernels in the simulator, cut into two groups or more.
constexpr int64_t kKeysOfGroups = 520;
constexpr int64_t kKeysOfCudaGroups = 300;
// Calls body(NaNKeys) for causal calls and others, with each map of features, and with up to `many` keys.
void ForEachNaNKeys(int64_t many, const std::function<void(const NaNKeys&)>& body);
// Does the same with the lengths of segments, for the calls whose keys can be appended.
void ForEachAppendedNaNKeys(
    const std::function<void(const NaNKeys&, const std::vector<int64_t>& segments)>& body);
// Expects NaN where the formula has it, and the bits of `clean` elsewhere.
void ExpectNaNOfFormula(const NaNKeys& keys, const LinearResults& results,
                        const LinearResults& clean);

// A call in which keys whose squares are beyond fp32, which some rows see, are the first of all keys or
// the only ones.
struct LongKeys {
  LinearCase c;
  LinearTensors tensors;
  LinearTensors shorter;  // the same with |k|^2 / 2 of 3e6, whose exponentials are 0 all the same
  int64_t first, last;    // the keys' places in the first head
  LinearResults expected;
};
// A call whose only key has a square of 1.9e38, just within fp32, and the weight 1.
struct OneLongKey {
  explicit OneLongKey(bool causal)
      : c{LinearProblem(1, 1, causal, 1, 4), LinearMap(Feature::kExp, 16, 4)}, tensors(c) {
    Fill(tensors.k.view(), 0);
    tensors.k.span<float>()[2] = 0x1.8p63f;
  }
  LinearCase c;
  LinearTensors tensors;
};
// Calls body(LongKeys) for causal calls and others, with each map of features, and with up to `many` keys.
void ForEachLongKeys(int64_t many, const std::function<void(const LongKeys&)>& body,
                     DType dtype = DType::kF32);
// Does the same with the lengths of segments, for the calls whose keys can be appended.
void ForEachAppendedLongKeys(
    const std::function<void(const LongKeys&, const std::vector<int64_t>& segments)>& body);
// Expects the numbers of the formula; of keys that are scaled to unit length, NaN in the rows that see long
// ones and nowhere else.
// `unit` is as in ExpectClose.
void ExpectLongKeysOfFormula(const LongKeys& keys, const LinearResults& results, double unit = 0);

// Returns the call for tokens begin to begin + tokens, with their places in the results.
LinearCall SegmentOf(LinearCall call, LinearResults& results, int64_t begin, int64_t tokens);

bool SameBits(const Tensor& a, const Tensor& b);
// Compares fp32 with float64. A weight is a sum of positive products, so its relative error is that
// of its exponents: w . x and |x|^2 / 2 round in proportion to |w| |x| = head_dim^(3/4) magnitude
// and |x|^2 = head_dim^(1/2) magnitude^2, a few units in 2^-24 each, and the logarithms of a
// chunk's gates add up to some 32; sums add about 10 more. Outputs are means of values of up to 5,
// or, where weights have signs and their sum may be small, larger in the proportion in which errors
// are; those of 16 bits are rounded once more. `unit` is the unit roundoff of the products'
// operands, where that is not fp32's.
void ExpectClose(const LinearCase& c, const LinearResults& results, const LinearResults& expected,
                 double unit = 0);

// Runs a layer of a technique on this engine, and its Backward with gradients of the outputs that
// are drawn, and expects the derivatives along a random direction of each input and parameter to be
// those of the technique's definition, by central differences. Expects also the same bits with
// another number of threads. The error of a forward row is at most Fp32Bound times `bounds`.
void ExpectGradientsOfDefinition(const Technique& technique, const Problem& problem,
                                 const NamedTensors& inputs, const RunRequest& request,
                                 double bounds = 1);

}  // namespace tfb

#endif  // TFB_CORE_LINEAR_LINEAR_TESTING_H_
