// A task has a group of queries of one head and part of its entries. It streams the keys in blocks
// that stay in cache while all queries of the group see them; the queries are packed once, so that
// the matrix product reads keys where they lie, and a key's scores against 64 queries lie side by
// side, as the filter wants them.
#include "core/search/search_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/cpu/kernels.h"
#include "core/flash/rows.h"
#include "core/workspace.h"

namespace tfb {
namespace {

constexpr int64_t kPanel = 64;          // queries that are packed together
constexpr int64_t kBlock = 96;          // keys: 16 register tiles of 6; 96 x 64 scores are 24 KiB
constexpr int64_t kDepth = 64;          // channels: 64 x 64 of a panel are 16 KiB, a third of L1
constexpr int64_t kMaxGroup = 256;      // queries of a task: a key is loaded once for 4 panels
constexpr int64_t kFewQueries = 2;      // for which a product of 16 columns is more work than dots
constexpr int64_t kSlack = 128;         // candidates beyond the k best, at least
constexpr int64_t kPartEntries = 1024;  // at least
constexpr int64_t kCandidateBytes = 4 << 20;  // of a group, where that leaves one panel

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool Before(const SearchHit& a, const SearchHit& b) {
  return a.score > b.score || (a.score == b.score && a.age < b.age);
}
constexpr SearchHit kNoHit = {-std::numeric_limits<double>::infinity(), -1};

struct Plan {
  int64_t hits;      // of a query in a part of the entries
  int64_t parts;     // ranges of ages, or buckets
  int64_t chunks;    // tasks that share the parts
  int64_t capacity;  // candidates of a query
  int64_t group;     // queries of a task
  int64_t groups;
  bool few;  // queries
};

Plan MakePlan(const SearchSizes& sizes, int threads) {
  Plan plan = {};
  const bool bucketed = sizes.selection == SearchSelection::kBucketed;
  plan.hits = bucketed ? 1 : std::min(sizes.k, sizes.slots);
  plan.capacity = RoundUp(std::min(plan.hits + std::max(plan.hits, kSlack), sizes.slots), 16);
  plan.few = sizes.queries <= kFewQueries;
  plan.group = kMaxGroup;
  while (plan.group > kPanel && plan.group * plan.capacity * 8 > kCandidateBytes) plan.group /= 2;
  plan.group = std::min(plan.group, RoundUp(sizes.queries, kPanel));
  plan.groups = CeilDiv(sizes.queries, plan.group);
  const int64_t tasks = sizes.heads * plan.groups;
  plan.chunks = 1;
  if (tasks % threads != 0 && tasks < 4 * threads) {
    const int64_t most = sizes.slots / std::max(kPartEntries, 4 * plan.hits);
    plan.chunks = std::max<int64_t>(std::min(CeilDiv(2 * threads, tasks), most), 1);
  }
  plan.parts = bucketed ? sizes.k : plan.chunks;
  plan.chunks = std::min(plan.chunks, plan.parts);
  return plan;
}

// Of one thread.
struct Scratch {
  float* queries;         // [group][depth]: zeros where a query is none
  double* query_norms;    // [group]
  float* panels;          // [group / 64][depth][64]
  double* lower;          // [group]: what at least `hits` candidates reach; -inf: nothing known
  float* bounds;          // [group]: what a score must reach to be kept
  int32_t* counts;        // [group]: candidates
  float* scores;          // [group][capacity]: of candidates
  int32_t* ages;          // [group][capacity]
  float* keys;            // [96][depth]: converted, where they cannot be read as they are
  float* products;        // [96][64]
  float* half_norms;      // [96]
  float* dots;            // [96]
  float* squares;         // [96]
  double* exact;          // [capacity]
  double* exact_squares;  // [capacity]
  int32_t* places;        // [96 * 64]
  int32_t* slots;         // [capacity]
  int32_t* order;         // [capacity]: scores as integers
  SearchHit* hits;        // [capacity]
};
Scratch LayOut(const Plan& plan, int64_t dim, Workspace& workspace) {
  const int64_t depth = RoundUp(dim, 4);
  Scratch s = {};
  s.queries = workspace.Take<float>(plan.group * depth);
  s.query_norms = workspace.Take<double>(plan.group);
  s.panels = workspace.Take<float>(plan.group * depth);
  s.lower = workspace.Take<double>(plan.group);
  s.bounds = workspace.Take<float>(plan.group);
  s.counts = workspace.Take<int32_t>(plan.group);
  s.scores = workspace.Take<float>(plan.group * plan.capacity);
  s.ages = workspace.Take<int32_t>(plan.group * plan.capacity);
  s.keys = workspace.Take<float>(kBlock * depth);
  s.products = workspace.Take<float>(kBlock * kPanel);
  s.half_norms = workspace.Take<float>(kBlock);
  s.dots = workspace.Take<float>(kBlock);
  s.squares = workspace.Take<float>(kBlock);
  s.exact = workspace.Take<double>(plan.capacity);
  s.exact_squares = workspace.Take<double>(plan.capacity);
  s.places = workspace.Take<int32_t>(kBlock * kPanel);
  s.slots = workspace.Take<int32_t>(plan.capacity);
  s.order = workspace.Take<int32_t>(plan.capacity);
  s.hits = workspace.Take<SearchHit>(plan.capacity);
  return s;
}

// Integers in the order of the floats, which are no NaN.
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

// A bound that at least `wanted` numbers reach, and at most `wanted + slack` where equal ones let it.
int32_t BoundOfLargest(const int32_t* numbers, int64_t count, int64_t wanted, int64_t slack) {
  int64_t low = std::numeric_limits<int32_t>::max(), high = std::numeric_limits<int32_t>::min();
  for (int64_t i = 0; i < count; ++i) low = std::min<int64_t>(low, numbers[i]);
  for (int64_t i = 0; i < count; ++i) high = std::max<int64_t>(high, numbers[i]);
  int64_t reach = count;  // low
  while (low < high && reach > wanted + slack) {
    const int64_t middle = low + (high - low) / 2 + 1;
    const auto bound = static_cast<int32_t>(middle);
    int32_t reach_middle = 0;  // as wide as the numbers, for vectors
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

// Entries whose slots lie one `step` apart, and so do their ages.
struct EntryRun {
  int64_t slot;
  int64_t age;
  int64_t step;
  int64_t count;
};

// One task's queries against one part of the entries after the other.
class GroupSearch {
 public:
  GroupSearch(const SearchCall& call, const Plan& plan, const Scratch& scratch, int64_t head,
              int64_t first, int64_t count)
      : call_(call),
        plan_(plan),
        s_(scratch),
        key_head_(head / (call.queries.dim(0) / call.keys.dim(0))),
        count_(count),
        dim_(call.keys.dim(2)),
        depth_(RoundUp(dim_, 4)),
        distance_(call.metric == SearchMetric::kSquaredDistance),
        kernels_(BestCpuKernels()) {
    if (call_.keys.dtype == DType::kF32) {
      direct_keys_ = call_.keys.At<float>(key_head_);
    }
    LoadQueries(head, first);
  }

  // found[query * stride + n] for n < hits: the best of a part in no order, then none.
  void Run(int64_t part, SearchHit* found, int64_t stride) {
    max_square_ = 0;
    max_norm_ = 0;
    for (int64_t q = 0; q < count_; ++q) {
      s_.counts[q] = 0;
      s_.lower[q] = -std::numeric_limits<double>::infinity();
      UpdateBound(q);
    }
    const bool bucketed = call_.selection == SearchSelection::kBucketed;
    const int64_t slots = call_.keys.dim(1);
    int64_t age = bucketed ? 0 : call_.entries * part / plan_.parts;
    const int64_t end = bucketed ? call_.entries : call_.entries * (part + 1) / plan_.parts;
    while (age < end) {  // to the end of the ring, and from its beginning
      const int64_t slot = (call_.oldest + age) % slots;
      const int64_t size = std::min(end - age, slots - slot);
      const int64_t step = bucketed ? plan_.parts : 1;
      const int64_t skip = bucketed ? (part - slot % step + step) % step : 0;
      if (skip < size) ScanRun({slot + skip, age + skip, step, CeilDiv(size - skip, step)});
      age += size;
    }
    for (int64_t q = 0; q < count_; ++q) Finish(q, found + q * stride);
  }

 private:
  void LoadQueries(int64_t head, int64_t first) {
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
    if (plan_.few) return;
    for (int64_t p = 0; p < padded; p += kPanel) {
      kernels_.transpose64(s_.queries + p * depth_, depth_, depth_, s_.panels + p * depth_);
    }
  }

  // ---- Bounds ----

  // What s is off by at most.
  double Error(int64_t q) const {
    const double norms = s_.query_norms[q] + max_norm_;
    return ScoreError(dim_) * norms * norms + kTinyScoreError;
  }
  // s as it would be without error.
  float ScoreOf(int64_t q, double exact) const {
    if (!distance_) return static_cast<float>(exact);
    return static_cast<float>((s_.query_norms[q] * s_.query_norms[q] + exact) / 2);
  }
  void UpdateBound(int64_t q) {
    const bool exists = s_.query_norms[q] < kInfinity;
    const double bound = std::max<double>(s_.lower[q] - Error(q), kLowest);
    s_.bounds[q] = exists ? static_cast<float>(bound) : kInfinity;
  }
  void RaiseLower(int64_t q, double lower) {
    s_.lower[q] = std::max(s_.lower[q], lower);
    UpdateBound(q);
  }

  // ---- Scanning ----

  void ScanRun(const EntryRun& run) {
    for (int64_t n = 0; n < run.count; n += kBlock) {
      const int64_t rows = std::min(kBlock, run.count - n);
      const EntryRun block = {run.slot + n * run.step, run.age + n * run.step, run.step, rows};
      IndexedRows keys = {s_.keys, depth_, nullptr, rows, dim_};
      if (direct_keys_ != nullptr) {
        keys.rows = direct_keys_ + block.slot * call_.keys.stride(1);
        keys.stride = run.step * call_.keys.stride(1);
      } else {
        for (int64_t r = 0; r < rows; ++r) LoadKey(block.slot + r * run.step, s_.keys + r * depth_);
      }
      ScanBlock(block, keys);
    }
  }
  void LoadKey(int64_t slot, float* to) const {
    LoadRow(call_.keys, call_.keys.Offset(key_head_, slot), call_.keys.stride(2), dim_, to);
  }

  void ScanBlock(const EntryRun& block, const IndexedRows& keys) {
    MeasureKeys(keys);
    for (int64_t p = 0; p < count_; p += kPanel) {
      const int64_t columns = Multiply(keys, p);
      const int64_t reached = kernels_.reaching({s_.products, kPanel, block.count, columns},
                                                s_.half_norms, s_.bounds + p, s_.places);
      for (int64_t n = 0; n < reached; ++n) {
        const int64_t r = s_.places[n] / kPanel, q = p + s_.places[n] % kPanel;
        Add(q, s_.products[s_.places[n]] - s_.half_norms[r], block.age + r * block.step);
      }
    }
  }

  // Products of the keys with the queries p, p + 1, ...; returns how many columns there are.
  int64_t Multiply(const IndexedRows& keys, int64_t p) {
    const int64_t count = std::min(kPanel, count_ - p);
    const int64_t columns = RoundUp(count, kColumnQuantum);
    if (!plan_.few) {
      for (int64_t c = 0; c < dim_; c += kDepth) {
        kernels_.gemm(keys.count, columns, std::min(kDepth, dim_ - c), keys.rows + c, keys.stride,
                      1, s_.panels + p * depth_ + c * kPanel, kPanel, s_.products, kPanel, c > 0);
      }
      return columns;
    }
    std::fill_n(s_.products, keys.count * kPanel, 0.0f);
    for (int64_t q = 0; q < count; ++q) {
      kernels_.dots(keys.count, dim_, keys.rows, keys.stride, s_.queries + q * depth_, s_.dots,
                    s_.squares);
      for (int64_t r = 0; r < keys.count; ++r) s_.products[r * kPanel + q] = s_.dots[r];
    }
    return columns;
  }

  // What to subtract from each key's products, and the largest norm so far.
  void MeasureKeys(const IndexedRows& keys) {
    kernels_.dots(keys.count, dim_, keys.rows, keys.stride, s_.queries, s_.dots, s_.squares);
    float largest = 0;
    for (int64_t r = 0; r < keys.count; ++r) {
      const bool exists = s_.squares[r] <= 0.5f * static_cast<float>(kMaxSquaredNorm) ||
                          SquaredNorm(keys.rows + r * keys.stride) <= kMaxSquaredNorm;
      if (exists) largest = std::max(largest, s_.squares[r]);
      const float half = distance_ ? s_.squares[r] / 2 : 0;
      s_.half_norms[r] = exists ? half : kInfinity;
    }
    if (largest <= max_square_) return;
    max_square_ = largest;
    max_norm_ = std::sqrt(largest * (1 + static_cast<double>(dim_ + 1) * 0x1p-23));
    for (int64_t q = 0; q < count_; ++q) UpdateBound(q);
  }
  double SquaredNorm(const float* row) const {
    double unused, square;
    kernels_.exact_scores(false, {row, dim_, nullptr, 1, dim_}, row, &unused, &square);
    return square;
  }

  // ---- Candidates ----

  void Add(int64_t q, float score, int64_t age) {
    if (score < s_.bounds[q]) return;  // which may have risen since the filter
    if (s_.counts[q] == plan_.capacity) {
      Shrink(q, (plan_.capacity - plan_.hits) / 8);
      if (s_.counts[q] > (plan_.hits + plan_.capacity) / 2) Resolve(q);
      if (score < s_.bounds[q]) return;
    }
    const int64_t place = q * plan_.capacity + s_.counts[q]++;
    s_.scores[place] = score;
    s_.ages[place] = static_cast<int32_t>(age);
  }

  // Drops candidates that `hits` others are certainly better than.
  void Shrink(int64_t q, int64_t slack) {
    float* scores = s_.scores + q * plan_.capacity;
    int32_t* ages = s_.ages + q * plan_.capacity;
    const int32_t count = s_.counts[q];
    for (int32_t i = 0; i < count; ++i) s_.order[i] = Ordered(scores[i]);
    const float best = FromOrdered(BoundOfLargest(s_.order, count, plan_.hits, slack));
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

  // Scores the candidates in float64 and keeps the best: those of s_.hits.
  void Resolve(int64_t q) {
    Rescore(q);
    SearchHit* end = s_.hits + s_.counts[q];
    if (s_.counts[q] < plan_.hits) return;
    std::nth_element(s_.hits, s_.hits + plan_.hits - 1, end, Before);
    s_.counts[q] = static_cast<int32_t>(plan_.hits);
    for (int64_t i = 0; i < plan_.hits; ++i) {
      s_.scores[q * plan_.capacity + i] = ScoreOf(q, s_.hits[i].score);
      s_.ages[q * plan_.capacity + i] = s_.hits[i].age;
    }
    RaiseLower(q, ScoreOf(q, s_.hits[plan_.hits - 1].score));
  }

  // The candidates as hits.
  void Rescore(int64_t q) {
    const int64_t count = s_.counts[q], slots = call_.keys.dim(1);
    const int32_t* ages = s_.ages + q * plan_.capacity;
    const float* query = s_.queries + q * depth_;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slot = call_.oldest + ages[i];
      s_.slots[i] = static_cast<int32_t>(slot < slots ? slot : slot - slots);
    }
    if (direct_keys_ != nullptr) {
      kernels_.exact_scores(distance_, {direct_keys_, call_.keys.stride(1), s_.slots, count, dim_},
                            query, s_.exact, s_.exact_squares);
    } else {
      for (int64_t i = 0; i < count; ++i) {
        LoadKey(s_.slots[i], s_.keys);
        kernels_.exact_scores(distance_, {s_.keys, depth_, nullptr, 1, dim_}, query, s_.exact + i,
                              s_.exact_squares + i);
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      s_.hits[i] = {distance_ ? -s_.exact[i] : s_.exact[i], ages[i]};
    }
  }

  void Finish(int64_t q, SearchHit* found) {
    if (s_.counts[q] > plan_.hits) Shrink(q, 0);
    Resolve(q);
    std::copy_n(s_.hits, s_.counts[q], found);
    std::fill(found + s_.counts[q], found + plan_.hits, kNoHit);
  }

  const SearchCall& call_;
  const Plan& plan_;
  const Scratch& s_;
  int64_t key_head_;
  int64_t count_;  // of queries
  int64_t dim_;
  int64_t depth_;
  bool distance_;
  const CpuKernels& kernels_;
  const float* direct_keys_ = nullptr;  // of the head, where they are floats
  float max_square_ = 0;                // of the keys so far
  double max_norm_ = 0;                 // not below that of any
};

// Sorts what was found and hands it out.
void Merge(const SearchCall& call, SearchHit* found, int64_t count, int32_t* slots, float* scores) {
  const bool distance = call.metric == SearchMetric::kSquaredDistance;
  SearchHit* end =
      std::partition(found, found + count, [](const SearchHit& h) { return h.age >= 0; });
  const int64_t wanted = std::min<int64_t>(call.k, end - found);
  std::partial_sort(found, found + wanted, end, Before);
  for (int64_t n = 0; n < wanted; ++n) {
    slots[n] = static_cast<int32_t>((call.oldest + found[n].age) % call.keys.dim(1));
    scores[n] = static_cast<float>(distance ? -found[n].score : found[n].score);
  }
  std::fill(slots + wanted, slots + call.k, -1);
  std::fill(scores + wanted, scores + call.k, distance ? kInfinity : -kInfinity);
}

SearchSizes SizesOf(const SearchCall& call) {
  return {call.keys.dim(0), call.queries.dim(0), call.queries.dim(1),
          call.keys.dim(2), call.keys.dim(1),    call.k,
          call.selection};
}

size_t ThreadBytes(const Plan& plan, int64_t dim) {
  return Workspace::Measure([&](Workspace& workspace) { LayOut(plan, dim, workspace); });
}

int64_t FoundOf(const SearchSizes& sizes, const Plan& plan) {
  return sizes.heads * sizes.queries * plan.parts * plan.hits;
}

}  // namespace

size_t SearchCpuWorkspaceBytes(const SearchSizes& sizes, int threads) {
  if (sizes.heads * sizes.queries * sizes.slots * sizes.k == 0) return 0;
  const Plan plan = MakePlan(sizes, threads);
  return threads * ThreadBytes(plan, sizes.dim) + Workspace::Measure([&](Workspace& workspace) {
           workspace.Take<SearchHit>(FoundOf(sizes, plan));
         });
}

void SearchCpu(const SearchCall& call, const Execution& execution) {
  const SearchSizes sizes = SizesOf(call);
  const int64_t rows = sizes.heads * sizes.queries;
  if (rows * sizes.k == 0) return;
  if (call.entries == 0) {
    for (int64_t row = 0; row < rows; ++row) {
      Merge(call, nullptr, 0, call.slots + row * call.k, call.scores + row * call.k);
    }
    return;
  }
  const Plan plan = MakePlan(sizes, execution.pool->threads());
  const size_t bytes = ThreadBytes(plan, sizes.dim);
  Workspace shared(execution.workspace.subspan(bytes * execution.pool->threads()));
  SearchHit* found = shared.Take<SearchHit>(FoundOf(sizes, plan));
  const int64_t of_query = plan.parts * plan.hits;

  execution.pool->ParallelFor(
      sizes.heads * plan.groups * plan.chunks, [&](int64_t task, int worker) {
        const int64_t chunk = task % plan.chunks, group = task / plan.chunks % plan.groups;
        const int64_t head = task / plan.chunks / plan.groups, first = group * plan.group;
        Workspace workspace(execution.workspace.subspan(worker * bytes, bytes));
        const Scratch scratch = LayOut(plan, sizes.dim, workspace);
        GroupSearch search(call, plan, scratch, head, first,
                           std::min(plan.group, sizes.queries - first));
        const int64_t end = plan.parts * (chunk + 1) / plan.chunks;
        for (int64_t part = plan.parts * chunk / plan.chunks; part < end; ++part) {
          SearchHit* to = found + (head * sizes.queries + first) * of_query + part * plan.hits;
          search.Run(part, to, of_query);
        }
      });
  execution.pool->ParallelFor(CeilDiv(rows, kPanel), [&](int64_t task, int) {
    for (int64_t row = task * kPanel; row < std::min((task + 1) * kPanel, rows); ++row) {
      Merge(call, found + row * of_query, of_query, call.slots + row * call.k,
            call.scores + row * call.k);
    }
  });
}

}  // namespace tfb
