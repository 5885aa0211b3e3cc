// The trained network that adds numbers (model/README.md), and problems to try it on.
//
//   x_t = first[a_t] + second[b_t],   digit t of the sum = argmax(out_t output.w + output.b)
//
// Digits are least significant first. Token 0 is a mark, the last digits are zeros for the carry.
#ifndef TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_ADDER_H_
#define TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_ADDER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/options.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb::universal_transformer {

// Additions of equal length: token t of problem b has index b tokens + t.
struct Additions {
  int64_t count = 0;
  int64_t digits = 0;
  std::vector<int32_t> first, second;  // 0 to 9, or kMark
  std::vector<int32_t> sum;            // 0 to 9; kMark for token 0
  // For each token, how many places to the right the carry into its digit is decided: 1 where the
  // pair beside it does not add up to 9, one more for each that does. 0 for token 0.
  std::vector<int32_t> reach;

  static constexpr int32_t kMark = 10;
  int64_t tokens() const { return digits + 2; }
};

// Draws additions in which each pair of digits adds up to 9 with probability `nines`, and is
// uniform otherwise. Equal seeds give equal additions, whatever else is drawn.
Additions DrawAdditions(int64_t count, int64_t digits, double nines, uint64_t seed);

class Adder {
 public:
  // Returns NotFound where there is no such file, and InvalidArgument with what is wrong with it.
  static absl::StatusOr<Adder> Read(const std::string& path);

  const TechniqueSpec& technique() const { return technique_; }
  int64_t steps() const { return steps_; }
  const std::string& data() const { return data_; }
  Problem ProblemOf(const Additions& additions) const;
  // Returns x [count, tokens, model_dim].
  Tensor Embed(const Additions& additions) const;
  // Creates a layer of the technique with the trained parameters; these options override the
  // model's.
  absl::StatusOr<std::unique_ptr<Layer>> LayerFor(const Additions& additions,
                                                  Options options) const;

  // The shares of digits, and of whole sums, that are right in `out` [count, tokens, model_dim],
  // f32.
  struct Accuracy {
    double digits = 0;
    double sums = 0;
  };
  Accuracy Judge(const Additions& additions, const Tensor& out) const;

 private:
  int32_t DigitOf(const float* state) const;

  TechniqueSpec technique_;
  int64_t steps_ = 0;
  int64_t heads_ = 0;
  std::string data_;
  NamedTensors parameters_;  // f32
};

}  // namespace tfb::universal_transformer

#endif  // TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_ADDER_H_
