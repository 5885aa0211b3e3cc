// Measures the paper's evaluation speed-up (arXiv:1901.02860v3, section 4.5, Table 9) on this
// implementation: the time for a byte of held-out text that the trained language model of
// harness/inputs/language_model scores, where every byte sees the same number of earlier ones.
//
//   recomputed      a network without memory, run on the whole window again for every byte
//   segments        the memory is the window, and --segment bytes are appended at a time
//   one at a time   the same, one byte at a time, as when text is generated
//
// The paper's figures, 363, 773, 1,409 and 1,874 times at 800, 1,800, 2,800 and 3,800 tokens, compare
// the first two on a GPU. All three have the same weights and score the same bytes; times are medians
// of runs that take turns. (A byte of a recomputed window sees no farther than the window; with a
// memory it sees farther through the layers below.)
//
//   bazel run //memory/transformer_xl:evaluation_speed -- --lengths=800,3800 --threads=2
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/command_line.h"
#include "core/status.h"
#include "harness/inputs/language_model.h"
#include "memory/transformer_xl/transformer_xl.h"
#include "results/statistics.h"

ABSL_FLAG(std::vector<std::string>, lengths,
          std::vector<std::string>({"800", "1800", "2800", "3800"}),
          "Attention lengths: bytes that a byte sees, itself included.");
ABSL_FLAG(int64_t, bytes, 64, "Bytes that are scored, and recomputed windows that are timed.");
ABSL_FLAG(int64_t, segment, 128, "Bytes of a segment.");
ABSL_FLAG(int, threads, 2, "Threads.");

namespace tfb::transformer_xl {
namespace {

constexpr char kProgram[] = "evaluation_speed";
constexpr char kUsage[] =
    "evaluation_speed [flags]\n"
    "Times how long the trained language model takes for a byte of held-out text: with a memory,\n"
    "segment by segment or byte by byte, and with the window of each byte recomputed.\n\n"
    "Exit status: 0 done, 2 bad usage.";
constexpr int64_t kSegments = 5;  // segments that are timed

// The model's stack with other options, and its weights.
class Reader {
 public:
  static absl::StatusOr<std::unique_ptr<Reader>> Create(const LanguageModel& model, int64_t tokens,
                                                        const Options& options, ThreadPool* pool) {
    std::unique_ptr<Reader> reader(new Reader);
    const TransformerXl technique;
    const Problem problem = model.Fit(Problem::SelfAttention(1, 1, tokens, 1, /*causal=*/true));
    TFB_ASSIGN_OR_RETURN(
        std::unique_ptr<Layer> layer,
        technique.Create(problem, model.FitOptions(technique.info(), options), Device::kCpu,
                         /*seed=*/1));
    TFB_ASSIGN_OR_RETURN(NamedTensors parameters, model.ParametersOf(*layer));
    TFB_RETURN_IF_ERROR(layer->SetParameters(std::move(parameters)));
    reader->layer_.reset(static_cast<StreamingLayer*>(layer.release()));
    reader->workspace_ = Tensor(
        DType::kU8, {static_cast<int64_t>(reader->layer_->workspace_bytes(pool->threads()))});
    reader->execution_.pool = pool;
    reader->execution_.workspace = absl::MakeSpan(static_cast<std::byte*>(reader->workspace_.raw()),
                                                  reader->workspace_.bytes());
    const Tensor x(DType::kF32, {1, tokens, problem.model_dim()});
    TFB_RETURN_IF_ERROR(reader->layer_->Setup({{"x", x.view()}}, reader->execution_));
    return reader;
  }

  absl::Status Run(const ConstTensorView& x, const TensorView& out) {
    return layer_->Run({{"x", x}}, {{"out", out}}, execution_);
  }
  absl::Status Append(const ConstTensorView& x, const TensorView& out) {
    return layer_->Append({{"x", x}}, {{"out", out}}, execution_);
  }

 private:
  std::unique_ptr<StreamingLayer> layer_;
  Tensor workspace_;
  Execution execution_;
};

// A text, the states that one way of reading gives its bytes, and the time that each piece took.
class Reading {
 public:
  explicit Reading(const ConstTensorView& x) : x_(x), out_(DType::kF32, {1, x.dim(1), x.dim(2)}) {}

  // Appends bytes begin, ..., begin + count - 1 of a stream.
  absl::Status Append(Reader* reader, int64_t begin, int64_t count) {
    return Time(count, [&] {
      return reader->Append(Slice(x_, 1, begin, count), Slice(out_.view(), 1, begin, count));
    });
  }
  // Reads byte t as the last of a window that is read alone.
  absl::Status Recompute(Reader* reader, int64_t t, int64_t window) {
    if (scratch_.shape().empty()) scratch_ = Tensor(DType::kF32, {1, window, x_.dim(2)});
    TFB_RETURN_IF_ERROR(Time(
        1, [&] { return reader->Run(Slice(x_, 1, t + 1 - window, window), scratch_.view()); }));
    CopyElements(Slice(scratch_.view(), 1, window - 1, 1), Slice(out_.view(), 1, t, 1));
    return absl::OkStatus();
  }

  void ForgetTimes() { seconds_.clear(); }
  double MsPerByte() const { return 1e3 * MedianOf(seconds_)->median; }

  // Returns the bits per byte of the bytes from `first` to `end`: the difference of two sums, in
  // which the earlier bytes cancel.
  absl::StatusOr<double> BitsPerByte(const LanguageModel& model, int64_t first, int64_t end) const {
    const auto sum = [&](int64_t tokens) -> absl::StatusOr<double> {
      const Problem problem = model.Fit(Problem::SelfAttention(1, 1, tokens, 1, /*causal=*/true));
      TFB_ASSIGN_OR_RETURN(const double mean, model.BitsPerByte(InputKind::kHidden, problem,
                                                                Slice(out_.view(), 1, 0, tokens)));
      return mean * static_cast<double>(tokens);
    };
    TFB_ASSIGN_OR_RETURN(const double with, sum(end));
    TFB_ASSIGN_OR_RETURN(const double without, sum(first));
    return (with - without) / static_cast<double>(end - first);
  }

 private:
  template <class Work>
  absl::Status Time(int64_t bytes, const Work& work) {
    const auto start = std::chrono::steady_clock::now();
    TFB_RETURN_IF_ERROR(work());
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    seconds_.push_back(taken.count() / static_cast<double>(bytes));
    return absl::OkStatus();
  }

  ConstTensorView x_;
  Tensor out_;
  Tensor scratch_;
  std::vector<double> seconds_;
};

absl::Status Measure(const LanguageModel& model, int64_t length, ThreadPool* pool) {
  const int64_t segment = absl::GetFlag(FLAGS_segment), bytes = absl::GetFlag(FLAGS_bytes);
  const int64_t end = length + std::max(bytes, kSegments * segment);
  const std::string window = absl::StrCat(length);
  const Options with_memory = {
      {"memory", window}, {"same_length", "true"}, {"segment", absl::StrCat(segment)}};
  TFB_ASSIGN_OR_RETURN(const auto windows,
                       Reader::Create(model, length, {{"memory", "0"}, {"segment", window}}, pool));
  TFB_ASSIGN_OR_RETURN(const auto by_segment, Reader::Create(model, segment, with_memory, pool));
  TFB_ASSIGN_OR_RETURN(const auto by_byte, Reader::Create(model, segment, with_memory, pool));

  const Problem text = model.Fit(Problem::SelfAttention(1, 1, end, 1, /*causal=*/true));
  TFB_ASSIGN_OR_RETURN(const NamedTensors inputs, model.MakeInputs(HiddenInputs(text), text));
  const ConstTensorView x = inputs.at("x").view();
  Reading recomputed(x), segments(x), one_at_a_time(x);
  for (int64_t t = 0; t < length; t += segment) {  // fills the memories
    const int64_t count = std::min(segment, length - t);
    TFB_RETURN_IF_ERROR(segments.Append(by_segment.get(), t, count));
    TFB_RETURN_IF_ERROR(one_at_a_time.Append(by_byte.get(), t, count));
  }
  segments.ForgetTimes();
  one_at_a_time.ForgetTimes();
  for (int64_t t = length; t < end; ++t) {
    if (t < length + bytes) {
      TFB_RETURN_IF_ERROR(recomputed.Recompute(windows.get(), t, length));
      TFB_RETURN_IF_ERROR(one_at_a_time.Append(by_byte.get(), t, 1));
    }
    if ((t - length) % segment == 0) {
      TFB_RETURN_IF_ERROR(segments.Append(by_segment.get(), t, std::min(segment, end - t)));
    }
  }

  const std::map<int64_t, const char*> published = {
      {800, "363x"}, {1800, "773x"}, {2800, "1409x"}, {3800, "1874x"}};
  const auto paper = published.find(length);
  std::printf("%7lld", static_cast<long long>(length));
  for (const Reading* reading : {&recomputed, &segments, &one_at_a_time}) {
    TFB_ASSIGN_OR_RETURN(const double bits, reading->BitsPerByte(model, length, length + bytes));
    std::printf(" %10.3f %6.3f", reading->MsPerByte(), bits);
    if (reading != &recomputed) {
      std::printf(" %6.0fx", recomputed.MsPerByte() / reading->MsPerByte());
    }
  }
  std::printf(" %7s\n", paper == published.end() ? "-" : paper->second);
  std::fflush(stdout);
  return absl::OkStatus();
}

absl::StatusOr<int> MeasureAll() {
  for (const auto& [flag, value] : {std::pair("bytes", absl::GetFlag(FLAGS_bytes)),
                                    std::pair("segment", absl::GetFlag(FLAGS_segment)),
                                    std::pair("threads", int64_t{absl::GetFlag(FLAGS_threads)})}) {
    if (value >= 1) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, " is ", value, "; allowed is 1 or more"));
  }
  std::vector<int64_t> lengths;
  for (const std::string& text : absl::GetFlag(FLAGS_lengths)) {
    if (absl::SimpleAtoi(text, &lengths.emplace_back()) && lengths.back() >= 1) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--lengths: \"", text, "\"; allowed are whole numbers of 1 or more"));
  }
  TFB_ASSIGN_OR_RETURN(const auto model, ShippedLanguageModel());
  ThreadPool pool(absl::GetFlag(FLAGS_threads));
  std::printf("%s, %lld bytes, segments of %lld, %d threads\n\n", model->data().c_str(),
              static_cast<long long>(absl::GetFlag(FLAGS_bytes)),
              static_cast<long long>(absl::GetFlag(FLAGS_segment)), pool.threads());
  std::printf("%7s %17s %25s %25s %7s\n", "", "recomputed", "segments", "one at a time", "paper's");
  std::printf("%7s %10s %6s %10s %6s %7s %10s %6s %7s %7s\n", "length", "ms a byte", "bits",
              "ms a byte", "bits", "faster", "ms a byte", "bits", "faster", "faster");
  for (const int64_t length : lengths) TFB_RETURN_IF_ERROR(Measure(*model, length, &pool));
  return kExitDone;
}

}  // namespace
}  // namespace tfb::transformer_xl

int main(int argc, char** argv) {
  return tfb::RunMain(tfb::transformer_xl::kProgram, tfb::transformer_xl::kUsage,
                      {argv, argv + argc}, tfb::transformer_xl::MeasureAll);
}
