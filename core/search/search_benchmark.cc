// Times engine search: batches beside the matrix product of the same shape, one query beside reading
// the keys.
//
// Every figure is the best of several samples, which alternate with samples of the work that it is
// compared with, so that shares are meaningful on a shared machine.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "core/cpu/kernels.h"
#include "core/layers/matmul.h"
#include "core/random.h"
#include "core/safetensors.h"
#include "core/search/inverted_lists.h"
#include "core/search/search.h"

ABSL_FLAG(int, threads, 2, "threads of the pool");
ABSL_FLAG(int, rounds, 9, "of which the best counts");
ABSL_FLAG(bool, cpu_time, false,
          "count the processor's time, not the clock's: for one thread on a shared machine");
ABSL_FLAG(std::vector<std::string>, tables, std::vector<std::string>({"batch", "few", "lists"}),
          "what to measure");
ABSL_FLAG(int64_t, queries, 512, "of a batch");
ABSL_FLAG(std::vector<std::string>, entries, std::vector<std::string>({"65536", "262144"}), "keys");
ABSL_FLAG(std::vector<std::string>, dims, std::vector<std::string>({"64", "192"}), "channels");
ABSL_FLAG(std::vector<std::string>, k, std::vector<std::string>({"32", "1024"}), "neighbours");
ABSL_FLAG(std::vector<std::string>, lists, std::vector<std::string>({"256", "1024"}),
          "of an index");
ABSL_FLAG(
    std::string, states, "",
    "safetensors file with keys [entries, dim] and queries [queries, dim] in the place of the "
    "synthetic ones");
ABSL_FLAG(int64_t, centers, 1024, "around which the synthetic keys and queries lie");

namespace tfb {
namespace {

using Work = std::function<void()>;

double Seconds(const Work& work) {
  const auto now = [] {
    if (absl::GetFlag(FLAGS_cpu_time)) {
      return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
    }
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(since).count();
  };
  const double begin = now();
  work();
  return now() - begin;
}

// Returns the best time of each work, in seconds; a first round is not counted.
std::vector<double> Measure(const std::vector<Work>& works) {
  std::vector<double> best(works.size(), INFINITY);
  for (int round = 0; round <= absl::GetFlag(FLAGS_rounds); ++round) {
    for (size_t n = 0; n < works.size(); ++n) {
      const double once = Seconds(works[n]);
      if (round > 0) best[n] = std::min(best[n], once);
    }
  }
  return best;
}

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::exit(1);
}

std::vector<int64_t> Numbers(const std::vector<std::string>& texts) {
  std::vector<int64_t> numbers;
  for (const std::string& text : texts) numbers.push_back(std::atoll(text.c_str()));
  return numbers;
}

// Returns rows around `centers` points, of the same distribution for every name.
Tensor Clustered(int64_t rows, int64_t dim, const char* name) {
  const int64_t centers = absl::GetFlag(FLAGS_centers);
  Tensor points(DType::kF32, {centers, dim}), tensor(DType::kF32, {1, rows, dim});
  FillNormal(&points, 1, "centers");
  FillNormal(&tensor, 2, name, 0, 0.5);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t center = static_cast<int64_t>((r * 2654435761u) >> 7) % centers;
    for (int64_t c = 0; c < dim; ++c) {
      tensor.span<float>()[r * dim + c] += points.span<float>()[center * dim + c];
    }
  }
  return tensor;
}

class Searcher {
 public:
  Searcher(const Tensor& keys, const Tensor& queries, int64_t count, int64_t k, SearchMetric metric,
           SearchSelection selection, ThreadPool* pool)
      : pool_(pool), slots_(count * k), scores_(count * k) {
    call_.keys = keys.view();
    call_.queries = Slice(queries.view(), 1, 0, count);
    call_.entries = keys.dim(1);
    call_.k = k;
    call_.metric = metric;
    call_.selection = selection;
    call_.slots = slots_.data();
    call_.scores = scores_.data();
    const SearchSizes sizes = {1, 1, count, keys.dim(2), keys.dim(1), k, selection};
    workspace_ =
        Tensor(DType::kU8,
               {static_cast<int64_t>(SearchWorkspaceBytes(Device::kCpu, sizes, pool->threads()))});
  }
  void Run() {
    Execution execution;
    execution.pool = pool_;
    execution.workspace =
        absl::MakeSpan(static_cast<std::byte*>(workspace_.raw()), workspace_.bytes());
    Check(Search(Device::kCpu, call_, execution));
  }
  const std::vector<int32_t>& slots() const { return slots_; }

 private:
  SearchCall call_ = {};
  ThreadPool* pool_;
  std::vector<int32_t> slots_;
  std::vector<float> scores_;
  Tensor workspace_;
};

// The matrix product of all keys with all queries by the kernel that search uses, block by block in
// cache; its results are dropped.
class Product {
 public:
  Product(const Tensor& keys, const Tensor& queries, ThreadPool* pool)
      : pool_(pool), keys_(keys), blocks_(pool->threads() * kRows * kPanel) {
    ConstTensorView weights = Transpose(queries.view(), 1, 2);
    weights.rank = 2;
    weights.dims = {queries.dim(2), queries.dim(1)};
    weights.strides = {1, queries.dim(2)};
    queries_ = PackedMatrix::Create(Device::kCpu, weights).value();
  }
  void Run() {
    const int64_t rows = keys_.dim(1), dim = keys_.dim(2);
    pool_->ParallelFor((rows + kRows - 1) / kRows, [&](int64_t task, int worker) {
      const float* keys = keys_.span<float>().data() + task * kRows * dim;
      float* block = blocks_.data() + worker * kRows * kPanel;
      for (int64_t p = 0; p < queries_.out(); p += kPanel) {
        for (int64_t c = 0; c < dim; c += kDepth) {
          BestCpuKernels().gemm(
              std::min(kRows, rows - task * kRows), kPanel, std::min(kDepth, dim - c), keys + c,
              dim, 1, queries_.weights() + p * dim + c * kPanel, kPanel, block, kPanel, c > 0);
        }
      }
    });
  }

 private:
  static constexpr int64_t kRows = 96, kPanel = 64, kDepth = 64;
  ThreadPool* pool_;
  const Tensor& keys_;
  PackedMatrix queries_;
  std::vector<float> blocks_;
};

// States that are synthetic, or read from --states.
struct States {
  Tensor keys;     // [1, entries, dim]
  Tensor queries;  // [1, queries, dim]
};
States MakeStates(int64_t entries, int64_t queries, int64_t dim) {
  const std::string path = absl::GetFlag(FLAGS_states);
  if (path.empty()) {
    return {Clustered(entries, dim, "keys"), Clustered(queries, dim, "queries")};
  }
  static const auto* file = new SafetensorsFile(ReadSafetensors(path).value());
  const auto part = [&](const char* name, int64_t rows) {
    const Tensor& from = file->tensors.at(name);
    rows = std::min(rows, from.dim(0));
    Tensor tensor(DType::kF32, {1, rows, from.dim(1)});
    CopyElements(Slice(from.view(), 0, 0, rows),
                 TensorView(tensor.raw(), DType::kF32, {rows, from.dim(1)}));
    return tensor;
  };
  return {part("keys", entries), part("queries", queries)};
}

long long Number(int64_t number) { return number; }  // for printf

void PrintBatch(const States& states, int64_t k, SearchMetric metric, SearchSelection selection,
                ThreadPool* pool) {
  constexpr int64_t kPeakIterations = 1'000'000;
  const int64_t queries = states.queries.dim(1), entries = states.keys.dim(1);
  Searcher searcher(states.keys, states.queries, queries, k, metric, selection, pool);
  Product product(states.keys, states.queries, pool);
  std::vector<double> peak_flops(pool->threads());
  const std::vector<double> seconds =
      Measure({[&] { searcher.Run(); }, [&] { product.Run(); },
               [&] {
                 pool->ParallelFor(pool->threads(), [&](int64_t n, int) {
                   peak_flops[n] = BestCpuKernels().fma_peak(kPeakIterations);
                 });
               }});
  const double flops = 2.0 * static_cast<double>(queries * entries * states.keys.dim(2));
  const double peak = std::accumulate(peak_flops.begin(), peak_flops.end(), 0.0) / seconds[2];
  std::printf("%7lld  %3lld  %4lld  %-8s  %-9s %7.2f  %7.1f  %9.0f%%  %10.0f%%\n", Number(entries),
              Number(states.keys.dim(2)), Number(k),
              metric == SearchMetric::kInnerProduct ? "product" : "distance",
              selection == SearchSelection::kExact ? "exact" : "bucketed", seconds[0] * 1e3,
              flops / seconds[0] * 1e-9, 100 * seconds[1] / seconds[0],
              100 * flops / seconds[0] / peak);
  std::fflush(stdout);
}

void PrintBatches(ThreadPool* pool) {
  const int64_t queries = absl::GetFlag(FLAGS_queries);
  std::printf("%lld queries\n", Number(queries));
  std::printf(
      "entries  dim     k  metric    selection      ms  GFLOP/s  of product  of FMA peak\n");
  for (const int64_t entries : Numbers(absl::GetFlag(FLAGS_entries))) {
    for (const int64_t dim : Numbers(absl::GetFlag(FLAGS_dims))) {
      const States states = MakeStates(entries, queries, dim);
      for (const int64_t k : Numbers(absl::GetFlag(FLAGS_k))) {
        PrintBatch(states, k, SearchMetric::kSquaredDistance, SearchSelection::kExact, pool);
        PrintBatch(states, k, SearchMetric::kInnerProduct, SearchSelection::kExact, pool);
        PrintBatch(states, k, SearchMetric::kInnerProduct, SearchSelection::kBucketed, pool);
      }
    }
  }
}

// Reads all keys and computes almost nothing with them.
void ReadAll(const Tensor& keys, ThreadPool* pool) {
  constexpr int64_t kPiece = 1 << 14, kSums = 32;
  const int64_t words = static_cast<int64_t>(keys.bytes() / sizeof(uint64_t));
  pool->ParallelFor((words + kPiece - 1) / kPiece, [&](int64_t n, int) {
    const auto* from = static_cast<const uint64_t*>(keys.raw()) + n * kPiece;
    uint64_t sums[kSums] = {};
    const int64_t count = std::min(kPiece, words - n * kPiece) / kSums * kSums;
    for (int64_t i = 0; i < count; i += kSums) {
      for (int64_t j = 0; j < kSums; ++j) sums[j] ^= from[i + j];
    }
    asm volatile("" : : "m"(sums));
  });
}

void PrintFewQueries(ThreadPool* pool) {
  std::printf("\nfew queries, k = 32, squared distance\n");
  std::printf("entries  dim  queries       ms     GB/s  of reading\n");
  for (const int64_t entries : Numbers(absl::GetFlag(FLAGS_entries))) {
    for (const int64_t dim : Numbers(absl::GetFlag(FLAGS_dims))) {
      const States states = MakeStates(entries, 8, dim);
      for (const int64_t queries : {1, 2, 4, 8}) {
        Searcher searcher(states.keys, states.queries, queries, 32, SearchMetric::kSquaredDistance,
                          SearchSelection::kExact, pool);
        const std::vector<double> seconds =
            Measure({[&] { searcher.Run(); }, [&] { ReadAll(states.keys, pool); }});
        std::printf("%7lld  %3lld  %7lld  %7.3f  %7.2f  %9.0f%%\n", Number(states.keys.dim(1)),
                    Number(states.keys.dim(2)), Number(queries), seconds[0] * 1e3,
                    static_cast<double>(states.keys.bytes()) / seconds[0] * 1e-9,
                    100 * seconds[1] / seconds[0]);
        std::fflush(stdout);
      }
    }
  }
}

// ---- Inverted lists ----

// Returns the share of the queries whose best entry was found, and the share of their k best.
std::pair<double, double> Recall(const std::vector<int32_t>& found,
                                 const std::vector<int32_t>& exact, int64_t k) {
  int64_t best = 0, all = 0;
  for (size_t row = 0; row < exact.size(); row += k) {
    const auto begin = found.begin() + static_cast<int64_t>(row), end = begin + k;
    best += std::find(begin, end, exact[row]) != end;
    for (int64_t n = 0; n < k; ++n) all += std::find(begin, end, exact[row + n]) != end;
  }
  const auto size = static_cast<double>(exact.size());
  return {static_cast<double>(best * k) / size, static_cast<double>(all) / size};
}

void PrintLists(const States& states, int64_t k, int64_t lists, ThreadPool* pool) {
  const int64_t queries = states.queries.dim(1), entries = states.keys.dim(1);
  const int64_t dim = states.keys.dim(2);
  InvertedListsOptions options;
  options.lists = lists;
  const ConstTensorView keys(states.keys.raw(), DType::kF32, {entries, dim});
  absl::StatusOr<InvertedLists> index;
  const double building = Seconds([&] { index = InvertedLists::Build(keys, options, pool); });
  Check(index.status());
  Searcher batch(states.keys, states.queries, queries, k, SearchMetric::kSquaredDistance,
                 SearchSelection::kExact, pool);
  Searcher one(states.keys, states.queries, 1, k, SearchMetric::kSquaredDistance,
               SearchSelection::kExact, pool);
  std::vector<int32_t> slots(queries * k);
  std::vector<float> scores(queries * k);
  for (int64_t probes = 1; probes <= lists / 8; probes *= 2) {
    Tensor workspace(
        DType::kU8,
        {static_cast<int64_t>(index->WorkspaceBytes(queries, k, probes, pool->threads()))});
    Execution execution;
    execution.pool = pool;
    execution.workspace =
        absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes());
    const auto search = [&](int64_t count) {
      const ConstTensorView some(states.queries.raw(), DType::kF32, {count, dim});
      Check(index->Search({some, k, probes, slots.data(), scores.data()}, execution));
    };
    const std::vector<double> seconds = Measure(
        {[&] { batch.Run(); }, [&] { search(queries); }, [&] { one.Run(); }, [&] { search(1); }});
    search(queries);
    const auto [best, all] = Recall(slots, batch.slots(), k);
    std::printf(
        "%7lld  %3lld  %5lld  %5lld  %6lld  %6.2f  %8.2f  %5.1fx  %8.3f  %5.1fx  %6.3f  %6.3f\n",
        Number(entries), Number(dim), Number(k), Number(lists), Number(probes), building,
        seconds[1] * 1e3, seconds[0] / seconds[1], seconds[3] * 1e3, seconds[2] / seconds[3], best,
        all);
    std::fflush(stdout);
    if (best > 0.999) break;
  }
}

void PrintAllLists(ThreadPool* pool) {
  std::printf("\ninverted lists, squared distance; times as fast as exact search\n");
  std::printf(
      "                                        batch             one query         recall\n");
  std::printf(
      "entries  dim      k  lists  probes  build s        ms               ms          @1      "
      "@k\n");
  for (const int64_t entries : Numbers(absl::GetFlag(FLAGS_entries))) {
    for (const int64_t dim : Numbers(absl::GetFlag(FLAGS_dims))) {
      const States states = MakeStates(entries, absl::GetFlag(FLAGS_queries), dim);
      for (const int64_t k : Numbers(absl::GetFlag(FLAGS_k))) {
        for (const int64_t lists : Numbers(absl::GetFlag(FLAGS_lists))) {
          PrintLists(states, k, lists, pool);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  tfb::ThreadPool pool(absl::GetFlag(FLAGS_threads));
  for (const std::string& table : absl::GetFlag(FLAGS_tables)) {
    if (table == "batch") tfb::PrintBatches(&pool);
    if (table == "few") tfb::PrintFewQueries(&pool);
    if (table == "lists") tfb::PrintAllLists(&pool);
  }
  return 0;
}
