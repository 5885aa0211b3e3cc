// Engine search: the k nearest of up to millions of keys, on every device.
//
//   score(q, e) = q . e               inner product: the largest are the best
//               = |q - e|^2           squared distance: the smallest are
//
// Guarantees. Scores are computed in float64: products of floats, which it holds exactly, or
// squares of differences rounded to float, added in sixteen sums of every sixteenth channel. These
// scores decide the k best and their order; among equal scores the older entry is first. So neither
// the order nor a tie depends on the number of threads, the instruction set, the device or its
// order of work. The scores that a search returns are these, rounded once.
//
// Speed. A matrix product in fp32 scores all entries, for the distance as
//
//   s = q . e - |e|^2 / 2 = (|q|^2 - |q - e|^2) / 2
//
// whose error is at most d = (dim / 2 + 5) 2^-24 (|q| + max |e|)^2 (search_kernels.h). An entry
// that is more than 2 d below the k-th best s of those seen so far cannot be among the k best; the
// few others are kept, and scored in float64 in the end. So the order of float64 costs little more
// than that of fp32, as long as few entries lie within 2 d of the k-th; where many do, such as
// copies of one key, the search is right but slow.
//
// Bounds. A query or entry with a NaN, an infinity or a norm above 2^60 does not count: it finds
// nothing, or is not found.
#ifndef TFB_CORE_SEARCH_SEARCH_H_
#define TFB_CORE_SEARCH_SEARCH_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "core/problem.h"
#include "core/search/search_kernels.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

// How entries are selected.
//   kExact     the k best.
//   kBucketed  the best of each of k buckets, where slot n is in bucket n % k, as in the code of
//              the Memorizing Transformer (google-research/meliad, transformer/memory_layer.py).
//              It finds the best entry, and of the k best on average, where slots are in random
//              order, the share 1 - (1 - 1 / k)^k, 64%. The product is all of the work here, so it
//              is no faster than kExact.
enum class SearchSelection : uint8_t { kExact, kBucketed };

// The sizes that a workspace depends on.
struct SearchSizes {
  int64_t key_heads;
  int64_t heads;  // a multiple of key_heads; consecutive heads share one
  int64_t queries;
  int64_t dim;
  int64_t slots;
  int64_t k;
  SearchSelection selection = SearchSelection::kExact;
};

// The views of a search, in memory of the device, each f32, bf16 or f16, channels side by side.
struct SearchCall {
  ConstTensorView keys;     // [key_heads, slots, dim]
  ConstTensorView queries;  // [heads, queries, dim]
  // The slots in use form a ring: the entry of age n is in slot (oldest + n) % slots, and age 0 is
  // the oldest.
  int64_t entries;
  int64_t oldest = 0;
  int64_t k;
  SearchMetric metric = SearchMetric::kInnerProduct;
  SearchSelection selection = SearchSelection::kExact;
  // [heads][queries][k], best first. Where fewer are found, the rest has slot -1 and the score -inf
  // or, for the distance, inf.
  int32_t* slots;
  float* scores;
};

// Returns the workspace of a call with up to so many queries.
size_t SearchWorkspaceBytes(Device device, const SearchSizes& sizes, int threads);
// Searches. It allocates nothing; on CUDA it enqueues on the stream. Returns InvalidArgument where
// sizes do not fit each other.
absl::Status Search(Device device, const SearchCall& call, const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_SEARCH_SEARCH_H_
