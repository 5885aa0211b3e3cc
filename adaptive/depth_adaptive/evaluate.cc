// Prints the average exit against bits per byte of the trained language model: for exits after each
// layer, for the oracles, which know the text, for the classifiers that were trained to predict
// them, and for confidence with the thresholds that do best on other text.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "adaptive/depth_adaptive/depth_adaptive.h"
#include "adaptive/depth_adaptive/oracle.h"
#include "adaptive/depth_adaptive/text_reader.h"
#include "adaptive/depth_adaptive/thresholds.h"
#include "core/command_line.h"
#include "core/status.h"
#include "core/text_plot.h"

ABSL_FLAG(int64_t, sequences, 64, "Sequences of held-out text.");
ABSL_FLAG(int64_t, tokens, 512, "Bytes of a sequence.");
ABSL_FLAG(int, levels, 5, "Classifiers of each kind, and searches, 1 to 5.");
ABSL_FLAG(double, sigma, 4,
          "Of the oracles' kernel over tokens, squared tokens; 0 does not smooth.");
ABSL_FLAG(int, threads, 2, "Threads.");

namespace tfb::depth_adaptive {
namespace {

constexpr char kProgram[] = "evaluate";
constexpr char kUsage[] =
    "evaluate [flags]\n"
    "Reads held-out text with the trained language model, its tokens leaving after layers that\n"
    "something fixed, foretold or knew, or where they are sure, and prints average exit, FLOPs "
    "saved\n"
    "and bits per byte, and a plot of them. The thresholds of confidence are searched on as much\n"
    "other text, behind that of the table.\n\n"
    "Exit status: 0 done, 2 bad usage.";
constexpr int64_t kSequencesAtATime = 64;
constexpr int64_t kExits = 6;  // exits of the shipped model

using Values = std::vector<ExitValues>;  // values of each sequence

// The table, whose rows are printed as soon as they are known, and its plot.
class Report {
 public:
  // The agreement of rows is with those of the whole model.
  explicit Report(const TextReading& whole) : whole_(whole) {
    std::printf("%-42s %6s %11s %10s %10s\n", "", "mean", "FLOPs", "bits per", "agreement");
    std::printf("%-42s %6s %11s %10s %10s\n", "exits", "layers", "saved", "byte", "with whole");
  }

  // Sets the mark of the following rows in the plot.
  void Begin(char mark, const std::string& name) { plot_.series.push_back({mark, name, {}}); }
  void Add(const std::string& name, const TextReading& reading) {
    std::printf("%-42s %6.2f %10.1f%% %10.4f %10.4f\n", name.c_str(), reading.layers,
                100 * reading.flops_saved, reading.BitsPerByte(), reading.Agreement(whole_));
    std::fflush(stdout);
    plot_.series.back().points.emplace_back(reading.layers, reading.BitsPerByte());
  }
  void PrintPlot() const { std::printf("\n%s", ToText(plot_).c_str()); }

 private:
  const TextReading& whole_;
  TextPlot plot_ = {"mean layers", "bits per byte", {}};
};

absl::StatusOr<std::unique_ptr<TextReader>> ReaderOf(const Options& options,
                                                     const TextSample& sample, ThreadPool* pool) {
  return TextReader::Create(DepthAdaptive(), options, sample, kSequencesAtATime, pool);
}

// Reads with the truncated models, the last of which is the whole one.
absl::StatusOr<std::vector<TextReading>> ReadFixed(const TextSample& sample, ThreadPool* pool) {
  std::vector<TextReading> readings;
  for (int64_t n = 1; n <= kExits; ++n) {
    TFB_ASSIGN_OR_RETURN(
        const auto reader,
        ReaderOf({{"classifier", "fixed"}, {"exit", absl::StrCat(n)}}, sample, pool));
    TFB_ASSIGN_OR_RETURN(TextReading reading, reader->Read());
    readings.push_back(std::move(reading));
  }
  return readings;
}

// The value of each exit for each byte: log2 p, so that penalties are in bits, or whether its
// prediction is right.
enum class Value { kLikelihood, kCorrectness };
Values ValuesOf(Value value, const std::vector<TextReading>& fixed, const TextSample& sample) {
  Values values(sample.sequences);
  for (int64_t s = 0; s < sample.sequences; ++s) {
    for (const TextReading& reading : fixed) {
      std::vector<double>& of_exit = values[s].emplace_back();
      for (int64_t t = s * sample.tokens; t < (s + 1) * sample.tokens; ++t) {
        const double correct = reading.best[t] == reading.next[t] ? 1 : 0;
        of_exit.push_back(value == Value::kCorrectness ? correct : -reading.bits[t]);
      }
    }
  }
  return values;
}

absl::Status AddOracles(Value value, const std::vector<TextReading>& fixed,
                        const TextSample& sample, ThreadPool* pool, Report* report) {
  const Values values = ValuesOf(value, fixed, sample);
  // For correctness even the least penalty matters: it decides between exits that are equally
  // right.
  std::vector<double> penalties = {0.4, 0.2, 0.1, 0.05, 0.02, 0};
  if (value == Value::kCorrectness) penalties = {0.4, 0.2, 0.1, 1e-4};
  TFB_ASSIGN_OR_RETURN(const auto reader, ReaderOf({{"classifier", "fixed"}}, sample, pool));
  Tensor exits(DType::kI32, {sample.sequences, sample.tokens});
  const double sigma = absl::GetFlag(FLAGS_sigma);
  for (const bool of_tokens : {false, true}) {
    for (const double penalty : penalties) {
      for (int64_t s = 0; s < sample.sequences; ++s) {
        int32_t* row = exits.view().MutableAt<int32_t>(s);
        if (of_tokens) {
          const std::vector<int32_t> best = TokenOracle(values[s], penalty, sigma);
          std::copy(best.begin(), best.end(), row);
        } else {
          std::fill_n(row, sample.tokens, static_cast<int32_t>(SequenceOracle(values[s], penalty)));
        }
      }
      TFB_ASSIGN_OR_RETURN(const TextReading reading, reader->Read(exits.view()));
      report->Add(
          absl::StrCat("oracle of ", of_tokens ? "tokens" : "sequences",
                       value == Value::kCorrectness ? ", correct" : "", ", penalty ", penalty),
          reading);
    }
  }
  return absl::OkStatus();
}

absl::Status AddClassifiers(const TextSample& sample, ThreadPool* pool, Report* report) {
  for (const char* classifier : {"sequence", "multinomial", "geometric"}) {
    report->Begin(classifier[0], classifier);
    for (const char* oracle : {"likelihood", "correctness"}) {
      for (int level = 0; level < absl::GetFlag(FLAGS_levels); ++level) {
        const Options options = {
            {"classifier", classifier}, {"oracle", oracle}, {"level", absl::StrCat(level)}};
        TFB_ASSIGN_OR_RETURN(const auto reader, ReaderOf(options, sample, pool));
        TFB_ASSIGN_OR_RETURN(const TextReading reading, reader->Read());
        report->Add(absl::StrCat(classifier, " of ", oracle, ", level ", level), reading);
      }
    }
  }
  return absl::OkStatus();
}

// Adds the row of each penalty, with the thresholds that do best on the text behind the sample.
absl::Status AddConfidence(const TextSample& sample, ThreadPool* pool, Report* report) {
  const TextSample behind = {sample.sequences, sample.tokens, /*skip=*/sample.tokens};
  TFB_ASSIGN_OR_RETURN(const std::vector<TextReading> fixed, ReadFixed(behind, pool));
  ExitValues values, confidences;
  for (const TextReading& reading : fixed) {
    std::vector<double>& of_exit = values.emplace_back();
    for (const float bits : reading.bits) of_exit.push_back(-bits);
    confidences.emplace_back(reading.sure.begin(), reading.sure.end());
  }
  report->Begin('c', "confidence");
  const std::vector<double> penalties = {0.4, 0.2, 0.1, 0.05, 0.02};
  for (int level = 0; level < absl::GetFlag(FLAGS_levels); ++level) {
    const std::string thresholds =
        absl::StrJoin(SearchThresholds(values, confidences, penalties[level]), "/");
    TFB_ASSIGN_OR_RETURN(
        const auto reader,
        ReaderOf({{"classifier", "confidence"}, {"thresholds", thresholds}}, sample, pool));
    TFB_ASSIGN_OR_RETURN(const TextReading reading, reader->Read());
    report->Add(absl::StrCat("confidence ", thresholds), reading);
  }
  return absl::OkStatus();
}

absl::StatusOr<int> Evaluate() {
  const TextSample sample = {absl::GetFlag(FLAGS_sequences), absl::GetFlag(FLAGS_tokens)};
  if (sample.sequences < 1)
    return absl::InvalidArgumentError("--sequences: allowed are 1 and more");
  if (sample.tokens < 1) return absl::InvalidArgumentError("--tokens: allowed are 1 and more");
  if (absl::GetFlag(FLAGS_levels) < 1 || absl::GetFlag(FLAGS_levels) > 5) {
    return absl::InvalidArgumentError("--levels: allowed are 1 to 5");
  }
  if (!(absl::GetFlag(FLAGS_sigma) >= 0 && absl::GetFlag(FLAGS_sigma) <= 1e6)) {
    return absl::InvalidArgumentError("--sigma: allowed are 0 to 1e6");
  }
  if (absl::GetFlag(FLAGS_threads) < 1) {
    return absl::InvalidArgumentError("--threads: allowed are 1 and more");
  }
  ThreadPool pool(absl::GetFlag(FLAGS_threads));
  TFB_ASSIGN_OR_RETURN(const std::vector<TextReading> fixed, ReadFixed(sample, &pool));
  Report report(fixed.back());
  report.Begin('o', "always after a layer");
  for (int64_t n = 1; n <= kExits; ++n) {
    report.Add(absl::StrCat("always after layer ", n), fixed[n - 1]);
  }
  report.Begin('^', "oracles");
  TFB_RETURN_IF_ERROR(AddOracles(Value::kLikelihood, fixed, sample, &pool, &report));
  TFB_RETURN_IF_ERROR(AddOracles(Value::kCorrectness, fixed, sample, &pool, &report));
  TFB_RETURN_IF_ERROR(AddClassifiers(sample, &pool, &report));
  TFB_RETURN_IF_ERROR(AddConfidence(sample, &pool, &report));
  report.PrintPlot();
  return kExitDone;
}

}  // namespace
}  // namespace tfb::depth_adaptive

int main(int argc, char** argv) {
  return tfb::RunMain(tfb::depth_adaptive::kProgram, tfb::depth_adaptive::kUsage,
                      {argv, argv + argc}, tfb::depth_adaptive::Evaluate);
}
