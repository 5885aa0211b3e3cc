#include "core/search/group_search.h"

#include <cmath>
#include <cstring>

#include "core/flash/rows.h"

namespace tfb {
namespace {

constexpr int64_t kPanel = 64;   // queries that are packed together
constexpr int64_t kBlock = 96;   // keys: 16 register tiles of 6; 96 x 64 scores are 24 KiB
constexpr int64_t kDepth = 64;   // channels: 64 x 64 of a panel are 16 KiB, a third of L1
constexpr int64_t kSlack = 128;  // candidates beyond the hits, at the least
constexpr int64_t kSpan = 24;    // entries whose second-best scores share one number
constexpr int64_t kGroup = 4;    // entries for which a part keeps only the largest score
constexpr int64_t kMaxPart = 32768;
// Groups for each hit, among which the k-th largest score bounds a part.
constexpr int64_t kGroupsOfHit = 4;
constexpr int64_t kPartOfHit = 16;  // entries of a part for each hit, at the least
static_assert(kBlock % kSpan == 0 && kSpan % kGroup == 0, "a block has whole spans and groups");
// best_of_four's bits change a score by at most this share of (|q| + |e|)^2: 3 units in the last
// place of at most half of it.
constexpr double kTagError = 3 * 0x1p-24;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr SearchHit kNoHit = {-std::numeric_limits<double>::infinity(), -1};

// Maps floats, which are not NaN, to integers in the same order.
int32_t Ordered(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits ^ (bits >> 31 & 0x7FFFFFFF);
}
float FromOrdered(int32_t order) {
  const int32_t bits = order ^ (order >> 31 & 0x7FFFFFFF);
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Returns a bound that at least `wanted` numbers reach, and at most `wanted + slack` where equal
// numbers allow it.
int32_t BoundOfLargest(const int32_t* numbers, int64_t count, int64_t wanted, int64_t slack) {
  int64_t low = std::numeric_limits<int32_t>::max(), high = std::numeric_limits<int32_t>::min();
  for (int64_t i = 0; i < count; ++i) low = std::min<int64_t>(low, numbers[i]);
  for (int64_t i = 0; i < count; ++i) high = std::max<int64_t>(high, numbers[i]);
  int64_t reach = count;  // low
  while (low < high && reach > wanted + slack) {
    const int64_t middle = low + (high - low) / 2 + 1;
    const auto bound = static_cast<int32_t>(middle);
    int32_t reach_middle = 0;  // an integer of the numbers' width, so that the loop vectorizes
    for (int64_t i = 0; i < count; ++i) reach_middle += numbers[i] >= bound;
    if (reach_middle >= wanted) {
      low = middle;
      reach = reach_middle;
    } else {
      high = middle - 1;
    }
  }
  return static_cast<int32_t>(low);
}

// Returns which entry of its group the best is.
int64_t PlaceInGroup(float best) {
  uint32_t bits;
  std::memcpy(&bits, &best, sizeof(bits));
  return bits % kGroup;
}

// Returns `count` entries of the run from the n-th on, or those that remain.
EntryRun PieceOf(const EntryRun& run, int64_t n, int64_t count) {
  return {run.slot + n * run.step, run.age + n * run.step, run.step,
          std::min(count, run.count - n)};
}

}  // namespace

int64_t CandidateCapacity(int64_t hits, int64_t slots) {
  return RoundUp(std::min(hits + std::max(hits, kSlack), slots), 16);
}

int64_t PartEntries(int64_t hits, int64_t slots) {
  const int64_t least = kPartOfHit * hits;
  if (slots < least || least > kMaxPart) return 0;
  return RoundUp(std::min(std::max<int64_t>(kMaxPart / 4, 2 * least), slots), kSpan);
}

GroupScratch LayOut(const GroupSizes& sizes, Workspace& workspace) {
  const int64_t depth = RoundUp(sizes.dim, 4), candidates = sizes.queries * sizes.capacity;
  GroupScratch s = {};
  s.queries = workspace.Take<float>(sizes.queries * depth);
  s.query_norms = workspace.Take<double>(sizes.queries);
  s.panels = workspace.Take<float>(sizes.panels ? sizes.queries * depth : 0);
  s.lower = workspace.Take<double>(sizes.queries);
  s.bounds = workspace.Take<float>(sizes.queries);
  s.counts = workspace.Take<int32_t>(sizes.queries);
  s.scores = workspace.Take<float>(candidates);
  s.ages = workspace.Take<int32_t>(candidates);
  s.keys = workspace.Take<float>(kBlock * depth);
  s.key = workspace.Take<float>(depth);
  s.products = workspace.Take<float>(kBlock * kPanel);
  s.half_norms = workspace.Take<float>(std::max(kBlock, sizes.part));
  s.dots = workspace.Take<float>(kBlock);
  s.squares = workspace.Take<float>(kBlock);
  s.places = workspace.Take<int32_t>(kBlock * kPanel);
  s.maxima = workspace.Take<float>(sizes.queries * (sizes.part / kGroup));
  s.seconds = workspace.Take<float>(sizes.queries * (sizes.part / kSpan));
  s.coarse = workspace.Take<float>(kPanel * (sizes.part / kGroup));
  s.zeros = workspace.Take<float>(sizes.part / kGroup);
  s.exact = workspace.Take<double>(sizes.capacity);
  s.slots = workspace.Take<int32_t>(sizes.capacity);
  s.order = workspace.Take<int32_t>(sizes.capacity);
  s.hits = workspace.Take<SearchHit>(sizes.capacity);
  return s;
}

GroupSearch::GroupSearch(const SearchCall& call, const GroupSizes& sizes,
                         const GroupScratch& scratch, int64_t head, int64_t first, int64_t count)
    : call_(call),
      sizes_(sizes),
      s_(scratch),
      key_head_(head / (call.queries.dim(0) / call.keys.dim(0))),
      count_(count),
      dim_(call.keys.dim(2)),
      depth_(RoundUp(dim_, 4)),
      distance_(call.metric == SearchMetric::kSquaredDistance),
      kernels_(BestCpuKernels()) {
  if (call_.keys.dtype == DType::kF32) float_keys_ = call_.keys.At<float>(key_head_);
  LoadQueries(head, first);
  std::fill_n(s_.zeros, sizes_.part / kGroup, 0.0f);
}

void GroupSearch::Begin() {
  max_square_ = 0;
  max_norm_ = 0;
  for (int64_t q = 0; q < count_; ++q) {
    s_.counts[q] = 0;
    s_.lower[q] = -std::numeric_limits<double>::infinity();
    UpdateBound(q);
  }
}

void GroupSearch::LoadQueries(int64_t head, int64_t first) {
  const int64_t padded = RoundUp(count_, kPanel);
  std::fill_n(s_.queries, padded * depth_, 0.0f);
  for (int64_t q = 0; q < padded; ++q) {
    s_.bounds[q] = kInfinity;
    s_.query_norms[q] = kInfinity;
    if (q >= count_) continue;
    float* row = s_.queries + q * depth_;
    LoadRow(call_.queries, call_.queries.Offset(head, first + q), call_.queries.stride(2), dim_,
            row);
    const double square = SquaredNorm(row);
    if (square <= kMaxSquaredNorm) {
      s_.query_norms[q] = std::sqrt(square);
    } else {
      std::fill_n(row, dim_, 0.0f);
    }
  }
  for (int64_t p = 0; sizes_.panels && p < padded; p += kPanel) {
    kernels_.transpose64(s_.queries + p * depth_, depth_, depth_, s_.panels + p * depth_);
  }
}

void GroupSearch::LoadKey(int64_t slot, float* to) const {
  LoadRow(call_.keys, call_.keys.Offset(key_head_, slot), call_.keys.stride(2), dim_, to);
}

double GroupSearch::SquaredNorm(const float* row) const {
  double square;
  kernels_.exact_scores(/*distance=*/false, {row, dim_, nullptr, 1, dim_}, row, &square);
  return square;
}

// ---- Bounds ----

// Returns the bound of the error of s.
double GroupSearch::Error(int64_t q) const {
  const double norms = s_.query_norms[q] + max_norm_;
  return (ScoreError(dim_) + kTagError) * norms * norms + kTinyScoreError;
}

// Returns s as it would be without error.
float GroupSearch::ScoreOf(int64_t q, double exact) const {
  if (!distance_) return static_cast<float>(exact);
  return static_cast<float>((s_.query_norms[q] * s_.query_norms[q] + exact) / 2);
}

void GroupSearch::UpdateBound(int64_t q) {
  const bool exists = s_.query_norms[q] < kInfinity;
  const double bound = std::max<double>(s_.lower[q] - Error(q), kLowest);
  s_.bounds[q] = exists ? static_cast<float>(bound) : kInfinity;
}

void GroupSearch::RaiseLower(int64_t q, double lower) {
  s_.lower[q] = std::max(s_.lower[q], lower);
  UpdateBound(q);
}

// ---- Scanning ----

void GroupSearch::Scan(const EntryRun& run) {
  const int64_t size = sizes_.part > 0 ? sizes_.part : run.count;
  for (int64_t begin = 0; begin < run.count; begin += size) {
    const EntryRun part = PieceOf(run, begin, size);
    if (sizes_.part > 0 && part.count >= kPartOfHit * sizes_.hits) {
      ScanPart(part);
      continue;
    }
    for (int64_t n = 0; n < part.count; n += kBlock) {
      const EntryRun block = PieceOf(part, n, kBlock);
      ScanBlock(block, KeysOf(block));
    }
  }
}

// Returns the keys of at most 96 entries: in place, or converted.
IndexedRows GroupSearch::KeysOf(const EntryRun& block) const {
  if (float_keys_ != nullptr) {
    return {float_keys_ + block.slot * call_.keys.stride(1), block.step * call_.keys.stride(1),
            nullptr, block.count, dim_};
  }
  for (int64_t r = 0; r < block.count; ++r) {
    LoadKey(block.slot + r * block.step, s_.keys + r * depth_);
  }
  return {s_.keys, depth_, nullptr, block.count, dim_};
}

// Computes the products of keys with a panel of queries, without half the keys' norms, in
// s_.products.
ScoreRows GroupSearch::Multiply(const IndexedRows& keys, int64_t panel) {
  const int64_t columns = RoundUp(std::min(kPanel, count_ - panel), kColumnQuantum);
  for (int64_t c = 0; c < dim_; c += kDepth) {
    kernels_.gemm(keys.count, columns, std::min(kDepth, dim_ - c), keys.rows + c, keys.stride, 1,
                  s_.panels + panel * depth_ + c * kPanel, kPanel, s_.products, kPanel, c > 0);
  }
  return {s_.products, kPanel, keys.count, columns};
}

void GroupSearch::ScanBlock(const EntryRun& block, const IndexedRows& keys) {
  const auto age = [&block](int64_t r) { return block.age + r * block.step; };
  if (!sizes_.panels) {
    for (int64_t q = 0; q < count_; ++q) ScanWith(q, keys, /*measure=*/q == 0, age);
    return;
  }
  kernels_.dots(keys, s_.queries, s_.dots, s_.squares);
  MeasureKeys(keys, s_.half_norms);
  for (int64_t p = 0; p < count_; p += kPanel) {
    const int64_t reached =
        kernels_.reaching(Multiply(keys, p), s_.half_norms, s_.bounds + p, s_.places);
    for (int64_t n = 0; n < reached; ++n) {
      const int64_t r = s_.places[n] / kPanel, q = p + s_.places[n] % kPanel;
      Add(q, s_.products[s_.places[n]] - s_.half_norms[r], age(r));
    }
  }
}

// Scans many entries at once. Most scores are far below the k-th best, so that at first only the
// largest of each group of a few is kept. The k-th largest of some hundred such maxima is a bound
// that k entries reach and few others do; only the groups that reach it are looked at again.
void GroupSearch::ScanPart(const EntryRun& part) {
  for (int64_t n = 0; n < part.count; n += kBlock) {
    const IndexedRows keys = KeysOf(PieceOf(part, n, kBlock));
    kernels_.dots(keys, s_.queries, s_.dots, s_.squares);
    MeasureKeys(keys, s_.half_norms + n);
    for (int64_t p = 0; p < count_; p += kPanel) {
      ScoreRows span = Multiply(keys, p);
      for (int64_t r = 0; r < keys.count; r += kSpan) {
        span.scores = s_.products + r * kPanel;
        span.rows = std::min(kSpan, keys.count - r);
        kernels_.best_of_four(span, s_.half_norms + n + r,
                              MaximaOf(p, 0).scores + (n + r) / kGroup * kPanel,
                              SecondsOf(p, 0).scores + (n + r) / kSpan * kPanel);
      }
    }
  }
  const int64_t groups = CeilDiv(part.count, kGroup), spans = CeilDiv(part.count, kSpan);
  for (int64_t p = 0; p < count_; p += kPanel) {
    RaiseBounds(p, groups);
    AddBest(part, p, groups);
    AddSeconds(part, p, spans);
  }
  for (int64_t q = 0; q < count_; ++q) {
    if (s_.counts[q] > sizes_.hits + kSlack / 4) Shrink(q, sizes_.hits / 16);
  }
}

// Returns the maxima that ScanPart keeps of a panel's scores: a row for each group.
ScoreRows GroupSearch::MaximaOf(int64_t panel, int64_t groups) const {
  const int64_t columns = RoundUp(std::min(kPanel, count_ - panel), kColumnQuantum);
  return {s_.maxima + panel * (sizes_.part / kGroup), kPanel, groups, columns};
}

ScoreRows GroupSearch::SecondsOf(int64_t panel, int64_t spans) const {
  ScoreRows seconds = MaximaOf(panel, spans);
  seconds.scores = s_.seconds + panel * (sizes_.part / kSpan);
  return seconds;
}

void GroupSearch::RaiseBounds(int64_t panel, int64_t groups) {
  ScoreRows maxima = MaximaOf(panel, groups);
  int64_t together = 1;
  while (groups / (2 * together) >= kGroupsOfHit * sizes_.hits) together *= 2;
  if (together > 1) {
    kernels_.group_maxima(maxima, s_.zeros, together, s_.coarse);
    maxima.scores = s_.coarse;
    maxima.rows = CeilDiv(groups, together);
  }
  float reached[kPanel];
  kernels_.column_bounds(maxima, sizes_.hits, reached);
  for (int64_t q = panel; q < std::min(panel + kPanel, count_); ++q) {
    RaiseLower(q, reached[q - panel] - Error(q));
  }
}

// Adds the best entries of the groups that reach the bounds.
void GroupSearch::AddBest(const EntryRun& part, int64_t panel, int64_t groups) {
  for (int64_t first = 0; first < groups; first += kBlock) {
    ScoreRows maxima = MaximaOf(panel, std::min(kBlock, groups - first));
    maxima.scores += first * kPanel;
    const int64_t reached = kernels_.reaching(maxima, s_.zeros, s_.bounds + panel, s_.places);
    for (int64_t n = 0; n < reached; ++n) {
      const int64_t q = panel + s_.places[n] % kPanel;
      const float score = maxima.scores[s_.places[n]];
      const int64_t r = (first + s_.places[n] / kPanel) * kGroup + PlaceInGroup(score);
      Add(q, score, part.age + r * part.step);
    }
  }
}

// Adds the other entries that reach the bounds. They are few: their spans are scored again.
void GroupSearch::AddSeconds(const EntryRun& part, int64_t panel, int64_t spans) {
  const float* maxima = MaximaOf(panel, 0).scores;
  for (int64_t first = 0; first < spans; first += kBlock) {
    ScoreRows seconds = SecondsOf(panel, std::min(kBlock, spans - first));
    seconds.scores += first * kPanel;
    const int64_t reached = kernels_.reaching(seconds, s_.zeros, s_.bounds + panel, s_.places);
    for (int64_t n = 0; n < reached; ++n) {
      const int64_t begin = (first + s_.places[n] / kPanel) * kSpan;
      const int64_t q = panel + s_.places[n] % kPanel;
      const IndexedRows keys = KeysOf(PieceOf(part, begin, kSpan));
      kernels_.dots(keys, s_.queries + q * depth_, s_.dots, /*squares=*/nullptr);
      for (int64_t r = 0; r < keys.count; ++r) {
        const float best = maxima[(begin + r) / kGroup * kPanel + q - panel];
        const float score = s_.dots[r] - s_.half_norms[begin + r];
        if (PlaceInGroup(best) != r % kGroup && score >= s_.bounds[q]) {
          Add(q, score, part.age + (begin + r) * part.step);
        }
      }
    }
  }
}

// Compares one query with a block; the first query of the block has to measure the keys.
template <class Age>
void GroupSearch::ScanWith(int64_t q, const IndexedRows& keys, bool measure, const Age& age) {
  kernels_.dots(keys, s_.queries + q * depth_, s_.dots, s_.squares);
  if (measure) MeasureKeys(keys, s_.half_norms);
  constexpr int64_t kRows = 16;  // rows at a time, most of which reach nothing
  for (int64_t first = 0; first < keys.count; first += kRows) {
    const int64_t end = std::min(first + kRows, keys.count);
    const float bound = s_.bounds[q];
    int32_t reached = 0;  // an integer of the scores' width, so that the loop vectorizes
    for (int64_t r = first; r < end; ++r) reached |= s_.dots[r] - s_.half_norms[r] >= bound;
    for (int64_t r = first; reached != 0 && r < end; ++r) {
      const float score = s_.dots[r] - s_.half_norms[r];
      if (score >= s_.bounds[q]) Add(q, score, age(r));
    }
  }
}

// Computes from the keys' squares the half norm to subtract from each key's products, and the
// largest norm so far.
void GroupSearch::MeasureKeys(const IndexedRows& keys, float* half_norms) {
  float largest = 0;
  for (int64_t r = 0; r < keys.count; ++r) {
    const int64_t row = keys.index == nullptr ? r : keys.index[r];
    const bool exists = s_.squares[r] <= 0.5f * static_cast<float>(kMaxSquaredNorm) ||
                        SquaredNorm(keys.rows + row * keys.stride) <= kMaxSquaredNorm;
    if (exists) largest = std::max(largest, s_.squares[r]);
    const float half = distance_ ? s_.squares[r] / 2 : 0;
    half_norms[r] = exists ? half : kInfinity;
  }
  if (largest <= max_square_) return;
  max_square_ = largest;
  // An fp32 sum of dim squares has a relative error of at most dim 2^-24.
  max_norm_ = std::sqrt(largest * (1 + static_cast<double>(dim_ + 1) * 0x1p-23));
  for (int64_t q = 0; q < count_; ++q) UpdateBound(q);
}

void GroupSearch::ScanSlots(absl::Span<const int32_t> slots, absl::Span<const int32_t> queries) {
  for (size_t n = 0; n < slots.size(); n += kBlock) {
    const absl::Span<const int32_t> block = slots.subspan(n, kBlock);
    const auto rows = static_cast<int64_t>(block.size());
    IndexedRows keys = {float_keys_, call_.keys.stride(1), block.data(), rows, dim_};
    if (float_keys_ == nullptr) {
      keys = {s_.keys, depth_, nullptr, rows, dim_};
      for (int64_t r = 0; r < rows; ++r) LoadKey(block[r], s_.keys + r * depth_);
    }
    for (const int32_t q : queries) {
      ScanWith(q, keys, /*measure=*/q == queries.front(), [&block](int64_t r) { return block[r]; });
    }
  }
}

// ---- Candidates ----

void GroupSearch::Add(int64_t q, float score, int64_t age) {
  if (score < s_.bounds[q]) return;  // the bound may have risen since the filter
  if (s_.counts[q] == sizes_.capacity) {
    Shrink(q, (sizes_.capacity - sizes_.hits) / 8);
    if (s_.counts[q] > (sizes_.hits + sizes_.capacity) / 2) Resolve(q);
    if (score < s_.bounds[q]) return;
  }
  const int64_t place = q * sizes_.capacity + s_.counts[q]++;
  s_.scores[place] = score;
  s_.ages[place] = static_cast<int32_t>(age);
}

// Drops candidates that `hits` others are certainly better than.
void GroupSearch::Shrink(int64_t q, int64_t slack) {
  float* scores = s_.scores + q * sizes_.capacity;
  int32_t* ages = s_.ages + q * sizes_.capacity;
  const int32_t count = s_.counts[q];
  for (int32_t i = 0; i < count; ++i) s_.order[i] = Ordered(scores[i]);
  const float best = FromOrdered(BoundOfLargest(s_.order, count, sizes_.hits, slack));
  RaiseLower(q, best - Error(q));
  const float bound = s_.bounds[q];
  int32_t kept = 0;
  for (int32_t i = 0; i < count; ++i) {
    const float score = scores[i];
    const int32_t age = ages[i];
    scores[kept] = score;
    ages[kept] = age;
    kept += score >= bound;
  }
  s_.counts[q] = kept;
}

// Scores the candidates in float64 and keeps the best s_.hits.
void GroupSearch::Resolve(int64_t q) {
  Rescore(q);
  SearchHit* end = s_.hits + s_.counts[q];
  if (s_.counts[q] < sizes_.hits) return;
  std::nth_element(s_.hits, s_.hits + sizes_.hits - 1, end, Before());
  s_.counts[q] = static_cast<int32_t>(sizes_.hits);
  for (int64_t i = 0; i < sizes_.hits; ++i) {
    s_.scores[q * sizes_.capacity + i] = ScoreOf(q, s_.hits[i].score);
    s_.ages[q * sizes_.capacity + i] = s_.hits[i].age;
  }
  RaiseLower(q, ScoreOf(q, s_.hits[sizes_.hits - 1].score));
}

// Returns the candidates as hits.
void GroupSearch::Rescore(int64_t q) {
  const int64_t count = s_.counts[q], slots = call_.keys.dim(1);
  const int32_t* ages = s_.ages + q * sizes_.capacity;
  const float* query = s_.queries + q * depth_;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t slot = call_.oldest + ages[i];
    s_.slots[i] = static_cast<int32_t>(slot < slots ? slot : slot - slots);
  }
  if (float_keys_ != nullptr) {
    kernels_.exact_scores(distance_, {float_keys_, call_.keys.stride(1), s_.slots, count, dim_},
                          query, s_.exact);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      LoadKey(s_.slots[i], s_.key);
      kernels_.exact_scores(distance_, {s_.key, depth_, nullptr, 1, dim_}, query, s_.exact + i);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    s_.hits[i] = {distance_ ? -s_.exact[i] : s_.exact[i], ages[i]};
  }
}

void GroupSearch::Finish(SearchHit* found, int64_t stride) {
  for (int64_t q = 0; q < count_; ++q, found += stride) {
    if (s_.counts[q] > sizes_.hits + 8) Shrink(q, sizes_.hits / 16);
    Resolve(q);
    std::copy_n(s_.hits, s_.counts[q], found);
    std::fill(found + s_.counts[q], found + sizes_.hits, kNoHit);
  }
}

}  // namespace tfb
