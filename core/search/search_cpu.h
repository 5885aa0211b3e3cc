// Engine search on the CPU; see search.h. Sizes have been checked.
#ifndef TFB_CORE_SEARCH_SEARCH_CPU_H_
#define TFB_CORE_SEARCH_SEARCH_CPU_H_

#include <cstddef>

#include "core/search/search.h"
#include "core/technique.h"

namespace tfb {

size_t SearchCpuWorkspaceBytes(const SearchSizes& sizes, int threads);
void SearchCpu(const SearchCall& call, const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_SEARCH_SEARCH_CPU_H_
