// Main of every technique's benchmark: the techniques that are linked in, beside dense attention.
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "core/random.h"
#include "core/status.h"
#include "core/technique.h"

ABSL_FLAG(std::string, technique, "", "the technique to measure; empty for all that are linked in");
ABSL_FLAG(int, threads, 1, "threads of the pool");

namespace tfb {
namespace {

absl::Status Measure(const Technique& technique, const Problem& problem, ThreadPool* pool,
                     benchmark::State& state) {
  constexpr uint64_t kSeed = 1;
  TFB_ASSIGN_OR_RETURN(const auto input_specs, technique.InputSpecs(problem, {}));
  TFB_ASSIGN_OR_RETURN(const auto output_specs, technique.OutputSpecs(problem, {}));
  TFB_ASSIGN_OR_RETURN(auto layer, technique.Create(problem, {}, Device::kCpu, kSeed));
  NamedTensors inputs, outputs;
  for (const TensorSpec& spec : input_specs) {
    if (spec.optional) continue;
    FillNormal(&(inputs[spec.name] = Tensor(spec.dtype, spec.shape)), kSeed, spec.name);
  }
  for (const TensorSpec& spec : output_specs) {
    if (!spec.optional) outputs[spec.name] = Tensor(spec.dtype, spec.shape);
  }
  Tensor workspace(DType::kU8, {static_cast<int64_t>(layer->workspace_bytes(pool->threads())) + 1});
  Execution execution;
  execution.pool = pool;
  execution.workspace = absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes());
  const Inputs input_views = ViewsOf(inputs);
  const Outputs output_views = MutableViewsOf(outputs);
  TFB_RETURN_IF_ERROR(layer->Setup(input_views, execution));
  for (auto _ : state) TFB_RETURN_IF_ERROR(layer->Run(input_views, output_views, execution));
  if (const auto flops = layer->cost().flops; flops.has_value()) {
    state.counters["FLOP/s"] =
        benchmark::Counter(*flops, benchmark::Counter::kIsIterationInvariantRate);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  absl::ParseCommandLine(argc, argv);
  tfb::ThreadPool pool(absl::GetFlag(FLAGS_threads));
  for (const tfb::Technique* technique : tfb::Registry::Global().All()) {
    for (const int64_t tokens : {256, 1024, 4096}) {
      const tfb::Problem problem = tfb::Problem::SelfAttention(
          1, 8, tokens, 64, /*causal=*/technique->info().supports_causal);
      benchmark::RegisterBenchmark(absl::StrCat(technique->info().name, "/", tokens).c_str(),
                                   [=, &pool](benchmark::State& state) {
                                     const absl::Status status =
                                         tfb::Measure(*technique, problem, &pool, state);
                                     if (!status.ok())
                                       state.SkipWithError(std::string(status.message()).c_str());
                                   })
          ->UseRealTime()
          ->Unit(benchmark::kMillisecond);
    }
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
