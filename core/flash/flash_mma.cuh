// Engine flash on tensor cores, for bf16 and f16: mma.sync m16n8k16 with f32 sums, sm_80 and later.
//
// A block does one tile of 128 queries of one head, as in FlashAttention-2 (Dao,
// arXiv:2307.08691v1, section 3.3): each warp has queries of its own and all 64 keys of a tile, so
// that scores, probabilities and the output never leave its registers. Accumulators of scores have
// the layout of the next product's left operand, the probabilities.
//
//   shared memory   queries 128 x D, and a ring of three tiles of 64 x D. While a warp multiplies
//                   with keys t, values t and keys t + 1 are on their way; while it multiplies with
//                   values t, keys t + 1 and values t + 1 are. 640 D bytes: 20, 40, 80, 160 KiB
//   reading it      a warp of 32 queries reads 2 x 64 D x 2 B of keys and values and 32 D x 2 B of
//                   queries, for 2 x 32 x 64 x D multiply-adds: 10 D cycles a block's tile, at 128 B
//                   a cycle, against 16 D of sm_80's tensor cores. With 16 queries a warp it would
//                   be 18 D; D = 256 has them since its output takes 128 registers so, and so have
//                   relative keys at D = 128
//   registers       of 32 queries: output D, scores 64 a thread. Two blocks of a multiprocessor, of
//                   which one multiplies while the other exponentiates
//
// The inputs, the probabilities and the output are rounded to 16 bits. Probabilities are in [0, 1];
// their sum is taken before they are rounded, as in FlashAttention. Sums over keys go tile by tile
// in the order of the schedule: every run gives the same bits.
#ifndef TFB_CORE_FLASH_FLASH_MMA_CUH_
#define TFB_CORE_FLASH_FLASH_MMA_CUH_

#include "core/flash/flash_mma_tile.cuh"

namespace tfb {
namespace {

constexpr int kQueries = kFlashQueries16;
constexpr float kLn2 = 0.693147181f;

// The score rules that kernels are compiled for.
enum class Rule {
  kNone,          // nothing
  kTables,        // any part of a score rule but
  kRelativeKeys,  // these
};

// ---- Shapes ----

template <int kDim, Rule kRule>
struct MmaShape {
  static constexpr int kWarps =
      kDim == 256 || (kDim == 128 && kRule == Rule::kRelativeKeys) ? 8 : 4;
  static constexpr int kThreads = kWarps * 32;
  // Blocks of a multiprocessor.
  static constexpr int kBlocks = kWarps == 8 ? 1 : kDim == 32 ? 3 : 2;
  static constexpr int kWarpRows = kQueries / kWarps;
  static constexpr int kRowTiles = kWarpRows / 16;  // row tiles of mma of a warp

  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kTileBytes = kKeys * kRowBytes;
  static constexpr int kRingBytes = 3 * kTileBytes;
  // At the end the output takes the place of queries and ring. A row's pad keeps rows of
  // neighbouring lanes in different banks, and holds the row's sum and maximum.
  static constexpr int kOutputRow = kDim + 8;  // floats
  static_assert(kQueries * kOutputRow * 4 <= kQueries * kRowBytes + kRingBytes, "no room");
};

// A block's shared memory. It holds the data that its threads share, since registers are scarce:
// everything that takes a division, which one thread computes once a task.
template <int kDim, Rule kRule>
struct MmaShared {
  using Shape = MmaShape<kDim, kRule>;
  struct Common {
    MmaTile tiles[4];  // tile n at n % 4, from the current tile to two further on
    int64_t index;     // of the task
    FlashTask task;
    WalkState walk;  // thread 0's
    MmaKeys keys;
    const int32_t* query_order;  // null: query n is token n
    int first_query;
    int queries;               // the number of queries that the batch row's tiles are made of
    bool has_queries;          // in this tile
    int tile_with_non_finite;  // the last
  };
  struct CommonOfRule : Common {
    const float* multipliers;  // multiplier of offset e at e + query_position
    const float* biases;
    float slope;   // 1 / ramp
    float widest;  // of the spans: see FindSpan
    float narrowest;
    float span[kQueries];   // z of SoftSpan
    float key_bias[kKeys];  // u . k
  };
  struct CommonOfRelativeKeys : CommonOfRule {
    const uint4* relative_keys;
    float offset_bias[256];  // w . r of offset e + query_position at that modulo 256
  };

  // Used where there are label keys.
  struct Labels {
    float products[kQueries][2];  // products of queries and label keys
    int query_ids[kQueries];
    int key_ids[kKeys];
  };

  unsigned char* queries;
  unsigned char* ring;
  CommonOfRelativeKeys* common;  // the members that the rule has

  __device__ explicit MmaShared(unsigned char* memory)
      : queries(memory),
        ring(memory + kQueries * Shape::kRowBytes),
        common(reinterpret_cast<CommonOfRelativeKeys*>(ring + Shape::kRingBytes)) {}
  // A rule has at most one of these, or the labels before the pairs.
  __device__ Labels& labels() const { return *reinterpret_cast<Labels*>(queries + BytesOfAll()); }
  __device__ TokenPairs<kQueries>& pairs(const ScoreRule& rule) const {
    return *reinterpret_cast<TokenPairs<kQueries>*>(queries + BytesOfAll() + BytesOfLabels(rule));
  }
  __host__ __device__ static constexpr size_t BytesOfAll() {
    return kQueries * Shape::kRowBytes + Shape::kRingBytes +
           (kRule == Rule::kNone     ? sizeof(Common)
            : kRule == Rule::kTables ? sizeof(CommonOfRule)
                                     : sizeof(CommonOfRelativeKeys));
  }
  __host__ __device__ static constexpr size_t BytesOfLabels(const ScoreRule& rule) {
    return rule.label_keys.keys != nullptr ? sizeof(Labels) : 0;
  }
  static size_t Bytes(const ScoreRule& rule) {
    return BytesOfAll() + BytesOfLabels(rule) +
           (rule.tokens.acts() ? sizeof(TokenPairs<kQueries>) : 0);
  }
  // Returns the bytes of the largest rule.
  static constexpr size_t MostBytes() {
    return BytesOfAll() +
           (kRule == Rule::kNone ? 0 : sizeof(Labels) + sizeof(TokenPairs<kQueries>));
  }
};

// Tells whether rows of a tensor are whole 16-byte chunks of the kernel's type, so that they can be
// copied unchanged.
struct InChunks {
  bool q;
  bool k;
  bool v;
  bool out;  // and out_rest, where it is there
};

// The rows of a head's relative keys from one offset on, with zeros where there is none.
class RelativeRows {
 public:
  // `offset` + query_position is the offset of the first row.
  __device__ RelativeRows(const ScoreRule& rule, const uint4* rows, int offset) {
    const RelativeKeyRows& keys = rule.relative_key_rows;
    rows_ = static_cast<int>(keys.high - keys.low) + 1;
    chunks_ = static_cast<int>(keys.row) / 8;
    row_ = static_cast<int>(offset - rule.query_position - keys.low);
    chunk_ = rows + static_cast<int64_t>(row_) * chunks_;
  }
  __device__ uint4 Chunk(int chunk) const {
    const bool exists =
        static_cast<unsigned>(row_) < static_cast<unsigned>(rows_) && chunk < chunks_;
    return exists ? __ldg(chunk_ + chunk) : make_uint4(0, 0, 0, 0);
  }
  __device__ void Advance(int rows) {
    row_ += rows;
    chunk_ += rows * chunks_;
  }

 private:
  const uint4* chunk_;
  int row_;
  int rows_;
  int chunks_;
};

// ---- One task ----

template <class T, int kDim, Rule kRule>
class FlashMmaBlock {
 public:
  using Shape = MmaShape<kDim, kRule>;
  using Shared = MmaShared<kDim, kRule>;

  __device__ FlashMmaBlock(const FlashArguments& a, const InChunks& in_chunks, const Shared& shared)
      : a_(a),
        in_chunks_(in_chunks),
        shared_(shared),
        common_(*shared.common),
        thread_(threadIdx.x) {}

  __device__ void Run(int64_t task) {
    if (!Begin(task)) return;
    Clear();
    // The keys of tile n are in slot 2 n of the ring, its values in slot 2 n + 1, modulo 3.
    int slot = 0;
    for (int n = 0;; ++n) {
      const MmaTile tile = common_.tiles[n % 4];
      if (tile.index < 0) break;
      __pipeline_wait_prior(1);
      __syncthreads();  // keys have arrived; the last tile's values have been read
      const int value_slot = slot == 2 ? 0 : slot + 1, next_slot = slot == 0 ? 2 : slot - 1;
      StartKeys(n + 1, next_slot);
      if (thread_ == 0) common_.tiles[(n + 2) % 4] = NextTile();
      const bool hides = HidesByRule(tile);
      const bool whole = !hides && AllTokens(a_, tile.index);
      if (kRule != Rule::kNone) {
        FindColumnBiases(n, slot);
        if (has_labels()) FindLabels(n, tile);
        if (has_pairs()) FindTokenPairs(n, tile);
      }
      thread_ = Anew(thread_);
      Scores score;
      RowValues minus;
      Score(tile, slot, score);
      if (kRule != Rule::kNone) ApplyRule(tile, score);
      if (!whole) Hide(tile, score);
      Shift(score, minus);
      __pipeline_wait_prior(1);
      if (hides) NoteNonFinite(value_slot, n);
      __syncthreads();  // values have arrived; keys have been read
      if (hides && common_.tile_with_non_finite == n) SetAsideNonFinite(tile, value_slot);
      StartValues(n + 1, slot);
      AddValues(value_slot, score, minus);
      slot = next_slot;
    }
    Store();
  }

 private:
  static constexpr int kRowTiles = Shape::kRowTiles;
  // Mma tiles of keys, side by side.
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr int kOutputTiles = kDim / 8;  // mma tiles of output columns
  static constexpr int kChunks = kDim / 8;       // of a row
  using Copies = RowCopies<T, kDim, Shape::kThreads>;

  static constexpr int kOffsetChunks = kDim == 256   ? 4
                                       : kDim == 128 ? 8
                                                     // Chunks of relative keys at a time.
                                                     : kChunks;
  using Scores = float[kRowTiles][kKeyTiles][4];
  using RowValues = float[kRowTiles][2];

  __device__ int lane() const { return static_cast<int>(thread_ % kWarp); }
  __device__ int warp_row() const {  // the warp's first query
    return static_cast<int>(thread_ / kWarp) * Shape::kWarpRows;
  }
  // A lane has rows row() and row() + 8 of the products of 16 rows, and columns column() and
  // column() + 1 of every 8.
  __device__ int row() const { return lane() / 4; }
  __device__ int column() const { return lane() % 4 * 2; }
  __device__ int RowOf(int row_tile, int half) const {
    return warp_row() + row_tile * 16 + half * 8 + row();
  }
  __device__ unsigned char* Slot(int slot) const { return shared_.ring + slot * Shape::kTileBytes; }

  __device__ void Clear() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      sum_[m][0] = sum_[m][1] = 0;
      maximum_[m][0] = maximum_[m][1] = -INFINITY;
#pragma unroll
      for (int n = 0; n < kOutputTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) output_[m][n][e] = 0;
      }
    }
  }

  // ---- Preparation of tasks ----

  // Prepares a task. Returns false where there is nothing to do.
  __device__ bool Begin(int64_t index) {
    if (thread_ == 0) FindTask(index);
    __syncthreads();
    if (!common_.has_queries) return false;
    FindSpan();
    if (thread_ == 0) {
      common_.tiles[0] = NextTile();
      common_.tiles[1] = NextTile();
    }
    __syncthreads();
    StartQueries();
    StartKeys(0, 0);
    StartValues(0, 1);
    return true;
  }

  __device__ void FindTask(int64_t index) {
    const FlashTask task = TaskOf(a_, index);
    common_.index = index;
    common_.task = task;
    common_.walk.Begin(a_, task, kQueries);
    common_.keys = MmaKeys(a_, task);
    common_.query_order = OrderOf(a_.query_order, task.batch, task.head);
    common_.first_query = static_cast<int>(task.query_tile) * kQueries;
    common_.queries = static_cast<int>(QueriesOf(a_, task.batch));
    common_.has_queries = HasQueries();
    common_.tile_with_non_finite = -1;
    const ScoreRule& rule = a_.rule;
    if (kRule != Rule::kNone) {
      common_.multipliers = EntriesOf(rule.relu_multiplier);
      common_.biases = EntriesOf(rule.bias);
      common_.slope = 1 / rule.soft_span.ramp;
    }
    if (kRule == Rule::kRelativeKeys) {
      const RelativeKeyRows& keys = rule.relative_key_rows;
      common_.relative_keys = static_cast<const uint4*>(keys.rows) +
                              task.head % keys.heads * (keys.high - keys.low + 1) * (keys.row / 8);
    }
  }
  __device__ bool HasQueries() const {
    if (a_.packs_asked || a_.asked.rows == nullptr) return common_.first_query < common_.queries;
    const int end = min(common_.first_query + kQueries, common_.queries);
    bool any = false;
    for (int i = common_.first_query; i < end; ++i) any |= IsAsked(a_, common_.task.batch, i);
    return any;
  }
  __device__ const float* EntriesOf(const DistanceEntries& table) const {
    if (table.values == nullptr) return nullptr;
    return table.values + common_.task.head % table.heads * table.row;
  }

  // Returns the next tile of which any query sees a key within its span.
  __device__ MmaTile NextTile() {
    WalkState& walk = common_.walk;
    while (walk.Next(a_.schedule)) {
      const KeyTile tile = walk.key_tile(a_.schedule);
      if (has_span() && WithinSpanOf(common_.widest, 0, tile.index) == 0) continue;
      return MmaTile(a_, tile);
    }
    return MmaTile::Last();
  }

  // ---- Copies ----

  // Queries and keys of the first tile are one group of copies; each further tile of keys, and each
  // tile of values, is a group of its own, even where there is nothing to copy.
  __device__ void StartQueries() {
    const auto token_of = [&](int r) { return IsQuery(r) ? QueryToken(RowOfCall(r)) : -1; };
    const int64_t offset =
        common_.task.batch * a_.q.strides[0] + common_.task.head * a_.q.strides[1];
    Copies::template StartOrConvert<kQueries>(thread_, shared_.queries, a_.q, offset, a_.head_dim,
                                              in_chunks_.q, token_of);
  }
  __device__ void StartKeys(int n, int slot) {
    StartTile(n, slot, a_.k, common_.keys.keys, a_.head_dim, in_chunks_.k);
  }
  __device__ void StartValues(int n, int slot) {
    StartTile(n, slot, a_.v, common_.keys.values, a_.value_dim, in_chunks_.v);
  }
  __device__ void StartTile(int n, int slot, const DeviceView& view, int64_t offset, int channels,
                            bool in_chunks) {
    const MmaTile& tile = common_.tiles[n % 4];
    if (tile.index >= 0) {
      common_.keys.template Start<Copies>(a_, tile, thread_, Slot(slot), view, offset, channels,
                                          in_chunks);
    }
    __pipeline_commit();
  }

  // Returns the row of the call that query r of the block is; beyond the last query, that of the
  // last. Only kernels without a rule fill tiles from a list.
  __device__ int64_t RowOfCall(int r) const {
    const int n = common_.first_query + r;
    if (kRule != Rule::kNone) return n;
    return QueryRow(a_, common_.task.batch, min(n, common_.queries - 1));
  }
  __device__ bool IsQuery(int r) const {
    return common_.first_query + r < common_.queries &&
           ((kRule == Rule::kNone && a_.packs_asked) ||
            IsAsked(a_, common_.task.batch, RowOfCall(r)));
  }
  __device__ int64_t QueryToken(int64_t i) const {
    return common_.query_order == nullptr ? i : common_.query_order[i];
  }
  // ---- Which keys a query sees ----

  __device__ bool has_span() const {
    return kRule != Rule::kNone && a_.rule.soft_span.span != nullptr;
  }

  __device__ uint64_t WithinSpanOf(float z, int row, int64_t tile) const {
    return WithinSpan(a_, z, int64_t{common_.first_query} + row, tile);
  }

  // Finds the widest and the narrowest span of the block's queries, in whole tokens from the first
  // query on, which no rounding makes too narrow or too wide. Rows beyond the last query see
  // nothing, and keep no tile from being whole.
  __device__ void FindSpan() {
    if (!has_span()) return;
    for (int r = thread_; r < kQueries; r += Shape::kThreads) {
      const int64_t i = min(int64_t{common_.first_query} + r, a_.query_tokens - 1);
      common_.span[r] = a_.rule.soft_span.Of(common_.task.batch, common_.task.head, i);
    }
    __syncthreads();
    if (thread_ > 0) return;
    float widest = -INFINITY, narrowest = INFINITY;
    const int rows =
        static_cast<int>(min(int64_t{kQueries}, a_.query_tokens - common_.first_query));
    for (int r = 0; r < rows; ++r) {
      widest = fmaxf(widest, ceilf(common_.span[r]) - static_cast<float>(r));
      narrowest = fminf(narrowest, floorf(common_.span[r]) - static_cast<float>(r));
    }
    common_.widest = widest;
    common_.narrowest = narrowest;
  }

  // Tells whether the schedule or a span hides tokens of the tile.
  __device__ bool HidesByRule(const MmaTile& tile) const {
    return tile.mask != TileRun::kFull ||
           (has_span() && WithinSpanOf(common_.narrowest, 0, tile.index) != ~uint64_t{0}) ||
           (kRule != Rule::kNone && a_.rule.tokens.hides());
  }

  // Returns a word whose bit c says that query `row` of the block sees key c of the tile, if that
  // is a token.
  __device__ uint64_t Visible(const MmaTile& tile, int row) const {
    uint64_t visible = MaskOf(a_.schedule, {tile.index, tile.mask}, RowOfCall(row), row, kQueries);
    if (has_span()) visible &= WithinSpanOf(common_.span[row], row, tile.index);
    if (kRule != Rule::kNone && a_.rule.tokens.hides()) {
      visible &= shared_.pairs(a_.rule).visible[row];
    }
    return visible;
  }

  __device__ void Hide(const MmaTile& tile, Scores& score) {
    const uint64_t tokens = common_.keys.Tokens(a_, tile, lane());
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint64_t visible = (Visible(tile, RowOf(m, half)) & tokens) >> column();
        const unsigned low = static_cast<unsigned>(visible);
        const unsigned high = static_cast<unsigned>(visible >> 32);
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            const unsigned bit = 1u << (n % 4 * 8 + x);
            if (((n < 4 ? low : high) & bit) == 0) score[m][n][half * 2 + x] = -INFINITY;
          }
        }
      }
    }
  }

  // ---- Scores ----

  // Computes products of the warp's queries and the keys in `slot`.
  __device__ void Score(const MmaTile& tile, int slot, Scores& score) {
    if (kRule == Rule::kRelativeKeys) {
      ScoreOffsets(tile, score);
    } else {
      ForEachScore(score, [](float& s, int, int) { s = 0; });
    }
    if (kRule != Rule::kNone && a_.rule.content_bias != nullptr) {
      ForEachScore(score,
                   [&](float& s, int n, int x) { s += common_.key_bias[n * 8 + column() + x]; });
    }
    const unsigned char* queries = shared_.queries + warp_row() * Shape::kRowBytes;
    AddInnerProducts<T, kDim, kRowTiles, kKeyTiles>(
        [&](int k, unsigned(&query)[kRowTiles][4]) {
          LoadLeft<kDim, kRowTiles>(queries, k, lane(), query);
        },
        Slot(slot), lane(), score);
  }
  // Calls act(score, n, x) for the scores of columns 8 n + column() + x.
  template <class Act>
  __device__ void ForEachScore(Scores& score, const Act& act) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) act(score[m][n][e], n, e % 2);
      }
    }
  }

  // Returns e + query_position of query 0 of the block and key 0 of the tile, a multiple of 64.
  __device__ int FirstOffset(const MmaTile& tile) const {
    return tile.index * kKeys - common_.first_query;
  }

  // Computes the dot products of biases with the tile's keys and with the relative keys of its
  // offsets, one a thread: u . k_c, and w . r_e of the offsets that the previous tile did not have.
  // Biases are not added to queries, which would round them.
  __device__ void FindColumnBiases(int n, int slot) {
    const bool of_keys = a_.rule.content_bias != nullptr;
    const bool of_offsets = kRule == Rule::kRelativeKeys && a_.rule.position_bias != nullptr;
    if (!of_keys && !of_offsets) return;
    const int end = FirstOffset(common_.tiles[n % 4]) + kKeys + 1;
    int begin = end - (kQueries + kKeys);
    if (n > 0) begin = max(begin, FirstOffset(common_.tiles[(n + 3) % 4]) + kKeys + 1);
    const int items = kKeys + (of_offsets ? end - begin : 0);
#pragma unroll 1
    for (int item = thread_; item < items; item += Shape::kThreads) {
      if (item < kKeys) {
        if (!of_keys) continue;
        const unsigned char* keys = Slot(slot);
        common_.key_bias[item] = Dot(
            a_.rule.content_bias, kChunks, [&](int c) { return ChunkOf(keys, item, c); },
            [](int c, int pair) { return c * 8 + pair * 2; });
      } else {
        const int offset = begin + item - kKeys;
        const RelativeRows rows(a_.rule, common_.relative_keys, offset);
        common_.offset_bias[offset & 255] = Dot(
            a_.rule.position_bias, kChunks, [&](int c) { return rows.Chunk(c); },
            [](int c, int pair) { return c / 4 * 32 + pair * 8 + c % 4 * 2; });
      }
    }
    __syncthreads();
  }
  __device__ static uint4 ChunkOf(const unsigned char* rows, int row, int chunk) {
    return *reinterpret_cast<const uint4*>(rows + ChunkOffset<kDim>(row, chunk));
  }
  // Returns bias . row. chunk_of(c) returns chunk c of the row; pair p of a chunk has the channels
  // from channel_of(c, p) on.
  template <class ChunkOfRow, class ChannelOf>
  __device__ float Dot(const float* bias, int chunks, const ChunkOfRow& chunk_of,
                       const ChannelOf& channel_of) const {
    bias += common_.task.head * a_.head_dim;
    float sum = 0;
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      const uint4 chunk = chunk_of(c);
      const unsigned pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int channel = channel_of(c, n / 2) + n % 2;
        if (channel < a_.head_dim) sum = fmaf(bias[channel], Half<T>(pairs[n / 2], n % 2), sum);
      }
    }
    return sum;
  }

  // Sets score = (q + w) . r, for the offset of each of the warp's pairs.
  //
  // 16 queries against 64 keys have 79 offsets. Where query 0 of them and key 0 have offset e, the
  // products with relative keys e - 15 ... e + 64 make rows of 80 columns, and key c of query r is
  // in column c - r + 15: row r is shifted by 15 - r. The next 16 queries need relative keys that
  // begin 16 offsets earlier. Relative keys come straight from memory, 16 bytes a lane, since 192
  // rows of them would not fit beside keys and values at D = 256. The blocks of a head share them,
  // and a tile shares all but 64 with the previous one.
  __device__ void ScoreOffsets(const MmaTile& tile, Scores& score) {
    ForEachScore(score, [](float& s, int, int) { s = 0; });
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; chunk += kOffsetChunks) AddOffsets(tile, chunk, score);
  }
  // Adds the products of the channels from chunk `first_chunk` on.
  __device__ void AddOffsets(const MmaTile& tile, int first_chunk, Scores& score) {
    unsigned query[kRowTiles][kOffsetChunks / 2][4];
    const int query_offset = ChunkOffset<kDim>(warp_row() + lane() % 16, lane() / 16);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int k = 0; k < kOffsetChunks / 2; ++k) {
        LdMatrixX4(query[m][k], shared_.queries +
                                    ChunksOn<kDim>(query_offset, first_chunk + k * 2) +
                                    m * 16 * Shape::kRowBytes);
      }
    }
    const int first = FirstOffset(tile) - warp_row() - (Shape::kWarpRows - 1);
    const bool has_bias = first_chunk == 0 && a_.rule.position_bias != nullptr;
    RelativeRows keys(a_.rule, common_.relative_keys, first + row());
    float product[kRowTiles][2][4];
#pragma unroll
    for (int c = 0; c < kKeyTiles + kRowTiles * 2; ++c) {
      float bias[2] = {0, 0};
      if (has_bias) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          bias[x] = common_.offset_bias[(first + c * 8 + column() + x) & 255];
        }
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) product[m][c % 2][e] = bias[e % 2];
      }
#pragma unroll
      for (int k = 0; k < kOffsetChunks / 2; k += 2) {
        const uint4 x = keys.Chunk(first_chunk + lane() % 4 + k * 2);
        const unsigned key[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          const int n = c - (kRowTiles - 1 - m) * 2;
          if (n < 0 || n >= kKeyTiles + 2) continue;
          Sixteen<T>::Multiply(product[m][c % 2], query[m][k], key);
          Sixteen<T>::Multiply(product[m][c % 2], query[m][k + 1], key + 2);
        }
      }
      keys.Advance(8);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const int n = c - (kRowTiles - 1 - m) * 2;
        const float(&near)[4] = product[m][(c + 1) % 2];
        const float(&far)[4] = product[m][c % 2];
        // The rows 8 further down are shifted by 8 columns fewer.
        if (n >= 2 && n < kKeyTiles + 2) AddShifted(near, far, 0, score[m][n - 2]);
        if (n >= 1 && n < kKeyTiles + 1) AddShifted(near, far, 1, score[m][n - 1]);
      }
    }
  }

  // score[r][c] += product[r][c - r + 15] for rows r of one half and 8 columns, where `near` and
  // `far` are the 16 columns of products that those can come from; rows and columns are spread over
  // the warp as results of products are. A lane's columns 2 t and 2 t + 1 come from columns that are
  // a pair of one lane of the row where r is odd, and of two where it is even.
  __device__ void AddShifted(const float (&near)[4], const float (&far)[4], int half,
                             float (&score)[4]) {
    const int t = lane() % 4, r = row();
    const bool odd = r % 2 != 0;
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int shift = (15 - r + x) / 2 - 4;  // 0 to 4 lanes
      const int source = (lane() & ~3) | ((t + shift) & 3);
      // Tells whether the lane that receives from this one needs an element of `far`.
      const bool is_far = ((t - shift) & 3) + shift >= 4;
      const float from_near = odd ? near[half * 2 + x] : near[half * 2 + 1 - x];
      const float from_far = odd ? far[half * 2 + x] : far[half * 2 + 1 - x];
      score[half * 2 + x] += __shfl_sync(~0u, is_far ? from_far : from_near, source);
    }
  }

  // Turns products into scores in nats.
  __device__ void ApplyRule(const MmaTile& tile, Scores& score) {
    if (has_labels()) AddLabels(score);
    ForEachScore(score, [&](float& s, int, int) { s *= a_.scale; });
    if (a_.rule.relu_multiplier.values != nullptr) {
      ForEachEntry(a_.rule.relu_multiplier, common_.multipliers, tile, score,
                   [](float& s, float entry) {
                     s = (s < 0 ? 0 : s) * entry;  // a NaN stays NaN
                   });
    }
    if (a_.rule.bias.values != nullptr) {
      ForEachEntry(a_.rule.bias, common_.biases, tile, score,
                   [](float& s, float entry) { s += entry; });
    }
    if (a_.rule.tokens.adjusts()) AddPairTerms(score);
    if (has_span() && common_.narrowest < DistanceOf(a_, common_.first_query, tile.index * kKeys)) {
      AddRamp(tile, score);
    }
  }

  __device__ bool has_pairs() const { return kRule != Rule::kNone && a_.rule.tokens.acts(); }
  __device__ void FindTokenPairs(int n, const MmaTile& tile) {
    TokenPairs<kQueries>& pairs = shared_.pairs(a_.rule);
    if (n == 0) {
      LoadQueryTokens<Shape::kThreads>(a_, common_.task, common_.first_query, pairs);
    }
    FindPairs<Shape::kThreads>(a_, common_.task, tile.index, pairs);
  }
  __device__ void AddPairTerms(Scores& score) {
    const TokenPairs<kQueries>& pairs = shared_.pairs(a_.rule);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            score[m][n][half * 2 + x] +=
                PairTerm(a_.rule.tokens, pairs, RowOf(m, half), n * 8 + column() + x);
          }
        }
      }
    }
  }

  __device__ bool has_labels() const {
    return kRule != Rule::kNone && a_.rule.label_keys.keys != nullptr;
  }
  // Loads the ids of the tile's keys and, before the first tile, the queries' ids and their scores
  // against the two label keys. For rows that are no queries both are arbitrary.
  __device__ void FindLabels(int n, const MmaTile& tile) {
    typename Shared::Labels& labels = shared_.labels();
    const int64_t batch = common_.task.batch;
    if (thread_ < kKeys) {
      const int64_t token = common_.keys.TokenOrNone(a_, tile, static_cast<int>(thread_));
      labels.key_ids[thread_] = token < 0 ? 0 : IdOf(a_.key_ids, batch, token);
    }
    if (n == 0) {
#pragma unroll 1
      for (int item = static_cast<int>(thread_); item < kQueries * 2; item += Shape::kThreads) {
        const int row = item % kQueries, label = item / kQueries;
        labels.products[row][label] = LabelProduct(row, label);
        if (label == 0) {
          labels.query_ids[row] =
              IsQuery(row) ? IdOf(a_.query_ids, batch, QueryToken(RowOfCall(row))) : 0;
        }
      }
    }
    __syncthreads();
  }
  __device__ float LabelProduct(int row, int label) const {
    const int64_t head = common_.task.head;
    const int64_t place = head % a_.rule.label_keys.heads * 2 + label;
    const float* key = a_.rule.label_keys.keys + place * a_.head_dim;
    const float* bias = a_.rule.position_bias;
    if (bias != nullptr) bias += head * a_.head_dim;
    const float* number = a_.rule.label_keys.biases;
    float sum = number == nullptr ? 0 : number[place];
#pragma unroll 1
    for (int c = 0; c < a_.head_dim; ++c) {
      const unsigned pair = *reinterpret_cast<const unsigned*>(
          shared_.queries + ChunkOffset<kDim>(row, c / 8) + c % 8 / 2 * 4);
      const float query = Half<T>(pair, c % 2);
      sum = fmaf(bias == nullptr ? query : query + bias[c], key[c], sum);
    }
    return sum;
  }
  __device__ void AddLabels(Scores& score) {
    const typename Shared::Labels& labels = shared_.labels();
    const int* key_ids = labels.key_ids + column();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int id = labels.query_ids[RowOf(m, half)];
        const float* products = labels.products[RowOf(m, half)];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            score[m][n][half * 2 + x] += key_ids[n * 8 + x] == id ? products[1] : products[0];
          }
        }
      }
    }
  }
  // Adds the logarithms of the soft span's weights to the scores.
  __device__ void AddRamp(const MmaTile& tile, Scores& score) {
    const float slope = common_.slope, ramp = a_.rule.soft_span.ramp;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = RowOf(m, half);
        const float z = common_.span[row];
        const float distance =
            DistanceOf(a_, common_.first_query + row, tile.index * kKeys + column());
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            const float weight = (z - (distance - static_cast<float>(n * 8 + x)) + ramp) * slope;
            score[m][n][half * 2 + x] += Log2(fmaxf(fminf(weight, 1), 0)) * kLn2;
          }
        }
      }
    }
  }
  // Calls act(score, the table's entry for it). Scores 8 rows and 8 columns apart share an entry,
  // so that a lane reads 22 entries for 64 scores. For rows and keys that do not exist the entry is
  // arbitrary.
  template <class Act>
  __device__ void ForEachEntry(const DistanceEntries& table, const float* entries,
                               const MmaTile& tile, Scores& score, const Act& act) {
    const int first = static_cast<int>(FirstOffset(tile) - a_.rule.query_position + table.zero) +
                      column() - RowOf(0, 0);
    const int last = static_cast<int>(table.row) - 1;
#pragma unroll
    for (int d = 1 - kRowTiles * 2; d < kKeyTiles; ++d) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const float entry = __ldg(entries + min(max(first + d * 8 + x, 0), last));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int n = d + m * 2 + half;
            if (n >= 0 && n < kKeyTiles) act(score[m][n][half * 2 + x], entry);
          }
        }
      }
    }
  }

  // ---- Softmax ----

  // Updates the running maxima for the tile, rescales the earlier sums, and prepares scores for
  // WeightOf. A weight is 2^(s factor - minus), one multiply-add; the rounding of minus = maximum
  // factor is the same in all weights of a row. Where minus exceeds 256 its rounding would differ
  // noticeably from one maximum to the next, and finite scores could become infinite: there the
  // maximum is subtracted from the scores themselves, and minus is 0.
  __device__ void Shift(Scores& score, RowValues& minus) {
    RowValues rescale;
    bool changed = false, far = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = maximum_[m][half];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          largest = fmaxf(largest, fmaxf(score[m][n][half * 2], score[m][n][half * 2 + 1]));
        }
        largest = MaxOfFour(largest);
        const float old = maximum_[m][half];
        rescale[m][half] = old == largest ? 1 : Exp2((old - largest) * Factor());
        sum_[m][half] *= rescale[m][half];
        maximum_[m][half] = largest;
        minus[m][half] = Finite(largest) * Factor();
        changed |= rescale[m][half] != 1;
        far |= IsFar(minus[m][half]);
      }
    }
    if (__any_sync(~0u, far)) SubtractMaxima(score, minus);
    if (!__any_sync(~0u, changed)) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kOutputTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) output_[m][n][e] *= rescale[m][e / 2];
      }
    }
  }
  __device__ void SubtractMaxima(Scores& score, RowValues& minus) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!IsFar(minus[m][half])) continue;
        minus[m][half] = 0;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int x = 0; x < 2; ++x) score[m][n][half * 2 + x] -= maximum_[m][half];
        }
      }
    }
  }
  __device__ static bool IsFar(float minus) { return fabsf(minus) > 256; }

  // Returns the exponent of 2 for a unit of scores, which are products without their scale, or
  // nats.
  __device__ float Factor() const { return kRule == Rule::kNone ? a_.scale * kLog2E : kLog2E; }
  // Replaces the maximum -inf of a row that has seen no key by 0: its scores of -inf then get
  // weights of 0, where -inf - -inf would be NaN.
  __device__ static float Finite(float x) { return x == -INFINITY ? 0 : x; }
  __device__ float WeightOf(float score, float minus) const {
    return Exp2(fmaf(score, Factor(), -minus));
  }

  // ---- Output ----

  // Adds the values in `slot`, weighted.
  __device__ void AddValues(int slot, const Scores& score, const RowValues& minus) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      unsigned weight[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float* s = score[m][k * 2 + n] + half * 2;
            const float p[2] = {WeightOf(s[0], minus[m][half]), WeightOf(s[1], minus[m][half])};
            sum_[m][half] += p[0] + p[1];
            weight[m][n * 2 + half] = Pair<T>(p[0], p[1]);
          }
        }
      }
      AddWeightedRows<T, kDim, kRowTiles>(weight, Slot(slot) + k * 16 * Shape::kRowBytes, lane(),
                                          output_);
    }
  }

  // Notes that a value that this thread has copied is not finite: a hidden key's weight of 0 must
  // not be multiplied by it.
  __device__ void NoteNonFinite(int slot, int n) {
    if (Copies::template HasNonFinite<kKeys>(thread_, Slot(slot))) {
      atomicMax(&common_.tile_with_non_finite, n);
    }
  }

  // Adds the values that are not finite to the rows that see them, and puts zeros in their place:
  // they stay infinite or NaN under any weight above 0.
  __device__ void SetAsideNonFinite(const MmaTile& tile, int slot) {
    const uint64_t tokens = common_.keys.Tokens(a_, tile, lane());
#pragma unroll 1
    for (int first = 0; first < kKeys; first += 32) {
      unsigned seen[kRowTiles][2];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          seen[m][half] = static_cast<unsigned>((Visible(tile, RowOf(m, half)) & tokens) >> first);
        }
      }
#pragma unroll 1
      for (int c = 0; c < 32; ++c) {
        AddNonFinite<T, kDim, kRowTiles>(Slot(slot), first + c, c, seen, column(), output_);
      }
    }
    __syncthreads();
    Copies::template ClearNonFinite<kKeys>(thread_, Slot(slot));
    __syncthreads();
  }

  // ---- Results ----

  // Stores the output through shared memory, from where whole rows are written in order.
  __device__ void Store() {
    __pipeline_wait_prior(0);
    __syncthreads();  // the last values have been read; no copy is in flight
    float* rows = reinterpret_cast<float*>(shared_.queries) + warp_row() * Shape::kOutputRow;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = sum_[m][half];
        sum = SumOfFour(sum);
        float* to = rows + (m * 16 + half * 8 + row()) * Shape::kOutputRow;
#pragma unroll
        for (int n = 0; n < kOutputTiles; ++n) {
          *reinterpret_cast<float2*>(to + n * 8 + column()) =
              make_float2(output_[m][n][half * 2], output_[m][n][half * 2 + 1]);
        }
        if (lane() % 4 == 0) {
          to[kDim] = sum;
          to[kDim + 1] = kRule == Rule::kNone ? maximum_[m][half] * a_.scale : maximum_[m][half];
        }
      }
    }
    __syncwarp();
    if (in_chunks_.out) {
      StoreInChunks(rows);
      return;
    }
    for (int r = 0; r < Shape::kWarpRows; ++r) {
      if (!IsQuery(warp_row() + r)) continue;
      const int64_t i = RowOfCall(warp_row() + r), token = QueryToken(i);
      const float* row = rows + r * Shape::kOutputRow;
      if (lane() == 0) StoreSums(a_, common_.task, i, token, row[kDim + 1], row[kDim]);
      const OutputRow output(a_, common_.task, i, token, row[kDim]);
      for (int c = lane(); c < a_.value_dim; c += 32) {
        const float value[1] = {row[c]};
        output.Store(c, value);
      }
    }
  }
  __device__ void StoreInChunks(const float* rows) const {
    T* to = static_cast<T*>(a_.out.data) + common_.task.batch * a_.out.strides[0] +
            common_.task.head * a_.out.strides[1];
    for (int n = lane(); n < Shape::kWarpRows * kChunks; n += 32) {
      const int r = n / kChunks, c = n % kChunks * 8;
      if (!IsQuery(warp_row() + r)) continue;
      const int64_t i = RowOfCall(warp_row() + r), token = QueryToken(i);
      const float* row = rows + r * Shape::kOutputRow;
      const float sum = row[kDim];
      if (c == 0) StoreSums(a_, common_.task, i, token, row[kDim + 1], sum);
      if (c >= a_.value_dim) continue;
      const float inverse = sum == 0 ? 0 : 1 / sum;
      const float4 x = *reinterpret_cast<const float4*>(row + c);
      const float4 y = *reinterpret_cast<const float4*>(row + c + 4);
      const uint4 rounded =
          make_uint4(Pair<T>(x.x * inverse, x.y * inverse), Pair<T>(x.z * inverse, x.w * inverse),
                     Pair<T>(y.x * inverse, y.y * inverse), Pair<T>(y.z * inverse, y.w * inverse));
      *reinterpret_cast<uint4*>(to + OutRow(a_, i, token) * a_.out.strides[2] + c) = rounded;
      if (a_.out_rest.data == nullptr) continue;
      const DeviceView& rest = a_.out_rest;
      *reinterpret_cast<uint4*>(static_cast<T*>(rest.data) + Offset(rest, common_.task.batch,
                                                                    common_.task.head,
                                                                    OutRow(a_, i, token), c)) =
          make_uint4(Rest(x.x, x.y, inverse, rounded.x), Rest(x.z, x.w, inverse, rounded.y),
                     Rest(y.x, y.y, inverse, rounded.z), Rest(y.z, y.w, inverse, rounded.w));
    }
  }
  // Returns what rounding took from two numbers times a factor.
  __device__ static unsigned Rest(float low, float high, float factor, unsigned rounded) {
    return Pair<T>(fmaf(low, factor, -Half<T>(rounded, 0)),
                   fmaf(high, factor, -Half<T>(rounded, 1)));
  }

  const FlashArguments& a_;
  const InChunks& in_chunks_;
  const Shared shared_;
  typename Shared::CommonOfRelativeKeys& common_;
  unsigned thread_;
  float output_[kRowTiles][kOutputTiles][4];
  RowValues maximum_;  // maxima of scores, in nats where there is a rule
  RowValues sum_;      // sums over this lane's keys
};

// ---- Launching ----

template <class T, int kDim, Rule kRule>
__global__ void __launch_bounds__(MmaShape<kDim, kRule>::kThreads, MmaShape<kDim, kRule>::kBlocks)
    FlashMma(const FlashArguments a, const InChunks in_chunks) {
  const MmaShared<kDim, kRule> shared(DynamicShared<MmaShared<kDim, kRule>::MostBytes()>());
  const int64_t tasks = FlashTasks(a);
  for (int64_t n = blockIdx.x; n < tasks;) {
    FlashMmaBlock<T, kDim, kRule>(a, in_chunks, shared).Run(n);
    n = shared.common->index + gridDim.x;
    __syncthreads();
  }
}

template <class T, int kDim, Rule kRule>
const char* LaunchMma(const FlashArguments& a, const InChunks& in_chunks, void* stream) {
  const int64_t tasks = FlashTasks(a);
  return Launch("FlashMma", &FlashMma<T, kDim, kRule>,
                {BlocksInTurns(tasks, a.max_blocks), MmaShape<kDim, kRule>::kThreads,
                 MmaShared<kDim, kRule>::Bytes(a.rule)},
                stream, a, in_chunks);
}

template <class T>
InChunks InChunksOf(const FlashArguments& a) {
  return {IsInChunks<T>(a.q, a.batch, a.query_heads, a.head_dim),
          IsInChunks<T>(a.k, a.batch, a.kv_heads, a.head_dim),
          IsInChunks<T>(a.v, a.batch, a.kv_heads, a.value_dim),
          a.partial == nullptr && IsInChunks<T>(a.out, a.batch, a.query_heads, a.value_dim) &&
              (a.out_rest.data == nullptr ||
               IsInChunks<T>(a.out_rest, a.batch, a.query_heads, a.value_dim))};
}
// Tells whether a call has no rule. The largest product has the largest score where the scale is
// above 0.
inline bool IsPlain(const FlashArguments& a) {
  return a.rule.relative_key_rows.rows == nullptr && a.rule.is_plain() &&
         a.rule.content_bias == nullptr && a.scale > 0;
}

template <class T, int kDim>
const char* LaunchMmaOfRule(const FlashArguments& a, void* stream) {
  const InChunks in_chunks = InChunksOf<T>(a);
  if (a.rule.relative_key_rows.rows != nullptr) {
    return LaunchMma<T, kDim, Rule::kRelativeKeys>(a, in_chunks, stream);
  }
  if (IsPlain(a)) return LaunchMma<T, kDim, Rule::kNone>(a, in_chunks, stream);
  return LaunchMma<T, kDim, Rule::kTables>(a, in_chunks, stream);
}

// All instantiations: three kernels for each of four head sizes.
template <class T>
const char* LaunchFlashMma(const FlashArguments& a, void* stream) {
  const int widest = a.head_dim > a.value_dim ? a.head_dim : a.value_dim;
  if (widest <= 32) return LaunchMmaOfRule<T, 32>(a, stream);
  if (widest <= 64) return LaunchMmaOfRule<T, 64>(a, stream);
  if (widest <= 128) return LaunchMmaOfRule<T, 128>(a, stream);
  return LaunchMmaOfRule<T, 256>(a, stream);
}

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_MMA_CUH_
