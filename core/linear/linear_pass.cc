#include "core/linear/linear_pass.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "core/flash/rows.h"

namespace tfb::linear_cpu {
namespace {

constexpr int64_t kFewTokens = 4;  // tokens that are taken one by one
// A gate below e^-18, a quarter of a rounding of 1, is a complete reset; the bound keeps sums of
// logarithms small.
constexpr float kLeastLogGate = -18;

// Factors of two sums at references a and b that bring them to the larger reference.
struct Rescale {
  Rescale(float a, float b) : reference(b > a ? b : a) {
    first = Factor(a);
    second = Factor(b);
  }
  float Factor(float from) const {
    if (from == reference) return 1;
    return from == kNegativeInfinity ? 0 : std::exp(from - reference);
  }
  float reference;
  float first;
  float second;
};

// Returns log(1 / (1 + exp(-x))).
float LogSigmoid(float x) { return std::min(x, 0.0f) - std::log1p(std::exp(-std::abs(x))); }

}  // namespace

void Pass::LoadKeys(int64_t kv_head, int64_t first, Keys& keys, LoadScratch& scratch) const {
  const int64_t b = kv_head / problem_.kv_heads, h = kv_head % problem_.kv_heads;
  keys.first = first;
  keys.count = std::min(kChunk, problem_.kv_tokens - first);
  for (int64_t j = 0; j < kChunk; ++j) {
    const bool seen = j < keys.count && IsToken(b, first + j);
    keys.seen[j] = seen ? 1.0f : 0.0f;
  }
  const Rows rows = LoadInputs(inputs_.k, b, h, first, keys.count, keys.seen, scratch);
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

void Pass::AdvanceHeader(Sums::Header& header, int64_t begin, int64_t end, Keys& keys) const {
  float reference = header.reference;
  for (int64_t j = begin; j < end; ++j) {
    if (keys.seen[j] == 0) continue;
    reference = std::max(reference, AsReference(keys.log_scale[j]));
    if (keys.tokens.max[j] > header.maximum) {
      header.maximum = keys.tokens.max[j];
      header.maximum_key = keys.first + j;
    }
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
    keys.total_scale[j] = keys.scale[j] * keys.tokens.total[j];
    header.scaled_feature += keys.total_scale[j];
    header.tokens += keys.seen[j];
  }
  // After the chunk the reference is relative to the chunk's end.
  header.reference = reference + (end == keys.count ? DecayOf(keys) : 0);
}

void Pass::AddToSlice(const Addend& tokens, const Sums& from, const Sums& to, int64_t first,
                      int64_t last, LoadScratch& scratch) const {
  const float rescale = tokens.rescale;
  // Returns the sums so far at the new scale: those of `from`, or of `to` where they change.
  const auto rescaled = [&](const float* sums, float* into, int64_t count) {
    if (rescale == 1) return sums;
    for (int64_t n = 0; n < count; ++n) into[n] = rescale * sums[n];
    return static_cast<const float*>(into);
  };
  const float* features = tokens.features + first * kChunk;
  ForEachPanel([&](int64_t panel, int64_t width) {
    const float* rows = tokens.rows + panel * kChunk + tokens.begin * width;
    float* scaled = scratch.scaled_values + panel * kChunk;
    for (int64_t j = 0; j < tokens.count; ++j) {
      const float scale = tokens.scale[j];
      for (int64_t c = 0; c < width; ++c) scaled[j * width + c] = scale * rows[j * width + c];
    }
    const int64_t offset = panel * sizes_.features + first * width;
    float* products = to.products() + offset;
    kernels_.gemm_plus(last - first, width, tokens.count, features, kChunk, 1, scaled, width,
                       rescaled(from.products() + offset, products, (last - first) * width), width,
                       products, width, &scratch.ahead);
    if (epsilon_ == 0 || first > 0) return;
    const auto add = [&](const float* factors, const float* sums, float* into) {
      kernels_.gemm_plus(1, width, tokens.count, factors, 0, 1, rows, width, sums, width, into,
                         width, nullptr);
    };
    add(tokens.constant, from.values() + panel, to.values() + panel);
    float* scaled_values = to.scaled_values() + panel;
    add(tokens.scaled, rescaled(from.scaled_values() + panel, scaled_values, width), scaled_values);
  });
  float* normaliser = to.normaliser() + first;
  for (int64_t r = 0; r < last - first; ++r) normaliser[r] = rescale * from.normaliser()[first + r];
  kernels_.matrix_vector(last - first, tokens.count, features, kChunk, tokens.normaliser,
                         normaliser, 1, true);
}

void Pass::Expect(const ConstTensorView& view, int64_t b, int64_t h, int64_t first,
                  LoadScratch& scratch) {
  Ahead& ahead = scratch.ahead;
  if (view.empty() || view.stride(3) != 1 || first >= view.dim(2)) return;
  if (ahead.count == static_cast<int64_t>(std::size(ahead.tensors))) return;
  const auto element = static_cast<int64_t>(SizeOf(view.dtype));
  AheadRows rows = {static_cast<const char*>(view.data) + view.Offset(b, h, first) * element,
                    view.stride(2) * element, view.dim(3) * element,
                    std::min(kChunk, view.dim(2) - first)};
  if (rows.stride == rows.bytes) rows = {rows.first, 0, rows.bytes * rows.rows, 1};
  ahead.tensors[ahead.count++] = rows;
}

void Pass::Merge(const Sums& into, const Sums& from) const {
  Sums::Header& header = into.header();
  const Sums::Header& other = from.header();
  const Rescale rescale(header.reference, other.reference);
  float* scaled = into.scaled();
  for (int64_t n = 0; n < sizes_.scaled_sums; ++n) {
    scaled[n] = rescale.first * scaled[n] + rescale.second * from.scaled()[n];
  }
  for (int64_t c = 0; c < sizes_.value_row; ++c) into.values()[c] += from.values()[c];
  const bool is_larger = other.maximum > header.maximum;
  header = {header.tokens + other.tokens, rescale.reference,
            is_larger ? other.maximum : header.maximum,
            is_larger ? other.maximum_key : header.maximum_key,
            rescale.first * header.scaled_feature + rescale.second * other.scaled_feature};
}

void Pass::RunMaxima(const Sums::Header& header, const float* sequence_maximum, Keys& keys) const {
  float reference = header.reference, maximum = header.maximum;
  for (int64_t j = 0; j < keys.count; ++j) {
    if (keys.seen[j] != 0) {
      reference = std::max(reference, AsReference(keys.log_scale[j]));
      maximum = std::max(maximum, keys.tokens.max[j]);
    }
    keys.running_reference[j] = reference;
    keys.running_maximum[j] = sequence_maximum != nullptr ? *sequence_maximum : maximum;
  }
}

void Pass::CopySlice(const Sums& from, int64_t first, int64_t last, const Sums& to) const {
  ForEachPanel([&](int64_t panel, int64_t width) {
    const int64_t offset = panel * sizes_.features + first * width;
    std::copy_n(from.products() + offset, (last - first) * width, to.products() + offset);
  });
  std::copy_n(from.normaliser() + first, last - first, to.normaliser() + first);
  if (first > 0) return;
  std::copy_n(from.scaled_values(), sizes_.value_row, to.scaled_values());
  std::copy_n(from.values(), sizes_.value_row, to.values());
}

void Pass::LoadValues(int64_t b, int64_t h, int64_t first, Keys& keys) const {
  keys.finite = true;
  ForEachPanel([&](int64_t panel, int64_t width) {
    const int64_t channels = std::min(width, problem_.value_dim - panel);
    float* rows = keys.values + panel * kChunk;
    for (int64_t j = 0; j < keys.count; ++j) {
      float* row = rows + j * width;
      const int64_t loaded = keys.seen[j] != 0 ? channels : 0;
      if (loaded > 0) {
        LoadRow(inputs_.v, inputs_.v.Offset(b, h, first + j, panel), inputs_.v.stride(3), channels,
                row);
      }
      std::fill(row + loaded, row + width, 0.0f);
    }
    keys.finite = keys.finite && AllFinite(rows, keys.count * width);
  });
}

Pass::Rows Pass::LoadInputs(const ConstTensorView& view, int64_t b, int64_t h, int64_t first,
                            int64_t count, const float* seen, LoadScratch& scratch) const {
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

// Computes, for the keys in `rows`, the gates, G, and log(1 - g_j) - G_j in log_scale.
void Pass::LoadGates(int64_t kv_head, const Rows& rows, Keys& keys) const {
  const float* gate = inputs_.gate.At<float>(kv_head);
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
      keys.gate[j] = logit;
    }
    keys.decay[j] = decay;
  }
}

// Returns the factor of inputs whose squares sum to `square`.
float Pass::InputFactor(float square) const {
  if (!map_.unit) return map_.input_scale;
  if (square < kLeastLength * kLeastLength) return 0;
  // The last term is NaN where the square is infinite or NaN.
  return map_.input_scale / (std::sqrt(square) + map_.length_epsilon) + 0 * square;
}

void Pass::MakeFeatures(const Rows& rows, int64_t count, int64_t kv_head, const float* normaliser,
                        Tokens& tokens, LoadScratch& scratch) const {
  const int64_t head_dim = problem_.head_dim;
  const int64_t lanes = RoundUp(count, kColumnQuantum);
  const float* w =
      inputs_.w.At<float>() + (map_.per_head ? kv_head * sizes_.projections * head_dim : 0);
  if (count <= kFewTokens) {
    for (int64_t t = 0; t < count; ++t) OneTokensFeatures(w, t, normaliser, tokens, scratch);
    return;
  }
  kernels_.transpose64(rows.data, rows.stride, sizes_.depth, scratch.columns);
  ScaleColumns(lanes, tokens, scratch);
  for (int64_t t = 0; tokens.inputs != nullptr && t < count; ++t) {
    KeepInput(rows.data + t * rows.stride, tokens.factor[t], tokens.inputs + t * sizes_.input_row);
  }
  Multiply(sizes_.projections, lanes, head_dim, w, head_dim, 1, scratch.columns, kChunk,
           tokens.features, kChunk, false, scratch);
  kernels_.features(map_.feature, {tokens.features, kChunk, sizes_.projections, lanes},
                    {tokens.max, tokens.total, normaliser, tokens.dot});
}

// Scales inputs for the features, in scratch.columns.
void Pass::ScaleColumns(int64_t lanes, Tokens& tokens, LoadScratch& scratch) const {
  float* factor = tokens.factor;
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

// Writes factor times a row of inputs, and zeros behind it.
void Pass::KeepInput(const float* row, float factor, float* to) const {
  for (int64_t c = 0; c < problem_.head_dim; ++c) to[c] = factor * row[c];
  std::fill(to + problem_.head_dim, to + sizes_.input_row, 0.0f);
}

// Does the same as MakeFeatures for token t alone, with its features side by side: vectors over
// tokens would be computed in vain for all but one of their lanes.
void Pass::OneTokensFeatures(const float* w, int64_t t, const float* normaliser, Tokens& tokens,
                             LoadScratch& scratch) const {
  float* row = scratch.rows + t * sizes_.depth;
  float square = 0;
  for (int64_t c = 0; c < problem_.head_dim; ++c) square += row[c] * row[c];
  const float factor = InputFactor(square);
  for (int64_t c = 0; c < problem_.head_dim; ++c) row[c] *= factor;
  if (tokens.inputs != nullptr) KeepInput(row, 1, tokens.inputs + t * sizes_.input_row);
  tokens.factor[t] = factor;
  tokens.half_square[t] = 0.5f * factor * factor * square;
  float* features = scratch.token_features;
  kernels_.matrix_vector(sizes_.projections, problem_.head_dim, w, problem_.head_dim, row, features,
                         1, false);
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

void Pass::ComputeFactors(int64_t rows, const Tokens& queries, QueryFactors& factors) const {
  if (epsilon_ == 0) {
    std::fill_n(factors.query, kChunk, 1.0f);
    std::fill_n(factors.query_epsilon, kChunk, 0.0f);
    std::fill_n(factors.key, kChunk, 1.0f);
    std::fill_n(factors.key_epsilon, kChunk, 0.0f);
    for (int64_t t = 0; t < rows; ++t) {
      factors.log_scale[t] = LogScale(queries, t) + factors.reference[t];
      if (map_.gated) factors.log_scale[t] += factors.decay[t];
    }
    return;
  }
  const int64_t lanes = RoundUp(rows, kColumnQuantum);
  for (int64_t t = 0; t < lanes; ++t) {
    const float query = IsStabilised() ? -queries.half_square[t] : LogScale(queries, t);
    const float key = KeyScale(factors, t);
    const float largest_query = std::max(query, log_epsilon_),
                largest_key = std::max(key, log_epsilon_);
    factors.query[t] = query - largest_query;
    factors.query_epsilon[t] = log_epsilon_ - largest_query;
    factors.key[t] = key - largest_key;
    factors.key_epsilon[t] = log_epsilon_ - largest_key;
    // The sum does not go through lambda_i and R, in which large halves of squares would cancel.
    factors.log_scale[t] = largest_query + largest_key;
    if (IsStabilised()) factors.log_scale[t] += queries.max[t] + factors.key_maximum[t];
  }
  const float no_shift = 0;
  for (float* exponents :
       {factors.query, factors.query_epsilon, factors.key, factors.key_epsilon}) {
    kernels_.exp({exponents, 0, 1, lanes}, &no_shift);
  }
}

}  // namespace tfb::linear_cpu
