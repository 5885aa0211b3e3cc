// What the forward and the backward pass of engine flash compute alike on the CPU, bit for bit: the
// scores of a tile of queries against tiles of keys, and which of them count.
//
// This is internal to the engine; core/flash/flash.h has the formula.
#ifndef TFB_CORE_FLASH_FLASH_SCORES_H_
#define TFB_CORE_FLASH_FLASH_SCORES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "core/cpu/kernels.h"
#include "core/flash/flash.h"
#include "core/flash/rows.h"
#include "core/workspace.h"

namespace tfb {

class FlashScores {
 public:
  static constexpr int64_t kTile = kFlashTile;
  static constexpr int64_t kChunkTiles = 8;  // a chunk's tiles at most
  static constexpr int64_t kGroupRows = 16;
  static constexpr int64_t kScoreRow =
      kChunkTiles * kTile + 16;  // not a multiple of 4 KiB, so that rows differ in cache set
  static constexpr int64_t kPositionRow =
      (kChunkTiles + 2) * kTile + 16;  // offsets of a chunk in any alignment

  // One tile of queries of a head: row r is place Place(r) of the tile.
  struct Task {
    int64_t batch;
    int64_t head;
    int64_t first_query;
    int64_t rows;
    int64_t slot;  // where the caller has the keys and values of the head
    // Whether the order names no token for a place before that of the last row.
    bool gaps;
    uint8_t places[kTile];  // the places of the rows, ascending; set where there are gaps

    int64_t Place(int64_t r) const { return gaps ? places[r] : r; }
  };

  // The queries or keys of a tile, where the call has a token rule.
  struct TokenSide {
    int32_t tokens[kTile];
    int32_t codes[kMaxTokenSlots][kTile];
  };
  static_assert(kTile == kPairColumns, "");

  struct Sizes {
    int64_t query_row;   // floats of a query's row, PackedKeyDepth(head_dim) at least
    bool has_positions;  // whether the rule has relative keys
  };
  // The scratch memory of one thread for one task.
  struct Scratch {
    float* content_query;      // [64][query_row], with the scale folded in
    float* position_query;     // [64][query_row]
    float* scores;             // [64][kScoreRow]
    float* positions;          // [64][kPositionRow]
    float (*label_scores)[2];  // [64] against the label keys
    int32_t* query_ids;        // [64]
    float* span;               // [64] z of SoftSpan
    uint64_t* visible;         // [kChunkTiles][64]: the mask words of the tiles that are not whole
    bool queries_finite;       // true only where all of content_query are
    TokenSide* queries = nullptr;  // set where the call has a token rule
  };
  static Scratch LayOut(const Sizes& sizes, Workspace& workspace);

  // Columns begin to end - 1 of a tile, in multiples of a vector.
  struct Extent {
    int64_t begin;
    int64_t end;  // 0: none
  };
  // A key tile and the keys of it that the task's queries see. Products of a tile that is not whole
  // are cut, for 16 rows at a time, to the columns that any of those rows sees: a triangle costs
  // 5/8 of a square, one column 1/4. A tile takes as many columns of the chunk's scores as any row
  // sees, so that a few keys of a tile do not cost a softmax over all 64; it takes all 64 where the
  // rule reads offsets.
  struct Tile {
    int64_t index;
    bool whole;               // every query sees every key
    const uint64_t* visible;  // [64] words, bit c for key c; set where the tile is not whole
    Extent seen;              // the columns that the chunk's scores contain
    // The column of key 0 in the chunk's scores, even where `seen` leaves key 0 out.
    int64_t column;
    Extent extents[kTile / kGroupRows];
    bool all_seen[kTile / kGroupRows];  // each of the rows sees all of `seen`
  };
  using Tiles = absl::Span<const Tile>;  // a chunk

  FlashScores(const Problem& problem, const FlashCall& call, const Sizes& sizes);

  Task MakeTask(int64_t b, int64_t h, int64_t query_tile, int64_t slot) const;
  // Loads the task's queries as the token rule reads them.
  void LoadSide(const Task& task, TokenSide* queries) const;
  // Loads query rows as float with the scale folded in, so that products with keys are scores.
  void LoadQueries(const Task& task, Scratch& scratch) const;

  // Loads query rows plus the head's row of `bias`, [query_heads][head_dim] or null, times the scale.
  // Returns true only where all of them are finite.
  bool LoadQueryRows(const Task& task, const float* bias, float* to) const;
  // Loads the ids of a tile's keys; those of keys that do not exist stay as they are.
  void LoadKeyIds(const Task& task, int64_t tile, int32_t* ids) const;

  // Returns how far key j is behind row r.
  float DistanceOf(const Task& task, int64_t r, int64_t j) const {
    return static_cast<float>(task.first_query + task.Place(r) + problem_.causal_offset() - j);
  }
  // Returns the first key, counted from key `from`, that row r gives a weight above 0.
  float FirstInSpan(const Task& task, int64_t r, int64_t from, const Scratch& scratch) const {
    return std::floor(DistanceOf(task, r, from) - scratch.span[r] - call_.rule.soft_span.ramp) + 1;
  }
  // Tells whether any row of the task gives any key of tile t a weight above 0.
  bool WithinSpan(const Task& task, int64_t t, const Scratch& scratch) const;
  // Makes key tile `index`, which the schedule shows by `mask`, or wholly where that is null. Its
  // mask words are written to `visible`. Where no row sees any key, `seen` is empty.
  Tile MakeTile(const Task& task, int64_t index, const uint64_t* mask, uint64_t* visible,
                const Scratch& scratch) const;
  // Computes the scores of a chunk. keys_of(tile) are the keys of a tile, [key_depth][64]. Scores of
  // hidden pairs are -inf in the columns that tiles see; other columns hold anything. Where the rule
  // has a ReLU, the scores before it are copied to `products`, [64][kScoreRow], unless that is null.
  void ComputeScores(const Task& task, Tiles chunk,
                     absl::FunctionRef<const float*(int64_t tile)> keys_of, Scratch& scratch,
                     float* products = nullptr) const;

  // Calls body(first_row, rows, extent) once for the whole tile, or for each group of rows that
  // sees any of it.
  template <class Body>
  void ForEachPart(const Task& task, const Tile& tile, const Body& body) const {
    if (tile.whole) return body(int64_t{0}, task.rows, Extent{0, kTile});
    for (int64_t first = 0; first < task.rows; first += kGroupRows) {
      const Extent& extent = tile.extents[first / kGroupRows];
      if (extent.end > extent.begin) {
        body(first, std::min(kGroupRows, task.rows - first), extent);
      }
    }
  }

  static bool AllWhole(Tiles chunk) {
    return std::all_of(chunk.begin(), chunk.end(), [](const Tile& tile) { return tile.whole; });
  }
  // Returns the columns of a chunk whose tiles are whole; others have fewer.
  static Extent WholeExtent(Tiles chunk) { return {0, static_cast<int64_t>(chunk.size()) * kTile}; }
  // Returns the extent from the first column of the chunk that the group sees to the last.
  static Extent ExtentOf(Tiles chunk, int64_t group);

  int64_t KvHead(const Task& task) const { return task.head / problem_.group(); }
  bool IsToken(int64_t b, int64_t kv_head, int64_t j) const;
  int64_t QueryToken(const Task& task, int64_t r) const {
    return call_.query_order(task.batch, task.head, task.first_query + task.Place(r));
  }

 protected:
  static void PrefetchBytes(const void* begin, int64_t bytes) {
    constexpr int64_t kLine = 64;
    for (int64_t n = 0; n < bytes; n += kLine) {
      __builtin_prefetch(static_cast<const std::byte*>(begin) + n, 0, 2);
    }
  }
  static void PrefetchRow(const ConstTensorView& view, int64_t b, int64_t head, int64_t token) {
    const int64_t element = SizeOf(view.dtype), offset = view.Offset(b, head, token);
    PrefetchBytes(static_cast<const std::byte*>(view.data) + offset * element,
                  view.dim(3) * view.stride(3) * element);
  }
  static void PrefetchRows(const ConstTensorView& view, int64_t b, int64_t head, int64_t first,
                           int64_t rows) {
    if (view.empty()) return;
    for (int64_t r = 0; r < rows; ++r) PrefetchRow(view, b, head, first + r);
  }
  static Extent ExtentOf(uint64_t keys) {
    if (keys == 0) return {0, 0};
    return {__builtin_ctzll(keys) / kColumnQuantum * kColumnQuantum,
            RoundUp(kTile - __builtin_clzll(keys), kColumnQuantum)};
  }

  // Loads key j of the task's head as floats; does nothing where j is no token.
  void LoadTokenRow(const ConstTensorView& view, const Task& task, int64_t j, int64_t channels,
                    float* to) const;

  const Problem& problem_;
  const FlashCall& call_;
  const CpuKernels& kernels_;
  const int64_t key_depth_;
  const int64_t query_row_;
  const float scale_;
  bool reads_offsets_;  // the rule reads tables along consecutive keys, so a gap must end a chunk
  bool queries_are_plain_;  // rows of q are adjacent floats

 private:
  // Slots begin to end - 1 of the token rule.
  struct Slots {
    int64_t begin;
    int64_t end;
  };
  // What is added to scores; nothing where first is null.
  struct Addend {
    const float* first = nullptr;  // what is added in row 0, column 0
    int64_t row = 0;               // distance from a row to the next

    const float* At(int64_t r, int64_t column) const {
      return first == nullptr ? nullptr : first + r * row + column;
    }
  };

  // Makes rows only for the places for which the order names tokens.
  void LeaveOut(Task* task) const;
  // Computes the scores of the queries in `rows` against the label keys. Each pair has one of them.
  void ScoreLabels(const Task& task, const float* rows, Scratch& scratch) const;
  // Loads the codes of the side's tokens in some slots.
  void LoadCodes(const Task& task, int64_t head, int64_t rows, const int32_t* codes, Slots slots,
                 TokenSide* side) const;
  void LoadKeySide(const Task& task, int64_t tile, Slots slots, TokenSide* side) const;
  // Clears the bits of pairs that the token rule hides. Returns false where it hides all pairs,
  // which the ranges of sorted codes mostly show without a look at pairs.
  bool HidePairs(const Task& task, int64_t tile, const TokenSide& queries, uint64_t* visible) const;
  // Clears the bits of pairs that the token rule's mask hides.
  void HideMaskedPairs(const Task& task, const TokenSide& queries, const TokenSide& keys,
                       uint64_t* visible) const;
  void AdjustPairs(const Task& task, const Tile& tile, Scratch& scratch) const;
  // Returns the keys of a tile that row r gives a weight above 0: those from FirstInSpan on.
  uint64_t WithinSpanOf(const Task& task, int64_t r, int64_t tile, const Scratch& scratch) const;
  // Returns a word whose bit c says whether key c of the tile is a token: not padding, and not
  // beyond the sequence.
  uint64_t TokensOf(const Task& task, int64_t tile) const;

  // Hides keys where not all rows see every column that the tile has in the chunk's scores.
  void Hide(const Task& task, const Tile& tile, Scratch& scratch) const;
  void AddLabels(const Task& task, const Tile& tile, Scratch& scratch) const;
  // Calls a kernel that reads a table along offsets; `first` is the entry of place 0, column 0.
  template <class Kernel>
  void ApplyTable(const Task& task, const ScoreRows& scores, const float* first,
                  Kernel kernel) const;
  // Adds scores against the relative keys to rows that see different columns, 16 of them at a time.
  void AddPositions(const Task& task, Tiles chunk, int64_t first, Scratch& scratch) const;
  // Returns the scores against the relative keys of some rows, from column extent.begin on; place 0
  // has the offset `first_of_tile` at column 0. The result is valid until the next call.
  Addend PositionScores(const Task& task, int64_t row, int64_t rows, const Extent& extent,
                        int64_t first_of_tile, Scratch& scratch) const;
  // Computes the scores of some rows against the relative keys of blocks first_block to end_block - 1,
  // of 16 offsets each, into rows of `to` that lie kPositionRow apart.
  void MultiplyPositions(const Task& task, int64_t row, int64_t rows, int64_t first_block,
                         int64_t end_block, float* to, const Scratch& scratch) const;
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_SCORES_H_
