// Engine search on the CPU. A task has a group of queries of one head and part of the entries, or
// of the lists that the group probes, each of which it reads once.
#include "core/search/search_cpu.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/flash/rows.h"
#include "core/search/group_search.h"
#include "core/workspace.h"

namespace tfb {
namespace {

constexpr int64_t kMaxGroup = 256;  // queries of a task: a key is loaded once for 4 panels
constexpr int64_t kPanel = 64;
// At most so many queries are faster by dots than by a product of 16 columns.
constexpr int64_t kFewQueries = 2;
constexpr int64_t kFewTasks = 4;              // of a thread: fewer are cut into parts
constexpr int64_t kPartEntries = 1024;        // at least
constexpr int64_t kCandidateBytes = 4 << 20;  // candidates of a group, where that leaves one panel

// Returns the sizes of a group of up to `queries` queries.
GroupSizes SizesOfGroup(const SearchSizes& sizes, int64_t hits, int64_t queries, bool panels) {
  GroupSizes group = {};
  group.dim = sizes.dim;
  group.hits = std::min(hits, sizes.slots);
  group.capacity = CandidateCapacity(group.hits, sizes.slots);
  group.panels = panels;
  if (panels && sizes.selection == SearchSelection::kExact) {
    group.part = PartEntries(group.hits, sizes.slots);
  }
  group.queries = kMaxGroup;
  while (group.queries > kPanel && group.queries * group.capacity * 8 > kCandidateBytes) {
    group.queries /= 2;
  }
  group.queries = std::min(group.queries, RoundUp(queries, kPanel));
  return group;
}

struct Plan {
  GroupSizes group;
  int64_t groups;
  int64_t parts;   // ranges of ages, or buckets
  int64_t chunks;  // tasks that share the parts
};

Plan MakePlan(const SearchSizes& sizes, int threads) {
  Plan plan = {};
  const bool bucketed = sizes.selection == SearchSelection::kBucketed;
  plan.group = SizesOfGroup(sizes, bucketed ? 1 : sizes.k, sizes.queries,
                            /*panels=*/sizes.queries > kFewQueries);
  plan.groups = CeilDiv(sizes.queries, plan.group.queries);
  const int64_t tasks = sizes.heads * plan.groups;
  plan.chunks = 1;
  if (tasks % threads != 0 && tasks < kFewTasks * threads) {
    const int64_t most = sizes.slots / std::max(kPartEntries, 4 * plan.group.hits);
    plan.chunks = std::max<int64_t>(std::min(CeilDiv(2 * threads, tasks), most), 1);
  }
  plan.parts = bucketed ? sizes.k : plan.chunks;
  plan.chunks = std::min(plan.chunks, plan.parts);
  return plan;
}

size_t ThreadBytes(const GroupSizes& sizes) {
  return Workspace::Measure([&](Workspace& workspace) { LayOut(sizes, workspace); });
}
size_t FoundBytes(int64_t hits) {
  return Workspace::Measure([&](Workspace& workspace) { workspace.Take<SearchHit>(hits); });
}

// Compares the group with a part of the entries.
void ScanPart(const SearchCall& call, int64_t part, int64_t parts, GroupSearch* search) {
  const bool bucketed = call.selection == SearchSelection::kBucketed;
  const int64_t slots = call.keys.dim(1), step = bucketed ? parts : 1;
  int64_t age = bucketed ? 0 : call.entries * part / parts;
  const int64_t end = bucketed ? call.entries : call.entries * (part + 1) / parts;
  while (age < end) {  // first to the end of the ring, then from its beginning
    const int64_t slot = (call.oldest + age) % slots;
    const int64_t size = std::min(end - age, slots - slot);
    const int64_t skip = bucketed ? (part - slot % step + step) % step : 0;
    if (skip < size) search->Scan({slot + skip, age + skip, step, CeilDiv(size - skip, step)});
    age += size;
  }
}

// Sorts the hits and writes the results.
void Merge(const SearchCall& call, SearchHit* found, int64_t count, int32_t* slots, float* scores) {
  const bool distance = call.metric == SearchMetric::kSquaredDistance;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  SearchHit* end =
      std::partition(found, found + count, [](const SearchHit& hit) { return hit.age >= 0; });
  const int64_t wanted = std::min<int64_t>(call.k, end - found);
  std::nth_element(found, found + wanted, end, Before());
  std::sort(found, found + wanted, Before());
  for (int64_t n = 0; n < wanted; ++n) {
    slots[n] = static_cast<int32_t>((call.oldest + found[n].age) % call.keys.dim(1));
    scores[n] = static_cast<float>(distance ? -found[n].score : found[n].score);
  }
  std::fill(slots + wanted, slots + call.k, -1);
  std::fill(scores + wanted, scores + call.k, distance ? kInfinity : -kInfinity);
}

// Does the same for every query, which has found `of_query` hits.
void MergeAll(const SearchCall& call, SearchHit* found, int64_t of_query, ThreadPool* pool) {
  const int64_t rows = call.queries.dim(0) * call.queries.dim(1);
  pool->ParallelFor(CeilDiv(rows, kPanel), [&](int64_t task, int) {
    for (int64_t row = task * kPanel; row < std::min((task + 1) * kPanel, rows); ++row) {
      Merge(call, found + row * of_query, of_query, call.slots + row * call.k,
            call.scores + row * call.k);
    }
  });
}

SearchSizes SizesOf(const SearchCall& call) {
  return {call.keys.dim(0), call.queries.dim(0), call.queries.dim(1),
          call.keys.dim(2), call.keys.dim(1),    call.k,
          call.selection};
}

bool IsEmpty(const SearchSizes& sizes) {
  return sizes.heads * sizes.queries * sizes.slots * sizes.k == 0;
}

}  // namespace

int64_t MostQueriesOfParts(int threads) { return kFewTasks * threads * kMaxGroup; }

size_t SearchCpuWorkspaceBytes(const SearchSizes& sizes, int threads) {
  if (IsEmpty(sizes)) return 0;
  const Plan plan = MakePlan(sizes, threads);
  return threads * ThreadBytes(plan.group) +
         FoundBytes(sizes.heads * sizes.queries * plan.parts * plan.group.hits);
}

void SearchCpu(const SearchCall& call, const Execution& execution) {
  const SearchSizes sizes = SizesOf(call);
  if (IsEmpty(sizes)) return MergeAll(call, nullptr, 0, execution.pool);
  const Plan plan = MakePlan(sizes, execution.pool->threads());
  const size_t bytes = ThreadBytes(plan.group);
  const int64_t of_query = plan.parts * plan.group.hits;
  Workspace shared(execution.workspace.subspan(bytes * execution.pool->threads()));
  auto* found = shared.Take<SearchHit>(sizes.heads * sizes.queries * of_query);

  const int64_t tasks = sizes.heads * plan.groups * plan.chunks;
  execution.pool->ParallelFor(tasks, [&](int64_t task, int worker) {
    const int64_t chunk = task % plan.chunks, head = task / plan.chunks / plan.groups;
    const int64_t first = task / plan.chunks % plan.groups * plan.group.queries;
    const int64_t count = std::min(plan.group.queries, sizes.queries - first);
    Workspace workspace(execution.workspace.subspan(worker * bytes, bytes));
    const GroupScratch scratch = LayOut(plan.group, workspace);
    GroupSearch search(call, plan.group, scratch, head, first, count);
    const int64_t end = plan.parts * (chunk + 1) / plan.chunks;
    for (int64_t part = plan.parts * chunk / plan.chunks; part < end; ++part) {
      search.Begin();
      ScanPart(call, part, plan.parts, &search);
      search.Finish(found + (head * sizes.queries + first) * of_query + part * plan.group.hits,
                    of_query);
    }
  });
  MergeAll(call, found, of_query, execution.pool);
}

// ---- Lists ----

namespace {

struct ListsPlan {
  GroupSizes group;
  int64_t step;  // queries of a task: at most a group's, and few enough to give all threads work
};
ListsPlan MakeListsPlan(const SearchSizes& sizes, int threads) {
  ListsPlan plan = {};
  plan.group = SizesOfGroup(sizes, sizes.k, sizes.queries, /*panels=*/false);
  plan.step = std::min(plan.group.queries, CeilDiv(sizes.queries, threads));
  return plan;
}

// The queries of a task that probe each list: those of list n end at ends[n], where those of list n
// + 1 begin.
struct Probers {
  int32_t* ends;     // [lists]
  int32_t* queries;  // [step * probes]
};
Probers LayOutProbers(const ListsPlan& plan, int64_t lists, int64_t probes, Workspace& workspace) {
  return {workspace.Take<int32_t>(lists), workspace.Take<int32_t>(plan.step * probes)};
}
size_t ListsThreadBytes(const ListsPlan& plan, int64_t lists, int64_t probes) {
  return Workspace::Measure([&](Workspace& workspace) {
    LayOut(plan.group, workspace);
    LayOutProbers(plan, lists, probes, workspace);
  });
}

// Sorts the probes by list, with a counting sort.
void FindProbers(const ProbedLists& lists, int64_t first, int64_t count, const Probers& probers) {
  const int32_t* probes = lists.probes + first * lists.count;
  const int64_t size = count * lists.count;
  std::fill_n(probers.ends, lists.lists, 0);
  for (int64_t n = 0; n < size; ++n) {
    if (probes[n] >= 0) ++probers.ends[probes[n]];
  }
  int32_t begin = 0;
  for (int64_t list = 0; list < lists.lists; ++list) {
    begin += std::exchange(probers.ends[list], begin);
  }
  for (int64_t n = 0; n < size; ++n) {
    if (probes[n] < 0) continue;
    probers.queries[probers.ends[probes[n]]++] = static_cast<int32_t>(n / lists.count);
  }
}

}  // namespace

size_t SearchListsWorkspaceBytes(const SearchSizes& sizes, int64_t lists, int64_t probes,
                                 int threads) {
  if (IsEmpty(sizes)) return 0;
  const ListsPlan plan = MakeListsPlan(sizes, threads);
  return threads * ListsThreadBytes(plan, lists, probes) +
         FoundBytes(sizes.queries * plan.group.hits);
}

void SearchLists(const SearchCall& call, const ProbedLists& lists, const Execution& execution) {
  const SearchSizes sizes = SizesOf(call);
  if (IsEmpty(sizes)) return MergeAll(call, nullptr, 0, execution.pool);
  const ListsPlan plan = MakeListsPlan(sizes, execution.pool->threads());
  const size_t bytes = ListsThreadBytes(plan, lists.lists, lists.count);
  Workspace shared(execution.workspace.subspan(bytes * execution.pool->threads()));
  auto* found = shared.Take<SearchHit>(sizes.queries * plan.group.hits);

  execution.pool->ParallelFor(CeilDiv(sizes.queries, plan.step), [&](int64_t task, int worker) {
    const int64_t first = task * plan.step, count = std::min(plan.step, sizes.queries - first);
    Workspace workspace(execution.workspace.subspan(worker * bytes, bytes));
    const GroupScratch scratch = LayOut(plan.group, workspace);
    const Probers probers = LayOutProbers(plan, lists.lists, lists.count, workspace);
    FindProbers(lists, first, count, probers);
    GroupSearch search(call, plan.group, scratch, 0, first, count);
    search.Begin();
    int32_t begin = 0;
    for (int64_t list = 0; list < lists.lists; begin = probers.ends[list++]) {
      if (begin == probers.ends[list]) continue;
      search.ScanSlots({lists.slots + lists.begins[list],
                        static_cast<size_t>(lists.begins[list + 1] - lists.begins[list])},
                       {probers.queries + begin, static_cast<size_t>(probers.ends[list] - begin)});
    }
    search.Finish(found + first * plan.group.hits, plan.group.hits);
  });
  MergeAll(call, found, plan.group.hits, execution.pool);
}

}  // namespace tfb
