#include <benchmark/benchmark.h>

#include <vector>

namespace {

void BM_SumVector(benchmark::State& state) {
  const std::vector<double> values(static_cast<size_t>(state.range(0)), 1.0);
  for (auto _ : state) {
    double sum = 0;
    for (double value : values) sum += value;
    benchmark::DoNotOptimize(sum);
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_SumVector)->Arg(1 << 10);

}  // namespace
