// Times engine search: batches beside the matrix product of the same shape, one query beside reading
// the keys.
//
// Every figure is a median of ratios within rounds: a round runs what is compared in turn, so that
// shares mean something on a shared machine.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "core/cpu/kernels.h"
#include "core/layers/matmul.h"
#include "core/random.h"
#include "core/search/search.h"

ABSL_FLAG(int, threads, 2, "threads of the pool");
ABSL_FLAG(int, rounds, 9, "of which the medians count");
ABSL_FLAG(int64_t, queries, 512, "of a batch");
ABSL_FLAG(int64_t, centers, 1024, "around which the synthetic keys and queries lie");

namespace tfb {
namespace {

using Work = std::function<void()>;

double Seconds(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// seconds[n][round] of each work; one round before is not counted.
std::vector<std::vector<double>> Measure(const std::vector<Work>& works) {
  std::vector<std::vector<double>> seconds(works.size());
  for (int round = 0; round <= absl::GetFlag(FLAGS_rounds); ++round) {
    for (size_t n = 0; n < works.size(); ++n) {
      const double once = Seconds(works[n]);
      if (round > 0) seconds[n].push_back(once);
    }
  }
  return seconds;
}

// rate_a / rate_b, the median over the rounds.
double Share(double work_a, const std::vector<double>& a, double work_b,
             const std::vector<double>& b) {
  std::vector<double> shares;
  for (size_t n = 0; n < a.size(); ++n) shares.push_back(work_a / a[n] / (work_b / b[n]));
  return Median(shares);
}

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::exit(1);
}

// Rows around `centers` points, of the same distribution for every name.
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

 private:
  SearchCall call_ = {};
  ThreadPool* pool_;
  std::vector<int32_t> slots_;
  std::vector<float> scores_;
  Tensor workspace_;
};

// The project's own matrix product of 4,096 keys with all queries: what it writes stays in cache.
class Product {
 public:
  Product(const Tensor& keys, const Tensor& queries, ThreadPool* pool) : pool_(pool) {
    x_ = Slice(keys.view(), 1, 0, kRows);
    const auto of_queries = Slice(queries.view(), 1, 0, queries.dim(1));
    ConstTensorView weights = Transpose(of_queries, 1, 2);
    weights.rank = 2;
    weights.dims = {queries.dim(2), queries.dim(1)};
    weights.strides = {1, queries.dim(2)};
    matrix_ = PackedMatrix::Create(Device::kCpu, weights).value();
    y_ = Tensor(DType::kF32, {1, kRows, queries.dim(1)});
    workspace_ = Tensor(
        DType::kU8, {static_cast<int64_t>(MatMulWorkspaceBytes(Device::kCpu, kRows, matrix_.in(),
                                                               matrix_.out(), pool->threads()))});
  }
  void Run() {
    Execution execution;
    execution.pool = pool_;
    execution.workspace =
        absl::MakeSpan(static_cast<std::byte*>(workspace_.raw()), workspace_.bytes());
    MatMulCall call;
    call.x = x_;
    call.y = y_.view();
    for (int n = 0; n < 8; ++n) Check(MatMul(matrix_, call, execution));
  }
  double flops() const { return 8.0 * 2 * kRows * matrix_.in() * matrix_.out(); }

 private:
  static constexpr int64_t kRows = 4096;
  ThreadPool* pool_;
  ConstTensorView x_;
  PackedMatrix matrix_;
  Tensor y_, workspace_;
};

void PrintBatches(ThreadPool* pool) {
  const int64_t count = absl::GetFlag(FLAGS_queries);
  constexpr int64_t kPeakIterations = 2'000'000;
  std::printf("%lld queries, clustered synthetic keys\n", static_cast<long long>(count));
  std::printf("entries  dim     k  metric    selection      ms  GFLOP/s  of SGEMM  of FMA peak\n");
  for (const int64_t entries : {65536, 262144}) {
    for (const int64_t dim : {64, 192}) {
      const Tensor keys = Clustered(entries, dim, "keys"),
                   queries = Clustered(count, dim, "queries");
      for (const int64_t k : {32, 1024}) {
        for (const auto& [metric, selection] :
             {std::pair(SearchMetric::kSquaredDistance, SearchSelection::kExact),
              std::pair(SearchMetric::kInnerProduct, SearchSelection::kExact),
              std::pair(SearchMetric::kInnerProduct, SearchSelection::kBucketed)}) {
          Searcher searcher(keys, queries, count, k, metric, selection, pool);
          Product product(keys, queries, pool);
          double peak_flops = 0;
          const auto seconds =
              Measure({[&] { searcher.Run(); }, [&] { product.Run(); },
                       [&] {
                         std::vector<double> of_thread(pool->threads());
                         pool->ParallelFor(pool->threads(), [&](int64_t n, int) {
                           of_thread[n] = BestCpuKernels().fma_peak(kPeakIterations);
                         });
                         peak_flops = std::accumulate(of_thread.begin(), of_thread.end(), 0.0);
                       }});
          const double flops = 2.0 * static_cast<double>(count * entries * dim);
          std::printf("%7lld  %3lld  %4lld  %-8s  %-9s %7.2f  %7.1f  %7.0f%%  %10.0f%%\n",
                      static_cast<long long>(entries), static_cast<long long>(dim),
                      static_cast<long long>(k),
                      metric == SearchMetric::kInnerProduct ? "product" : "distance",
                      selection == SearchSelection::kExact ? "exact" : "bucketed",
                      Median(seconds[0]) * 1e3, flops / Median(seconds[0]) * 1e-9,
                      100 * Share(flops, seconds[0], product.flops(), seconds[1]),
                      100 * Share(flops, seconds[0], peak_flops, seconds[2]));
          std::fflush(stdout);
        }
      }
    }
  }
}

void PrintFewQueries(ThreadPool* pool) {
  std::printf(
      "\nfew queries, k = 32, squared distance\nentries  dim  queries       ms     GB/s  of "
      "reading\n");
  for (const auto& [entries, dim] :
       {std::pair<int64_t, int64_t>{65536, 64}, {262144, 64}, {262144, 192}, {1048576, 192}}) {
    const Tensor keys = Clustered(entries, dim, "keys"), queries = Clustered(8, dim, "queries");
    const auto* bytes = static_cast<const int64_t*>(keys.raw());
    const auto words = static_cast<int64_t>(keys.bytes() / 8);
    for (const int64_t count : {1, 2, 4, 8}) {
      Searcher searcher(keys, queries, count, 32, SearchMetric::kSquaredDistance,
                        SearchSelection::kExact, pool);
      std::vector<int64_t> sums(pool->threads() * 8);
      const auto read = [&] {
        constexpr int64_t kPiece = 1 << 15;
        pool->ParallelFor(words / kPiece, [&](int64_t n, int worker) {
          int64_t sum[8] = {};
          for (int64_t i = n * kPiece; i < (n + 1) * kPiece; i += 8) {
            for (int64_t j = 0; j < 8; ++j) sum[j] ^= bytes[i + j];
          }
          sums[worker * 8] += std::accumulate(sum, sum + 8, int64_t{0});
        });
      };
      const auto seconds = Measure({[&] { searcher.Run(); }, read});
      const auto size = static_cast<double>(keys.bytes());
      std::printf("%7lld  %3lld  %7lld  %7.3f  %7.2f  %9.0f%%\n", static_cast<long long>(entries),
                  static_cast<long long>(dim), static_cast<long long>(count),
                  Median(seconds[0]) * 1e3, size / Median(seconds[0]) * 1e-9,
                  100 * Share(size, seconds[0], size, seconds[1]));
      std::fflush(stdout);
    }
  }
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  tfb::ThreadPool pool(absl::GetFlag(FLAGS_threads));
  tfb::PrintBatches(&pool);
  tfb::PrintFewQueries(&pool);
  return 0;
}
