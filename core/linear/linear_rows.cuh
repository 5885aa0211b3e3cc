// Utilities that the kernels of engine linear share: reading rows of tensors, the factors with
// which a query's row of sums is read, and the end of that row.
#ifndef TFB_CORE_LINEAR_LINEAR_ROWS_CUH_
#define TFB_CORE_LINEAR_LINEAR_ROWS_CUH_

#include "core/linear/linear_kernels.h"
#include "core/linear/linear_math.cuh"

namespace tfb {
namespace {

// ---- Rows ----

// Loads four channels of a row of Math's dtype, zeros beyond the last one. `is_vector` says that
// they can be read as one aligned vector.
template <class Math>
__device__ typename Math::Raw FetchFour(const char* row, int64_t stride, int channel, int channels,
                                        bool is_vector) {
  using Raw = typename Math::Raw;
  if (channel >= channels) return Math::Nothing();
  const char* from = row + channel * stride * (sizeof(Raw) / 4);
  if (is_vector) return *reinterpret_cast<const Raw*>(from);
  return Math::Gather(from, stride, channels - channel);
}

// Returns row `token` of a head.
__device__ inline const char* RowOf(const DeviceView& view, int64_t b, int64_t h, int64_t token) {
  const int64_t offset = b * view.strides[0] + h * view.strides[1] + token * view.strides[2];
  return static_cast<const char*>(view.data) + offset * (view.element == Element::kF32 ? 4 : 2);
}

// Loads four channels of row `projection` of W for a key-value head, scaled for the inputs.
__device__ inline float4 FetchMatrix(const LinearArguments& a, int64_t kv_head, int64_t projection,
                                     int channel) {
  if (projection >= a.map.projections) return make_float4(0, 0, 0, 0);
  const int64_t row = (a.map.per_head ? kv_head * a.map.projections : 0) + projection;
  return FetchFour<Fp32>(reinterpret_cast<const char*>(a.w + row * a.head_dim), 1, channel,
                         a.head_dim, a.head_dim % 4 == 0);
}

// Tells whether key j of a batch row is a token.
__device__ inline bool IsToken(const LinearArguments& a, int64_t b, int64_t j) {
  return a.key_mask == nullptr ||
         a.key_mask[b * a.key_mask_strides[0] + j * a.key_mask_strides[1]] != 0;
}

__device__ inline float4 Times(const float4& x, float factor) {
  return make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
}

// Adds up |x|^2 / 2 of a row of inputs (before they are scaled to unit length, where the map does),
// of which 16 lanes have four channels each. With `first` the sum begins with the row's first
// channels, else it goes on.
__device__ inline void AddHalfSquare(const LinearArguments& a, const float4& x, bool first,
                                     float* half_square) {
  float sum = x.x * x.x + x.y * x.y + (x.z * x.z + x.w * x.w);
  sum = SumOfLanes<16>(sum);
  if (OpaqueLane() % 16 != 0) return;
  sum *= a.map.unit ? 0.5f : 0.5f * a.map.input_scale * a.map.input_scale;
  *half_square = first ? sum : *half_square + sum;
}

// ---- Features ----

// Returns the rows of W in a tile of features.
__device__ inline bool IsPair(const LinearArguments& a) {
  return a.map.feature == Feature::kExpPair || a.map.feature == Feature::kSinCos;
}
__device__ inline int TileProjections(const LinearArguments& a) {
  return IsPair(a) ? kTile / 2 : kTile;
}
__device__ inline bool IsExponential(const LinearArguments& a) {
  return a.map.feature == Feature::kExp || a.map.feature == Feature::kExpPair;
}
__device__ inline bool IsStabilised(const LinearArguments& a) {
  return IsExponential(a) && a.map.stabiliser != KeyStabiliser::kNone;
}

// Computes the projections of 32 rows of tokens on a tile's features, of which a warp has 32 from
// `column` on. For pairs, columns 16 to 31 of a warp repeat the first 16, with kExpPair with the
// other sign. A feature beyond the last has the projection -inf, or 0 where the map is not
// exponential.
template <class Math, class Inputs, class Matrix>
__device__ void AddProjections(const LinearArguments& a, const Inputs& inputs, int row,
                               const Matrix& w, int column, int depth, Fragment<32>* projections) {
  if (!IsPair(a)) {
    Math::Project(a.q.element, inputs, row, w, column, depth, projections);
    return;
  }
  Fragment<16> half;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) half.at[i][j] = projections->at[i][j];
  }
  Math::Project(a.q.element, inputs, row, w, column / 2, depth, &half);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      projections->at[i][j] = half.at[i][j];
      projections->at[i][4 + j] =
          a.map.feature == Feature::kExpPair ? -half.at[i][j] : half.at[i][j];
    }
  }
}
template <class Math>
__device__ void HideMissingFeatures(const LinearArguments& a, int64_t tile, int column,
                                    Fragment<32>* projections) {
  // Rows of W from this tile on.
  const int64_t left = a.map.projections - tile * TileProjections(a);
  if (left >= TileProjections(a) || !IsExponential(a)) return;
  const bool pair = IsPair(a);
  const int first = (pair ? column / 2 : column) + Math::FirstColumn();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (first + Math::Column(pair ? j % 4 : j) < left) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) projections->at[i][j] = -INFINITY;
  }
}

// Returns the factor that scales inputs to unit length, from half of their square.
__device__ inline float InverseLength(const LinearArguments& a, float half_square) {
  const float square = 2 * half_square;
  if (square < kLeastLength * kLeastLength) return 0;
  // The last term is NaN where the square is infinite or NaN.
  return 1 / (sqrtf(square) + a.map.length_epsilon) + 0 * square;
}
// Returns |x|^2 / 2 of a row that AddHalfSquare has summed, of unit length where the map asks for it.
__device__ inline float HalfSquareOf(const LinearArguments& a, float half_square) {
  if (!a.map.unit) return half_square;
  const float factor = a.map.input_scale * InverseLength(a, half_square);
  return factor * factor * half_square;
}
// Scales projections of 32 rows to those of unit vectors; `half_squares` are those of the warp's
// rows.
template <class Math>
__device__ void BringToUnitLength(const LinearArguments& a, const float* half_squares,
                                  Fragment<32>* projections) {
  if (!a.map.unit) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float factor = InverseLength(a, half_squares[Math::FirstRow() + Math::Row(i)]);
#pragma unroll
    for (int j = 0; j < 8; ++j) projections->at[i][j] *= factor;
  }
}
// Turns projections into features that are not exponential.
template <class Math>
__device__ void MakePlainFeatures(const LinearArguments& a, int64_t tile, int column,
                                  Fragment<32>* features) {
  if (IsExponential(a)) return;
  const int64_t left = a.map.projections - tile * TileProjections(a) - column / 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (a.map.feature == Feature::kRelu) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        features->at[i][j] = features->at[i][j] < 0 ? 0 : features->at[i][j];
      continue;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool exists = Math::FirstColumn() + Math::Column(j) < left;
      float sine, cosine;
      sincosf(features->at[i][j], &sine, &cosine);
      features->at[i][j] = exists ? sine : 0;
      features->at[i][4 + j] = exists ? cosine : 0;
    }
  }
}

// Returns a maximum that ignores NaN.
__device__ inline float MaxOf(const float* values, int count) {
  float largest = values[0];
#pragma unroll
  for (int n = 1; n < count; ++n) largest = fmaxf(largest, values[n]);
  return largest;
}
// ---- A query's row ----

// A query's numbers from its features F_ir = exp(w_r . q_i - maximum), whose sum is `total`.
struct QueryRow {
  float maximum;
  float half_square;
  float total;
};

// The factors with which the sums are read (see linear.h): for sums at the reference R of the keys
// that the row sees, the row of y before it is divided, and with ones for values its denominator,
// is
//
//   product F . sums + key (sum of the features' sums) + constant (sum of values)
//
// The denominator has `extra` added, which is d's term. log D = log(denominator) + log_scale + 2
// log c.
struct RowFactors {
  float product;
  float key;
  float constant;
  float extra;
  float log_scale;
};

// The factors of a query's features, phi_ir = query F_ir + query_epsilon with the sum query_sum, and
// those of the keys' features, both divided by the larger of the two.
struct FeatureFactors {
  float query;
  float query_epsilon;
  float query_sum;
  float key;
  float key_epsilon;
  float largest_key;  // the logarithm of what the keys' are divided by
  float log_scale;
};

// `key_maximum` is S of a map that is stabilised.
__device__ inline FeatureFactors FeatureFactorsOf(const LinearArguments& a, const QueryRow& query,
                                                  float reference, float key_maximum) {
  const float log_epsilon = a.constants.log_epsilon;
  const bool has_keys = reference != -INFINITY;
  const float log_query = IsExponential(a) ? query.maximum - query.half_square : 0;
  // These are the logarithms of exp(lambda_i - s) and exp(R - S).
  const float query_scale = IsStabilised(a) ? -query.half_square : log_query;
  const float key_scale = IsStabilised(a) && has_keys ? reference - key_maximum : reference;
  if (a.constants.epsilon == 0) {
    return {1, 0, query.total, 1, 0, key_scale, log_query + reference};
  }
  const float largest_query = fmaxf(query_scale, log_epsilon);
  const float largest_key = fmaxf(key_scale, log_epsilon);
  FeatureFactors factors;
  factors.query = ExpOf(query_scale - largest_query);
  factors.query_epsilon = ExpOf(log_epsilon - largest_query);
  factors.query_sum = factors.query * query.total + factors.query_epsilon * a.constants.features;
  factors.key = ExpOf(key_scale - largest_key);
  factors.key_epsilon = ExpOf(log_epsilon - largest_key);
  factors.largest_key = largest_key;
  // The sum does not go through lambda_i and R, in which large halves of squares would cancel.
  factors.log_scale = largest_query + largest_key;
  if (IsStabilised(a)) factors.log_scale += query.maximum + key_maximum;
  return factors;
}

// Returns the term of d in a row's denominator, which is d times the sum of the query's features.
__device__ inline float ExtraOf(const LinearArguments& a, float query_sum, float largest_key,
                                bool has_keys) {
  if (a.constants.denominator_epsilon == 0 || !has_keys) return 0;
  return a.constants.denominator_epsilon * query_sum * expf(-largest_key);
}

__device__ inline RowFactors FactorsOf(const LinearArguments& a, const QueryRow& query,
                                       float reference, float key_maximum) {
  const FeatureFactors factors = FeatureFactorsOf(a, query, reference, key_maximum);
  return {factors.query * factors.key, factors.query_epsilon * factors.key,
          factors.key_epsilon * factors.query_sum,
          ExtraOf(a, factors.query_sum, factors.largest_key, reference != -INFINITY),
          factors.log_scale};
}

// Returns the floor of a denominator. `log_scale` is its scale, see RowFactors.
__device__ inline float DenominatorFloor(const LinearArguments& a, float log_scale) {
  return a.constants.denominator_floor * (a.map.gated ? expf(-log_scale) : 1.0f);
}

// Returns the denominator that divides a row which sees a key, held at the floor. `counts` is true
// for the one thread of a row that counts it.
__device__ inline float HoldDenominator(const LinearArguments& a, float denominator,
                                        float log_scale, bool counts) {
  const float floor = DenominatorFloor(a, log_scale);
  if (!(denominator <= floor)) return denominator;
  if (counts && a.rows_without_weight != nullptr) atomicAdd(a.rows_without_weight, 1ull);
  return fabsf(denominator) <= floor ? copysignf(floor, denominator) : denominator;
}

// ---- Gates ----

// Returns u . k_j + b of a key, in all lanes.
__device__ inline float GateLogit(const LinearArguments& a, int64_t head, int64_t key) {
  const int64_t b = head / a.kv_heads, h = head % a.kv_heads;
  const int64_t row = b * a.k.strides[0] + h * a.k.strides[1] + key * a.k.strides[2];
  const float* gate = a.gate + h * (a.head_dim + 1);
  float sum = 0;
  for (int c = OpaqueLane(); c < a.head_dim; c += 32) {
    sum = fmaf(gate[c], LoadElement(a.k.data, a.k.element, row + c * a.k.strides[3]), sum);
  }
  return SumOfWarp(sum) + gate[a.head_dim];
}

// Returns the two numbers of key_gates of a key.
__device__ inline const float* GatesOf(const LinearArguments& a, int64_t head, int64_t key) {
  return a.key_gates + (head * a.kv_tokens + key) * 2;
}

__device__ inline void StoreLogSumExp(const LinearArguments& a, int64_t b, int64_t h, int64_t i,
                                      float denominator, float log_scale, bool has_keys) {
  if (a.log_sum_exp == nullptr) return;
  float result = -INFINITY;
  if (has_keys) {
    result = static_cast<float>(static_cast<double>(logf(fabsf(denominator))) + log_scale +
                                a.constants.log_scale);
  }
  a.log_sum_exp[b * a.log_sum_exp_strides[0] + h * a.log_sum_exp_strides[1] +
                i * a.log_sum_exp_strides[2]] = result;
}
// Stores four columns of an output row, as far as they exist.
__device__ inline void StoreOut(const LinearArguments& a, int64_t b, int64_t h, int64_t i,
                                int column, int count, const float4& y) {
  const int64_t offset = b * a.out.strides[0] + h * a.out.strides[1] + i * a.out.strides[2] +
                         column * a.out.strides[3];
  if (a.vector_out && count >= 4) {
    if (a.out.element == Element::kF32) {
      *reinterpret_cast<float4*>(static_cast<float*>(a.out.data) + offset) = y;
      return;
    }
    const bool is_bf16 = a.out.element == Element::kBf16;
    const uint2 four = is_bf16 ? make_uint2(PackBf16(y.x, y.y), PackBf16(y.z, y.w))
                               : make_uint2(PackF16(y.x, y.y), PackF16(y.z, y.w));
    *reinterpret_cast<uint2*>(static_cast<unsigned short*>(a.out.data) + offset) = four;
    return;
  }
  const float columns[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if (n < count) {
      StoreElement(a.out.data, a.out.element, offset + n * a.out.strides[3], columns[n]);
    }
  }
}

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_LINEAR_LINEAR_ROWS_CUH_
