// Measures how many digits the trained adder gets right after each number of steps, and the savings
// of halting, on newly drawn additions.
//
//   bazel run -c opt //adaptive/universal_transformer:evaluate
//
// Networks take turns, and a time is compared with that of the network that never halts in the same
// round; the table has the medians of these ratios.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "adaptive/universal_transformer/adder.h"
#include "core/command_line.h"
#include "core/runfiles.h"
#include "core/status.h"
#include "core/thread_pool.h"
#include "results/files.h"
#include "results/statistics.h"

ABSL_FLAG(std::string, model, "", "A model's file. Empty: the one of the repository.");
ABSL_FLAG(std::vector<std::string>, digits, std::vector<std::string>({"24", "48", "96"}),
          "Digits of the numbers, 1 to 4096; the model was trained on up to 24.");
ABSL_FLAG(int64_t, problems, 256, "Additions of each length, 1 to 65536.");
ABSL_FLAG(double, nines, 0.5,
          "Share of the digits that add up to 9, 0 to 1: through these a carry reaches further.");
ABSL_FLAG(std::vector<std::string>, thresholds,
          std::vector<std::string>({"0", "0.5", "0.9", "0.99", "0.999"}),
          "Sums of halting probabilities at which a token stops, 0 to 1.");
ABSL_FLAG(int, rounds, 9, "Times that each network is run for its time; 0: not timed.");
ABSL_FLAG(
    int, threads, 1,
    "Threads. With 1 the processor's time counts, not the clock's, as others may use it too.");
ABSL_FLAG(uint64_t, seed, 1, "Of the additions.");

namespace tfb::universal_transformer {
namespace {

constexpr char kProgram[] = "evaluate";
constexpr char kUsage[] =
    "evaluate [--digits=24,48] [--problems=256] [--thresholds=0.9,0.99] ...\n\n"
    "Adds numbers with the trained Universal Transformer: how much is right after a fixed number "
    "of\n"
    "steps and with adaptive computation time, how many steps digits take, and what that saves of\n"
    "floating-point operations and of time.\n";

struct Settings {
  std::vector<int64_t> digits;
  std::vector<std::string> thresholds;
  int64_t problems = 0;
  double nines = 0;
  int rounds = 0;
};

absl::Status OutOfRange(absl::string_view flag, absl::string_view value, absl::string_view range) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": \"", value, "\"; allowed are ", range));
}

absl::StatusOr<Settings> ReadSettings() {
  Settings settings;
  for (const std::string& text : absl::GetFlag(FLAGS_digits)) {
    int64_t digits;
    if (!absl::SimpleAtoi(text, &digits) || digits < 1 || digits > 4096) {
      return OutOfRange("digits", text, "1 to 4096");
    }
    settings.digits.push_back(digits);
  }
  settings.thresholds = absl::GetFlag(FLAGS_thresholds);
  for (const std::string& text : settings.thresholds) {
    double threshold;
    if (!absl::SimpleAtod(text, &threshold) || !(threshold >= 0 && threshold <= 1)) {
      return OutOfRange("thresholds", text, "0 to 1");
    }
  }
  settings.problems = absl::GetFlag(FLAGS_problems);
  settings.nines = absl::GetFlag(FLAGS_nines);
  settings.rounds = absl::GetFlag(FLAGS_rounds);
  const int threads = absl::GetFlag(FLAGS_threads);
  if (settings.problems < 1 || settings.problems > 65536) {
    return OutOfRange("problems", absl::StrCat(settings.problems), "1 to 65536");
  }
  if (!(settings.nines >= 0 && settings.nines <= 1)) {
    return OutOfRange("nines", absl::StrCat(settings.nines), "0 to 1");
  }
  if (settings.rounds < 0) return OutOfRange("rounds", absl::StrCat(settings.rounds), "0 and more");
  if (threads < 1 || threads > 1024)
    return OutOfRange("threads", absl::StrCat(threads), "1 to 1024");
  return settings;
}

// Returns the time of this thread alone where it is the only one.
double Seconds(const ThreadPool& pool) {
  if (pool.threads() > 1) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return absl::ToDoubleSeconds(absl::DurationFromTimespec(time));
}

// A layer with the arguments of its calls.
class Network {
 public:
  static absl::StatusOr<Network> Create(std::string name, const Adder& adder,
                                        const Additions& additions, const Options& options,
                                        ThreadPool* pool, bool never_halts = false) {
    Network network;
    network.name_ = std::move(name);
    network.pool_ = pool;
    TFB_ASSIGN_OR_RETURN(network.layer_, adder.LayerFor(additions, options));
    if (never_halts) {
      NamedTensors bias;
      Fill((bias["halting.b"] = Tensor(DType::kF32, {1})).view(), -1000);  // p = 0
      TFB_RETURN_IF_ERROR(network.layer_->SetParameters(bias));
    }
    network.x_ = adder.Embed(additions);
    for (const TensorSpec& spec : network.layer_->outputs()) {
      TFB_ASSIGN_OR_RETURN(network.outputs_[spec.name], Tensor::Allocate(spec.dtype, spec.shape));
    }
    TFB_ASSIGN_OR_RETURN(
        network.workspace_,
        Tensor::Allocate(DType::kU8,
                         {static_cast<int64_t>(network.layer_->workspace_bytes(pool->threads()))}));
    TFB_RETURN_IF_ERROR(network.layer_->Setup({{"x", network.x_.view()}}, network.Call()));
    TFB_RETURN_IF_ERROR(network.Run());
    network.accuracy_ = adder.Judge(additions, network.outputs_.at("out"));
    return network;
  }

  absl::Status Run() {
    Outputs outputs;
    for (auto& [name, tensor] : outputs_) outputs.Set(name, tensor.view());
    return layer_->Run({{"x", x_.view()}}, outputs, Call());
  }
  absl::Status Time() {
    const double start = Seconds(*pool_);
    TFB_RETURN_IF_ERROR(Run());
    seconds_.push_back(Seconds(*pool_) - start);
    return absl::OkStatus();
  }

  const std::string& name() const { return name_; }
  const Adder::Accuracy& accuracy() const { return accuracy_; }
  double flops() const { return *layer_->cost().flops; }
  double statistic(const std::string& name) const { return layer_->statistics().at(name); }
  const Tensor& output(const std::string& name) const { return outputs_.at(name); }
  // Return the median over the rounds, and the median of the ratio to the other network's times.
  double seconds() const { return MedianOf(seconds_)->median; }
  double RatioTo(const Network& other) const {
    std::vector<double> ratios;
    for (size_t n = 0; n < seconds_.size(); ++n) {
      ratios.push_back(seconds_[n] / other.seconds_[n]);
    }
    return MedianOf(ratios)->median;
  }
  bool is_timed() const { return !seconds_.empty(); }

 private:
  Execution Call() {
    Execution execution;
    execution.pool = pool_;
    execution.workspace =
        absl::MakeSpan(static_cast<std::byte*>(workspace_.raw()), workspace_.bytes());
    return execution;
  }

  std::string name_;
  ThreadPool* pool_ = nullptr;
  std::unique_ptr<Layer> layer_;
  Tensor x_, workspace_;
  NamedTensors outputs_;
  Adder::Accuracy accuracy_;
  std::vector<double> seconds_;
};

// The networks of one length: of 1, 2, ... fixed steps, with halting, and with a gate that never
// opens.
struct Networks {
  std::vector<Network> fixed;
  std::vector<Network> halting;
  std::vector<Network> gate_alone;  // one
};

absl::StatusOr<Networks> MakeNetworks(const Adder& adder, const Additions& additions,
                                      const Settings& settings, ThreadPool* pool) {
  Networks networks;
  for (int64_t n = 1; n <= adder.steps(); ++n) {
    const Options options = {{"halting", "none"}, {"steps", absl::StrCat(n)}};
    TFB_ASSIGN_OR_RETURN(Network network,
                         Network::Create(absl::StrCat(n, n == 1 ? " step" : " steps"), adder,
                                         additions, options, pool));
    networks.fixed.push_back(std::move(network));
  }
  for (const std::string& threshold : settings.thresholds) {
    TFB_ASSIGN_OR_RETURN(Network network,
                         Network::Create(absl::StrCat("act ", threshold), adder, additions,
                                         {{"threshold", threshold}}, pool));
    networks.halting.push_back(std::move(network));
  }
  TFB_ASSIGN_OR_RETURN(Network gate_alone, Network::Create("act, never", adder, additions, {}, pool,
                                                           /*never_halts=*/true));
  networks.gate_alone.push_back(std::move(gate_alone));
  return networks;
}

absl::Status TimeInTurns(const Settings& settings, Networks* networks) {
  const bool shows_progress = isatty(fileno(stderr)) != 0;
  for (int round = 0; round < settings.rounds; ++round) {
    if (shows_progress) std::fprintf(stderr, "\rround %d of %d", round + 1, settings.rounds);
    for (auto* group : {&networks->fixed, &networks->halting, &networks->gate_alone}) {
      for (Network& network : *group) TFB_RETURN_IF_ERROR(network.Time());
    }
  }
  if (shows_progress) std::fputs("\r\033[K", stderr);
  return absl::OkStatus();
}

void PrintRow(const Network& network, const Network& all_steps) {
  const double saved = 1 - network.flops() / all_steps.flops();
  std::printf("%-12s %8.2f %% %8.2f %% %7.2f %7.2f %8.1f %%", network.name().c_str(),
              100 * network.accuracy().digits, 100 * network.accuracy().sums,
              network.statistic("mean_steps"), network.statistic("mean_ponder"), 100 * saved);
  if (network.is_timed()) {
    const double time_saved = 1 - network.RatioTo(all_steps);
    std::printf(" %8.2f %8.1f %%", 1e3 * network.seconds(), 100 * time_saved);
    if (saved > 0.02) std::printf(" %10.2f", time_saved / saved);
  }
  std::printf("\n");
}

void PrintTable(const Networks& networks) {
  const Network& all_steps = networks.fixed.back();
  std::printf("%-12s %10s %10s %7s %7s %10s", "", "digits", "sums", "mean", "", "FLOPs");
  if (all_steps.is_timed()) std::printf(" %8s %10s %10s", "", "time", "time saved");
  std::printf("\n%-12s %10s %10s %7s %7s %10s", "", "right", "right", "steps", "ponder", "saved");
  if (all_steps.is_timed()) std::printf(" %8s %10s %10s", "ms", "saved", "of FLOPs");
  std::printf("\n");
  for (const auto* group : {&networks.fixed, &networks.halting}) {
    for (const Network& network : *group) PrintRow(network, all_steps);
  }
  if (!all_steps.is_timed()) return;
  const Network& never_halts = networks.gate_alone[0];
  std::printf("the gate takes %.1f %% of a step: act that never halts, %.2f ms, against %s\n",
              100 * (never_halts.RatioTo(all_steps) - 1), 1e3 * never_halts.seconds(),
              all_steps.name().c_str());
}

// Prints how many steps tokens took at the model's own threshold, and how that depends on the
// carry.
void PrintSteps(const Additions& additions, int64_t limit, const Network& network) {
  const auto steps = network.output("steps").span<int32_t>();
  std::vector<int64_t> taking(limit + 1, 0);
  for (const int32_t n : steps) ++taking[n];
  std::printf("steps taken by tokens, %s\n", network.name().c_str());
  const int64_t most = *std::max_element(taking.begin(), taking.end());
  for (int64_t n = 1; n <= limit; ++n) {
    std::printf("%4lld %7.2f %% %s\n", static_cast<long long>(n),
                100.0 * static_cast<double>(taking[n]) / static_cast<double>(steps.size()),
                std::string(static_cast<size_t>((40 * taking[n] + most - 1) / most), '#').c_str());
  }
  struct Sum {
    double ponder = 0;
    int64_t count = 0;
  };
  std::map<int32_t, Sum> by_reach;  // places, doubling
  for (size_t i = 0; i < steps.size(); ++i) {
    if (additions.reach[i] == 0) continue;
    int32_t largest = 1;
    while (largest < additions.reach[i]) largest *= 2;
    Sum& sum = by_reach[largest];
    sum.ponder += network.output("ponder").span<float>()[i];
    ++sum.count;
  }
  std::printf("ponder by how many places away the carry is decided\n");
  for (const auto& [largest, sum] : by_reach) {
    std::printf("%11s %6.2f   %lld digits\n",
                largest <= 2 ? absl::StrCat(largest).c_str()
                             : absl::StrCat(largest / 2 + 1, " to ", largest).c_str(),
                sum.ponder / static_cast<double>(sum.count), static_cast<long long>(sum.count));
  }
}

absl::Status EvaluateLength(const Adder& adder, int64_t digits, const Settings& settings,
                            ThreadPool* pool) {
  const Additions additions =
      DrawAdditions(settings.problems, digits, settings.nines, absl::GetFlag(FLAGS_seed));
  std::printf("\n%lld digits, %lld additions\n", static_cast<long long>(digits),
              static_cast<long long>(settings.problems));
  TFB_ASSIGN_OR_RETURN(Networks networks, MakeNetworks(adder, additions, settings, pool));
  TFB_RETURN_IF_ERROR(TimeInTurns(settings, &networks));
  PrintTable(networks);
  TFB_ASSIGN_OR_RETURN(const Network trained,
                       Network::Create("as trained", adder, additions, {}, pool));
  PrintSteps(additions, adder.steps(), trained);
  std::fflush(stdout);
  return absl::OkStatus();
}

absl::StatusOr<int> Evaluate() {
  TFB_ASSIGN_OR_RETURN(const Settings settings, ReadSettings());
  std::string path = CallerPath(absl::GetFlag(FLAGS_model));
  if (absl::GetFlag(FLAGS_model).empty()) {
    TFB_ASSIGN_OR_RETURN(path,
                         RunfilePath("adaptive/universal_transformer/model/model.safetensors"));
  }
  TFB_ASSIGN_OR_RETURN(const Adder adder, Adder::Read(path));
  ThreadPool pool(absl::GetFlag(FLAGS_threads));
  std::printf("%s\ntrained on %s\n%.0f %% of the digits add up to 9; %d thread%s\n",
              ToString(adder.technique()).c_str(), adder.data().c_str(), 100 * settings.nines,
              pool.threads(), pool.threads() == 1 ? ", its own time" : "s, the clock's time");
  for (const int64_t digits : settings.digits) {
    TFB_RETURN_IF_ERROR(EvaluateLength(adder, digits, settings, &pool));
  }
  return kExitDone;
}

}  // namespace
}  // namespace tfb::universal_transformer

int main(int argc, char** argv) {
  return tfb::RunMain(tfb::universal_transformer::kProgram, tfb::universal_transformer::kUsage,
                      {argv, argv + argc}, tfb::universal_transformer::Evaluate);
}
