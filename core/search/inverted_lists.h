// Approximate nearest neighbours by inverted lists (Jegou, Douze, Schmid 2011, section IV, without
// their codes; faiss::IndexIVFFlat): k-means parts the entries, and a query sees those of the few
// clusters whose centroids are best for it.
//
// A search finds the k best entries of the lists that it probes, in the order and with the scores
// of search.h; probing all lists is exact search. The lists and so the results depend on the keys,
// the options and the seed, not on the number of threads.
//
// Cost of a query: a product with all centroids, and entries * probes / lists dots; a batch reads
// each list once for up to 256 queries. Keys are not copied: an index holds centroids and 4 bytes
// an entry. CPU only, as k-means and lists of different lengths have no CUDA kernels here.
//
// Why not a library: Debian's FAISS (1.7.3) is built for any x86-64 and any BLAS, of which a plain
// installation has the reference one. core/search:faiss_benchmark on one thread, 65,536 keys of 192
// channels in 1,024 lists, batches of 512 queries with 2 probes: exact search here 66 ms, these lists
// 10 ms, built in 2.4 s; faiss::IndexFlatL2 2,333 ms, faiss::IndexIVFFlat 123 ms, built in 69 s.
#ifndef TFB_CORE_SEARCH_INVERTED_LISTS_H_
#define TFB_CORE_SEARCH_INVERTED_LISTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/search/search.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/thread_pool.h"

namespace tfb {

struct InvertedListsOptions {
  int64_t lists = 1024;
  int64_t iterations = 10;       // of k-means
  int64_t sample_per_list = 64;  // keys that k-means uses, for each list
  uint64_t seed = 1;             // draws them
  // Metric of searches; clusters are by distance.
  SearchMetric metric = SearchMetric::kSquaredDistance;
};

class InvertedLists {
 public:
  // Builds an index of keys [entries, dim] as in a SearchCall, in host memory, which the caller
  // keeps unchanged. Rows that are no entries (search.h) are in no list. There are at most as many
  // lists as entries. Returns InvalidArgument for options out of their range.
  static absl::StatusOr<InvertedLists> Build(const ConstTensorView& keys,
                                             const InvertedListsOptions& options, ThreadPool* pool);

  int64_t lists() const { return centroids_.dim(1); }
  // Returns the slots of a list, ascending.
  absl::Span<const int32_t> list(int64_t n) const;
  size_t bytes() const;

  // A call of Search with one head: slots and scores are [queries][k]. queries are [queries, dim];
  // `probes` lists are searched, or all of them where there are fewer. It allocates nothing.
  struct Call {
    ConstTensorView queries;
    int64_t k;
    int64_t probes;
    int32_t* slots;
    float* scores;
  };
  size_t WorkspaceBytes(int64_t queries, int64_t k, int64_t probes, int threads) const;
  // Returns the workspace before there is an index, which will have so many entries in `lists`
  // lists.
  static size_t WorkspaceBytes(int64_t entries, int64_t dim, int64_t lists, int64_t queries,
                               int64_t k, int64_t probes, int threads);
  absl::Status Search(const Call& call, const Execution& execution) const;

 private:
  void Fill(const std::vector<int32_t>& list_of_slot);

  ConstTensorView keys_;  // [1, entries, dim]
  SearchMetric metric_ = SearchMetric::kSquaredDistance;
  Tensor centroids_;             // [1, lists, dim]
  std::vector<int32_t> begins_;  // [lists + 1]
  std::vector<int32_t> slots_;
};

}  // namespace tfb

#endif  // TFB_CORE_SEARCH_INVERTED_LISTS_H_
