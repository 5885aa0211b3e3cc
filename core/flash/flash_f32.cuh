// The scores of a tile of 64 queries and 64 keys in fp32, which the forward and the backward
// kernels of engine flash share: loads, products, all terms of the rule, and which pairs count.
//
// (ty, tx) of a block's 8 x 16 threads, or of more rows of threads, holds the scores of some
// consecutive queries against keys 4 tx .. 4 tx + 3. Queries and keys lie in shared memory by
// channel (core/cuda/register_tile.cuh).
#ifndef TFB_CORE_FLASH_FLASH_F32_CUH_
#define TFB_CORE_FLASH_FLASH_F32_CUH_

#include "core/cuda/register_tile.cuh"
#include "core/flash/flash_tile.cuh"

namespace tfb {
namespace {

constexpr int kQueries = kFlashQueriesF32;
constexpr int kThreadsX = 16;  // threads that share queries
constexpr int ThreadsFor(int dim) { return dim <= 128 ? 128 : 256; }
constexpr int kStride = 68;  // of 64 floats: float4 stay aligned, rows begin in other banks
static_assert(kQueries == 64 && kKeys == 64, "threads are laid out for tiles of 64 x 64");

// Offsets of the arrays in the block's shared memory, in floats.
template <int kDim>
struct Shared {
  static constexpr int kValueStride = kDim + 4;
  static constexpr int kKeysAndValues =
      kDim * kStride > kKeys* kValueStride ? kDim* kStride : kKeys* kValueStride;

  float* q;           // [kDim][kStride], by channel
  float* kv;          // keys [kDim][kStride], by channel; or values [64][kValueStride]
  float* p;           // [64][kStride], by key (ScoreTile::StoreByKey) or by query
  float* key_bias;    // [64] u . k
  float* span;        // [64] z of SoftSpan
  uint64_t* visible;  // [64] bit c of word r: query r sees key c
  unsigned* flags;    // [4]: the tokens among the keys; whether a row is not finite
  int* rows;          // [64] row of the call of each query; queries beyond the last repeat it
  // Used where there are label or relative keys.
  float2* label_scores;         // [64] queries against the label keys
  int* query_ids;               // [64]
  int* key_ids;                 // [64]
  float* position;              // [64][kStride], where there are relative keys
  TokenPairs<kQueries>* pairs;  // used where there is a token rule

  __device__ Shared(float* memory, const ScoreRule& rule)
      : q(memory),
        kv(q + kDim * kStride),
        p(kv + kKeysAndValues),
        key_bias(p + kKeys * kStride),
        span(key_bias + 64),
        visible(reinterpret_cast<uint64_t*>(span + 64)),
        flags(reinterpret_cast<unsigned*>(visible + 64)),
        rows(reinterpret_cast<int*>(flags + 4)),
        label_scores(reinterpret_cast<float2*>(rows + 64)),
        query_ids(reinterpret_cast<int*>(label_scores + 64)),
        key_ids(query_ids + 64),
        position(reinterpret_cast<float*>(key_ids + 64)),
        pairs(reinterpret_cast<TokenPairs<kQueries>*>(memory + Floats(rule))) {}

  // Returns the floats of all arrays but `pairs`: an even number.
  __host__ __device__ static constexpr size_t Floats(const ScoreRule& rule) {
    const bool relative_keys = rule.relative_key_rows.rows != nullptr;
    return kDim * kStride + kKeysAndValues + kKeys * kStride + 64 + 64 + 128 + 4 + 64 +
           (relative_keys || rule.label_keys.keys != nullptr ? 128 + 64 + 64 : 0) +
           (relative_keys ? kQueries * kStride : 0);
  }
  static size_t Bytes(const ScoreRule& rule) {
    return Floats(rule) * sizeof(float) + (rule.tokens.acts() ? sizeof(TokenPairs<kQueries>) : 0);
  }
  // Returns the bytes of the largest rule, or those without one.
  static constexpr size_t MostBytes(bool has_rule) {
    ScoreRule rule;
    if (!has_rule) return Floats(rule) * sizeof(float);
    constexpr float kAny = 0;
    rule.relative_key_rows.rows = &kAny;
    rule.label_keys.keys = &kAny;
    return Floats(rule) * sizeof(float) + sizeof(TokenPairs<kQueries>);
  }
};

// Reads four channels of a row of any dtype and stride, with zeros beyond the last channel.
class RowReader {
 public:
  // Reads zeros.
  __device__ RowReader() : data_(nullptr) {}
  __device__ RowReader(const DeviceView& view, int64_t b, int64_t h, int64_t token, int channels)
      : data_(view.data),
        offset_(b * view.strides[0] + h * view.strides[1] + token * view.strides[2]),
        stride_(view.strides[3]),
        channels_(channels),
        element_(view.element) {
    const float* row = static_cast<const float*>(data_) + offset_;
    is_vector_ = element_ == Element::kF32 && stride_ == 1 &&
                 reinterpret_cast<uintptr_t>(row) % sizeof(float4) == 0;
  }
  __device__ float4 Load(int channel) const {
    if (data_ == nullptr) return make_float4(0, 0, 0, 0);
    if (is_vector_ && channel + 4 <= channels_) {
      return *reinterpret_cast<const float4*>(static_cast<const float*>(data_) + offset_ + channel);
    }
    float4 values;
    values.x = LoadOne(channel);
    values.y = LoadOne(channel + 1);
    values.z = LoadOne(channel + 2);
    values.w = LoadOne(channel + 3);
    return values;
  }

 private:
  __device__ float LoadOne(int channel) const {
    return channel < channels_ ? LoadElement(data_, element_, offset_ + channel * stride_) : 0;
  }

  const void* data_;
  int64_t offset_ = 0;
  int64_t stride_ = 1;
  int channels_ = 0;
  Element element_ = Element::kF32;
  bool is_vector_ = false;
};

// Transposes rows to to[channel][n] for 64 rows n; reader_of(n) reads row n. Neighbouring threads
// store neighbouring words.
template <int kThreads, class ReaderOf>
__device__ void LoadTransposed(float* to, int depth, const ReaderOf& reader_of) {
  const int n = threadIdx.x % 64;
  const RowReader reader = reader_of(n);
#pragma unroll 4
  for (int channel = threadIdx.x / 64 * 4; channel < depth; channel += kThreads / 64 * 4) {
    const float4 x = reader.Load(channel);
    to[channel * kStride + n] = x.x;
    to[(channel + 1) * kStride + n] = x.y;
    to[(channel + 2) * kStride + n] = x.z;
    to[(channel + 3) * kStride + n] = x.w;
  }
}

// kBlock is the number of threads, of a multiple of 128.
template <int kDim, bool kRule, int kBlock = ThreadsFor(kDim)>
class ScoreTile {
 public:
  static constexpr int kThreads = kBlock;
  static constexpr int kRows = kQueries * kThreadsX / kThreads;  // per thread
  static constexpr int kColumns = kDim / kThreadsX;              // of sums of rows, per thread
  static constexpr int kVector = kColumns < 4 ? kColumns : 4;    // consecutive columns
  static constexpr int kGroups = kColumns / kVector;
  static constexpr int kValueStride = Shared<kDim>::kValueStride;

  __device__ ScoreTile(const FlashArguments& a, const FlashTask& task, float* memory)
      : a_(a),
        task_(task),
        shared_(memory, a.rule),
        tx_(threadIdx.x % kThreadsX),
        ty_(threadIdx.x / kThreadsX) {
    depth_ = (a.head_dim + 3) / 4 * 4;
    queries_ = QueriesOf(a, task.batch);
    SetQueryTile(task.query_tile);
  }

 protected:
  __device__ void SetQueryTile(int64_t tile) {
    task_.query_tile = tile;
    first_query_ = tile * kQueries;
  }

  // Tells whether this thread has a query: the last tile leaves out products of the other threads.
  __device__ bool has_rows() const { return first_query_ + ty_ * kRows < queries_; }
  __device__ bool has_pairs() const { return kRule && a_.rule.tokens.acts(); }
  // Returns the row of the call that query `row` of the tile is; the last row beyond it.
  __device__ int64_t RowOf(int row) const {
    return QueryRow(a_, task_.batch, min(first_query_ + row, queries_ - 1));
  }
  __device__ int64_t QueryToken(int row) const {
    return a_.query_order(task_.batch, task_.head, RowOf(row));
  }
  __device__ bool IsQuery(int row) const {
    return first_query_ + row < queries_ &&
           (a_.packs_asked || IsAsked(a_, task_.batch, RowOf(row)));
  }

  // Loads the rows and limits of the tile's queries, and the queries that is_query tells, zeros in place of others.
  template <class Tells>
  __device__ void LoadQueries(const Tells& is_query) {
    if (threadIdx.x < kQueries) {
      shared_.rows[threadIdx.x] = static_cast<int>(RowOf(static_cast<int>(threadIdx.x)));
    }
    LoadQueryChannels(is_query);
    if (kRule && a_.rule.soft_span.span != nullptr && threadIdx.x < kQueries) {
      const int64_t i = min(first_query_ + threadIdx.x, a_.query_tokens - 1);
      shared_.span[threadIdx.x] = a_.rule.soft_span.Of(task_.batch, task_.head, i);
    }
  }
  template <class Tells>
  __device__ void LoadQueryChannels(const Tells& is_query) {
    LoadTransposed<kThreads>(shared_.q, depth_, [&](int row) {
      if (!is_query(row)) return RowReader();
      return RowReader(a_.q, task_.batch, task_.head, QueryToken(row), a_.head_dim);
    });
  }

  // Finds the widest and the narrowest span, in whole tokens from the tile's first query on, which
  // no rounding makes too narrow or too wide. Rows that are no queries see nothing, and keep no tile
  // from being whole.
  __device__ void FindSpan() {
    if (!kRule || a_.rule.soft_span.span == nullptr) return;
    widest_ = -INFINITY;
    narrowest_ = INFINITY;
    const int rows = static_cast<int>(min(int64_t{kQueries}, a_.query_tokens - first_query_));
    for (int r = 0; r < rows; ++r) {
      widest_ = fmaxf(widest_, ceilf(shared_.span[r]) - static_cast<float>(r));
      narrowest_ = fminf(narrowest_, floorf(shared_.span[r]) - static_cast<float>(r));
    }
  }
  __device__ bool WithinAnySpan(int64_t tile) const {
    return a_.rule.soft_span.span == nullptr || WithinSpan(a_, widest_, first_query_, tile) != 0;
  }
  __device__ bool InAllSpans(int64_t tile) const {
    return !kRule || a_.rule.soft_span.span == nullptr ||
           WithinSpan(a_, narrowest_, first_query_, tile) == ~uint64_t{0};
  }

  // Loads the queries' ids and computes their scores against the two label keys. For rows that are
  // no queries both are arbitrary.
  __device__ void ScoreLabels() {
    if (threadIdx.x >= 2 * kQueries) return;
    const int row = threadIdx.x % kQueries, label = threadIdx.x / kQueries;
    const LabelKeys& labels = a_.rule.label_keys;
    const float* key = labels.keys + (task_.head % labels.heads * 2 + label) * a_.head_dim;
    const float* bias = a_.rule.position_bias;
    if (bias != nullptr) bias += task_.head * a_.head_dim;
    const float* number = labels.biases;
    float sum = number == nullptr ? 0 : number[task_.head % labels.heads * 2 + label];
    for (int c = 0; c < a_.head_dim; ++c) {
      const float query = shared_.q[c * kStride + row];
      sum = fmaf(bias == nullptr ? query : query + bias[c], key[c], sum);
    }
    reinterpret_cast<float*>(shared_.label_scores)[row * 2 + label] = sum * a_.scale;
    if (label != 0) return;
    shared_.query_ids[row] = IsQuery(row) ? IdOf(a_.query_ids, task_.batch, QueryToken(row)) : 0;
  }
  __device__ void LoadKeyIds(int64_t tile) {
    const int c = threadIdx.x;
    if (c >= kKeys) return;
    const bool exists = tile * kKeys + c < a_.kv_tokens;
    shared_.key_ids[c] = exists ? IdOf(a_.key_ids, task_.batch, KeyToken(a_, task_, tile, c)) : 0;
  }
  __device__ void AddLabels(float scores[kRows][4]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = ty_ * kRows + r, id = shared_.query_ids[row];
      const float2 score = shared_.label_scores[row];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        scores[r][c] += shared_.key_ids[tx_ * 4 + c] == id ? score.y : score.x;
      }
    }
  }

  __device__ void LoadKeys(int64_t tile) {
    LoadTransposed<kThreads>(shared_.kv, depth_, [&](int c) {
      if (!IsToken(a_, task_, tile, c)) return RowReader();
      return RowReader(a_.k, task_.batch, task_.kv_head, KeyToken(a_, task_, tile, c), a_.head_dim);
    });
  }

  // Adds the products of the queries and what lies in kv by channel.
  __device__ void MultiplyQueries(float (&products)[kRows][4]) const {
    AddProduct<4>({shared_.q + ty_ * kRows, kStride}, {shared_.kv + tx_ * 4, kStride}, depth_,
                  products);
  }

  // Finds which keys of the tile each query sees.
  __device__ void FindVisible(const KeyTile& tile) {
    const int t = static_cast<int>(threadIdx.x);
    if (t < kKeys) {
      const unsigned tokens = __ballot_sync(~0u, IsToken(a_, task_, tile.index, t));
      if (t % kWarp == 0) shared_.flags[t / kWarp] = tokens;
    }
    if (t == kKeys) shared_.flags[kFirstRows] = shared_.flags[kSecondRows] = 0;
    __syncthreads();
    if (t < kQueries) {
      uint64_t word = shared_.flags[0] | static_cast<uint64_t>(shared_.flags[1]) << 32;
      word &= MaskOf(a_.schedule, tile, shared_.rows[t], t, kQueries);
      if (kRule && a_.rule.soft_span.span != nullptr)
        word &= WithinSpan(a_, shared_.span[t], first_query_ + t, tile.index);
      if (kRule && a_.rule.tokens.hides()) word &= shared_.pairs->visible[t];
      shared_.visible[t] = word;
    }
  }

  // Adds u . k_c to each score of key c.
  __device__ void ApplyKeyBias(float scores[kRows][4]) {
    if (a_.rule.content_bias == nullptr) return;
    AddColumnBias(a_.rule.content_bias, scores);
  }
  // Adds bias . (column c of the matrix in kv) to column c of the products. When it ends, other
  // threads may still be reading kv.
  __device__ void AddColumnBias(const float* bias, float products[kRows][4]) {
    if (threadIdx.x < kKeys) {
      const float* row = bias + task_.head * a_.head_dim;
      float sum = 0;
      for (int d = 0; d < a_.head_dim; ++d) {
        sum = fmaf(row[d], shared_.kv[d * kStride + threadIdx.x], sum);
      }
      shared_.key_bias[threadIdx.x] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float extra = shared_.key_bias[tx_ * 4 + c];
#pragma unroll
      for (int r = 0; r < kRows; ++r) products[r][c] += extra;
    }
    __syncthreads();
  }

  // Applies everything of the rule that acts on scores; the soft span acts on weights. Where there
  // is a ReLU, the scores before it are stored to `products`, if that is not null, where this
  // thread finds them again (ProductsOf).
  __device__ void ApplyRule(int64_t tile, float (&scores)[kRows][4], float* products) {
    const ScoreRule& rule = a_.rule;
    // The offset of row 0, column 0.
    const int64_t first = tile * kKeys - first_query_ - rule.query_position;
    if (rule.relative_key_rows.rows != nullptr) AddPositions(tile, scores);
    if (rule.label_keys.keys != nullptr) AddLabels(scores);
    if (rule.relu_multiplier.values != nullptr) {
      if (products != nullptr) StoreByQuery(scores, products);
      ForEachEntry(rule.relu_multiplier, tile, first, [&](int r, int c, float entry) {
        scores[r][c] = (scores[r][c] < 0 ? 0 : scores[r][c]) * entry;  // a NaN stays NaN
      });
    }
    if (rule.bias.values != nullptr) {
      ForEachEntry(rule.bias, tile, first,
                   [&](int r, int c, float entry) { scores[r][c] += entry; });
    }
    if (rule.tokens.adjusts()) AddPairTerms(scores);
  }
  __device__ void AddPairTerms(float scores[kRows][4]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        scores[r][c] += PairTerm(a_.rule.tokens, *shared_.pairs, ty_ * kRows + r, tx_ * 4 + c);
      }
    }
  }

  // Calls act(r, c, the table's entry for score r, c). Offsets of rows and keys that do not exist
  // may lie outside the table.
  template <class Act>
  __device__ void ForEachEntry(const DistanceEntries& table, int64_t tile, int64_t first,
                               const Act& act) {
    const int rows =
        static_cast<int>(min(a_.query_tokens - first_query_, int64_t{64})) - ty_ * kRows;
    const int keys = static_cast<int>(min(a_.kv_tokens - tile * kKeys, int64_t{64})) - tx_ * 4;
    const float* entries = table.Of(task_.head) + first + (tx_ * 4 - ty_ * kRows);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (r < rows && c < keys) act(r, c, entries[c - r]);
      }
    }
  }

  // Returns the relative key of an offset.
  __device__ RowReader RelativeKeyRow(int64_t offset) const {
    const RelativeKeyRows& keys = a_.rule.relative_key_rows;
    if (offset < keys.low || offset > keys.high) return RowReader();
    const int64_t row = task_.head % keys.heads * (keys.high - keys.low + 1) + offset - keys.low;
    const DeviceView rows = {const_cast<void*>(keys.rows), {0, 0, keys.row, 1}, Element::kF32};
    return RowReader(rows, 0, 0, row, a_.head_dim);
  }
  // Adds scores against the relative keys of the tile's offsets, which are as many as its keys and
  // the rows from its first query to its last. It does 64 at a time through shared memory, where
  // the column of a query's key c depends on the query's row. Queries that follow one another have
  // 127 offsets. Where only one in n is asked, 64 of them have 64 (n + 1), so that this product
  // falls to 1/2 (1 + 1/n) of what it is for all queries, while the others fall to 1/n.
  __device__ void AddPositions(int64_t tile, float scores[kRows][4]) {
    const RelativeKeyRows& keys = a_.rule.relative_key_rows;
    const int last_row = shared_.rows[kQueries - 1];
    const int offsets = kKeys + last_row - shared_.rows[0];
    const int64_t lowest = tile * kKeys - last_row - a_.rule.query_position;
    for (int begin = 0; begin < offsets; begin += 64) {
      if (lowest + begin > keys.high || lowest + begin + 63 < keys.low) continue;  // all are zero
      __syncthreads();  // the keys, or the previous offsets, have been read
      LoadTransposed<kThreads>(shared_.kv, depth_,
                               [&](int n) { return RelativeKeyRow(lowest + begin + n); });
      __syncthreads();
      float products[kRows][4] = {};
      if (has_rows()) MultiplyQueries(products);
      if (a_.rule.position_bias != nullptr) AddColumnBias(a_.rule.position_bias, products);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        *reinterpret_cast<float4*>(shared_.position + (ty_ * kRows + r) * kStride + tx_ * 4) =
            make_float4(products[r][0] * a_.scale, products[r][1] * a_.scale,
                        products[r][2] * a_.scale, products[r][3] * a_.scale);
      }
      __syncthreads();
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int row = ty_ * kRows + r, shift = last_row - shared_.rows[row] - begin;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int column = tx_ * 4 + c + shift;
          if (column < 0 || column >= 64) continue;
          scores[r][c] += shared_.position[row * kStride + column];
        }
      }
    }
  }

  // Tells whether every query of the tile sees every key of it, with the same answer for all threads.
  __device__ bool IsWhole(const KeyTile& tile) const {
    return tile.mask == TileRun::kFull && AllTokens(a_, tile.index) && InAllSpans(tile.index) &&
           !(kRule && a_.rule.tokens.hides());
  }
  // Loads what the scores of the task's queries need besides queries: behind them and a barrier.
  __device__ void BeginQueries() {
    FindSpan();
    if (kRule && a_.rule.label_keys.keys != nullptr) ScoreLabels();
    if (has_pairs()) LoadQueryTokens<kThreads>(a_, task_, first_query_, *shared_.pairs);
  }
  // Loads the tile's keys and computes this thread's scores. Other threads may be reading keys when it ends.
  __device__ void ComputeScores(const KeyTile& tile, bool whole, float (&scores)[kRows][4],
                                float* products = nullptr) {
    if (has_pairs()) FindPairs<kThreads>(a_, task_, tile.index, *shared_.pairs);
    LoadKeys(tile.index);
    if (kRule && a_.rule.label_keys.keys != nullptr) LoadKeyIds(tile.index);
    if (!whole) FindVisible(tile);
    __syncthreads();
    if (has_rows()) MultiplyQueries(scores);
    if (kRule || a_.rule.content_bias != nullptr) ApplyKeyBias(scores);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) scores[r][c] *= a_.scale;
    }
    if (kRule) ApplyRule(tile.index, scores, products);
  }

  // Stores this thread's numbers of pairs to [64 queries][kStride].
  __device__ void StoreByQuery(const float (&pairs)[kRows][4], float* to) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      *reinterpret_cast<float4*>(to + (ty_ * kRows + r) * kStride + tx_ * 4) =
          make_float4(pairs[r][0], pairs[r][1], pairs[r][2], pairs[r][3]);
    }
  }
  // Returns which row of [64 keys][kStride] a key's numbers are in: keys that threads side by side store at the same
  // time have rows side by side, which begin in other banks.
  static constexpr int KeyRowOf(int key) { return key % 4 * kThreadsX + key / 4; }
  // Stores them to [64 keys][kStride].
  __device__ void StoreByKey(const float (&pairs)[kRows][4], float* to) const {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float4* row = reinterpret_cast<float4*>(to + KeyRowOf(tx_ * 4 + c) * kStride + ty_ * kRows);
#pragma unroll
      for (int r = 0; r < kRows; r += 4) {
        row[r / 4] = make_float4(pairs[r][c], pairs[r + 1][c], pairs[r + 2][c], pairs[r + 3][c]);
      }
    }
  }

  // Loads 64 rows to kv [64][kValueStride]. Returns whether all are finite, or need not be, since
  // every query sees every key. Ends with a barrier. Of a tile that FindVisible has seen, there may
  // be two such loads.
  static constexpr int kFirstRows = 2, kSecondRows = 3;  // flags
  template <class ReaderOf>
  __device__ bool LoadRows(bool whole, int flag, const ReaderOf& reader_of) {
    constexpr int kVectors = kDim / 4;
    const int channel = threadIdx.x % kVectors * 4;
    bool finite = true;
    for (int n = threadIdx.x / kVectors; n < 64; n += kThreads / kVectors) {
      const float4 x = reader_of(n).Load(channel);
      finite = finite && isfinite(x.x) && isfinite(x.y) && isfinite(x.z) && isfinite(x.w);
      *reinterpret_cast<float4*>(shared_.kv + n * kValueStride + channel) = x;
    }
    if (!whole && !finite) atomicOr(shared_.flags + flag, 1u);
    __syncthreads();
    return whole || shared_.flags[flag] == 0;
  }

  // Adds weights[r] row[column] to this thread's sums, for the rows r that takes(r) tells.
  template <class Takes>
  __device__ void AddRow(const float (&weights)[kRows], const float* row,
                         float (&sums)[kRows][kColumns], const Takes& takes) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      float values[kVector];
      LoadVectors(row + g * 64 + tx_ * kVector, values);
      AddOuterProduct(weights, values, sums, g * kVector, takes);
    }
  }
  // Adds the products of 64 rows [64][kValueStride] with weights [64][kStride], of which a thread
  // has kRows side by side; those of row n are in row n, or in KeyRowOf(n). A weight of 0 must not
  // meet a row that is not finite: where some are, takes(r, n) tells which weights count.
  template <bool kByKey, class Takes>
  __device__ void AddRows(const float* weights, const float* rows, bool finite,
                          float (&sums)[kRows][kColumns], const Takes& takes) const {
    const auto add = [&](int n, const auto& takes_row) {
      float own[kRows];
      LoadVectors(weights + (kByKey ? KeyRowOf(n) : n) * kStride + ty_ * kRows, own);
      AddRow(own, rows + n * kValueStride, sums, takes_row);
    };
    if (finite) {
      for (int four = 0; four < 16; ++four) {  // so that KeyRowOf is four + a constant
#pragma unroll
        for (int n = 0; n < 4; ++n) add(four * 4 + n, [](int) { return true; });
      }
    } else {
      for (int n = 0; n < 64; ++n) add(n, [&](int r) { return takes(r, n); });
    }
  }
  // Tells whether query ty kRows + r sees key c of the tile, where FindVisible has run.
  __device__ bool SeesKey(int r, int c) const {
    return (shared_.visible[ty_ * kRows + r] >> c & 1) != 0;
  }

  const FlashArguments& a_;
  FlashTask task_;
  const Shared<kDim> shared_;
  const int tx_;
  const int ty_;
  int depth_;
  int64_t first_query_;
  int64_t queries_;
  float widest_ = 0;
  float narrowest_ = 0;
};

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_F32_CUH_
