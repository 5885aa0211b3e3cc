// The paper's evaluation speed-up (arXiv:1901.02860v3, section 4.5, Table 9), measured on ours:
// time per token of text that is scored, where every token sees the same number of earlier ones.
//
//   recomputed      a network without memory, run on the whole window again for every token
//   segments        the memory is the window, and --segment tokens are appended at a time
//   one at a time   the same, one token at a time, as when text is generated
//
// The paper's figures, 363, 773, 1,409 and 1,874 times at 800, 1,800, 2,800 and 3,800 tokens,
// compare the first two on a GPU. All three share parameters; samples of the three take turns, and
// a row holds their medians.
//
//   bazel run //memory/transformer_xl:evaluation_speed -- --lengths=800,3800 --threads=2
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "core/random.h"
#include "memory/transformer_xl/transformer_xl.h"

ABSL_FLAG(std::vector<std::string>, lengths,
          std::vector<std::string>({"800", "1800", "2800", "3800"}),
          "attention lengths: tokens that a token sees, itself included");
ABSL_FLAG(int64_t, layers, 4, "layers of the network");
ABSL_FLAG(int64_t, heads, 8, "attention heads");
ABSL_FLAG(int64_t, head_dim, 64, "channels of a head");
ABSL_FLAG(int64_t, segment, 128, "tokens of a segment");
ABSL_FLAG(int, threads, 2, "threads");
ABSL_FLAG(int, samples, 5, "samples of each kind, of which the median is shown");

namespace tfb {
namespace {

// Writes the message and ends the program, where a status is not OK.
void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::exit(2);
}

double Median(std::vector<double> samples) {
  std::nth_element(samples.begin(), samples.begin() + samples.size() / 2, samples.end());
  return samples[samples.size() / 2];
}

// A layer, its workspace, and a segment of text for it.
class Reader {
 public:
  Reader(int64_t tokens, const Options& options, ThreadPool* pool) {
    const Problem problem = Problem::SelfAttention(1, absl::GetFlag(FLAGS_heads), tokens,
                                                   absl::GetFlag(FLAGS_head_dim), /*causal=*/true);
    auto layer = TransformerXl().Create(problem, options, Device::kCpu, /*seed=*/1);
    Check(layer.status());
    layer_.reset(static_cast<StreamingLayer*>(layer->release()));
    x_ = Tensor(DType::kF32, {1, tokens, problem.model_dim()});
    out_ = Tensor(DType::kF32, x_.shape());
    FillNormal(&x_, 1, "text");
    workspace_ =
        Tensor(DType::kU8, {static_cast<int64_t>(layer_->workspace_bytes(pool->threads()))});
    execution_.pool = pool;
    execution_.workspace =
        absl::MakeSpan(static_cast<std::byte*>(workspace_.raw()), workspace_.bytes());
    Check(layer_->Setup({{"x", x_.view()}}, execution_));
  }

  void Run() { Check(layer_->Run({{"x", x_.view()}}, {{"out", out_.view()}}, execution_)); }
  // Appends the text's first tokens.
  void Append(int64_t tokens) {
    Check(layer_->Append({{"x", Slice(x_.view(), 1, 0, tokens)}},
                         {{"out", Slice(out_.view(), 1, 0, tokens)}}, execution_));
  }

 private:
  std::unique_ptr<StreamingLayer> layer_;
  Tensor x_, out_, workspace_;
  Execution execution_;
};

template <class Work>
double Seconds(const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void Measure(int64_t length, ThreadPool* pool) {
  const int64_t segment = absl::GetFlag(FLAGS_segment);
  const std::string layers = absl::StrCat(absl::GetFlag(FLAGS_layers)),
                    window = absl::StrCat(length);
  Reader recomputed(length, {{"layers", layers}, {"memory", "0"}, {"segment", window}}, pool);
  Reader streamed(segment,
                  {{"layers", layers},
                   {"memory", window},
                   {"same_length", "true"},
                   {"segment", absl::StrCat(segment)}},
                  pool);
  for (int64_t filled = 0; filled < length; filled += segment) streamed.Append(segment);
  recomputed.Run();
  streamed.Append(1);
  constexpr int64_t kSegments = 4, kTokens = 64;  // of one sample
  std::vector<double> whole, by_segment, by_token;
  for (int n = 0; n < absl::GetFlag(FLAGS_samples); ++n) {
    whole.push_back(Seconds([&] { recomputed.Run(); }));
    by_segment.push_back(Seconds([&] {
                           for (int64_t i = 0; i < kSegments; ++i) streamed.Append(segment);
                         }) /
                         static_cast<double>(kSegments * segment));
    by_token.push_back(Seconds([&] {
                         for (int64_t i = 0; i < kTokens; ++i) streamed.Append(1);
                       }) /
                       kTokens);
  }
  const double a = Median(whole), b = Median(by_segment), c = Median(by_token);
  std::printf("%7lld %15.3f %12.4f %8.0fx %16.4f %8.0fx\n", static_cast<long long>(length), 1e3 * a,
              1e3 * b, a / b, 1e3 * c, a / c);
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  tfb::ThreadPool pool(absl::GetFlag(FLAGS_threads));
  std::printf("%d layers, %d heads of %d, segments of %d, %d threads; ms per token\n",
              static_cast<int>(absl::GetFlag(FLAGS_layers)),
              static_cast<int>(absl::GetFlag(FLAGS_heads)),
              static_cast<int>(absl::GetFlag(FLAGS_head_dim)),
              static_cast<int>(absl::GetFlag(FLAGS_segment)), absl::GetFlag(FLAGS_threads));
  std::printf("%7s %15s %12s %9s %16s %9s\n", "length", "recomputed", "segments", "faster",
              "one at a time", "faster");
  for (const std::string& length : absl::GetFlag(FLAGS_lengths)) {
    tfb::Measure(std::strtoll(length.c_str(), nullptr, 10), &pool);
  }
  return 0;
}
