// The heart of engine search on the CPU: a group of queries of one head against runs or lists of
// entries, and the candidates that each query keeps.
//
// Keys are streamed in blocks that stay in cache while all queries of the group see them. The queries
// are packed once, so that the matrix product reads keys where they lie, and a key's scores against
// 64 queries lie side by side, as the filter wants them.
#ifndef TFB_CORE_SEARCH_GROUP_SEARCH_H_
#define TFB_CORE_SEARCH_GROUP_SEARCH_H_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "absl/types/span.h"
#include "core/cpu/kernels.h"
#include "core/search/search.h"
#include "core/workspace.h"

namespace tfb {

// The better of two hits is before the other; of equal ones the older.
struct Before {
  bool operator()(const SearchHit& a, const SearchHit& b) const {
    return a.score > b.score || (a.score == b.score && a.age < b.age);
  }
};

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct GroupSizes {
  int64_t queries;  // of a group at most, a multiple of 64
  int64_t dim;
  int64_t hits;      // wanted of a query
  int64_t capacity;  // candidates of a query
  bool panels;       // packs the queries for Scan; without, each is multiplied by itself
  int64_t part;      // entries whose scores are held in groups, a multiple of 24; 0: none are
};
// How many candidates of a query there is room for.
int64_t CandidateCapacity(int64_t hits, int64_t slots);
// The part for so many hits.
int64_t PartEntries(int64_t hits, int64_t slots);

// Of one thread.
struct GroupScratch {
  float* queries;       // [queries][depth]: zeros where a query is none
  double* query_norms;  // [queries]
  float* panels;        // [queries / 64][depth][64]
  double* lower;        // [queries]: what at least `hits` candidates reach; -inf: nothing known
  float* bounds;        // [queries]: what a score must reach to be kept
  int32_t* counts;      // [queries]: candidates
  float* scores;        // [queries][capacity]: of candidates
  int32_t* ages;        // [queries][capacity]
  float* keys;          // [96][depth]: converted, where they cannot be read as they are
  float* key;           // [depth]: likewise, one
  float* products;      // [96][64]
  float* half_norms;    // [96], or [part] where that is more
  float* dots;          // [96]
  float* squares;       // [96]
  int32_t* places;      // [96 * 64]
  float* maxima;        // [queries / 64][part / 4][64]: of groups of 4 entries, see best_of_four
  float* seconds;       // [queries / 64][part / 24][64]: of those that are not the best of their 4
  float* coarse;        // [part / 4][64]: of larger groups, for one panel
  float* zeros;         // [part / 4]
  double* exact;        // [capacity]
  int32_t* slots;       // [capacity]
  int32_t* order;       // [capacity]: scores as integers
  SearchHit* hits;      // [capacity]
};
GroupScratch LayOut(const GroupSizes& sizes, Workspace& workspace);

// Entries whose slots lie one `step` apart, and so do their ages.
struct EntryRun {
  int64_t slot;
  int64_t age;
  int64_t step;
  int64_t count;
};

class GroupSearch {
 public:
  // Queries first, ..., first + count - 1 of the head. What is given stays where it is.
  GroupSearch(const SearchCall& call, const GroupSizes& sizes, const GroupScratch& scratch,
              int64_t head, int64_t first, int64_t count);

  // Forgets what was scanned.
  void Begin();
  // Holds all queries against a run of entries.
  void Scan(const EntryRun& run);
  // Holds those of `queries` against the entries in these slots, which are their ages.
  void ScanSlots(absl::Span<const int32_t> slots, absl::Span<const int32_t> queries);
  // found[query * stride + n] for n < hits: the best of what was scanned in no order, then none.
  void Finish(SearchHit* found, int64_t stride);

 private:
  void LoadQueries(int64_t head, int64_t first);
  void LoadKey(int64_t slot, float* to) const;
  double SquaredNorm(const float* row) const;

  double Error(int64_t q) const;
  float ScoreOf(int64_t q, double exact) const;
  void UpdateBound(int64_t q);
  void RaiseLower(int64_t q, double lower);

  IndexedRows KeysOf(const EntryRun& block) const;
  void ScanBlock(const EntryRun& block, const IndexedRows& keys);
  ScoreRows Multiply(const IndexedRows& keys, int64_t panel);
  void ScanPart(const EntryRun& part);
  ScoreRows MaximaOf(int64_t panel, int64_t groups) const;
  ScoreRows SecondsOf(int64_t panel, int64_t spans) const;
  void RaiseBounds(int64_t panel, int64_t groups);
  void AddBest(const EntryRun& part, int64_t panel, int64_t groups);
  void AddSeconds(const EntryRun& part, int64_t panel, int64_t spans);
  template <class Age>
  void ScanWith(int64_t q, const IndexedRows& keys, bool measure, const Age& age);
  void MeasureKeys(const IndexedRows& keys, float* half_norms);

  void Add(int64_t q, float score, int64_t age);
  void Shrink(int64_t q, int64_t slack);
  void Resolve(int64_t q);
  void Rescore(int64_t q);

  const SearchCall& call_;
  const GroupSizes& sizes_;
  const GroupScratch& s_;
  int64_t key_head_;
  int64_t count_;  // of queries
  int64_t dim_;
  int64_t depth_;  // of stored rows: dim_ rounded up to 4
  bool distance_;
  const CpuKernels& kernels_;
  const float* float_keys_ = nullptr;  // of the head, where they are floats
  float max_square_ = 0;               // of the keys so far
  double max_norm_ = 0;                // not below that of any
};

}  // namespace tfb

#endif  // TFB_CORE_SEARCH_GROUP_SEARCH_H_
