// Engine search on the CPU; see search.h. Callers have checked the sizes.
#ifndef TFB_CORE_SEARCH_SEARCH_CPU_H_
#define TFB_CORE_SEARCH_SEARCH_CPU_H_

#include <cstddef>
#include <cstdint>

#include "core/search/search.h"
#include "core/technique.h"

namespace tfb {

// Returns the number of queries of a head up to which a call may be cut into parts of the entries,
// so that fewer queries may need more memory. Beyond it more queries need more.
int64_t MostQueriesOfParts(int threads);
size_t SearchCpuWorkspaceBytes(const SearchSizes& sizes, int threads);
void SearchCpu(const SearchCall& call, const Execution& execution);

// The lists of slots that each query probes for its k best entries.
struct ProbedLists {
  const int32_t* begins;  // [lists + 1]: where each list begins in `slots`
  const int32_t* slots;
  int64_t lists;
  const int32_t* probes;  // [queries][count]: lists; -1: none
  int64_t count;
};
// Returns the workspace for keys and queries with one head, and a ring that begins in slot 0.
size_t SearchListsWorkspaceBytes(const SearchSizes& sizes, int64_t lists, int64_t probes,
                                 int threads);
void SearchLists(const SearchCall& call, const ProbedLists& lists, const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_SEARCH_SEARCH_CPU_H_
