// Times the simulator: each load and store, barrier and thread, shuffle, and launch.
#include "benchmark/benchmark.h"
#include "core/cuda/runtime.h"
#include "core/cuda/simulator/simulator.h"
#include "core/cuda/simulator/sound_kernels.h"

namespace tfb {
namespace {

using benchmark::Counter;
using cuda_simulator::TotalCounts;

const SoundKernels& Kernels() { return KernelsOn<SoundKernels>(CudaTarget::kSimulator); }

DeviceBuffer Floats(int count) {
  CudaRuntime* runtime = CudaRuntime::For(Device::kSimulator).value();
  const std::vector<float> zeros(count);
  return runtime->Upload(zeros.data(), count * sizeof(float)).value();
}

// Reports the time for each of the `count` operations of one iteration.
void SetTimeOfEach(double count, benchmark::State* state) {
  state->counters["each"] = Counter(count, Counter::kIsIterationInvariantRate | Counter::kInvert);
}

void BM_Access(benchmark::State& state) {
  const int n = static_cast<int>(state.range(0));
  const DeviceBuffer a = Floats(n * n), b = Floats(n * n), c = Floats(n * n);
  const int64_t before = TotalCounts().accesses;
  int64_t runs = 0;
  for (auto _ : state) {
    if (Kernels().multiply_in_tiles(a.As<float>(), b.As<float>(), c.As<float>(), n) != nullptr) {
      state.SkipWithError("findings");
    }
    ++runs;
  }
  SetTimeOfEach(static_cast<double>(TotalCounts().accesses - before) / runs, &state);
}
BENCHMARK(BM_Access)->Arg(128);

void BM_BarrierOfThread(benchmark::State& state) {
  const DeviceBuffer output = Floats(64);
  const int count = static_cast<int>(state.range(0));
  for (auto _ : state) Kernels().sync_often(output.As<float>(), count);
  SetTimeOfEach(256.0 * count, &state);
}
BENCHMARK(BM_BarrierOfThread)->Arg(1000);

void BM_ShuffleOfThread(benchmark::State& state) {
  const DeviceBuffer output = Floats(64);
  const int count = static_cast<int>(state.range(0));
  for (auto _ : state) Kernels().shuffle_often(output.As<float>(), count);
  SetTimeOfEach(256.0 * count, &state);
}
BENCHMARK(BM_ShuffleOfThread)->Arg(1000);

void BM_LaunchOfThread(benchmark::State& state) {
  const DeviceBuffer output = Floats(64);
  for (auto _ : state) Kernels().sync_often(output.As<float>(), 0);
  SetTimeOfEach(256, &state);
}
BENCHMARK(BM_LaunchOfThread);

}  // namespace
}  // namespace tfb
