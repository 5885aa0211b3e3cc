// What the forward and the backward pass of engine linear share on the CPU: tokens are loaded as
// features, and added to sums.
#ifndef TFB_CORE_LINEAR_LINEAR_PASS_H_
#define TFB_CORE_LINEAR_LINEAR_PASS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/cpu/kernels.h"
#include "core/linear/linear.h"
#include "core/linear/linear_memory.h"
#include "core/problem.h"

namespace tfb::linear_cpu {

constexpr int64_t kDepthBlock = 64;  // rows of B that a GEMM takes at a time
constexpr int64_t kSumSlices = 4;    // tasks of one head's running sums
constexpr int64_t kTileRows = 6;     // of the GEMM

// Up to 64 tokens that are added to sums: products += features (scale rows)^T, normaliser +=
// features normaliser, scaled_values += scaled rows, values += constant rows, where the sums so far
// are multiplied by `rescale` first, all but values.
struct Addend {
  const float* features;  // [features][64], of the first token on
  const float* rows;      // [64][value_row] in panels, of the chunk
  int64_t begin;          // the first token's place in the chunk
  int64_t count;
  const float* scale;
  const float* normaliser;
  const float* scaled;
  const float* constant;
  float rescale;
};

// The whole call; it does not change while its tasks run.
class Pass {
 public:
  Pass(const Problem& problem, const LinearInputs& inputs, const Sizes& sizes)
      : problem_(problem),
        inputs_(inputs),
        map_(inputs.map),
        sizes_(sizes),
        kernels_(BestCpuKernels()),
        exponential_(IsExponential(inputs.map.feature)),
        epsilon_(static_cast<float>(inputs.map.epsilon)),
        log_epsilon_(std::log(epsilon_)) {}

  // Loads the features, values and scales of the keys from `first` to the end of their chunk.
  void LoadKeys(int64_t kv_head, int64_t first, Keys& keys, LoadScratch& scratch) const;

  // Updates the header of sums with keys [begin, end) of the chunk, and finds the scales of the
  // keys and of the sums so far.
  void AdvanceHeader(Sums::Header& header, int64_t begin, int64_t end, Keys& keys) const;

  // Does the part of to = from + tokens for features [first, last); the slice with the first
  // feature also does the sums without features. `to` may be `from`.
  void AddToSlice(const Addend& tokens, const Sums& from, const Sums& to, int64_t first,
                  int64_t last, LoadScratch& scratch) const;

  // Forgets what is expected; a chunk begins with it.
  static void ExpectNothing(LoadScratch& scratch) {
    scratch.ahead.count = scratch.ahead.tensor = scratch.ahead.row = scratch.ahead.byte = 0;
  }
  // Lets the products from now on ask for up to 64 tokens of a head, from `first` on.
  static void Expect(const ConstTensorView& view, int64_t b, int64_t h, int64_t first,
                     LoadScratch& scratch);

  // Adds `from` to `into`.
  void Merge(const Sums& into, const Sums& from) const;

  // Finds the running maxima of a chunk's keys after those in the sums with that header. Where
  // `sequence_maximum` is not null, it takes the place of S.
  void RunMaxima(const Sums::Header& header, const float* sequence_maximum, Keys& keys) const;

 protected:
  bool IsToken(int64_t b, int64_t j) const {
    return inputs_.key_mask.empty() || *inputs_.key_mask.At<uint8_t>(b, j) != 0;
  }
  // Returns what is subtracted for a reference: 0 for a head without keys.
  static float Shift(float reference) { return reference == kNegativeInfinity ? 0 : reference; }
  // Returns what the rho_j of a key that is seen counts as in a reference. NaN stays, and is no maximum:
  // std::max returns its first argument where one of them is NaN.
  static float AsReference(float log_scale) { return std::max(log_scale, kLeastReference); }
  // Returns the logarithm of the largest unstabilised feature: rho_j, lambda_i.
  float LogScale(const Tokens& tokens, int64_t t) const {
    return exponential_ ? tokens.max[t] - tokens.half_square[t] : 0.0f;
  }
  bool IsStabilised() const { return exponential_ && map_.stabiliser != KeyStabiliser::kNone; }

  // Returns keys [begin, end) of the chunk as AdvanceHeader left them.
  Addend AddendOf(const Keys& keys, int64_t begin, int64_t end) const {
    return {keys.tokens.features + begin,
            keys.values,
            begin,
            end - begin,
            keys.scale + begin,
            keys.scale + begin,
            keys.total_scale + begin,
            keys.seen + begin,
            keys.rescale[begin / kPart]};
  }
  // Returns G of the chunk's last key.
  float DecayOf(const Keys& keys) const { return map_.gated ? keys.decay[keys.count - 1] : 0; }

  // Calls body(first column, columns) for each panel of 64 value channels.
  template <class Body>
  void ForEachPanel(Body body) const {
    for (int64_t panel = 0; panel < sizes_.value_row; panel += kDepthBlock) {
      body(panel, std::min(kDepthBlock, sizes_.value_row - panel));
    }
  }

  // Returns the first feature of a slice; slices are whole tiles of the GEMM.
  int64_t SliceBegin(int64_t slice) const {
    return std::min(RoundUp(CeilDivide(sizes_.features, kSumSlices), kTileRows) * slice,
                    sizes_.features);
  }
  void CopySlice(const Sums& from, int64_t first, int64_t last, const Sums& to) const;

  // 64 rows of inputs.
  struct Rows {
    const float* data;
    int64_t stride;
  };
  // Loads `count` rows of inputs from `first` on; those with seen 0 are zeros, and rows beyond them
  // are arbitrary. The rows stay in place if they can be read there, else they go to scratch.rows.
  Rows LoadInputs(const ConstTensorView& view, int64_t b, int64_t h, int64_t first, int64_t count,
                  const float* seen, LoadScratch& scratch) const;

  // Computes features of `count` tokens; where they are few, their inputs are in scratch.rows.
  // Their products with `normaliser` are computed where that is not null.
  void MakeFeatures(const Rows& rows, int64_t count, int64_t kv_head, const float* normaliser,
                    Tokens& tokens, LoadScratch& scratch) const;

  // Computes the factors of rows of queries from their features and from what they see: reference,
  // key_maximum and decay.
  void ComputeFactors(int64_t rows, const Tokens& queries, QueryFactors& factors) const;
  // Returns the logarithm of exp(R - S) for row t.
  float KeyScale(const QueryFactors& factors, int64_t t) const {
    const float reference = factors.reference[t];
    if (!IsStabilised() || reference == kNegativeInfinity) return reference;
    return reference - factors.key_maximum[t];
  }
  // Returns sum_r phi_q(q_i)_r / c, divided by max(exp(lambda_i - s), epsilon).
  double QuerySum(int64_t t, const Tokens& queries, const QueryFactors& factors) const {
    return factors.query[t] * queries.total[t] +
           factors.query_epsilon[t] * static_cast<double>(sizes_.features);
  }
  // Returns the factor of QuerySum in the denominator, which is divided as the four terms are.
  double QuerySumFactor(int64_t t, const QueryFactors& factors) const {
    const float key = KeyScale(factors, t);
    const float largest = epsilon_ == 0 ? key : std::max(key, log_epsilon_);
    return map_.denominator_epsilon / map_.constant * std::exp(-largest);
  }

  // Does kernels_.gemm, and asks for what is expected.
  void Multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row,
                int64_t a_depth, const float* b, int64_t b_row, float* c, int64_t c_row,
                bool accumulate, LoadScratch& scratch) const {
    kernels_.gemm_plus(rows, columns, depth, a, a_row, a_depth, b, b_row, accumulate ? c : nullptr,
                       c_row, c, c_row, &scratch.ahead);
  }

  const Problem& problem_;
  const LinearInputs& inputs_;
  const FeatureMap& map_;
  const Sizes& sizes_;
  const CpuKernels& kernels_;
  const bool exponential_;
  const float epsilon_;
  const float log_epsilon_;

 private:
  void LoadGates(int64_t kv_head, const Rows& rows, Keys& keys) const;
  void LoadValues(int64_t b, int64_t h, int64_t first, Keys& keys) const;
  float InputFactor(float square) const;
  void ScaleColumns(int64_t lanes, Tokens& tokens, LoadScratch& scratch) const;
  void OneTokensFeatures(const float* w, int64_t t, const float* normaliser, Tokens& tokens,
                         LoadScratch& scratch) const;
  void KeepInput(const float* row, float factor, float* to) const;
};

}  // namespace tfb::linear_cpu

#endif  // TFB_CORE_LINEAR_LINEAR_PASS_H_
