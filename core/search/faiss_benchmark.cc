// Times engine search beside FAISS, exact and by inverted lists, on the same synthetic keys:
//
//   bazel run //core/search:faiss_benchmark -- --threads=2
//
// FAISS computes with threads of its own (OpenMP) and the BLAS that is installed.
#include <faiss/IndexFlat.h>
#include <faiss/IndexIVFFlat.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "core/random.h"
#include "core/search/inverted_lists.h"
#include "core/search/search.h"

ABSL_FLAG(int, threads, 2, "of the pool, and of FAISS");
ABSL_FLAG(int, rounds, 3, "of which the best counts");
ABSL_FLAG(int64_t, entries, 65536, "keys");
ABSL_FLAG(int64_t, queries, 512, "of a batch");
ABSL_FLAG(int64_t, dim, 192, "channels");
ABSL_FLAG(int64_t, k, 32, "neighbours");
ABSL_FLAG(int64_t, lists, 256, "inverted lists");

namespace tfb {
namespace {

double Seconds(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}
double Best(const std::function<void()>& work) {
  double best = INFINITY;
  for (int n = 0; n < absl::GetFlag(FLAGS_rounds); ++n) best = std::min(best, Seconds(work));
  return best;
}

// Returns rows around 1,024 points.
std::vector<float> Clustered(int64_t rows, const char* name) {
  const int64_t dim = absl::GetFlag(FLAGS_dim);
  Tensor points(DType::kF32, {1024, dim}), noise(DType::kF32, {rows, dim});
  FillNormal(&points, 1, "centers");
  FillNormal(&noise, 2, name, 0, 0.5);
  std::vector<float> keys(noise.span<float>().begin(), noise.span<float>().end());
  for (int64_t n = 0; n < rows * dim; ++n) {
    const int64_t center = static_cast<int64_t>((n / dim * 2654435761u) >> 7) % 1024;
    keys[n] += points.span<float>()[center * dim + n % dim];
  }
  return keys;
}

struct Workload {
  std::vector<float> keys = Clustered(absl::GetFlag(FLAGS_entries), "keys");
  std::vector<float> queries = Clustered(absl::GetFlag(FLAGS_queries), "queries");
  int64_t entries = absl::GetFlag(FLAGS_entries);
  int64_t count = absl::GetFlag(FLAGS_queries);
  int64_t dim = absl::GetFlag(FLAGS_dim);
  int64_t k = absl::GetFlag(FLAGS_k);
  ThreadPool pool{absl::GetFlag(FLAGS_threads)};
};

// Returns the share of `slots` whose row of `exact` begins with one of the row.
template <class Slot>
double RecallOfBest(const std::vector<Slot>& slots, const std::vector<int32_t>& exact, int64_t k) {
  int64_t found = 0;
  const auto size = static_cast<int64_t>(exact.size());
  for (int64_t row = 0; row < size; row += k) {
    const auto begin = slots.begin() + row;
    found += std::find(begin, begin + k, exact[row]) != begin + k;
  }
  return static_cast<double>(found * k) / static_cast<double>(size);
}

void Print(const std::string& what, double building, double batch, double one, double recall) {
  std::printf("%-28s %8.2f  %8.2f  %8.3f  %6.3f\n", what.c_str(), building, batch * 1e3, one * 1e3,
              recall);
  std::fflush(stdout);
}

std::vector<int32_t> RunOurs(Workload& p) {
  std::vector<int32_t> slots(p.count * p.k);
  std::vector<float> scores(p.count * p.k);
  const auto search = [&](int64_t count, Tensor& workspace) {
    SearchCall call = {};
    call.keys = ConstTensorView(p.keys.data(), DType::kF32, {1, p.entries, p.dim});
    call.queries = ConstTensorView(p.queries.data(), DType::kF32, {1, count, p.dim});
    call.entries = p.entries;
    call.k = p.k;
    call.metric = SearchMetric::kSquaredDistance;
    call.slots = slots.data();
    call.scores = scores.data();
    Execution execution;
    execution.pool = &p.pool;
    execution.workspace =
        absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes());
    if (!Search(Device::kCpu, call, execution).ok()) std::abort();
  };
  const auto memory = [&](int64_t count) {
    const SearchSizes sizes = {1, 1, count, p.dim, p.entries, p.k};
    return Tensor(
        DType::kU8,
        {static_cast<int64_t>(SearchWorkspaceBytes(Device::kCpu, sizes, p.pool.threads()))});
  };
  Tensor of_one = memory(1), of_all = memory(p.count);
  const double one = Best([&] { search(1, of_one); });
  const double batch = Best([&] { search(p.count, of_all); });
  Print("exact", 0, batch, one, 1);
  return slots;
}

void RunOurLists(Workload& p, const std::vector<int32_t>& exact) {
  InvertedListsOptions options;
  options.lists = absl::GetFlag(FLAGS_lists);
  absl::StatusOr<InvertedLists> index;
  const ConstTensorView keys(p.keys.data(), DType::kF32, {p.entries, p.dim});
  const double building = Seconds([&] { index = InvertedLists::Build(keys, options, &p.pool); });
  std::vector<int32_t> slots(p.count * p.k);
  std::vector<float> scores(p.count * p.k);
  for (int64_t probes = 1; probes <= options.lists / 8; probes *= 2) {
    Tensor workspace(
        DType::kU8,
        {static_cast<int64_t>(index->WorkspaceBytes(p.count, p.k, probes, p.pool.threads()))});
    Execution execution;
    execution.pool = &p.pool;
    execution.workspace =
        absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes());
    const auto search = [&](int64_t count) {
      const ConstTensorView some(p.queries.data(), DType::kF32, {count, p.dim});
      if (!index->Search({some, p.k, probes, slots.data(), scores.data()}, execution).ok()) {
        std::abort();
      }
    };
    const double one = Best([&] { search(1); }), batch = Best([&] { search(p.count); });
    Print("lists, probes " + std::to_string(probes), building, batch, one,
          RecallOfBest(slots, exact, p.k));
  }
}

void RunFaiss(Workload& p, const std::vector<int32_t>& exact) {
  omp_set_num_threads(p.pool.threads());
  std::vector<float> scores(p.count * p.k);
  std::vector<int64_t> slots(p.count * p.k);
  const auto run = [&](const std::string& what, const faiss::Index& index, double building) {
    const auto search = [&](int64_t count) {
      index.search(count, p.queries.data(), p.k, scores.data(), slots.data());
    };
    const double one = Best([&] { search(1); }), batch = Best([&] { search(p.count); });
    Print(what, building, batch, one, RecallOfBest(slots, exact, p.k));
  };
  faiss::IndexFlatL2 flat(p.dim);
  flat.add(p.entries, p.keys.data());
  run("faiss::IndexFlatL2", flat, 0);
  faiss::IndexFlatL2 centroids(p.dim);
  faiss::IndexIVFFlat lists(&centroids, p.dim, absl::GetFlag(FLAGS_lists));
  lists.cp.niter = 10;
  lists.cp.max_points_per_centroid = 64;
  const double building = Seconds([&] {
    lists.train(p.entries, p.keys.data());
    lists.add(p.entries, p.keys.data());
  });
  for (int64_t probes = 1; probes <= absl::GetFlag(FLAGS_lists) / 8; probes *= 2) {
    lists.nprobe = probes;
    run("faiss::IndexIVFFlat, probes " + std::to_string(probes), lists, building);
  }
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  std::printf("%-28s %8s  %8s  %8s  %6s\n", "", "build s", "batch ms", "one ms", "rec.@1");
  tfb::Workload problem;
  const std::vector<int32_t> exact = tfb::RunOurs(problem);
  tfb::RunOurLists(problem, exact);
  tfb::RunFaiss(problem, exact);
  return 0;
}
