// The main function of every technique's benchmark: it runs Google Benchmark on the techniques that
// are linked in, each beside its dense counterpart on the same problem.
//
//   bazel run //attention/longformer:longformer_benchmark -- --technique=longformer:window=*
//       --lengths=1024 --device=cuda
//
// //harness:sweep, which interleaves the layers that it compares, writes the times of result files;
// this program is for the development of one technique, with all of Google Benchmark's flags.
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "benchmark/benchmark.h"
#include "core/command_line.h"
#include "core/cuda/runtime.h"
#include "core/status.h"
#include "core/technique.h"
#include "harness/judge/bound_layer.h"
#include "harness/judge/device_memory.h"
#include "harness/measure/device_peaks.h"
#include "harness/measure/machine.h"
#include "harness/measure/timing.h"
#include "harness/plan/cases.h"
#include "results/files.h"
#include "results/reader.h"

ABSL_FLAG(std::string, technique, "*",
          "What to measure, with options as //harness:sweep takes them.");
ABSL_FLAG(std::string, device, "cpu",
          "cpu, cuda, or simulator, whose times mean nothing but to who works on the simulator.");
ABSL_FLAG(std::string, lengths, "256,1024,4096", "Tokens: numbers, or ranges that double.");
ABSL_FLAG(std::string, heads, "8", "Query heads.");
ABSL_FLAG(std::string, kv_heads, "", "Key-value heads. Empty: as many as query heads.");
ABSL_FLAG(std::string, head_dims, "64", "Channels of a head.");
ABSL_FLAG(std::string, batches, "1", "Sequences in a batch.");
ABSL_FLAG(std::string, dtypes, "f32", "Of f32, bf16, f16.");
ABSL_FLAG(std::string, causal, "auto", "Of true, false, auto: causal where the technique can be.");
ABSL_FLAG(std::string, input, "gaussian",
          "Of gaussian, peaked, needle, real, FILE.safetensors: sweep explains them.");
ABSL_FLAG(int, threads, 1, "Threads of the pool.");
ABSL_FLAG(bool, setup, false, "Also measure Setup.");
ABSL_FLAG(bool, denormals, false,
          "Also time each case on denormal inputs, in turns with the usual ones: the counter "
          "denormal_x is the ratio of the fastest runs. On the CPU alone.");

namespace tfb {
namespace {

constexpr char kProgram[] = "benchmark";
constexpr char kUsage[] =
    "benchmark [flags] [--benchmark_filter=… and the other flags of Google Benchmark]\n"
    "Times techniques beside their dense counterparts.\n\n"
    "Counters: GFLOP/s by the technique's own count of operations, of_peak: its share of the\n"
    "measured rate of arithmetic in its type in percent, tokens/s; with --denormals, denormal_x. "
    "On\n"
    "a GPU a time is that of many calls that are enqueued together.";

// A bound layer with its inputs and pool.
struct Callable {
  NamedTensors inputs;  // of the host
  std::unique_ptr<Layer> layer;
  BoundLayer bound;
};

// Multiplies the inputs by `scale`: with 1e-40 all of them, and their products, are denormal.
absl::StatusOr<Callable> Prepare(const Job& job, ThreadPool* pool, double scale = 1) {
  TFB_RETURN_IF_ERROR(job.obstacle);
  Callable callable;
  TFB_ASSIGN_OR_RETURN(callable.layer, job.CreateLayer());
  TFB_ASSIGN_OR_RETURN(callable.inputs, job.LoadInputs());
  for (auto& [name, tensor] : callable.inputs) {
    if (scale == 1 || !IsFloating(tensor.dtype())) continue;
    const TensorView view = tensor.view();
    for (int64_t i = 0; i < tensor.num_elements(); ++i) view.Set(i, scale * view.Get(i));
  }
  TFB_ASSIGN_OR_RETURN(callable.bound,
                       Bind(callable.layer.get(), job.device, ViewsOf(callable.inputs), pool,
                            /*optional_too=*/false));
  TFB_RETURN_IF_ERROR(callable.bound.Setup());
  return callable;
}

// Returns the time of the fastest run on denormal inputs over that of the fastest on usual ones,
// which alternate. The fastest run is the least disturbed.
absl::StatusOr<double> DenormalRatio(const Job& job, const BoundLayer& usual, ThreadPool* pool) {
  TFB_ASSIGN_OR_RETURN(const Callable denormal, Prepare(job, pool, 1e-40));
  constexpr int kPairs = 15;
  double fastest[2] = {std::numeric_limits<double>::infinity(),
                       std::numeric_limits<double>::infinity()};
  for (int pair = 0; pair < kPairs; ++pair) {
    for (int which = 0; which < 2; ++which) {
      const double begin = MonotonicSeconds();
      TFB_RETURN_IF_ERROR((which == 0 ? usual : denormal.bound).Run());
      fastest[which] = std::min(fastest[which], MonotonicSeconds() - begin);
    }
  }
  return fastest[1] / fastest[0];
}

// Times Run, or Setup, and sets the counters.
absl::Status Measure(const Job& job, bool setup, ThreadPool* pool, double peak,
                     benchmark::State& state) {
  TFB_ASSIGN_OR_RETURN(const Callable callable, Prepare(job, pool));
  const BoundLayer& bound = callable.bound;
  const auto call = [&] { return setup ? bound.Setup() : bound.Run(); };
  TFB_RETURN_IF_ERROR(call());  // warms up
  TFB_RETURN_IF_ERROR(bound.Synchronize());
  const double begin = MonotonicSeconds();
  absl::Status status;
  benchmark::IterationCount calls = 0;
  for (auto _ : state) {
    status.Update(call());
    // Synchronize is inside the timed part, once, since a device works asynchronously.
    if (++calls == state.max_iterations) status.Update(bound.Synchronize());
  }
  const double seconds = (MonotonicSeconds() - begin) / static_cast<double>(state.max_iterations);
  TFB_RETURN_IF_ERROR(status);
  if (setup) return absl::OkStatus();
  const Problem& problem = job.problem;
  state.counters["tokens/s"] = static_cast<double>(problem.batch * problem.query_tokens) / seconds;
  if (const auto flops = callable.layer->cost().flops; flops.has_value()) {
    state.counters["GFLOP/s"] = *flops / seconds / 1e9;
    if (peak > 0) state.counters["of_peak"] = 100 * *flops / seconds / peak;
  }
  if (absl::GetFlag(FLAGS_denormals) && bound.runtime == nullptr) {
    TFB_ASSIGN_OR_RETURN(state.counters["denormal_x"], DenormalRatio(job, bound, pool));
  }
  return absl::OkStatus();
}

// Returns "longformer:window=256/1024x8x64/causal/f32": tokens, heads and channels. It has no
// spaces, for --benchmark_filter.
std::string NameOf(const Job& job, bool setup) {
  const Problem& p = job.problem;
  std::string name = absl::StrReplaceAll(job.DisplayName(), {{" ", ":"}});
  absl::StrAppend(&name, "/", p.query_tokens, "x", p.query_heads, "x", p.head_dim);
  if (p.kv_heads != p.query_heads) absl::StrAppend(&name, "/kv_heads:", p.kv_heads);
  if (p.batch != 1) absl::StrAppend(&name, "/batch:", p.batch);
  absl::StrAppend(&name, p.causal ? "/causal" : "", "/", Name(p.dtype));
  if (job.device != Device::kCpu) absl::StrAppend(&name, "/", Name(job.device));
  if (job.input.captured != nullptr) {
    absl::StrAppend(&name, "/", job.input.captured->file, ":", job.input.captured->layer);
  }
  return setup ? name + "/setup" : name;
}

absl::StatusOr<std::vector<Job>> CasesFromFlags() {
  CaseFlags flags;
  flags.techniques = absl::GetFlag(FLAGS_technique);
  flags.devices = absl::GetFlag(FLAGS_device);
  flags.simulator = true;
  flags.lengths = absl::GetFlag(FLAGS_lengths);
  flags.heads = absl::GetFlag(FLAGS_heads);
  flags.kv_heads = absl::GetFlag(FLAGS_kv_heads);
  flags.head_dims = absl::GetFlag(FLAGS_head_dims);
  flags.batches = absl::GetFlag(FLAGS_batches);
  flags.dtypes = absl::GetFlag(FLAGS_dtypes);
  flags.causal = absl::GetFlag(FLAGS_causal);
  flags.inputs = absl::GetFlag(FLAGS_input);
  flags.threads = absl::StrCat(absl::GetFlag(FLAGS_threads));
  return MakeCases(flags, Registry::Global(), CallerPath("."));
}

// Returns the device's rates of arithmetic in FLOP/s, by type.
std::map<ElementType, double> MeasuredPeaks(Device device, int threads) {
  Environment machine;
  if (device == Device::kCpu) {
    MeasurePeaks({threads}, &machine);
  } else if (const auto gpu = CudaRuntime::For(device); device == Device::kCuda && gpu.ok()) {
    MeasureDevicePeaks(*gpu, CublasPeakLibrary(Device::kCuda), &machine)
        .IgnoreError();  // without peaks, no shares are reported
  }
  std::map<ElementType, double> peaks;
  for (const Peak& peak : machine.peaks()) {
    if (peak.kind() != Peak::KIND_COMPUTE) continue;
    double& highest = peaks[peak.dtype()];
    highest = std::max(highest, peak.value());
  }
  return peaks;
}

absl::StatusOr<int> RunBenchmarks() {
  // It is static because the registered functions refer to it until the program ends.
  static const std::vector<Job>* cases;
  TFB_ASSIGN_OR_RETURN(std::vector<Job> made, CasesFromFlags());
  cases = new std::vector<Job>(std::move(made));
  const int threads = absl::GetFlag(FLAGS_threads);
  static ThreadPool& pool = *new ThreadPool(threads);
  const Device device = cases->front().device;
  // A missing GPU is the program's failure, not a case's.
  TFB_RETURN_IF_ERROR(DeviceStatus(device));
  const std::map<ElementType, double> peaks = MeasuredPeaks(device, threads);
  for (const auto& [dtype, peak] : peaks) {
    benchmark::AddCustomContext(
        absl::StrCat("peak ", Name(dtype)),
        absl::StrFormat("%.4g GFLOP/s on device %s", peak / 1e9, Name(device)));
  }
  for (const Job& job : *cases) {
    for (const bool setup : {false, true}) {
      if (setup && !absl::GetFlag(FLAGS_setup)) continue;
      const auto found = peaks.find(MakeRecord(job).key().dtype());
      const double peak = found == peaks.end() ? 0 : found->second;
      benchmark::RegisterBenchmark(NameOf(job, setup).c_str(),
                                   [&job, setup, peak](benchmark::State& state) {
                                     const absl::Status status =
                                         Measure(job, setup, &pool, peak, state);
                                     if (!status.ok())
                                       state.SkipWithError(std::string(status.message()).c_str());
                                   })
          ->UseRealTime()
          ->Unit(benchmark::kMillisecond);
    }
  }
  benchmark::RunSpecifiedBenchmarks();
  return kExitDone;
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv, argv + argc);
  const bool help = std::find(words.begin(), words.end(), "--help") != words.end();
  if (!help) benchmark::Initialize(&argc, argv);  // removes its own flags
  return tfb::RunMain(tfb::kProgram, tfb::kUsage, {argv, argv + argc}, tfb::RunBenchmarks);
}
