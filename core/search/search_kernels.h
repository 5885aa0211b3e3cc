// The CUDA kernels of engine search as C++ sees them, plain data and launchers, and what both
// devices share. Every pointer is to device memory; what the kernels do is said in search.h.
#ifndef TFB_CORE_SEARCH_SEARCH_KERNELS_H_
#define TFB_CORE_SEARCH_SEARCH_KERNELS_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"

namespace tfb {

enum class SearchMetric : uint8_t { kInnerProduct, kSquaredDistance };

// Squared norms of what can be a query or an entry: up to 2^60 squared, so that no fp32 score
// overflows. NaN are above it.
constexpr double kMaxSquaredNorm = 0x1p120;

// The error of an fp32 score s is at most ScoreError(dim) (|q| + max |e|)^2. With u = 2^-24 those of
// the dot product and of |e|^2 / 2 are at most dim u |q||e| and dim u |e|^2 / 2, in any order of
// summation; that of subtracting u (|q||e| + |e|^2), and the definition's own roundings of
// differences, of s and of the bound to float u (|q| + |e|)^2 each; |q||e| + |e|^2 / 2 is at most
// half of (|q| + |e|)^2. What is left of 4 u is for terms in u^2 and the norms. Products below the
// least normal number are off by less than kTinyScoreError in all.
constexpr double ScoreError(int64_t dim) { return (static_cast<double>(dim) / 2 + 5) * 0x1p-24; }
constexpr double kTinyScoreError = 0x1p-110;

// An entry that may be among the best, with its score in float64: larger is better, so distances
// are negative here. Entries are told by age; none is -1, behind all others.
struct SearchHit {
  double score;
  int64_t age;  // wide, so that a hit has no padding that copies would read
};

struct SearchArguments {
  DeviceView keys;     // [key_heads, slots, dim]
  DeviceView queries;  // [heads, queries, dim]
  int64_t key_heads;
  int64_t heads;
  int64_t query_count;
  int64_t slots;
  int64_t entries;
  int64_t oldest;
  int64_t dim;
  int64_t k;
  SearchMetric metric;
  bool bucketed;       // part n has the slots n, n + parts, ...; else ages that follow each other
  int64_t parts;       // of the entries, each searched by itself
  int64_t hits;        // of a query in a part
  int64_t blocks;      // that search
  int64_t capacity;    // candidates of a query: hits and kSearchKeys at least
  double score_error;  // ScoreError(dim)
  // Scratch.
  int32_t* max_squares;     // [key_heads]: bits of the largest |e|^2; zeros before `measure`
  float* half_norms;        // [key_heads][slots]: |e|^2 / 2, or 0; infinite of what is no entry
  float* candidate_scores;  // [blocks][kSearchQueries][capacity]
  int32_t* candidate_ages;  // likewise
  double* exact;            // [blocks][kSearchWarps][capacity]
  SearchHit* found;         // [heads][queries][parts][hits]
  // Results: [heads][queries][k].
  int32_t* result_slots;
  float* result_scores;
};

constexpr int kSearchWarps = 8;     // of a block
constexpr int kSearchQueries = 64;  // of a block
constexpr int kSearchKeys = 128;    // of a tile

// Each enqueues on the stream and returns null, or why not. To be called in this order.
struct SearchKernels {
  const char* (*measure)(const SearchArguments& arguments, void* stream);
  const char* (*search)(const SearchArguments& arguments, void* stream);
  const char* (*merge)(const SearchArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_SEARCH_SEARCH_KERNELS_H_
