// Times engine linear: its stages on one chunk, whole runs beside engine flash, backward passes
// beside runs, and decoding.
//
// Every figure is the best of several samples, which alternate with samples of the FMA peak, so
// that shares of the peak are meaningful on a shared machine.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "core/cpu/kernels.h"
#include "core/flash/flash.h"
#include "core/flash/rows.h"
#include "core/linear/linear.h"
#include "core/random.h"
#include "core/schedule/block_schedule.h"
#include "core/schedule/pattern.h"

ABSL_FLAG(int, threads, 1, "threads of the pool");
ABSL_FLAG(int64_t, features, 256, "length of phi: rows of W, or twice them for sin_cos");
ABSL_FLAG(std::string, feature, "exp", "exp, or sin_cos of unit vectors");
ABSL_FLAG(int64_t, heads, 8, "query and key-value heads");
ABSL_FLAG(int64_t, head_dim, 64, "channels of a head");
ABSL_FLAG(double, epsilon, 1e-6, "added to each feature");
ABSL_FLAG(int, samples, 7, "of which the best counts");
ABSL_FLAG(bool, backward_only, false, "print backward passes alone");

namespace tfb {
namespace {

using Work = std::function<void()>;

double Seconds(const Work& work, int64_t iterations) {
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t n = 0; n < iterations; ++n) work();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  return elapsed.count() / static_cast<double>(iterations);
}

struct Timed {
  std::string name;
  Work work;
  double seconds = INFINITY;  // best
};

// Takes samples of 5 ms or more of the entries in turn, and of the FMA peak in between. Returns the
// FMA peak of one core in FLOP/s.
double Measure(std::vector<Timed>* entries) {
  constexpr int64_t kPeakIterations = 200000;
  double peak = 0;
  for (int sample = 0; sample < absl::GetFlag(FLAGS_samples); ++sample) {
    double flops = 0;
    const double seconds = Seconds([&] { flops = BestCpuKernels().fma_peak(kPeakIterations); }, 3);
    peak = std::max(peak, flops / seconds);
    for (Timed& entry : *entries) {
      const double once = Seconds(entry.work, 1);
      const int64_t iterations = std::clamp<int64_t>(static_cast<int64_t>(5e-3 / once), 1, 100000);
      entry.seconds = std::min(entry.seconds, Seconds(entry.work, iterations));
    }
  }
  return peak;
}

Tensor Normal(std::initializer_list<int64_t> shape, const char* name) {
  Tensor tensor(DType::kF32, shape);
  FillNormal(&tensor, 1, name);
  return tensor;
}

bool IsSinCos() { return absl::GetFlag(FLAGS_feature) == "sin_cos"; }
int64_t Rows() { return absl::GetFlag(FLAGS_features) / (IsSinCos() ? 2 : 1); }

FeatureMap Map(int64_t head_dim) {
  FeatureMap map;
  map.projections = Rows();
  if (IsSinCos()) {
    map.feature = Feature::kSinCos;
    map.stabiliser = KeyStabiliser::kNone;
    map.unit = true;
    return map;
  }
  map.input_scale = static_cast<float>(std::pow(static_cast<double>(head_dim), -0.25));
  map.constant = 1 / std::sqrt(static_cast<double>(map.projections));
  map.epsilon = absl::GetFlag(FLAGS_epsilon);
  return map;
}

// A call's tensors and workspace: engine linear and engine flash on the same inputs.
class Calls {
 public:
  Calls(const Problem& problem, ThreadPool* pool)
      : problem_(problem),
        pool_(pool),
        q_(Normal({1, problem.query_heads, problem.query_tokens, problem.head_dim}, "q")),
        k_(Normal({1, problem.kv_heads, problem.kv_tokens, problem.head_dim}, "k")),
        v_(Normal({1, problem.kv_heads, problem.kv_tokens, problem.value_dim}, "v")),
        w_(Normal({Rows(), problem.head_dim}, "w")),
        out_(DType::kF32, {1, problem.query_heads, problem.query_tokens, problem.value_dim}),
        schedule_(BuildSchedule(problem, FullPattern())) {
    linear_.map = Map(problem.head_dim);
    linear_.q = flash_.q = q_.view();
    linear_.k = flash_.k = k_.view();
    linear_.v = flash_.v = v_.view();
    linear_.w = w_.view();
    linear_.out = flash_.out = out_.view();
    flash_.schedule = &schedule_;
    const size_t bytes = std::max(LinearWorkspaceBytes(problem, linear_.map, pool->threads()),
                                  FlashWorkspaceBytes(problem, false, pool->threads()));
    workspace_ = Tensor(DType::kU8, {static_cast<int64_t>(bytes)});
    state_ = Tensor(DType::kU8, {static_cast<int64_t>(LinearStateBytes(problem, linear_.map))});
    ResetState();
    LayOutBackward();
  }

  void Linear() { Check(LinearCpu(problem_, linear_, execution())); }
  // Runs and keeps what Backward needs.
  void KeepingLinear() {
    Execution keeping = execution();
    keeping.kept = Bytes(&kept_);
    Check(LinearCpu(problem_, linear_, keeping));
  }
  void Backward() {
    Execution keeping = execution();
    keeping.kept = Bytes(&kept_);
    Check(LinearBackwardCpu(problem_, backward_, keeping));
  }
  // Leaves the gradient of W out of Backward.
  void LeaveOutW() { backward_.w_gradient = TensorView(); }
  double kept_mib() const { return static_cast<double>(kept_.bytes()) / (1 << 20); }
  void Flash() { Check(FlashCpu(problem_, flash_, execution())); }
  // Appends the first `tokens` tokens of the inputs.
  void Append(int64_t tokens) {
    LinearCall call = linear_;
    for (ConstTensorView* view : {&call.q, &call.k, &call.v}) *view = Slice(*view, 2, 0, tokens);
    call.out = Slice(call.out, 2, 0, tokens);
    Check(LinearAppend(problem_, tokens, call, Bytes(&state_), execution()));
  }
  void ResetState() { LinearReset(problem_, linear_.map, Bytes(&state_)); }

 private:
  static void Check(const absl::Status& status) {
    if (status.ok()) return;
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    std::exit(1);
  }
  static absl::Span<std::byte> Bytes(Tensor* tensor) {
    return absl::MakeSpan(static_cast<std::byte*>(tensor->raw()), tensor->bytes());
  }
  Execution execution() { return {pool_, Bytes(&workspace_), nullptr}; }
  void LayOutBackward() {
    kept_ = Tensor(DType::kU8, {static_cast<int64_t>(LinearKeptBytes(problem_, linear_.map))});
    const size_t bytes = LinearBackwardWorkspaceBytes(problem_, linear_.map, pool_->threads());
    if (workspace_.bytes() < bytes) {
      workspace_ = Tensor(DType::kU8, {static_cast<int64_t>(bytes)});
    }
    out_gradient_ = Tensor(DType::kF32, out_.shape());
    FillNormal(&out_gradient_, 1, "out_gradient");
    static_cast<LinearInputs&>(backward_) = linear_;
    backward_.out = out_.view();
    backward_.out_gradient = out_gradient_.view();
    backward_.q_gradient = (q_gradient_ = Tensor(DType::kF32, q_.shape())).view();
    backward_.k_gradient = (k_gradient_ = Tensor(DType::kF32, k_.shape())).view();
    backward_.v_gradient = (v_gradient_ = Tensor(DType::kF32, v_.shape())).view();
    backward_.w_gradient = (w_gradient_ = Tensor(DType::kF32, w_.shape())).view();
  }

  Problem problem_;
  ThreadPool* pool_;
  Tensor q_, k_, v_, w_, out_, workspace_, state_, kept_;
  Tensor out_gradient_, q_gradient_, k_gradient_, v_gradient_, w_gradient_;
  BlockSchedule schedule_;
  LinearCall linear_;
  LinearBackwardCall backward_;
  FlashCall flash_;
};

Problem SelfAttention(int64_t tokens, bool causal) {
  return Problem::SelfAttention(1, absl::GetFlag(FLAGS_heads), tokens,
                                absl::GetFlag(FLAGS_head_dim), causal);
}

// Times the kernels on one chunk of 64 tokens, with operands in cache, beside predictions from
// their work: products at 0.87 of the FMA peak, an exponential 0.27 ns. The rest of a run's time is
// loading, transposing, scaling and writing rows, and cache misses.
void PrintStages() {
  constexpr int64_t kChunk = kLinearChunk, kTokens = 4096;
  const CpuKernels& kernels = BestCpuKernels();
  const int64_t m = absl::GetFlag(FLAGS_features);
  const int64_t d = RoundUp(absl::GetFlag(FLAGS_head_dim), kColumnQuantum);
  Tensor w = Normal({m, d}, "w"), x = Normal({d, kChunk}, "x"), v = Normal({kChunk, d}, "v");
  Tensor features = Normal({m, kChunk}, "f"), keys = Normal({m, kChunk}, "e");
  Tensor sums = Normal({m, d}, "s"), out = Normal({kChunk, d}, "o"), pairs(DType::kF32, {64, 64});
  std::vector<float> max(kChunk), total(kChunk), dot(kChunk);
  const FeatureMap map = Map(d);
  const auto data = [](Tensor& tensor) { return tensor.span<float>().data(); };
  ThreadPool pool(1);
  Calls all(SelfAttention(kTokens, false), &pool), causal(SelfAttention(kTokens, true), &pool);

  std::vector<Timed> stages = {
      {"project",
       [&] {
         kernels.gemm(Rows(), kChunk, d, data(w), d, 1, data(x), kChunk, data(features), kChunk,
                      false);
       }},
      {"features",
       [&] {
         kernels.features(map.feature, {data(features), kChunk, map.projections, kChunk},
                          {max.data(), total.data(), data(w), dot.data()});
       }},
      {"add keys",
       [&] { kernels.gemm(m, d, kChunk, data(keys), kChunk, 1, data(v), d, data(sums), d, true); }},
      {"read sums",
       [&] {
         for (int64_t r = 0; r < m; r += 64) {
           kernels.gemm(kChunk, d, std::min<int64_t>(64, m - r), data(features) + r * kChunk, 1,
                        kChunk, data(sums) + r * d, d, data(out), d, r > 0);
         }
       }},
      {"pairs",
       [&] {
         for (int64_t r = 0; r < m; r += 64) {
           kernels.gemm(kChunk, kChunk, std::min<int64_t>(64, m - r), data(features) + r * kChunk,
                        1, kChunk, data(keys) + r * kChunk, kChunk, data(pairs), kChunk, r > 0);
         }
       }},
      {"all", [&] { all.Linear(); }},
      {"causal", [&] { causal.Linear(); }},
  };
  const double peak = Measure(&stages);
  const double product = 2.0 * static_cast<double>(m * d * kChunk) / (0.87 * peak);
  const double projections = product * static_cast<double>(Rows()) / static_cast<double>(m);
  const double exponentials = 0.27e-9 * static_cast<double>(m * kChunk);
  const double chunks = static_cast<double>(kTokens / kChunk * absl::GetFlag(FLAGS_heads));
  const double whole = stages[5].seconds / chunks, whole_causal = stages[6].seconds / chunks;
  std::printf("FMA peak %.1f GFLOP/s a core\n\n", peak * 1e-9);
  std::printf("64 tokens of a head, us     predicted  measured  times  share\n");
  const auto row = [&](int index, double predicted, int times) {
    const double seconds = stages[index].seconds;
    std::printf("%-26s %10.2f %9.2f %6d %5.1f%%\n", stages[index].name.c_str(), predicted * 1e6,
                seconds * 1e6, times, 100 * times * seconds / whole);
    return times * seconds;
  };
  double sum = row(0, projections, 2) + row(1, exponentials, 2) + row(2, product, 1);
  sum += row(3, product, 1);
  std::printf("%-26s %10s %9.2f %6d %5.1f%%\n", "rest", "", (whole - sum) * 1e6, 1,
              100 * (1 - sum / whole));
  std::printf("%-26s %10.2f %9.2f\n", "whole run",
              (2 * product + 2 * projections + 2 * exponentials) * 1e6, whole * 1e6);
  std::printf("%-26s %10.2f %9.2f  (all 64 x 64 pairs; a run leaves out what a row does not see)\n",
              "pairs", product * kChunk / static_cast<double>(d) * 1e6, stages[4].seconds * 1e6);
  std::printf("%-26s %10s %9.2f  rate over not causal %.2f\n\n", "whole run, causal", "",
              whole_causal * 1e6, whole / whole_causal);
}

void PrintLengths(ThreadPool* pool) {
  const double m = static_cast<double>(absl::GetFlag(FLAGS_features));
  const double d = static_cast<double>(absl::GetFlag(FLAGS_head_dim));
  std::printf(
      "tokens  causal   dense ms  linear ms  dense / linear  share of peak: dense  linear\n");
  for (const bool causal : {false, true}) {
    for (const int64_t tokens : {256, 512, 1024, 2048, 4096}) {
      Calls calls(SelfAttention(tokens, causal), pool);
      std::vector<Timed> entries = {{"dense", [&] { calls.Flash(); }},
                                    {"linear", [&] { calls.Linear(); }}};
      const double peak = Measure(&entries) * pool->threads();
      const double n = static_cast<double>(tokens);
      const double heads = static_cast<double>(absl::GetFlag(FLAGS_heads));
      const double dense = 4 * d * heads * (causal ? n * (n + 1) / 2 : n * n);
      const double rows = static_cast<double>(Rows());
      const double linear = heads * n * (4 * rows * d + 4 * m * (d + 1));
      std::printf("%6lld  %6s  %9.3f  %9.3f  %14.2f  %20.2f  %6.2f\n",
                  static_cast<long long>(tokens), causal ? "yes" : "no", entries[0].seconds * 1e3,
                  entries[1].seconds * 1e3, entries[0].seconds / entries[1].seconds,
                  dense / entries[0].seconds / peak, linear / entries[1].seconds / peak);
    }
  }
}

void PrintBackward(ThreadPool* pool) {
  std::printf(
      "\ntokens  causal  linear ms  keeping  backward  times  without W's  kept MiB  times of 1 "
      "thread: linear  backward\n");
  ThreadPool single(1);
  for (const bool causal : {false, true}) {
    for (const int64_t tokens : {1024, 4096, 16384}) {
      const Problem problem = SelfAttention(tokens, causal);
      Calls calls(problem, pool), without_w(problem, pool), alone(problem, &single);
      without_w.LeaveOutW();
      for (Calls* each : {&calls, &without_w, &alone}) each->KeepingLinear();
      std::vector<Timed> entries = {
          {"linear", [&] { calls.Linear(); }},       {"keeping", [&] { calls.KeepingLinear(); }},
          {"backward", [&] { calls.Backward(); }},   {"without W's", [&] { without_w.Backward(); }},
          {"linear alone", [&] { alone.Linear(); }}, {"backward alone", [&] { alone.Backward(); }}};
      Measure(&entries);
      const auto ms = [&](int n) { return entries[n].seconds * 1e3; };
      std::printf("%6lld  %6s  %9.3f  %7.3f  %8.3f  %5.2f  %11.2f  %8.1f  %24.2f  %8.2f\n",
                  static_cast<long long>(tokens), causal ? "yes" : "no", ms(0), ms(1), ms(2),
                  ms(2) / ms(0), ms(3) / ms(0), calls.kept_mib(), ms(4) / ms(0), ms(5) / ms(2));
    }
  }
}

void PrintDecoding(ThreadPool* pool) {
  std::printf(
      "\ndecoding, us a token of all heads\nafter tokens   1 at a time   8 at a time  64 at a "
      "time\n");
  Calls calls(SelfAttention(4096, true), pool);
  int64_t appended = 0;
  for (const int64_t before : {0, 4096, 65536}) {
    for (; appended < before; appended += 4096) calls.Append(4096);
    std::vector<Timed> entries = {{"1", [&] { calls.Append(1); }},
                                  {"8", [&] { calls.Append(8); }},
                                  {"64", [&] { calls.Append(64); }}};
    Measure(&entries);
    std::printf("%12lld  %12.2f  %12.2f  %12.2f\n", static_cast<long long>(before),
                entries[0].seconds * 1e6, entries[1].seconds / 8 * 1e6,
                entries[2].seconds / 64 * 1e6);
  }
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  tfb::ThreadPool pool(absl::GetFlag(FLAGS_threads));
  if (absl::GetFlag(FLAGS_backward_only)) {
    tfb::PrintBackward(&pool);
    return 0;
  }
  tfb::PrintStages();
  tfb::PrintLengths(&pool);
  tfb::PrintBackward(&pool);
  tfb::PrintDecoding(&pool);
  return 0;
}
