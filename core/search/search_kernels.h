// The CUDA kernels of engine search as C++ sees them, plain data and launchers, and the constants
// that both devices share. Every pointer is to device memory; search.h says what the kernels
// compute.
#ifndef TFB_CORE_SEARCH_SEARCH_KERNELS_H_
#define TFB_CORE_SEARCH_SEARCH_KERNELS_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"

namespace tfb {

enum class SearchMetric : uint8_t { kInnerProduct, kSquaredDistance };

// The largest squared norm of a query or an entry: (2^60)^2, so that no fp32 score overflows. NaN
// are above it.
constexpr double kMaxSquaredNorm = 0x1p120;

// The error of an fp32 score s is at most ScoreError(dim) (|q| + max |e|)^2. With u = 2^-24, the
// errors of the dot product and of |e|^2 / 2 are at most dim u |q||e| and dim u |e|^2 / 2, in any
// order of summation. The error of subtracting is at most u (|q||e| + |e|^2). The definition's own
// roundings of differences, of s and of the bound to float are at most u (|q| + |e|)^2 each. |q||e|
// + |e|^2 / 2 is at most half of (|q| + |e|)^2. The rest of 4 u covers terms in u^2 and the norms.
// Products below the least normal number have an error of less than kTinyScoreError in all.
constexpr double ScoreError(int64_t dim) { return (static_cast<double>(dim) / 2 + 5) * 0x1p-24; }
constexpr double kTinyScoreError = 0x1p-110;

// An entry that may be among the best, with its score in float64: larger is better, so distances
// are negative here. An age identifies the entry; -1 means none and comes behind all others.
struct SearchHit {
  double score;
  int64_t age;  // 64 bits, so that a hit has no padding that copies would read
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
  bool bucketed;       // part n has the slots n, n + parts, ...; otherwise it has consecutive ages
  int64_t parts;       // parts of the entries, each searched on its own
  int64_t hits;        // hits of a query in a part
  int64_t blocks;      // that search
  int64_t capacity;    // candidates of a query: at least hits and kSearchKeys
  double score_error;  // ScoreError(dim)
  // Scratch.
  int32_t* max_squares;  // [key_heads]: bits of the largest |e|^2; zeros before `measure`
  // [key_heads][slots]: |e|^2 / 2, or 0; infinite for a row that is no entry.
  float* half_norms;
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

// Each launcher enqueues on the stream and returns null, or a text that says why it could not. Call
// them in this order.
struct SearchKernels {
  const char* (*measure)(const SearchArguments& arguments, void* stream);
  const char* (*search)(const SearchArguments& arguments, void* stream);
  const char* (*merge)(const SearchArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_SEARCH_SEARCH_KERNELS_H_
