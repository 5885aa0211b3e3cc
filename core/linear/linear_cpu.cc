// Engine linear on the CPU.
//
// Features are kept with tokens in columns, [features][64], so that maxima, sums and exponentials
// of 64 tokens are vertical vector operations, W is read in place, and every product is the GEMM
// kernel with a B operand of 64 columns and 64 rows (16 KiB, half of a 32 KiB L1). For a chunk of
// 64 tokens of one head, head_dim = value_dim = 64, m = 256 features:
//
//   project keys      W [256 x 64] K^T [64 x 64]           1.05 M FMA
//   add to the sums   E [256 x 64] V [64 x 64]             1.05 M FMA
//   project queries   as for keys                              1.05 M FMA
//   read the sums     F^T [64 x 256] A [256 x 64]          1.05 M FMA
//   exponentials      2 x 16 K
//   causal, twice     F^T [32 x 256] E [256 x 32]          0.26 M FMA, less what is right of the
//                     weights [32 x 32] V [32 x 64]        0.07 M FMA  diagonal
//
// Causal chunks are added and read in two parts, which halves the pairs within them: adding 32 keys at
// a time costs 5% more than 64 for the sums that are read and written twice, the pairs of 64 cost 40%
// more than those of two 32.
//
// What it touches (W, E, F, A: 64 KiB each) stays in a 1 MiB L2.
//
// Tasks. Not causal: the sums of each key-value head, in groups of keys where there are few heads,
// then one task per 256 queries. Causal: one task per key-value head walks its chunks; where threads
// would wait for each other's heads, several chunks at once: their features, the running sums before
// each, then their queries. Both ways compute the same numbers in the same order.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/cpu/kernels.h"
#include "core/flash/rows.h"
#include "core/linear/linear.h"
#include "core/linear/linear_memory.h"
#include "core/workspace.h"

namespace tfb {
namespace linear_cpu {
namespace {

constexpr int64_t kDepthBlock = 64;  // rows of B that a GEMM takes at a time
constexpr int64_t kFewTokens = 4;    // tokens that are taken one by one
// A gate below e^-18, a quarter of a rounding of 1, is a complete reset; the bound keeps sums of
// logarithms small.
constexpr float kLeastLogGate = -18;
constexpr int64_t kTaskChunks = 4;  // chunks of queries in a task
constexpr int64_t kSumSlices = 4;   // tasks of one head's running sums
constexpr int64_t kTileRows = 6;    // of the GEMM
constexpr int64_t kPairRows = 16;   // rows of a triangle of pairs at a time

// The whole call; it does not change while its tasks run.
class LinearRun {
 public:
  LinearRun(const Problem& problem, const LinearCall& call, const Sizes& sizes)
      : problem_(problem),
        call_(call),
        map_(call.map),
        sizes_(sizes),
        kernels_(BestCpuKernels()),
        exponential_(IsExponential(call.map.feature)),
        epsilon_(static_cast<float>(call.map.epsilon)),
        log_epsilon_(std::log(epsilon_)),
        floor_(static_cast<float>(map_.denominator_floor / (map_.constant * map_.constant))),
        log_constants_(2 * std::log(map_.constant)) {}

  // Sets the S of the causal rows of all heads to the maximum of the sequence, instead of each
  // row's own.
  void set_sequence_maximum(const float* maximum) { sequence_maximum_ = maximum; }

  // Returns max_j M_j over all keys of a head.
  float SequenceMaximum(int64_t kv_head, Scratch& scratch) const {
    float maximum = kNegativeInfinity;
    for (int64_t first = 0; first < problem_.kv_tokens; first += kChunk) {
      LoadKeys(kv_head, first, scratch.keys, scratch);
      const Keys& keys = scratch.keys;
      for (int64_t j = 0; j < keys.count; ++j) {
        if (keys.seen[j] != 0) maximum = std::max(maximum, keys.tokens.max[j]);
      }
    }
    return maximum;
  }

  // Adds keys [begin, end) of a head.
  void SumKeys(int64_t kv_head, int64_t begin, int64_t end, const Sums& sums,
               Scratch& scratch) const {
    for (int64_t first = begin; first < end; first += kChunk) {
      LoadKeys(kv_head, first, scratch.keys, scratch);
      Add(scratch.keys, 0, scratch.keys.count, sums, scratch);
    }
  }

  // Loads the features, values and scales of the keys from `first` to the end of their chunk.
  void LoadKeys(int64_t kv_head, int64_t first, Keys& keys, Scratch& scratch) const {
    const int64_t b = kv_head / problem_.kv_heads, h = kv_head % problem_.kv_heads;
    keys.count = std::min(kChunk, problem_.kv_tokens - first);
    for (int64_t j = 0; j < kChunk; ++j) {
      const bool seen = j < keys.count && IsToken(b, first + j);
      keys.seen[j] = seen ? 1.0f : 0.0f;
    }
    const Rows rows = LoadInputs(call_.k, b, h, first, keys.count, keys.seen, scratch);
    if (map_.gated) LoadGates(h, rows, keys);
    MakeFeatures(rows, keys.count, h, nullptr, keys.tokens, scratch);
    for (int64_t j = 0; j < kChunk; ++j) {
      if (keys.seen[j] == 0) {
        keys.log_scale[j] = kNegativeInfinity;
      } else if (map_.gated) {
        keys.log_scale[j] += LogScale(keys.tokens, j);
      } else {
        keys.log_scale[j] = LogScale(keys.tokens, j);
      }
    }
    LoadValues(b, h, first, keys);
  }

  // Adds keys [begin, end) of the chunk to the sums.
  void Add(Keys& keys, int64_t begin, int64_t end, const Sums& sums, Scratch& scratch) const {
    AdvanceHeader(sums.header(), begin, end, keys);
    AddToSlice(keys, begin, end, sums, 0, sizes_.features, scratch);
  }

  // Updates the header of sums with those keys, and finds the scales of the keys and of the sums so
  // far.
  void AdvanceHeader(Sums::Header& header, int64_t begin, int64_t end, Keys& keys) const {
    float reference = header.reference;
    for (int64_t j = begin; j < end; ++j) {
      // Std::max returns its first argument where the other is NaN.
      reference = std::max(reference, keys.log_scale[j]);
      if (keys.seen[j] != 0) header.maximum = std::max(header.maximum, keys.tokens.max[j]);
    }
    // Empty sums are zeros at any scale.
    const bool is_empty = header.reference == kNegativeInfinity;
    const float rescale = is_empty ? 1 : Rescale(header.reference, reference).first;
    keys.rescale[begin / kPart] = rescale;
    std::copy(keys.log_scale + begin, keys.log_scale + end, keys.scale + begin);
    const float shift = Shift(reference);
    kernels_.exp({keys.scale + begin, 0, 1, RoundUp(end - begin, kColumnQuantum)}, &shift);
    header.scaled_feature *= rescale;
    for (int64_t j = begin; j < end; ++j) {
      header.scaled_feature += keys.scale[j] * keys.tokens.total[j];
      header.tokens += keys.seen[j];
    }
    // After the chunk the reference is relative to the chunk's end.
    header.reference = reference + (end == keys.count ? DecayOf(keys) : 0);
  }

  // Does the part of sums += keys [begin, end) for features [first, last); the slice with the first
  // feature also does the sums without features.
  void AddToSlice(const Keys& keys, int64_t begin, int64_t end, const Sums& sums, int64_t first,
                  int64_t last, Scratch& scratch) const {
    const int64_t count = end - begin;
    const float rescale = keys.rescale[begin / kPart];
    const float* features = keys.tokens.features + first * kChunk + begin;
    ForEachPanel([&](int64_t panel, int64_t width) {
      const float* from = keys.values + panel * kChunk + begin * width;
      float* to = scratch.scaled_values + panel * kChunk;
      for (int64_t j = 0; j < count; ++j) {
        const float scale = keys.scale[begin + j];
        for (int64_t c = 0; c < width; ++c) to[j * width + c] = scale * from[j * width + c];
      }
      float* products = sums.products() + panel * sizes_.features + first * width;
      ScaleRow(rescale, products, (last - first) * width);
      kernels_.gemm(last - first, width, count, features, kChunk, 1, to, width, products, width,
                    true);
      if (epsilon_ == 0 || first > 0) return;
      ScaleRow(rescale, sums.scaled_values() + panel, width);
      kernels_.gemm(1, width, count, keys.seen + begin, 0, 1, from, width, sums.values() + panel,
                    width, true);
      kernels_.gemm(1, width, count, keys.tokens.total + begin, 0, 1, to, width,
                    sums.scaled_values() + panel, width, true);
    });
    float* normaliser = sums.normaliser() + first;
    for (int64_t r = 0; rescale != 1 && r < last - first; ++r) normaliser[r] *= rescale;
    kernels_.matrix_vector(last - first, count, features, kChunk, keys.scale + begin, normaliser, 1,
                           true);
  }

  // Adds `from` to `into`.
  void Merge(const Sums& into, const Sums& from) const {
    Sums::Header& header = into.header();
    const Sums::Header& other = from.header();
    const Rescale rescale(header.reference, other.reference);
    Combine(rescale, into.scaled(), from.scaled(), sizes_.scaled_sums);
    for (int64_t c = 0; c < sizes_.value_row; ++c) into.values()[c] += from.values()[c];
    header = Merged(header, other);
  }

  // Computes slice `slice` of the running sums of one head, adding the keys of each of its chunks
  // in turn. The sums before part p of chunk n are left in `before` kParts n + p. AdvanceHeader has
  // computed the headers.
  void AdvanceSlice(const Keys* keys, int64_t chunks, int64_t slice, const Sums& running,
                    const Sums& before, Scratch& scratch) const {
    const int64_t first = SliceBegin(slice), last = SliceBegin(slice + 1);
    if (first == last) return;
    for (int64_t n = 0; n < chunks; ++n) {
      for (int64_t begin = 0; begin < keys[n].count; begin += kPart) {
        CopySlice(running, first, last, before.Next(n * kParts + begin / kPart));
        AddToSlice(keys[n], begin, EndOfPart(keys[n], begin), running, first, last, scratch);
      }
    }
  }
  static int64_t EndOfPart(const Keys& keys, int64_t begin) {
    return std::min(begin + kPart, keys.count);
  }

  // Computes rows [begin, end) of query head `h`, which see all keys of the sums.
  void ReadRows(int64_t b, int64_t h, int64_t begin, int64_t end, const Sums& sums,
                Scratch& scratch) const {
    const Sums::Header& header = sums.header();
    for (int64_t first = begin; first < end; first += kChunk) {
      const int64_t rows = std::min(kChunk, end - first);
      std::fill_n(scratch.reference, kChunk, header.reference);
      std::fill_n(scratch.key_maximum, kChunk, header.maximum);
      LoadQueries(b, h, first, rows, sums, scratch);
      ReadSums(rows, sums, scratch);
      Finish(b, h, first, rows, scratch);
    }
  }

  // Finds the running maxima of a chunk's keys after those in the sums.
  void RunMaxima(const Sums& sums, int64_t kv_head, Keys& keys) const {
    float reference = sums.header().reference, maximum = sums.header().maximum;
    for (int64_t j = 0; j < keys.count; ++j) {
      reference = std::max(reference, keys.log_scale[j]);
      if (keys.seen[j] != 0) maximum = std::max(maximum, keys.tokens.max[j]);
      keys.running_reference[j] = reference;
      keys.running_maximum[j] = sequence_maximum_ != nullptr ? sequence_maximum_[kv_head] : maximum;
    }
  }

  // Computes the queries of head h at the places from `begin` on of the chunk of keys from
  // `first_key`: they see the sums and the keys of the part up to their own.
  void AttendPart(int64_t b, int64_t h, int64_t first_key, int64_t begin, const Keys& keys,
                  const Sums& sums, Scratch& scratch) const {
    const int64_t offset = problem_.causal_offset(), end = EndOfPart(keys, begin);
    const int64_t first = std::max<int64_t>(first_key + begin - offset, 0);
    const int64_t rows = std::min(first_key + end - offset, problem_.query_tokens) - first;
    if (rows <= 0) return;
    for (int64_t t = 0; t < kChunk; ++t) {
      // Rows beyond the last are computed in whole vectors and not stored.
      const int64_t last = std::min(first + t + offset - first_key, end - 1);
      scratch.visible[t] = static_cast<int32_t>(last + 1 - begin);
      scratch.reference[t] = keys.running_reference[last];
      scratch.key_maximum[t] = keys.running_maximum[last];
      if (map_.gated) scratch.decay[t] = keys.decay[last];
    }
    LoadQueries(b, h, first, rows, sums, scratch);
    ReadSums(rows, sums, scratch);
    AddPairs(rows, begin, keys, scratch);
    Finish(b, h, first, rows, scratch);
  }

  // Goes through all chunks of one head in order, starting from `sums`. Where `keeps`, the last
  // keys are added to the sums as well.
  void Scan(int64_t kv_head, const Sums& sums, bool keeps, Scratch& scratch) const {
    const int64_t b = kv_head / problem_.kv_heads, h = kv_head % problem_.kv_heads;
    for (int64_t first = 0; first < problem_.kv_tokens; first += kChunk) {
      LoadKeys(kv_head, first, scratch.keys, scratch);
      RunMaxima(sums, kv_head, scratch.keys);
      for (int64_t begin = 0; begin < scratch.keys.count; begin += kPart) {
        for (int64_t g = 0; g < problem_.group(); ++g) {
          AttendPart(b, h * problem_.group() + g, first, begin, scratch.keys, sums, scratch);
        }
        const int64_t end = EndOfPart(scratch.keys, begin);
        if (keeps || first + end < problem_.kv_tokens) Add(scratch.keys, begin, end, sums, scratch);
      }
    }
  }

  // Clears rows [begin, end) of a head that see no key.
  void ClearRows(int64_t b, int64_t h, int64_t begin, int64_t end, Scratch& scratch) const {
    std::memset(scratch.rows, 0, sizes_.value_row * sizeof(float));
    for (int64_t i = begin; i < end; ++i) {
      StoreRow(scratch.rows, problem_.value_dim, call_.out, call_.out.Offset(b, h, i),
               call_.out.stride(3));
      if (call_.log_sum_exp.empty()) continue;
      *call_.log_sum_exp.MutableAt<float>(b, h, i) = kNegativeInfinity;
    }
  }

 private:
  bool IsToken(int64_t b, int64_t j) const {
    return call_.key_mask.empty() || *call_.key_mask.At<uint8_t>(b, j) != 0;
  }
  // Returns what is subtracted for a reference: 0 for a head without keys.
  static float Shift(float reference) { return reference == kNegativeInfinity ? 0 : reference; }
  // Returns the logarithm of the largest unstabilised feature: rho_j, lambda_i.
  float LogScale(const Tokens& tokens, int64_t t) const {
    return exponential_ ? tokens.max[t] - tokens.half_square[t] : 0.0f;
  }

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

  void CopySlice(const Sums& from, int64_t first, int64_t last, const Sums& to) const {
    ForEachPanel([&](int64_t panel, int64_t width) {
      const int64_t offset = panel * sizes_.features + first * width;
      std::copy_n(from.products() + offset, (last - first) * width, to.products() + offset);
    });
    std::copy_n(from.normaliser() + first, last - first, to.normaliser() + first);
    if (first > 0) return;
    std::copy_n(from.scaled_values(), sizes_.value_row, to.scaled_values());
    std::copy_n(from.values(), sizes_.value_row, to.values());
  }

  void ScaleRow(float factor, float* row, int64_t columns) const {
    if (factor != 1) kernels_.scale_rows({row, 0, 1, columns}, &factor);
  }

  // Loads the values of the keys from `first` on, with zeros for padding.
  void LoadValues(int64_t b, int64_t h, int64_t first, Keys& keys) const {
    keys.finite = true;
    ForEachPanel([&](int64_t panel, int64_t width) {
      const int64_t channels = std::min(width, problem_.value_dim - panel);
      float* rows = keys.values + panel * kChunk;
      for (int64_t j = 0; j < keys.count; ++j) {
        float* row = rows + j * width;
        const int64_t loaded = keys.seen[j] != 0 ? channels : 0;
        if (loaded > 0) {
          LoadRow(call_.v, call_.v.Offset(b, h, first + j, panel), call_.v.stride(3), channels,
                  row);
        }
        std::fill(row + loaded, row + width, 0.0f);
      }
      keys.finite = keys.finite && AllFinite(rows, keys.count * width);
    });
  }

  static Sums::Header Merged(const Sums::Header& a, const Sums::Header& b) {
    const Rescale rescale(a.reference, b.reference);
    return {a.tokens + b.tokens, rescale.reference, std::max(a.maximum, b.maximum),
            rescale.first * a.scaled_feature + rescale.second * b.scaled_feature};
  }
  static void Combine(const Rescale& rescale, float* into, const float* from, int64_t count) {
    const float first = rescale.first, second = rescale.second;
    for (int64_t n = 0; n < count; ++n) into[n] = first * into[n] + second * from[n];
  }

  // Returns G of the chunk's last key.
  float DecayOf(const Keys& keys) const { return map_.gated ? keys.decay[keys.count - 1] : 0; }

  // 64 rows of inputs.
  struct Rows {
    const float* data;
    int64_t stride;
  };
  // Loads `count` rows of inputs from `first` on; those with seen 0 are zeros, and rows beyond them
  // are arbitrary. The rows stay in place if they can be read there, else they go to scratch.rows.
  Rows LoadInputs(const ConstTensorView& view, int64_t b, int64_t h, int64_t first, int64_t count,
                  const float* seen, Scratch& scratch) const {
    const bool all_seen = seen == nullptr || std::count(seen, seen + count, 0.0f) == 0;
    if (view.dtype == DType::kF32 && view.stride(3) == 1 && problem_.head_dim == sizes_.depth &&
        first + kChunk <= view.dim(2) && count > kFewTokens && all_seen) {
      return {view.At<float>(b, h, first), view.stride(2)};
    }
    for (int64_t t = 0; t < count; ++t) {
      float* row = scratch.rows + t * sizes_.depth;
      const int64_t loaded = seen == nullptr || seen[t] != 0 ? problem_.head_dim : 0;
      if (loaded > 0) LoadRow(view, view.Offset(b, h, first + t), view.stride(3), loaded, row);
      std::fill(row + loaded, row + sizes_.depth, 0.0f);
    }
    std::fill_n(scratch.rows + count * sizes_.depth,
                (RoundUp(count, kColumnQuantum) - count) * sizes_.depth, 0.0f);
    return {scratch.rows, sizes_.depth};
  }

  // Computes, for the keys in `rows`, G, and log(1 - g_j) - G_j in log_scale.
  void LoadGates(int64_t kv_head, const Rows& rows, Keys& keys) const {
    const float* gate = call_.gate.At<float>(kv_head);
    float logits[kChunk];
    kernels_.matrix_vector(keys.count, problem_.head_dim, rows.data, rows.stride, gate, logits, 1,
                           false);
    float decay = 0;
    for (int64_t j = 0; j < keys.count; ++j) {
      if (keys.seen[j] != 0) {
        const float logit = logits[j] + gate[problem_.head_dim];
        const float log_gate = LogSigmoid(logit);
        decay += log_gate < kLeastLogGate ? kLeastLogGate : log_gate;
        keys.log_scale[j] = LogSigmoid(-logit) - decay;
      }
      keys.decay[j] = decay;
    }
  }
  // Returns log(1 / (1 + exp(-x))).
  static float LogSigmoid(float x) {
    return std::min(x, 0.0f) - std::log1p(std::exp(-std::abs(x)));
  }

  // Returns the factor of inputs whose squares sum to `square`.
  float InputFactor(float square) const {
    if (!map_.unit) return map_.input_scale;
    if (square < kLeastLength * kLeastLength) return 0;
    // The last term is NaN where the square is infinite or NaN.
    return map_.input_scale / (std::sqrt(square) + map_.length_epsilon) + 0 * square;
  }

  // Computes features of `count` tokens; where they are few, their inputs are in scratch.rows.
  void MakeFeatures(const Rows& rows, int64_t count, int64_t kv_head, const float* normaliser,
                    Tokens& tokens, Scratch& scratch) const {
    const int64_t head_dim = problem_.head_dim;
    const int64_t lanes = RoundUp(count, kColumnQuantum);
    const float* w =
        call_.w.At<float>() + (map_.per_head ? kv_head * sizes_.projections * head_dim : 0);
    if (count <= kFewTokens) {
      for (int64_t t = 0; t < count; ++t) OneTokensFeatures(w, t, normaliser, tokens, scratch);
      return;
    }
    kernels_.transpose64(rows.data, rows.stride, sizes_.depth, scratch.columns);
    ScaleColumns(lanes, tokens, scratch);
    kernels_.gemm(sizes_.projections, lanes, head_dim, w, head_dim, 1, scratch.columns, kChunk,
                  tokens.features, kChunk, false);
    kernels_.features(map_.feature, {tokens.features, kChunk, sizes_.projections, lanes},
                      {tokens.max, tokens.total, normaliser, tokens.dot});
  }

  // Scales inputs for the features, in scratch.columns.
  void ScaleColumns(int64_t lanes, Tokens& tokens, Scratch& scratch) const {
    float factor[kChunk];
    float* half_square = tokens.half_square;
    if (map_.unit) {
      std::fill_n(factor, kChunk, 0.0f);
      for (int64_t c = 0; c < problem_.head_dim; ++c) {
        const float* column = scratch.columns + c * kChunk;
        for (int64_t t = 0; t < lanes; ++t) factor[t] += column[t] * column[t];
      }
      for (int64_t t = 0; t < lanes; ++t) factor[t] = InputFactor(factor[t]);
    } else {
      std::fill_n(factor, kChunk, map_.input_scale);
    }
    std::fill_n(half_square, kChunk, 0.0f);
    for (int64_t c = 0; c < problem_.head_dim; ++c) {
      float* column = scratch.columns + c * kChunk;
      for (int64_t t = 0; t < lanes; ++t) {
        column[t] *= factor[t];
        half_square[t] += 0.5f * column[t] * column[t];
      }
    }
  }

  // Does the same for token t alone, with its features side by side: vectors over tokens would be
  // computed in vain for all but one of their lanes.
  void OneTokensFeatures(const float* w, int64_t t, const float* normaliser, Tokens& tokens,
                         Scratch& scratch) const {
    float* row = scratch.rows + t * sizes_.depth;
    float square = 0;
    for (int64_t c = 0; c < problem_.head_dim; ++c) square += row[c] * row[c];
    const float factor = InputFactor(square);
    for (int64_t c = 0; c < problem_.head_dim; ++c) row[c] *= factor;
    tokens.half_square[t] = 0.5f * factor * factor * square;
    float* features = scratch.token_features;
    kernels_.matrix_vector(sizes_.projections, problem_.head_dim, w, problem_.head_dim, row,
                           features, 1, false);
    if (exponential_) {
      for (int64_t r = sizes_.projections; r < sizes_.features; ++r) {
        features[r] = -features[r - sizes_.projections];
      }
      std::fill(features + sizes_.features, features + sizes_.normaliser, kNegativeInfinity);
      float unused;
      tokens.max[t] = kNegativeInfinity;
      tokens.total[t] = 0;
      kernels_.softmax({features, 0, 1, sizes_.normaliser},
                       {tokens.max + t, tokens.total + t, &unused}, nullptr);
    } else if (map_.feature == Feature::kSinCos) {
      kernels_.sin_cos(sizes_.projections, features, features, features + sizes_.projections);
      tokens.max[t] = tokens.total[t] = 0;
    } else {
      tokens.max[t] = tokens.total[t] = 0;
      for (int64_t r = 0; r < sizes_.features; ++r) {
        if (features[r] < 0) features[r] = 0;
        tokens.total[t] += features[r];
      }
    }
    if (normaliser != nullptr) {
      kernels_.matrix_vector(1, sizes_.features, features, 0, normaliser, tokens.dot + t, 1, false);
    }
    for (int64_t r = 0; r < sizes_.features; ++r) tokens.features[r * kChunk + t] = features[r];
  }

  // Computes features of rows of queries, and the factors of the four terms against
  // scratch.reference and key_maximum.
  void LoadQueries(int64_t b, int64_t h, int64_t first, int64_t rows, const Sums& sums,
                   Scratch& scratch) const {
    const Rows inputs = LoadInputs(call_.q, b, h, first, rows, nullptr, scratch);
    MakeFeatures(inputs, rows, h / problem_.group(), sums.normaliser(), scratch.queries, scratch);
    ComputeCarry(rows, sums, scratch);
    if (epsilon_ == 0) {
      std::fill_n(scratch.product, kChunk, 1.0f);
      std::fill_n(scratch.key, kChunk, 0.0f);
      std::fill_n(scratch.constant, kChunk, 0.0f);
      for (int64_t t = 0; t < rows; ++t) {
        scratch.log_scale[t] = LogScale(scratch.queries, t) + scratch.reference[t];
        if (map_.gated) scratch.log_scale[t] += scratch.decay[t];
      }
    } else {
      ComputeFactors(rows, scratch);
    }
  }

  void ComputeCarry(int64_t rows, const Sums& sums, Scratch& scratch) const {
    const float reference = sums.header().reference;
    if (reference == kNegativeInfinity) {
      std::fill_n(scratch.carry, rows, 0.0f);
      return;
    }
    for (int64_t t = 0; t < kChunk; ++t) scratch.carry[t] = reference - scratch.reference[t];
    const float no_shift = 0;
    kernels_.exp({scratch.carry, 0, 1, RoundUp(rows, kColumnQuantum)}, &no_shift);
  }

  bool IsStabilised() const { return exponential_ && map_.stabiliser != KeyStabiliser::kNone; }

  // Return the logarithms of the two scales of row t: exp(lambda_i - s) and exp(R - S).
  float QueryScale(const Scratch& scratch, int64_t t) const {
    return IsStabilised() ? -scratch.queries.half_square[t] : LogScale(scratch.queries, t);
  }
  float KeyScale(const Scratch& scratch, int64_t t) const {
    const float reference = scratch.reference[t];
    if (!IsStabilised() || reference == kNegativeInfinity) return reference;
    return reference - scratch.key_maximum[t];
  }

  void ComputeFactors(int64_t rows, Scratch& scratch) const {
    const int64_t lanes = RoundUp(rows, kColumnQuantum);
    for (int64_t t = 0; t < lanes; ++t) {
      const float query = QueryScale(scratch, t), key = KeyScale(scratch, t);
      const float largest_query = std::max(query, log_epsilon_),
                  largest_key = std::max(key, log_epsilon_);
      scratch.exponent[0][t] = query - largest_query;
      scratch.exponent[1][t] = log_epsilon_ - largest_query;
      scratch.exponent[2][t] = key - largest_key;
      scratch.exponent[3][t] = log_epsilon_ - largest_key;
      // The sum does not go through lambda_i and R, in which large halves of squares would cancel.
      scratch.log_scale[t] = largest_query + largest_key;
      if (IsStabilised()) scratch.log_scale[t] += scratch.queries.max[t] + scratch.key_maximum[t];
    }
    const float no_shift[4] = {};
    kernels_.exp({scratch.exponent[0], kChunk, 4, lanes}, no_shift);
    const float features = static_cast<float>(sizes_.features);
    for (int64_t t = 0; t < lanes; ++t) {
      const float query = scratch.exponent[0][t], query_epsilon = scratch.exponent[1][t];
      const float key = scratch.exponent[2][t], key_epsilon = scratch.exponent[3][t];
      scratch.product[t] = query * key;
      scratch.key[t] = query_epsilon * key;
      scratch.constant[t] =
          key_epsilon * (query * scratch.queries.total[t] + query_epsilon * features);
    }
  }

  // Computes output and denominator of the rows from the sums alone.
  void ReadSums(int64_t rows, const Sums& sums, Scratch& scratch) const {
    const Sums::Header& header = sums.header();
    if (header.tokens == 0) {
      std::fill_n(scratch.output, kChunk * sizes_.value_row, 0.0f);
      std::fill_n(scratch.denominator, kChunk, 0.0f);
      return;
    }
    ForEachPanel([&](int64_t panel, int64_t width) {
      float* output = scratch.output + panel * kChunk;
      const float* products = sums.products() + panel * sizes_.features;
      for (int64_t r = 0; r < sizes_.features; r += kDepthBlock) {
        kernels_.gemm(rows, width, std::min(kDepthBlock, sizes_.features - r),
                      scratch.queries.features + r * kChunk, 1, kChunk, products + r * width, width,
                      output, width, r > 0);
      }
      for (int64_t t = 0; t < rows; ++t) {
        const float product = scratch.carry[t] * scratch.product[t];
        const float key = scratch.carry[t] * scratch.key[t];
        float* row = output + t * width;
        if (epsilon_ == 0) {
          for (int64_t c = 0; c < width; ++c) row[c] *= product;
          continue;
        }
        for (int64_t c = 0; c < width; ++c) {
          row[c] = product * row[c] + key * sums.scaled_values()[panel + c] +
                   scratch.constant[t] * sums.values()[panel + c];
        }
      }
    });
    for (int64_t t = 0; t < rows; ++t) {
      scratch.denominator[t] = scratch.carry[t] * (scratch.product[t] * scratch.queries.dot[t] +
                                                   scratch.key[t] * header.scaled_feature) +
                               scratch.constant[t] * static_cast<float>(header.tokens);
    }
  }

  // Adds the keys of the part itself, which begins at `begin`, pair by pair. Rows go in blocks, so
  // that the keys right of the diagonal are skipped.
  void AddPairs(int64_t rows, int64_t begin, const Keys& keys, Scratch& scratch) const {
    for (int64_t t = 0; t < rows; ++t) scratch.shift[t] = Shift(scratch.reference[t]);
    // A hidden value that is not finite must not be multiplied by its weight of 0.
    const int64_t block = keys.finite ? kPairRows : 1;
    for (int64_t first = 0; first < rows; first += block) {
      const int64_t count = std::min(block, rows - first);
      const int64_t depth = scratch.visible[first + count - 1];
      const int64_t columns = RoundUp(depth, kColumnQuantum);
      float* weights = scratch.weights + first * kChunk;
      for (int64_t r = 0; r < sizes_.features; r += kDepthBlock) {
        kernels_.gemm(count, columns, std::min(kDepthBlock, sizes_.features - r),
                      scratch.queries.features + r * kChunk + first, 1, kChunk,
                      keys.tokens.features + r * kChunk + begin, kChunk, weights, kChunk, r > 0);
      }
      kernels_.pair_weights(
          {weights, kChunk, count, columns},
          {keys.log_scale + begin, keys.tokens.total + begin, keys.seen + begin,
           scratch.shift + first, scratch.product + first, scratch.key + first,
           scratch.constant + first, scratch.visible + first, scratch.sum + first});
      ForEachPanel([&](int64_t panel, int64_t width) {
        kernels_.gemm(count, width, depth, weights, kChunk, 1,
                      keys.values + panel * kChunk + begin * width, width,
                      scratch.output + panel * kChunk + first * width, width, true);
      });
    }
    for (int64_t t = 0; t < rows; ++t) scratch.denominator[t] += scratch.sum[t];
  }

  // Divides by the denominators and writes the rows.
  void Finish(int64_t b, int64_t h, int64_t first, int64_t rows, Scratch& scratch) const {
    int64_t without_weight = 0;
    for (int64_t t = 0; t < rows; ++t) {
      const float denominator = Denominator(t, scratch, &without_weight);
      const float inverse = denominator == 0 ? 0 : 1 / denominator;
      ForEachPanel([&](int64_t panel, int64_t width) {
        float* row = scratch.output + panel * kChunk + t * width;
        for (int64_t c = 0; c < width; ++c) row[c] *= inverse;
        StoreRow(row, std::min(width, problem_.value_dim - panel), call_.out,
                 call_.out.Offset(b, h, first + t, panel), call_.out.stride(3));
      });
      if (call_.log_sum_exp.empty()) continue;
      *call_.log_sum_exp.MutableAt<float>(b, h, first + t) = LogSumExp(t, denominator, scratch);
    }
    if (without_weight != 0 && call_.rows_without_weight != nullptr) {
      call_.rows_without_weight->fetch_add(without_weight, std::memory_order_relaxed);
    }
  }

  float Denominator(int64_t t, const Scratch& scratch, int64_t* without_weight) const {
    float denominator = scratch.denominator[t];
    const bool seen = scratch.reference[t] != kNegativeInfinity;
    if (map_.denominator_epsilon != 0 && seen) {
      // This is d sum_r phi_q(q_i)_r, divided as the four terms are.
      const float key = KeyScale(scratch, t);
      const float largest = epsilon_ == 0 ? key : std::max(key, log_epsilon_);
      const double query_sum = QuerySum(t, scratch);
      denominator += static_cast<float>(map_.denominator_epsilon / map_.constant * query_sum *
                                        std::exp(-largest));
    }
    const float floor = map_.gated ? floor_ * std::exp(-scratch.log_scale[t]) : floor_;
    if (!seen || !(denominator <= floor)) return denominator;
    ++*without_weight;
    return std::abs(denominator) <= floor ? std::copysign(floor, denominator) : denominator;
  }

  // Returns sum_r phi_q(q_i)_r / c, divided by max(exp(lambda_i - s), epsilon).
  double QuerySum(int64_t t, const Scratch& scratch) const {
    if (epsilon_ == 0) return scratch.queries.total[t];
    return scratch.exponent[0][t] * scratch.queries.total[t] +
           scratch.exponent[1][t] * static_cast<double>(sizes_.features);
  }

  float LogSumExp(int64_t t, float denominator, const Scratch& scratch) const {
    if (scratch.reference[t] == kNegativeInfinity && denominator == 0) return kNegativeInfinity;
    return static_cast<float>(std::log(std::abs(denominator)) + log_constants_ +
                              scratch.log_scale[t]);
  }

  const Problem& problem_;
  const LinearCall& call_;
  const FeatureMap& map_;
  const Sizes& sizes_;
  const CpuKernels& kernels_;
  const bool exponential_;
  const float epsilon_;
  const float log_epsilon_;
  const float floor_;           // relative to c^2
  const double log_constants_;  // 2 log c
  const float* sequence_maximum_ = nullptr;
};

// Sums all keys of each head, then computes all queries.
void RunAll(const Problem& problem, const LinearRun& run, const Sizes& sizes, const Plan& plan,
            const Memory& memory, ThreadPool& pool) {
  const int64_t group_tokens = RoundUp(CeilDivide(problem.kv_tokens, plan.groups), kChunk);
  const int64_t tiles = CeilDivide(problem.query_tokens, kTaskChunks * kChunk);
  const auto sums = [&](int64_t slot, int64_t group) {
    return Sums(sizes, memory.states + (slot * plan.groups + group) * sizes.state);
  };
  for (int64_t first = 0; first < plan.heads; first += plan.held_heads) {
    const int64_t heads = std::min(plan.held_heads, plan.heads - first);
    pool.ParallelFor(heads * plan.groups, [&](int64_t task, int worker) {
      const int64_t slot = task / plan.groups, group = task % plan.groups;
      sums(slot, group).Reset();
      run.SumKeys(first + slot, group * group_tokens,
                  std::min((group + 1) * group_tokens, problem.kv_tokens), sums(slot, group),
                  memory.scratch[worker]);
    });
    if (plan.groups > 1) {
      pool.ParallelFor(heads, [&](int64_t slot, int) {
        for (int64_t group = 1; group < plan.groups; ++group)
          run.Merge(sums(slot, 0), sums(slot, group));
      });
    }
    pool.ParallelFor(heads * problem.group() * tiles, [&](int64_t task, int worker) {
      const int64_t slot = task / (problem.group() * tiles);
      const int64_t b = (first + slot) / problem.kv_heads;
      const int64_t h =
          (first + slot) % problem.kv_heads * problem.group() + task / tiles % problem.group();
      const int64_t begin = task % tiles * kTaskChunks * kChunk;
      run.ReadRows(b, h, begin, std::min(begin + kTaskChunks * kChunk, problem.query_tokens),
                   sums(slot, 0), memory.scratch[worker]);
    });
  }
}

// Goes through several chunks of each head at a time, for few heads. `states` [heads] holds the
// running sums.
void RunSteps(const Problem& problem, const LinearRun& run, const Sizes& sizes, const Plan& plan,
              const Memory& memory, float* states, ThreadPool& pool) {
  const int64_t heads = plan.heads, group = problem.group();
  for (int64_t step = 0; step < plan.chunks; step += plan.step_chunks) {
    const int64_t chunks = std::min(plan.step_chunks, plan.chunks - step);
    const auto first_key = [&](int64_t slot) { return (step + slot % chunks) * kChunk; };
    // Returns the sums before the part from `begin` on.
    const auto sums = [&](int64_t slot, int64_t begin) {
      return Sums(sizes, memory.chunk_states + (slot * kParts + begin / kPart) * sizes.state);
    };
    const auto running = [&](int64_t head) { return Sums(sizes, states + head * sizes.state); };

    pool.ParallelFor(heads * chunks, [&](int64_t slot, int worker) {
      run.LoadKeys(slot / chunks, first_key(slot), memory.chunk_keys[slot], memory.scratch[worker]);
    });
    for (int64_t slot = 0; slot < heads * chunks; ++slot) {
      Keys& keys = memory.chunk_keys[slot];
      Sums::Header& header = running(slot / chunks).header();
      run.RunMaxima(running(slot / chunks), slot / chunks, keys);
      for (int64_t begin = 0; begin < keys.count; begin += kPart) {
        sums(slot, begin).header() = header;
        run.AdvanceHeader(header, begin, run.EndOfPart(keys, begin), keys);
      }
    }
    pool.ParallelFor(heads * kSumSlices, [&](int64_t task, int worker) {
      const int64_t head = task / kSumSlices;
      run.AdvanceSlice(memory.chunk_keys + head * chunks, chunks, task % kSumSlices, running(head),
                       sums(head * chunks, 0), memory.scratch[worker]);
    });
    pool.ParallelFor(heads * chunks * group, [&](int64_t task, int worker) {
      const int64_t slot = task / group;
      const int64_t b = slot / chunks / problem.kv_heads, h = slot / chunks % problem.kv_heads;
      const Keys& keys = memory.chunk_keys[slot];
      for (int64_t begin = 0; begin < keys.count; begin += kPart) {
        run.AttendPart(b, h * group + task % group, first_key(slot), begin, keys, sums(slot, begin),
                       memory.scratch[worker]);
      }
    });
  }
}

// Runs a causal problem, starting from the sums in `states` [heads], or from none where it is null.
void RunCausal(const Problem& problem, const LinearRun& run, const Sizes& sizes, const Plan& plan,
               const Memory& memory, float* states, ThreadPool& pool) {
  const int64_t keyless_rows =
      std::clamp<int64_t>(-problem.causal_offset(), 0, problem.query_tokens);
  if (keyless_rows > 0) {
    pool.ParallelFor(problem.batch * problem.query_heads, [&](int64_t task, int worker) {
      run.ClearRows(task / problem.query_heads, task % problem.query_heads, 0, keyless_rows,
                    memory.scratch[worker]);
    });
  }
  if (plan.stepped) {
    for (int64_t head = 0; states == nullptr && head < plan.heads; ++head) {
      Sums(sizes, memory.states + head * sizes.state).Reset();
    }
    return RunSteps(problem, run, sizes, plan, memory, states == nullptr ? memory.states : states,
                    pool);
  }
  pool.ParallelFor(plan.heads, [&](int64_t head, int worker) {
    float* state =
        states == nullptr ? memory.states + worker * sizes.state : states + head * sizes.state;
    const Sums sums(sizes, state);
    if (states == nullptr) sums.Reset();
    run.Scan(head, sums, states != nullptr, memory.scratch[worker]);
  });
}

// `states` is null, or the sums that a causal problem starts from.
absl::Status Run(const Problem& problem, const LinearCall& call, float* states,
                 const Execution& execution) {
  TFB_RETURN_IF_ERROR(CheckLinearMap(problem, call.map, call.w));
  const Sizes sizes(problem, call.map);
  const Plan plan(problem, sizes, execution.pool->threads());
  Workspace workspace(execution.workspace);
  const Memory memory =
      LayOut(problem, sizes, plan, states != nullptr, execution.pool->threads(), workspace);
  LinearRun run(problem, call, sizes);
  if (!problem.causal) {
    RunAll(problem, run, sizes, plan, memory, *execution.pool);
    return absl::OkStatus();
  }
  if (call.map.stabiliser == KeyStabiliser::kSequence) {
    execution.pool->ParallelFor(plan.heads, [&](int64_t head, int worker) {
      memory.sequence_maximum[head] = run.SequenceMaximum(head, memory.scratch[worker]);
    });
    run.set_sequence_maximum(memory.sequence_maximum);
  }
  RunCausal(problem, run, sizes, plan, memory, states, *execution.pool);
  return absl::OkStatus();
}

// Returns the problem of self-attention over the next `tokens` tokens.
Problem SegmentOf(const Problem& problem, int64_t tokens) {
  Problem segment = problem;
  segment.query_tokens = segment.kv_tokens = tokens;
  segment.causal = true;
  return segment;
}

}  // namespace
}  // namespace linear_cpu

absl::Status CheckLinearMap(const Problem& problem, const FeatureMap& map,
                            const ConstTensorView& w) {
  const Shape shape = map.per_head ? Shape{problem.kv_heads, map.projections, problem.head_dim}
                                   : Shape{map.projections, problem.head_dim};
  if (map.projections < 1 || w.shape() != shape || w.dtype != DType::kF32 || !w.is_contiguous()) {
    return absl::InternalError(absl::StrCat("W is ", Name(w.dtype), " ", ShapeString(w.shape()),
                                            "; expected is contiguous f32 ", ShapeString(shape)));
  }
  if (map.denominator_floor != 0 && IsExponential(map.feature)) {
    return absl::InternalError("a floor of the denominator is not for exponential features");
  }
  if (!map.gated) return absl::OkStatus();
  if (!problem.causal || IsExponential(map.feature) || map.epsilon != 0 ||
      map.denominator_epsilon != 0) {
    return absl::InternalError("gates are for causal problems, without epsilon or exponentials");
  }
  return absl::OkStatus();
}

size_t LinearWorkspaceBytes(const Problem& problem, const FeatureMap& map, int threads) {
  const linear_cpu::Sizes sizes(problem, map);
  const linear_cpu::Plan plan(problem, sizes, threads);
  return Workspace::Measure([&](Workspace& workspace) {
    linear_cpu::LayOut(problem, sizes, plan, false, threads, workspace);
  });
}

absl::Status LinearCpu(const Problem& problem, const LinearCall& call, const Execution& execution) {
  return linear_cpu::Run(problem, call, nullptr, execution);
}

size_t LinearStateBytes(const Problem& problem, const FeatureMap& map) {
  return problem.batch * problem.kv_heads * linear_cpu::Sizes(problem, map).state * sizeof(float);
}

void LinearReset(const Problem& problem, const FeatureMap& map, absl::Span<std::byte> state) {
  const linear_cpu::Sizes sizes(problem, map);
  float* sums = reinterpret_cast<float*>(state.data());
  for (int64_t head = 0; head < problem.batch * problem.kv_heads; ++head) {
    linear_cpu::Sums(sizes, sums + head * sizes.state).Reset();
  }
}

absl::Status LinearAppend(const Problem& problem, int64_t tokens, const LinearCall& call,
                          absl::Span<std::byte> state, const Execution& execution) {
  if (call.map.stabiliser == KeyStabiliser::kSequence) {
    return absl::InvalidArgumentError(
        "the keys' maximum over the whole sequence is not known while tokens are appended");
  }
  return linear_cpu::Run(linear_cpu::SegmentOf(problem, tokens), call,
                         reinterpret_cast<float*>(state.data()), execution);
}

}  // namespace tfb
