#include "core/flash/flash_scores.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/flash/rows.h"

namespace tfb {
namespace {

int64_t FloorDiv(int64_t value, int64_t divisor) {
  return (value >= 0 ? value : value - divisor + 1) / divisor;
}

}  // namespace

FlashScores::Scratch FlashScores::LayOut(const Sizes& sizes, Workspace& workspace) {
  Scratch scratch;
  scratch.content_query = workspace.Take<float>(kTile * sizes.query_row);
  scratch.position_query =
      sizes.has_positions ? workspace.Take<float>(kTile * sizes.query_row) : nullptr;
  scratch.scores = workspace.Take<float>(kTile * kScoreRow);
  scratch.positions = sizes.has_positions ? workspace.Take<float>(kTile * kPositionRow) : nullptr;
  scratch.label_scores = workspace.Take<float[2]>(kTile);
  scratch.query_ids = workspace.Take<int32_t>(kTile);
  scratch.span = workspace.Take<float>(kTile);
  scratch.visible = workspace.Take<uint64_t>(kChunkTiles * kTile);
  return scratch;
}

FlashScores::FlashScores(const Problem& problem, const FlashCall& call, const Sizes& sizes)
    : problem_(problem),
      call_(call),
      kernels_(BestCpuKernels()),
      key_depth_(PackedKeyDepth(problem.head_dim)),
      query_row_(sizes.query_row),
      scale_(static_cast<float>(ProductScale(problem, call.scale))) {
  const ScoreRule& rule = call.rule;
  reads_offsets_ = rule.relative_keys != nullptr || rule.relu_multiplier.values != nullptr ||
                   rule.bias.values != nullptr || rule.soft_span.span != nullptr;
  queries_are_plain_ = call.q.dtype == DType::kF32 && call.q.stride(3) == 1;
}

FlashScores::Task FlashScores::MakeTask(int64_t b, int64_t h, int64_t query_tile,
                                        int64_t slot) const {
  Task task;
  task.batch = b;
  task.head = h;
  task.first_query = query_tile * kTile;
  task.rows = std::min(kTile, problem_.query_tokens - task.first_query);
  task.slot = slot;
  task.gaps = false;
  if (call_.query_order.tokens != nullptr) LeaveOut(&task);
  return task;
}

void FlashScores::LoadSide(const Task& task, TokenSide* queries) const {
  const TokenRule& rule = call_.rule.tokens;
  if (!rule.acts()) return;
  for (int64_t r = 0; r < task.rows; ++r) {
    queries->tokens[r] = static_cast<int32_t>(QueryToken(task, r));
  }
  LoadCodes(task, task.head, task.rows, rule.query_codes, {0, rule.slots}, queries);
}

void FlashScores::LeaveOut(Task* task) const {
  int64_t rows = 0;
  for (int64_t place = 0; place < task->rows; ++place) {
    if (call_.query_order(task->batch, task->head, task->first_query + place) < 0) continue;
    task->places[rows++] = static_cast<uint8_t>(place);
  }
  task->rows = rows;
  task->gaps = rows > 0 && task->places[rows - 1] != rows - 1;
}

bool FlashScores::IsToken(int64_t b, int64_t kv_head, int64_t j) const {
  return j < problem_.kv_tokens &&
         (call_.key_mask.empty() ||
          *call_.key_mask.At<uint8_t>(b, call_.key_order(b, kv_head, j)) != 0);
}

bool FlashScores::LoadQueryRows(const Task& task, const float* bias, float* to) const {
  const int64_t channels = problem_.head_dim;
  const float* of_head = bias == nullptr ? nullptr : bias + task.head * channels;
  // Kernels read and write whole vectors.
  if (queries_are_plain_ && channels == query_row_ && channels % kColumnQuantum == 0 &&
      call_.query_order.tokens == nullptr) {
    return kernels_.load_scaled(
        {to, query_row_, task.rows, query_row_},
        {call_.q.At<float>(task.batch, task.head, task.first_query), call_.q.stride(2)}, of_head,
        scale_);
  }
  for (int64_t r = 0; r < task.rows; ++r) {
    const int64_t offset = call_.q.Offset(task.batch, task.head, QueryToken(task, r));
    float* row = to + r * query_row_;
    const float* query = row;
    if (queries_are_plain_) {
      query = static_cast<const float*>(call_.q.data) + offset;
    } else {
      LoadRow(call_.q, offset, call_.q.stride(3), channels, row);
    }
    if (of_head != nullptr) {
      for (int64_t c = 0; c < channels; ++c) row[c] = (query[c] + of_head[c]) * scale_;
    } else {
      for (int64_t c = 0; c < channels; ++c) row[c] = query[c] * scale_;
    }
    std::fill(row + channels, row + query_row_, 0.0f);
  }
  return false;
}

void FlashScores::LoadQueries(const Task& task, Scratch& scratch) const {
  const ScoreRule& rule = call_.rule;
  scratch.queries_finite = LoadQueryRows(task, rule.content_bias, scratch.content_query);
  if (rule.relative_keys != nullptr) {
    LoadQueryRows(task, rule.position_bias, scratch.position_query);
  }
  if (rule.label_keys.keys != nullptr) {
    float* rows = scratch.scores;  // the scores' memory, which is free here
    LoadQueryRows(task, rule.position_bias, rows);
    ScoreLabels(task, rows, scratch);
  }
  if (rule.soft_span.span == nullptr) return;
  for (int64_t r = 0; r < task.rows; ++r) {
    scratch.span[r] = rule.soft_span.Of(task.batch, task.head, task.first_query + task.Place(r));
  }
}

void FlashScores::LoadKeyIds(const Task& task, int64_t tile, int32_t* ids) const {
  const int64_t first = tile * kTile;
  for (int64_t c = 0; c < std::min(kTile, problem_.kv_tokens - first); ++c) {
    const int64_t token = call_.key_order(task.batch, KvHead(task), first + c);
    ids[c] = *call_.key_ids.At<int32_t>(task.batch, token);
  }
}

void FlashScores::ScoreLabels(const Task& task, const float* rows, Scratch& scratch) const {
  const LabelKeys& labels = call_.rule.label_keys;
  const int64_t channels = problem_.head_dim;
  for (int64_t label = 0; label < 2; ++label) {
    const float* key = labels.keys + (task.head % labels.heads * 2 + label) * channels;
    kernels_.matrix_vector(task.rows, channels, rows, query_row_, key,
                           scratch.label_scores[0] + label, 2, false);
    if (labels.biases == nullptr) continue;
    const float bias = scale_ * labels.biases[task.head % labels.heads * 2 + label];
    for (int64_t r = 0; r < task.rows; ++r) scratch.label_scores[r][label] += bias;
  }
  for (int64_t r = 0; r < task.rows; ++r) {
    scratch.query_ids[r] = *call_.query_ids.At<int32_t>(task.batch, QueryToken(task, r));
  }
}

bool FlashScores::WithinSpan(const Task& task, int64_t t, const Scratch& scratch) const {
  if (call_.rule.soft_span.span == nullptr) return true;
  for (int64_t r = 0; r < task.rows; ++r) {
    if (FirstInSpan(task, r, t * kTile, scratch) < static_cast<float>(kTile)) return true;
  }
  return false;
}

FlashScores::Tile FlashScores::MakeTile(const Task& task, int64_t index, const uint64_t* mask,
                                        uint64_t* visible, const Scratch& scratch) const {
  Tile tile{};
  tile.index = index;
  tile.visible = visible;
  bool in_span = true;
  for (int64_t r = 0; r < task.rows && call_.rule.soft_span.span != nullptr && in_span; ++r) {
    in_span = FirstInSpan(task, r, index * kTile, scratch) <= 0;
  }
  const bool all_tokens = call_.key_mask.empty() && (index + 1) * kTile <= problem_.kv_tokens;
  tile.whole = mask == nullptr && in_span && all_tokens && !call_.rule.tokens.hides();
  if (tile.whole) {
    tile.seen = {0, kTile};
    for (Extent& extent : tile.extents) extent = {0, kTile};
    return tile;
  }
  const uint64_t tokens = all_tokens ? ~uint64_t{0} : TokensOf(task, index);
  for (int64_t r = 0; r < task.rows; ++r) {
    visible[r] = tokens & (mask == nullptr ? ~uint64_t{0} : mask[task.Place(r)]);
    if (!in_span) visible[r] &= WithinSpanOf(task, r, index, scratch);
  }
  if (call_.rule.tokens.hides() && !HidePairs(task, index, *scratch.queries, visible)) return tile;
  uint64_t any_row = 0, all_rows[kTile / kGroupRows];
  for (int64_t g = 0; g * kGroupRows < task.rows; ++g) {
    uint64_t any = 0, all = ~uint64_t{0};
    const int64_t end = std::min(task.rows, (g + 1) * kGroupRows);
    for (int64_t r = g * kGroupRows; r < end; ++r) {
      any |= visible[r];
      all &= visible[r];
    }
    tile.extents[g] = ExtentOf(any);
    all_rows[g] = all;
    any_row |= any;
  }
  if (any_row == 0) return tile;
  tile.seen = reads_offsets_ ? Extent{0, kTile} : ExtentOf(any_row);
  const uint64_t seen = ~uint64_t{0} >> (kTile - tile.seen.end) & ~uint64_t{0} << tile.seen.begin;
  for (int64_t g = 0; g * kGroupRows < task.rows; ++g) {
    tile.all_seen[g] = (seen & ~all_rows[g]) == 0;
  }
  return tile;
}

void FlashScores::LoadCodes(const Task& task, int64_t head, int64_t rows, const int32_t* codes,
                            Slots slots, TokenSide* side) const {
  const TokenRule& rule = call_.rule.tokens;
  for (int64_t n = slots.begin; n < slots.end; ++n) {
    const int64_t offset = rule.Codes(n, task.batch, head);
    for (int64_t r = 0; r < rows; ++r) side->codes[n][r] = codes[offset + side->tokens[r]];
  }
}

void FlashScores::LoadKeySide(const Task& task, int64_t tile, Slots slots, TokenSide* side) const {
  const int64_t first = tile * kTile, keys = std::min(kTile, problem_.kv_tokens - first);
  for (int64_t r = 0; r < keys; ++r) {
    side->tokens[r] = static_cast<int32_t>(call_.key_order(task.batch, KvHead(task), first + r));
  }
  LoadCodes(task, KvHead(task), keys, call_.rule.tokens.key_codes, slots, side);
  for (int64_t r = keys; r < kTile; ++r) {  // repeats the last code: these keys are hidden anyway
    side->tokens[r] = side->tokens[keys - 1];
    for (int64_t n = slots.begin; n < slots.end; ++n) side->codes[n][r] = side->codes[n][keys - 1];
  }
}

bool FlashScores::HidePairs(const Task& task, int64_t tile, const TokenSide& queries,
                            uint64_t* visible) const {
  const TokenRule& rule = call_.rule.tokens;
  const Slots own = rule.own < 0 ? Slots{0, 0} : Slots{rule.own, rule.own + 1};
  TokenSide keys;
  LoadKeySide(task, tile, own, &keys);
  if (rule.causal && *std::min_element(keys.tokens, keys.tokens + kTile) >
                         *std::max_element(queries.tokens, queries.tokens + task.rows)) {
    return false;
  }
  TokenPairs pairs = {queries.tokens, keys.tokens, nullptr, nullptr, 0};
  if (rule.own >= 0) {
    pairs.row_codes = queries.codes[rule.own];
    pairs.column_codes = keys.codes[rule.own];
    pairs.slots = 1;
    const auto [low, high] = std::minmax_element(pairs.row_codes, pairs.row_codes + task.rows);
    const auto [first, last] = std::minmax_element(pairs.column_codes, pairs.column_codes + kTile);
    if (*high < *first || *low > *last + 1) return false;
  }
  kernels_.hide_pairs(task.rows, pairs, rule.causal, visible);
  if (rule.mask.data != nullptr) HideMaskedPairs(task, queries, keys, visible);
  return true;
}

void FlashScores::HideMaskedPairs(const Task& task, const TokenSide& queries, const TokenSide& keys,
                                  uint64_t* visible) const {
  const PairMask& mask = call_.rule.tokens.mask;
  for (int64_t r = 0; r < task.rows; ++r) {
    for (uint64_t rest = visible[r]; rest != 0; rest &= rest - 1) {
      const int c = __builtin_ctzll(rest);
      if (mask.Shows(task.batch, queries.tokens[r], keys.tokens[c])) continue;
      visible[r] &= ~(uint64_t{1} << c);
    }
  }
}

void FlashScores::AdjustPairs(const Task& task, const Tile& tile, Scratch& scratch) const {
  const TokenRule& rule = call_.rule.tokens;
  const Slots counted = {0, rule.counts ? rule.slots : 0};
  TokenSide keys;
  LoadKeySide(task, tile.index, counted, &keys);
  const TokenSide& queries = *scratch.queries;
  ForEachPart(task, tile, [&](int64_t row, int64_t rows, const Extent& extent) {
    const int64_t column = extent.begin;
    kernels_.adjust_pairs({scratch.scores + row * kScoreRow + tile.column + column, kScoreRow, rows,
                           extent.end - column},
                          {queries.tokens + row, keys.tokens + column, queries.codes[0] + row,
                           keys.codes[0] + column, counted.end},
                          rule.self_bias);
  });
}

uint64_t FlashScores::WithinSpanOf(const Task& task, int64_t r, int64_t tile,
                                   const Scratch& scratch) const {
  const float first = FirstInSpan(task, r, tile * kTile, scratch);
  if (first <= 0) return ~uint64_t{0};
  return first >= static_cast<float>(kTile) ? 0 : ~uint64_t{0} << static_cast<int64_t>(first);
}

uint64_t FlashScores::TokensOf(const Task& task, int64_t tile) const {
  const int64_t keys = std::min(kTile, problem_.kv_tokens - tile * kTile);
  const uint64_t exist = keys == kTile ? ~uint64_t{0} : (uint64_t{1} << keys) - 1;
  if (call_.key_mask.empty()) return exist;
  uint64_t tokens = 0;
  for (int64_t c = 0; c < keys; ++c) {
    tokens |= uint64_t{IsToken(task.batch, KvHead(task), tile * kTile + c)} << c;
  }
  return tokens;
}

void FlashScores::LoadTokenRow(const ConstTensorView& view, const Task& task, int64_t j,
                               int64_t channels, float* to) const {
  const int64_t h = KvHead(task);
  if (!IsToken(task.batch, h, j)) return;
  LoadRow(view, view.Offset(task.batch, h, call_.key_order(task.batch, h, j)), view.stride(3),
          channels, to);
}

FlashScores::Extent FlashScores::ExtentOf(Tiles chunk, int64_t group) {
  Extent all{};
  for (const Tile& tile : chunk) {
    const Extent& extent = tile.extents[group];
    if (extent.end == extent.begin) continue;
    if (all.end == all.begin) all.begin = tile.column + extent.begin;
    all.end = tile.column + extent.end;
  }
  return all;
}

void FlashScores::ComputeScores(const Task& task, Tiles chunk,
                                absl::FunctionRef<const float*(int64_t tile)> keys_of,
                                Scratch& scratch, float* products) const {
  const ScoreRule& rule = call_.rule;
  const ScoreRows scores{scratch.scores, kScoreRow, task.rows, WholeExtent(chunk).end};
  // Place 0 of the tile at column 0 has the offset `first`; one place further down it is one
  // less.
  const int64_t first = chunk[0].index * kTile - task.first_query - rule.query_position;
  const bool whole = AllWhole(chunk);
  // One term that depends on the distance is added where the products are still in registers.
  Addend term;
  const bool adds_positions = rule.relative_keys != nullptr && (!whole || task.gaps);
  const bool adds_bias =
      rule.bias.values != nullptr &&
      (rule.relative_keys != nullptr || rule.relu_multiplier.values != nullptr || task.gaps);
  if (rule.relative_keys != nullptr && !adds_positions) {
    term = PositionScores(task, 0, task.rows, WholeExtent(chunk), first, scratch);
  } else if (rule.bias.values != nullptr && !adds_bias) {
    term = {rule.bias.Of(task.head) + first, -1};
  }
  for (const Tile& tile : chunk) {
    const float* keys = keys_of(tile.index);
    ForEachPart(task, tile, [&](int64_t row, int64_t rows, const Extent& extent) {
      const int64_t column = tile.column + extent.begin;
      kernels_.gemm_plus(rows, extent.end - extent.begin, key_depth_,
                         scratch.content_query + row * query_row_, query_row_, 1,
                         keys + extent.begin, kTile, term.At(row, column), term.row,
                         scratch.scores + row * kScoreRow + column, kScoreRow, nullptr);
    });
  }
  if (adds_positions) AddPositions(task, chunk, first, scratch);
  if (rule.label_keys.keys != nullptr) {
    for (const Tile& tile : chunk) AddLabels(task, tile, scratch);
  }
  if (rule.relu_multiplier.values != nullptr) {
    for (int64_t r = 0; products != nullptr && r < task.rows; ++r) {
      std::copy_n(scores.scores + r * kScoreRow, scores.columns, products + r * kScoreRow);
    }
    ApplyTable(task, scores, rule.relu_multiplier.Of(task.head) + first, kernels_.relu_multiply);
  }
  if (adds_bias) ApplyTable(task, scores, rule.bias.Of(task.head) + first, kernels_.add);
  if (call_.rule.tokens.adjusts()) {
    for (const Tile& tile : chunk) AdjustPairs(task, tile, scratch);
  }
  // Hiding comes last, since it also overwrites the columns outside the extents, which hold
  // anything so far.
  for (const Tile& tile : chunk) {
    if (!tile.whole) Hide(task, tile, scratch);
  }
}

void FlashScores::Hide(const Task& task, const Tile& tile, Scratch& scratch) const {
  const auto [begin, end] = tile.seen;
  for (int64_t first = 0; first < task.rows; first += kGroupRows) {
    if (tile.all_seen[first / kGroupRows]) continue;
    kernels_.mask({scratch.scores + first * kScoreRow + tile.column + begin, kScoreRow,
                   std::min(kGroupRows, task.rows - first), end - begin},
                  tile.visible + first, begin);
  }
}

void FlashScores::AddLabels(const Task& task, const Tile& tile, Scratch& scratch) const {
  int32_t key_ids[kTile] = {};  // keys that do not exist may have any id
  LoadKeyIds(task, tile.index, key_ids);
  ForEachPart(task, tile, [&](int64_t row, int64_t rows, const Extent& extent) {
    const int64_t column = extent.begin;
    kernels_.add_by_label({scratch.scores + row * kScoreRow + tile.column + column, kScoreRow, rows,
                           extent.end - column},
                          scratch.query_ids + row, key_ids + column, scratch.label_scores + row);
  });
}

template <class Kernel>
void FlashScores::ApplyTable(const Task& task, const ScoreRows& scores, const float* first,
                             Kernel kernel) const {
  if (!task.gaps) return kernel(scores, first, -1);
  for (int64_t r = 0; r < task.rows; ++r) {
    kernel({scores.scores + r * scores.stride, scores.stride, 1, scores.columns},
           first - task.Place(r), 0);
  }
}

void FlashScores::AddPositions(const Task& task, Tiles chunk, int64_t first,
                               Scratch& scratch) const {
  for (int64_t row = 0; row < task.rows; row += kGroupRows) {
    const int64_t rows = std::min(kGroupRows, task.rows - row);
    const Extent extent = ExtentOf(chunk, row / kGroupRows);
    if (extent.end == extent.begin) continue;
    const Addend positions = PositionScores(task, row, rows, extent, first, scratch);
    if (positions.first == nullptr) continue;
    const int64_t columns = extent.end - extent.begin;
    float* scores = scratch.scores + row * kScoreRow + extent.begin;
    if (!task.gaps) {
      kernels_.add({scores, kScoreRow, rows, columns}, positions.first, positions.row);
      continue;
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t earlier = task.Place(row + r) - task.Place(row);
      kernels_.add({scores + r * kScoreRow, kScoreRow, 1, columns},
                   positions.first + r * kPositionRow - earlier, 0);
    }
  }
}

FlashScores::Addend FlashScores::PositionScores(const Task& task, int64_t row, int64_t rows,
                                                const Extent& extent, int64_t first_of_tile,
                                                Scratch& scratch) const {
  const RelativeKeys& keys = *call_.rule.relative_keys;
  const int64_t first = first_of_tile - task.Place(row);
  const int64_t lowest = first_of_tile + extent.begin - task.Place(row + rows - 1);
  const int64_t highest = first + extent.end - 1;
  if (highest < keys.low() || lowest > keys.high()) return {};  // zeros
  constexpr int64_t kBlock = RelativeKeys::kBlock;
  const int64_t first_block = FloorDiv(lowest, kBlock);
  // A few rows at a time: together they need hardly more offsets than one of them.
  for (int64_t r = 0; r < rows; r += kGroupRows) {
    const int64_t count = std::min(kGroupRows, rows - r);
    const int64_t begin =
        FloorDiv(first_of_tile + extent.begin - task.Place(row + r + count - 1), kBlock);
    const int64_t end = FloorDiv(first_of_tile + extent.end - 1 - task.Place(row + r), kBlock) + 1;
    MultiplyPositions(task, row + r, count, begin, end,
                      scratch.positions + r * kPositionRow + (begin - first_block) * kBlock,
                      scratch);
  }
  // The scores of each further place begin one column earlier.
  return {scratch.positions + (first + extent.begin - first_block * kBlock), kPositionRow - 1};
}

void FlashScores::MultiplyPositions(const Task& task, int64_t row, int64_t rows,
                                    int64_t first_block, int64_t end_block, float* to,
                                    const Scratch& scratch) const {
  const RelativeKeys& keys = *call_.rule.relative_keys;
  constexpr int64_t kBlock = RelativeKeys::kBlock, kOfPanel = kTile / kBlock;
  for (int64_t block = first_block, end; block < end_block; block = end) {
    const int64_t p = FloorDiv(block, kOfPanel);
    const float* panel = keys.Panel(task.head, p);
    float* columns = to + (block - first_block) * kBlock;
    end = block + 1;
    if (panel == nullptr || (block > first_block && keys.Repeats(task.head, block))) {
      for (int64_t r = 0; r < rows; ++r, columns += kPositionRow) {
        std::fill_n(columns, kBlock, panel == nullptr ? 0.0f : columns[-1]);
      }
      continue;
    }
    while (end < std::min(end_block, (p + 1) * kOfPanel) && !keys.Repeats(task.head, end)) ++end;
    kernels_.gemm(rows, (end - block) * kBlock, problem_.head_dim,
                  scratch.position_query + row * query_row_, query_row_, 1,
                  panel + (block - p * kOfPanel) * kBlock, kTile, columns, kPositionRow, false);
  }
}

}  // namespace tfb
