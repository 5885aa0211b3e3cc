// Measures the time that the store adds to a step, beside the paper's figures (arXiv:2203.08913v1):
// 0.20 s a step without a store, 0.25 s with 8,192 tokens in it, 0.60 s with 65,536, on TPUs, where
// a step trains; here a step appends a segment.
//
// The stacks share their parameters' seed and take turns; a row holds medians over the samples, and
// the median of each sample's ratio to the stack without a store.
//
//   bazel run -c opt //memory/memorizing:step_time -- --stores=0,8192,65536 --threads=2
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/command_line.h"
#include "core/random.h"
#include "core/status.h"
#include "memory/memorizing/memorizing.h"
#include "results/statistics.h"

ABSL_FLAG(std::vector<std::string>, stores,
          std::vector<std::string>({"0", "1024", "8192", "65536"}),
          "sizes of the store in tokens; the first is what the others are held against");
ABSL_FLAG(int64_t, layers, 6, "layers of the network");
ABSL_FLAG(int64_t, heads, 8, "attention heads");
ABSL_FLAG(int64_t, head_dim, 64, "channels of a head");
ABSL_FLAG(int64_t, segment, 512, "tokens of a segment, and of the layers' memory");
ABSL_FLAG(int64_t, k, 32, "tokens that a query retrieves");
ABSL_FLAG(std::string, selection, "exact", "exact or bucketed");
ABSL_FLAG(int, threads, 2, "threads");
ABSL_FLAG(int, samples, 7, "samples of each store");
ABSL_FLAG(bool, cpu_time, false,
          "count the processor's time, not the clock's: for one thread on a shared machine");

namespace tfb::memorizing {
namespace {

constexpr char kProgram[] = "step_time";
constexpr char kUsage[] =
    "step_time [flags]\n"
    "Times how long a stack takes for a segment, over sizes of the store that one of its layers\n"
    "retrieves from.\n\n"
    "Exit status: 0 done, 2 bad usage.";

double Now() {
  if (absl::GetFlag(FLAGS_cpu_time)) return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A stack whose store is full, and its texts: different ones each time, so that keys differ.
class Reader {
 public:
  static absl::StatusOr<std::unique_ptr<Reader>> Create(const std::string& store,
                                                        ThreadPool* pool) {
    const int64_t segment = absl::GetFlag(FLAGS_segment);
    const Problem problem = Problem::SelfAttention(1, absl::GetFlag(FLAGS_heads), segment,
                                                   absl::GetFlag(FLAGS_head_dim), /*causal=*/true);
    const Options options = {{"layers", absl::StrCat(absl::GetFlag(FLAGS_layers))},
                             {"segment", absl::StrCat(segment)},
                             {"memory", absl::StrCat(segment)},
                             {"pre_norm", "true"},
                             {"k", absl::StrCat(absl::GetFlag(FLAGS_k))},
                             {"selection", absl::GetFlag(FLAGS_selection)},
                             {"store", store}};
    TFB_ASSIGN_OR_RETURN(std::unique_ptr<Layer> layer,
                         Memorizing().Create(problem, options, Device::kCpu, /*seed=*/1));
    std::unique_ptr<Reader> reader(new Reader);
    reader->layer_.reset(static_cast<StreamingLayer*>(layer.release()));
    reader->x_ = Tensor(DType::kF32, {1, segment, problem.model_dim()});
    reader->out_ = Tensor(DType::kF32, reader->x_.shape());
    reader->workspace_ = Tensor(
        DType::kU8, {static_cast<int64_t>(reader->layer_->workspace_bytes(pool->threads()))});
    reader->execution_.pool = pool;
    reader->execution_.workspace = absl::MakeSpan(static_cast<std::byte*>(reader->workspace_.raw()),
                                                  reader->workspace_.bytes());
    FillNormal(&reader->x_, 1, "text");
    TFB_RETURN_IF_ERROR(reader->layer_->Setup({{"x", reader->x_.view()}}, reader->execution_));
    const double capacity = std::strtod(store.c_str(), nullptr);
    do {
      TFB_RETURN_IF_ERROR(reader->Seconds().status());
    } while (reader->layer_->statistics().at("store_entries") < capacity);
    return reader;
  }

  // Returns the time of appending the next segment.
  absl::StatusOr<double> Seconds() {
    FillNormal(&x_, ++texts_, "text");
    const double start = Now();
    TFB_RETURN_IF_ERROR(layer_->Append({{"x", x_.view()}}, {{"out", out_.view()}}, execution_));
    return Now() - start;
  }
  double store_bytes() const { return layer_->statistics().at("store_bytes"); }

 private:
  Reader() = default;

  std::unique_ptr<StreamingLayer> layer_;
  Tensor x_, out_, workspace_;
  Execution execution_;
  uint64_t texts_ = 0;
};

absl::Status CheckFlags() {
  if (absl::GetFlag(FLAGS_stores).empty()) {
    return absl::InvalidArgumentError("--stores: expected is one size or more");
  }
  for (const auto& [flag, value] : {std::pair("segment", absl::GetFlag(FLAGS_segment)),
                                    std::pair("heads", absl::GetFlag(FLAGS_heads)),
                                    std::pair("head_dim", absl::GetFlag(FLAGS_head_dim)),
                                    std::pair("samples", int64_t{absl::GetFlag(FLAGS_samples)}),
                                    std::pair("threads", int64_t{absl::GetFlag(FLAGS_threads)})}) {
    if (value >= 1) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, " is ", value, "; allowed is 1 or more"));
  }
  return absl::OkStatus();
}

absl::StatusOr<int> Measure() {
  TFB_RETURN_IF_ERROR(CheckFlags());
  ThreadPool pool(absl::GetFlag(FLAGS_threads));
  const std::vector<std::string> stores = absl::GetFlag(FLAGS_stores);
  std::vector<std::unique_ptr<Reader>> readers;
  for (const std::string& store : stores) {
    TFB_ASSIGN_OR_RETURN(readers.emplace_back(), Reader::Create(store, &pool));
  }
  std::vector<std::vector<double>> seconds(stores.size()), ratios(stores.size());
  for (int n = 0; n < absl::GetFlag(FLAGS_samples); ++n) {
    for (size_t s = 0; s < stores.size(); ++s) {
      TFB_ASSIGN_OR_RETURN(seconds[s].emplace_back(), readers[s]->Seconds());
      ratios[s].push_back(seconds[s].back() / seconds[0].back());
    }
  }
  std::printf("%d layers, %d heads of %d, segments of %d, %d retrieved, %d threads\n",
              static_cast<int>(absl::GetFlag(FLAGS_layers)),
              static_cast<int>(absl::GetFlag(FLAGS_heads)),
              static_cast<int>(absl::GetFlag(FLAGS_head_dim)),
              static_cast<int>(absl::GetFlag(FLAGS_segment)),
              static_cast<int>(absl::GetFlag(FLAGS_k)), pool.threads());
  std::printf("%9s %12s %9s %12s\n", "store", "ms a step", "ratio", "store MiB");
  for (size_t s = 0; s < stores.size(); ++s) {
    std::printf("%9s %12.2f %8.2fx %12.1f\n", stores[s].c_str(), 1e3 * MedianOf(seconds[s])->median,
                MedianOf(ratios[s])->median, readers[s]->store_bytes() / (1 << 20));
  }
  return kExitDone;
}

}  // namespace
}  // namespace tfb::memorizing

int main(int argc, char** argv) {
  return tfb::RunMain(tfb::memorizing::kProgram, tfb::memorizing::kUsage, {argv, argv + argc},
                      tfb::memorizing::Measure);
}
