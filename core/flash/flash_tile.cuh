// Utilities that the flash kernels of all dtypes share: how the work is cut into blocks, the walk
// over a row of the schedule, and which keys a query sees.
#ifndef TFB_CORE_FLASH_FLASH_TILE_CUH_
#define TFB_CORE_FLASH_FLASH_TILE_CUH_

#include "core/cuda/warp.cuh"
#include "core/flash/flash_kernels.h"

namespace tfb {
namespace {

constexpr int kKeys = 64;  // of a tile

// ---- Calls with a list of queries ----

// Returns the number of queries of batch row b that tiles are made of.
__device__ inline int64_t QueriesOf(const FlashArguments& a, int64_t b) {
  return a.packs_asked ? a.asked.begins[b + 1] - a.asked.begins[b] : a.query_tokens;
}
// Returns the row of the call that the n-th such query is.
__device__ inline int64_t QueryRow(const FlashArguments& a, int64_t b, int64_t n) {
  return a.packs_asked ? a.asked.rows[a.asked.begins[b] + n] - b * a.query_tokens : n;
}
__device__ inline bool IsAsked(const FlashArguments& a, int64_t b, int64_t row) {
  return a.asked.rows == nullptr || a.asked.is_listed[b * a.query_tokens + row] != 0;
}

// One tile of queries of one head, and which part of its keys.
struct FlashTask {
  int64_t batch;
  int64_t head;
  int64_t kv_head;
  int64_t query_tile;
  int64_t split;
};

__host__ __device__ inline int64_t FlashTasks(const FlashArguments& a) {
  return a.batch * a.query_heads * a.schedule.query_tiles * a.splits;
}

// Returns a task. Tasks of a head follow each other, so that its keys and values are read from L2.
// The longest rows come first, so that none is left to run alone at the end.
__device__ inline FlashTask TaskOf(const FlashArguments& a, int64_t index) {
  FlashTask task;
  task.split = index % a.splits;
  index /= a.splits;
  const int64_t rank = index % a.schedule.query_tiles;
  index /= a.schedule.query_tiles;
  task.head = index % a.query_heads;
  task.batch = index / a.query_heads;
  task.kv_head = task.head / (a.query_heads / a.kv_heads);
  task.query_tile =
      a.schedule.order == nullptr
          ? rank
          : a.schedule.order[task.head % a.schedule.heads * a.schedule.query_tiles + rank];
  return task;
}

// A tile of keys as a row of the schedule lists it.
struct KeyTile {
  static constexpr int32_t kBand = -2;  // `mask` of a tile that the schedule's band cuts

  int32_t index;
  int32_t mask;  // as in TileRun, or kBand
};

// Sets bits first to end - 1 of a word, where `first` and `end` may lie outside it.
__device__ inline uint64_t Bits(int64_t first, int64_t end) {
  if (first >= kKeys || end <= 0 || end <= first) return 0;
  const uint64_t from = first <= 0 ? ~uint64_t{0} : ~uint64_t{0} << first;
  const uint64_t below = end >= kKeys ? ~uint64_t{0} : (uint64_t{1} << end) - 1;
  return from & below;
}

// Returns a word whose bit c says that the schedule shows key c of the tile to row i of the call,
// which is query `row` of a tile of `queries`.
__device__ inline uint64_t MaskOf(const ScheduleView& schedule, const KeyTile& tile, int64_t i,
                                  int row, int queries) {
  if (tile.mask == TileRun::kFull) return ~uint64_t{0};
  if (tile.mask != KeyTile::kBand) {
    return schedule.masks[static_cast<int64_t>(tile.mask) * queries + row];
  }
  const Band& band = schedule.band;
  const int64_t key = static_cast<int64_t>(tile.index) * kKeys;
  return Bits(max(band.first_key, i + band.low) - key, i + band.high + 1 - key);
}

// Tells whether every row from first_row to last_row sees every key of the tile in the band.
__device__ inline bool IsWholeInBand(const Band& band, int64_t tile, int64_t first_row,
                                     int64_t last_row) {
  const int64_t first = tile * kKeys, last = first + kKeys - 1;
  return first >= band.first_key && first - last_row >= band.low && last - first_row <= band.high;
}

// Returns the pattern of a head, without the division that takes longest where all heads have one.
__device__ inline int PatternOf(const ScheduleView& schedule, int64_t head) {
  return schedule.heads == 1 ? 0
                             : static_cast<int>(static_cast<unsigned>(head) %
                                                static_cast<unsigned>(schedule.heads));
}

// The state of a walk over the key tiles of a task. It is plain data, so that it can lie in shared
// memory, and of 32 bits where numbers of tiles and of rows are, so that it takes few registers.
struct WalkState {
  int first_row;  // row of the first of the task's queries
  int last_row;
  int left;    // tiles
  int in_run;  // tiles of the run that are done
  int tile;
  bool full;
  int64_t run;

  // Places the walk before the first tile.
  __device__ void Begin(const FlashArguments& a, const FlashTask& task, int queries) {
    const ScheduleView& schedule = a.schedule;
    const int64_t first_query = task.query_tile * queries, count = QueriesOf(a, task.batch);
    in_run = tile = left = 0;
    run = 0;
    full = false;
    if (first_query >= count) return;
    first_row = static_cast<int>(QueryRow(a, task.batch, first_query));
    last_row = static_cast<int>(QueryRow(a, task.batch, min(first_query + queries, count) - 1));
    int64_t tiles = 0;
    if (schedule.row_begin != nullptr) {
      const int64_t row = PatternOf(schedule, task.head) * schedule.query_tiles + task.query_tile;
      run = schedule.row_begin[row];
      const int64_t runs_end = schedule.row_begin[row + 1];
      for (int64_t r = run; r < runs_end; ++r) tiles += schedule.runs[r].tiles;
    } else {
      const Band& band = schedule.band;
      const int64_t first = max(band.first_key, max(first_row + band.low, int64_t{0}));
      const int64_t end = min(a.kv_tokens, last_row + band.high + 1);
      tile = static_cast<int>(first / kKeys);
      tiles = end > first ? (end - 1) / kKeys + 1 - tile : 0;
    }
    // Skips the tiles before this part's.
    int64_t skip = a.splits == 1 ? 0 : tiles * task.split / a.splits;
    left = static_cast<int>(a.splits == 1 ? tiles : tiles * (task.split + 1) / a.splits - skip);
    if (schedule.row_begin == nullptr) {
      tile += static_cast<int>(skip) - 1;
      return;
    }
    if (left == 0) return;
    while (skip >= schedule.runs[run].tiles) skip -= schedule.runs[run++].tiles;
    in_run = static_cast<int>(skip) - 1;
  }

  // Goes to the next tile. Returns false after the last.
  __device__ bool Next(const ScheduleView& schedule) {
    if (left-- <= 0) return false;
    if (schedule.row_begin == nullptr) {
      ++tile;
      full = IsWholeInBand(schedule.band, tile, first_row, last_row);
      return true;
    }
    if (++in_run >= schedule.runs[run].tiles) {
      ++run;
      in_run = 0;
    }
    tile = schedule.runs[run].first_tile + in_run;
    full = schedule.runs[run].mask == TileRun::kFull;
    return true;
  }

  __device__ KeyTile key_tile(const ScheduleView& schedule) const {
    const int32_t mask = full                            ? TileRun::kFull
                         : schedule.row_begin != nullptr ? schedule.runs[run].mask
                                                         : KeyTile::kBand;
    return {tile, mask};
  }
};

// Walks the key tiles of a task. All threads of a block take the same steps.
class TileWalk {
 public:
  __device__ TileWalk(const FlashArguments& a, const FlashTask& task, int queries)
      : schedule_(a.schedule) {
    state_.Begin(a, task, queries);
  }

  // Goes to the next tile. Returns false after the last.
  __device__ bool Next() { return state_.Next(schedule_); }
  __device__ int64_t tile() const { return state_.tile; }
  // Tells whether every query of the tile sees every key of it that is a token.
  __device__ bool full() const { return state_.full; }
  __device__ KeyTile key_tile() const { return state_.key_tile(schedule_); }
  // Returns a word whose bit c says that the schedule shows key c to query `row` of the tile, row i
  // of the call.
  __device__ uint64_t Mask(int64_t i, int row, int queries) const {
    return MaskOf(schedule_, state_.key_tile(schedule_), i, row, queries);
  }

 private:
  const ScheduleView& schedule_;
  WalkState state_;
};

// Returns the row of k and v that is key 0 of the tile, where there is no order of keys.
__device__ inline int64_t FirstKeyRow(const FlashArguments& a, int64_t tile) {
  if (a.ring_tiles == 0) return tile * kKeys;
  const int64_t of_ring = tile + a.first_tile;
  return (of_ring < a.ring_tiles ? of_ring : of_ring - a.ring_tiles) * kKeys;
}
// Returns the token of k and v that is key `c` of the tile; the caller knows that c is within the
// keys.
__device__ inline int64_t KeyToken(const FlashArguments& a, const FlashTask& task, int64_t tile,
                                   int c) {
  return a.key_order(task.batch, task.kv_head, FirstKeyRow(a, tile) + c);
}

// Tells whether key c of the tile is a token: not beyond the sequence, and not padding.
__device__ inline bool IsToken(const FlashArguments& a, const FlashTask& task, int64_t tile,
                               int c) {
  if (tile * kKeys + c >= a.kv_tokens) return false;
  return a.key_mask == nullptr ||
         a.key_mask[task.batch * a.key_mask_strides[0] +
                    KeyToken(a, task, tile, c) * a.key_mask_strides[1]] != 0;
}
// Tells whether all keys of the tile are known to be tokens without a look at the mask.
__device__ inline bool AllTokens(const FlashArguments& a, int64_t tile) {
  return a.key_mask == nullptr && (tile + 1) * kKeys <= a.kv_tokens;
}

// Returns how far key j is behind query i.
__device__ inline float DistanceOf(const FlashArguments& a, int64_t i, int64_t j) {
  return static_cast<float>(i + a.causal_offset - j);
}
// Returns the keys of a tile that query i gives a weight above 0 where its soft span is z.
__device__ inline uint64_t WithinSpan(const FlashArguments& a, float z, int64_t i, int64_t tile) {
  const float first = floorf(DistanceOf(a, i, tile * kKeys) - z - a.rule.soft_span.ramp) + 1;
  if (first <= 0) return ~uint64_t{0};
  return first >= static_cast<float>(kKeys) ? 0 : ~uint64_t{0} << static_cast<int>(first);
}

__device__ inline int IdOf(const DeviceIds& ids, int64_t b, int64_t token) {
  return ids.ids[b * ids.batch_stride + token * ids.stride];
}

// Returns the row of `out` and `log_sum_exp` for row i of the call, which is token `token`.
__device__ inline int64_t OutRow(const FlashArguments& a, int64_t i, int64_t token) {
  return a.out_by_row ? i : token;
}

// A block's data on its tile's tokens where the call has a token rule, in shared memory.
template <int kRows>
struct TokenPairs {
  uint64_t visible[kRows];  // bit c: the rule does not hide key c from the query
  int query_tokens[kRows];
  int key_tokens[kKeys];
  int own_codes[kKeys];
  float logs[kMaxTokenSlots + 1];  // of counts
  unsigned char counts[kRows][kKeys];
};

// Tells whether 0 <= query code - key code <= 1.
__device__ inline bool HasPair(int query, int key) {
  return static_cast<unsigned>(query - key) <= 1;
}

// Loads the codes of a block's queries in `kThreads` threads. They are visible after the caller's
// barrier.
template <int kThreads, int kRows>
__device__ void LoadQueryTokens(const FlashArguments& a, const FlashTask& task, int64_t first,
                                TokenPairs<kRows>& pairs) {
  for (int r = threadIdx.x; r < kRows; r += kThreads) {
    const int64_t i = min(first + r, a.query_tokens - 1);
    pairs.query_tokens[r] = static_cast<int>(a.query_order(task.batch, task.head, i));
  }
  for (int n = threadIdx.x; n <= kMaxTokenSlots; n += kThreads) {
    pairs.logs[n] = n > 1 ? logf(static_cast<float>(n)) : 0;
  }
}
// Loads the codes of a tile's keys and finds the keys that the rule hides. Begins and ends with a
// barrier.
template <int kThreads, int kRows>
__device__ void FindPairs(const FlashArguments& a, const FlashTask& task, int64_t tile,
                          TokenPairs<kRows>& pairs) {
  const TokenRule& rule = a.rule.tokens;
  const bool has_codes = rule.own >= 0;
  __syncthreads();
  if (threadIdx.x < kKeys) {
    const int64_t last = a.kv_tokens - 1 - tile * kKeys;
    const int c = static_cast<int>(min(int64_t{threadIdx.x}, last));
    const int64_t token = KeyToken(a, task, tile, c);
    pairs.key_tokens[threadIdx.x] = static_cast<int>(token);
    if (has_codes) {
      pairs.own_codes[threadIdx.x] =
          rule.key_codes[rule.Codes(rule.own, task.batch, task.kv_head) + token];
    }
  }
  __syncthreads();
  for (int r = threadIdx.x; rule.hides() && r < kRows; r += kThreads) {
    const int token = pairs.query_tokens[r];
    const int code =
        has_codes ? rule.query_codes[rule.Codes(rule.own, task.batch, task.head) + token] : 0;
    uint64_t visible = 0;
    for (int c = 0; c < kKeys; ++c) {
      const bool sees =
          (!rule.causal || pairs.key_tokens[c] <= token) &&
          (!has_codes || HasPair(code, pairs.own_codes[c])) &&
          (rule.mask.data == nullptr || rule.mask.Shows(task.batch, token, pairs.key_tokens[c]));
      visible |= static_cast<uint64_t>(sees) << c;
    }
    pairs.visible[r] = visible;
  }
  for (int n = threadIdx.x; rule.counts && n < kRows * kKeys; n += kThreads) {
    const int row = n / kKeys, column = n % kKeys;
    const int32_t* of_query =
        rule.query_codes + rule.Codes(0, task.batch, task.head) + pairs.query_tokens[row];
    const int32_t* of_key =
        rule.key_codes + rule.Codes(0, task.batch, task.kv_head) + pairs.key_tokens[column];
    int count = 0;
    for (int slot = 0; slot < rule.slots; ++slot) {
      count += HasPair(of_query[slot * rule.slot_stride], of_key[slot * rule.slot_stride]);
    }
    pairs.counts[row][column] = static_cast<unsigned char>(count);
  }
  __syncthreads();
}

// Returns the rule's term for the score of query `row` of the block and key `column` of the tile.
template <int kRows>
__device__ inline float PairTerm(const TokenRule& rule, const TokenPairs<kRows>& pairs, int row,
                                 int column) {
  const bool same = pairs.query_tokens[row] == pairs.key_tokens[column];
  const float term = same ? rule.self_bias : 0;
  return rule.counts ? term - pairs.logs[pairs.counts[row][column]] : term;
}

// Returns the floats of `partial` that belong to a row of a split.
__device__ inline float* PartialRow(const FlashArguments& a, int64_t split, int64_t b, int64_t h,
                                    int64_t n) {
  const int64_t row = ((split * a.batch + b) * a.query_heads + h) * a.query_tokens + n;
  return a.partial + row * (a.value_dim + 2);
}
// Returns the floats of row i of a task, which is token `token` of `out`.
__device__ inline float* PartialRow(const FlashArguments& a, const FlashTask& task, int64_t i,
                                    int64_t token) {
  return PartialRow(a, a.first_split + task.split, task.batch, task.head,
                    a.partial_by_token ? token : i);
}

// The destination of a finished row: `out`, where it is divided by the sum of its weights, and
// `out_rest`, or `partial`, undivided.
class OutputRow {
 public:
  __device__ OutputRow(const FlashArguments& a, const FlashTask& task, int64_t i, int64_t token,
                       float sum) {
    channels_ = a.value_dim;
    if (a.partial != nullptr) {
      data_ = PartialRow(a, task, i, token);
      return;
    }
    factor_ = sum == 0 ? 0 : 1 / sum;  // no key: the output is 0 and stays 0
    data_ = a.out.data;
    offset_ = task.batch * a.out.strides[0] + task.head * a.out.strides[1] +
              OutRow(a, i, token) * a.out.strides[2];
    stride_ = a.out.strides[3];
    element_ = a.out.element;
    if (a.out_rest.data == nullptr) return;
    rest_ = a.out_rest.data;
    rest_offset_ = Offset(a.out_rest, task.batch, task.head, OutRow(a, i, token), 0);
    rest_stride_ = a.out_rest.strides[3];
  }
  // Stores channels `first` to first + kCount - 1, as far as they exist. `first` is a multiple of
  // kCount.
  template <int kCount>
  __device__ void Store(int first, const float (&values)[kCount]) const {
    float* row = static_cast<float*>(data_) + offset_ + first;
    if (kCount == 4 && element_ == Element::kF32 && stride_ == 1 && first + 4 <= channels_ &&
        reinterpret_cast<uintptr_t>(row) % sizeof(float4) == 0) {
      *reinterpret_cast<float4*>(row) =
          make_float4(values[0] * factor_, values[1] * factor_, values[kCount - 2] * factor_,
                      values[kCount - 1] * factor_);
      return;
    }
#pragma unroll 1
    for (int n = 0; n < kCount && first + n < channels_; ++n) {
      float value = values[0];
#pragma unroll
      for (int m = 1; m < kCount; ++m) value = n == m ? values[m] : value;
      const int64_t to = offset_ + (first + n) * stride_;
      StoreElement(data_, element_, to, value * factor_);
      if (rest_ == nullptr) continue;
      StoreElement(rest_, element_, rest_offset_ + (first + n) * rest_stride_,
                   fmaf(value, factor_, -LoadElement(data_, element_, to)));
    }
  }

 private:
  void* data_;
  int64_t offset_ = 0;
  int64_t stride_ = 1;
  void* rest_ = nullptr;
  int64_t rest_offset_ = 0;
  int64_t rest_stride_ = 1;
  float factor_ = 1;
  int channels_;
  Element element_ = Element::kF32;
};

// Writes the maximum of a row's scores in nats and the sum of its weights. One thread a row calls
// it.
__device__ inline void StoreSums(const FlashArguments& a, const FlashTask& task, int64_t i,
                                 int64_t token, float maximum, float sum) {
  if (a.partial != nullptr) {
    float* row = PartialRow(a, task, i, token);
    row[a.value_dim] = maximum;
    row[a.value_dim + 1] = sum;
  } else if (a.log_sum_exp != nullptr) {
    const int64_t row = task.batch * a.log_sum_exp_strides[0] +
                        task.head * a.log_sum_exp_strides[1] +
                        OutRow(a, i, token) * a.log_sum_exp_strides[2];
    const float log_of_sum = logf(sum), whole = maximum + log_of_sum;
    a.log_sum_exp[row] = sum == 0 ? -INFINITY : whole;
    if (a.log_sum_exp_rest == nullptr) return;
    // Knuth's sum of two numbers gives the error of its rounding, whichever of the two is larger.
    const float part = whole - maximum;
    a.log_sum_exp_rest[row] = sum == 0 ? 0 : (maximum - (whole - part)) + (log_of_sum - part);
  }
}

// Returns exp(x) for x <= 0, or NaN for NaN.
__device__ inline float ExpOf(float x) { return exp2f(x * 1.44269504f); }

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_TILE_CUH_
