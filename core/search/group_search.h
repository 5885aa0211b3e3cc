// The inner part of engine search on the CPU: a group of queries of one head is compared with runs
// or lists of entries, and each query keeps candidates.
//
// Keys are streamed in blocks that stay in cache while all queries of the group are compared with
// them. The queries are packed once, so that the matrix product reads keys in place, and a key's
// scores against 64 queries lie side by side for the filter.
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

// Orders hits: the better of two comes first, and of equal ones the older.
struct Before {
  bool operator()(const SearchHit& a, const SearchHit& b) const {
    return a.score > b.score || (a.score == b.score && a.age < b.age);
  }
};

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct GroupSizes {
  int64_t queries;  // queries of a group at most, a multiple of 64
  int64_t dim;
  int64_t hits;      // hits that a query wants
  int64_t capacity;  // candidates of a query
  // Whether queries are packed for Scan; without it, each is multiplied on its own.
  bool panels;
  int64_t part;  // entries whose scores are held in groups, a multiple of 24; 0 for none
};
// Returns how many candidates of a query there is room for.
int64_t CandidateCapacity(int64_t hits, int64_t slots);
// Returns the part for so many hits.
int64_t PartEntries(int64_t hits, int64_t slots);

// The scratch of one thread.
struct GroupScratch {
  float* queries;       // [queries][depth]: zeros where there is no query
  double* query_norms;  // [queries]
  float* panels;        // [queries / 64][depth][64]
  // [queries]: a score that at least `hits` candidates reach; -inf while none is known.
  double* lower;
  float* bounds;      // [queries]: the score that a candidate must reach
  int32_t* counts;    // [queries]: numbers of candidates
  float* scores;      // [queries][capacity]: scores of candidates
  int32_t* ages;      // [queries][capacity]
  float* keys;        // [96][depth]: converted keys, where they cannot be read in place
  float* key;         // [depth]: one converted key
  float* products;    // [96][64]
  float* half_norms;  // [96], or [part] where that is more
  float* dots;        // [96]
  float* squares;     // [96]
  int32_t* places;    // [96 * 64]
  // [queries / 64][part / 4][64]: maxima of groups of 4 entries, see best_of_four.
  float* maxima;
  // [queries / 64][part / 24][64]: maxima of the entries that are not the best of their 4.
  float* seconds;
  float* coarse;    // [part / 4][64]: maxima of larger groups, for one panel
  float* zeros;     // [part / 4]
  double* exact;    // [capacity]
  int32_t* slots;   // [capacity]
  int32_t* order;   // [capacity]: scores as integers
  SearchHit* hits;  // [capacity]
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
  // Searches for queries first, ..., first + count - 1 of the head. The arguments must outlive the
  // search.
  GroupSearch(const SearchCall& call, const GroupSizes& sizes, const GroupScratch& scratch,
              int64_t head, int64_t first, int64_t count);

  // Forgets the scanned entries.
  void Begin();
  // Compares all queries with a run of entries.
  void Scan(const EntryRun& run);
  // Compares some queries with the entries in these slots, which are also their ages.
  void ScanSlots(absl::Span<const int32_t> slots, absl::Span<const int32_t> queries);
  // Writes found[query * stride + n] for n < hits: the best scanned entries in no order, then none.
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
  int64_t depth_;  // floats of a stored row: dim_ rounded up to 4
  bool distance_;
  const CpuKernels& kernels_;
  const float* float_keys_ = nullptr;  // keys of the head, where they are floats
  float max_square_ = 0;               // the largest square of the keys so far
  double max_norm_ = 0;                // not below the norm of any key
};

}  // namespace tfb

#endif  // TFB_CORE_SEARCH_GROUP_SEARCH_H_
