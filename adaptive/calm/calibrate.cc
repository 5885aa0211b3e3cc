// Finds thresholds of calm for the trained language model by Learn then Test, counts how often the
// promised risk is exceeded, and measures the savings.
//
// A reading of the text with a threshold feeds nothing back but keys and values, so one reading per
// threshold gives every sequence's loss; calibrations are then made of the table.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "adaptive/calm/calm.h"
#include "adaptive/calm/learn_then_test.h"
#include "adaptive/depth_adaptive/text_reader.h"
#include "core/command_line.h"
#include "core/status.h"
#include "core/text_plot.h"

ABSL_FLAG(double, risk, 0.1, "The loss that is promised at most, in (0, 1).");
ABSL_FLAG(double, confidence, 0.95, "With what probability the promise holds, in (0, 1).");
ABSL_FLAG(
    std::string, loss, "disagreement",
    "Of disagreement (the share of bytes that are not the whole model's most likely ones) and "
    "excess (bits per byte above the whole model's, at most 1).");
ABSL_FLAG(std::string, measures, "softmax,saturation,classifier",
          "What says that a prediction will do: calm's option confidence.");
ABSL_FLAG(std::string, p_value, "hoeffding_bentkus", "Of hoeffding, hoeffding_bentkus.");
ABSL_FLAG(std::string, schedule, "constant", "calm's option of that name.");
ABSL_FLAG(double, temperature, 4, "calm's option of that name.");
ABSL_FLAG(int64_t, sequences, 512, "Sequences of held-out text, of which half calibrate.");
ABSL_FLAG(int64_t, tokens, 256, "Bytes of a sequence.");
ABSL_FLAG(int64_t, splits, 1000, "Random halves that are calibrated with.");
ABSL_FLAG(int64_t, decode_batch, 64, "Sequences that are decoded together, a byte a step.");
ABSL_FLAG(int, repetitions, 5, "Timings of each kind, of which the median counts.");
ABSL_FLAG(int, threads, 2, "Threads of the readings; timings are of one.");
ABSL_FLAG(uint64_t, seed, 1, "Of the splits.");

namespace tfb::calm {
namespace {

using depth_adaptive::TextReading;

constexpr char kProgram[] = "calibrate";
constexpr char kUsage[] =
    "calibrate [flags]\n"
    "Reads held-out text with the trained language model, its tokens leaving when calm's "
    "confidence\n"
    "reaches a threshold, and finds for each measure the threshold that keeps the risk with the\n"
    "asked confidence (Learn then Test). Prints what it saves, how often random halves of the "
    "text\n"
    "break the promise on the other half, and a plot of what each threshold gives.\n\n"
    "Exit status: 0 done, 2 bad usage.";
constexpr int64_t kSequencesAtATime = 64;
constexpr char kNothingLeaves[] = "2";

absl::Status Bad(absl::string_view flag, absl::string_view value, absl::string_view allowed) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, "=", value, "; allowed are ", allowed));
}

struct Settings {
  RiskPromise promise;
  PValue p_value = PValue::kHoeffdingBentkus;
  bool excess = false;
  std::vector<std::string> measures;
  depth_adaptive::TextSample sample;
};

Options OptionsOf(const std::string& measure, const std::string& threshold) {
  return {{"confidence", measure},
          {"threshold", threshold},
          {"schedule", absl::GetFlag(FLAGS_schedule)},
          {"temperature", absl::StrCat(absl::GetFlag(FLAGS_temperature))}};
}

absl::StatusOr<Settings> SettingsOfFlags() {
  Settings settings;
  settings.promise = {absl::GetFlag(FLAGS_risk), 1 - absl::GetFlag(FLAGS_confidence)};
  for (const char* flag : {"risk", "confidence"}) {
    const double value =
        flag[0] == 'r' ? absl::GetFlag(FLAGS_risk) : absl::GetFlag(FLAGS_confidence);
    if (!(value > 0 && value < 1)) return Bad(flag, absl::StrCat(value), "numbers in (0, 1)");
  }
  const std::string loss = absl::GetFlag(FLAGS_loss), p_value = absl::GetFlag(FLAGS_p_value);
  if (loss != "disagreement" && loss != "excess") return Bad("loss", loss, "disagreement, excess");
  if (p_value != "hoeffding" && p_value != "hoeffding_bentkus") {
    return Bad("p_value", p_value, "hoeffding, hoeffding_bentkus");
  }
  settings.excess = loss == "excess";
  if (p_value == "hoeffding") settings.p_value = PValue::kHoeffding;
  settings.measures = absl::StrSplit(absl::GetFlag(FLAGS_measures), ',', absl::SkipEmpty());
  for (const std::string& measure : settings.measures) {
    TFB_RETURN_IF_ERROR(Calm().Canonical(OptionsOf(measure, kNothingLeaves)).status());
  }
  settings.sample = {absl::GetFlag(FLAGS_sequences), absl::GetFlag(FLAGS_tokens)};
  // Each half has a sequence.
  if (settings.sample.sequences < 2) {
    return Bad("sequences", absl::StrCat(settings.sample.sequences), "2 and more");
  }
  const std::vector<std::pair<const char*, int64_t>> counts = {
      {"tokens", settings.sample.tokens},
      {"splits", absl::GetFlag(FLAGS_splits)},
      {"decode_batch", absl::GetFlag(FLAGS_decode_batch)},
      {"repetitions", absl::GetFlag(FLAGS_repetitions)},
      {"threads", absl::GetFlag(FLAGS_threads)}};
  for (const auto& [flag, count] : counts) {
    if (count < 1) return Bad(flag, absl::StrCat(count), "1 and more");
  }
  return settings;
}

// Returns thresholds from the safest on. Successive states of a trained model are nearly parallel.
std::vector<double> ThresholdsOf(const std::string& measure) {
  std::vector<double> thresholds;
  for (const double gap : {0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85}) {
    thresholds.push_back(1 - (measure == "saturation" ? 0.3 * gap : gap));
  }
  return thresholds;
}

absl::StatusOr<std::unique_ptr<depth_adaptive::TextReader>> ReaderOf(
    const std::string& measure, const std::string& threshold,
    const depth_adaptive::TextSample& sample, int64_t at_a_time, bool decodes, ThreadPool* pool) {
  Options options = OptionsOf(measure, threshold);
  if (decodes) options["segment"] = "1";
  return depth_adaptive::TextReader::Create(Calm(), options, sample, at_a_time, pool);
}

// Returns the loss of each sequence, in [0, 1].
std::vector<double> LossesOf(const TextReading& reading, const TextReading& whole,
                             const Settings& settings) {
  const int64_t tokens = settings.sample.tokens;
  std::vector<double> losses;
  for (int64_t s = 0; s < settings.sample.sequences; ++s) {
    double differ = 0, excess = 0;
    for (int64_t place = s * tokens; place < (s + 1) * tokens; ++place) {
      differ += reading.best[place] != whole.best[place] ? 1 : 0;
      excess += reading.bits[place] - whole.bits[place];
    }
    const double mean = (settings.excess ? excess : differ) / static_cast<double>(tokens);
    losses.push_back(std::clamp(mean, 0.0, 1.0));
  }
  return losses;
}

// The results of one measure at each threshold.
struct Table {
  std::vector<double> thresholds;
  std::vector<TextReading> readings;
  std::vector<std::vector<double>> losses;  // of each sequence

  double MeanLoss(size_t threshold, const int64_t* sequences, int64_t count) const {
    double sum = 0;
    for (int64_t n = 0; n < count; ++n) sum += losses[threshold][sequences[n]];
    return sum / static_cast<double>(count);
  }
  // Calibrates by the given sequences: returns the last threshold that is accepted, or -1.
  int64_t Calibrate(const Settings& settings, const int64_t* sequences, int64_t count) const {
    std::vector<double> means;
    for (size_t n = 0; n < thresholds.size(); ++n) means.push_back(MeanLoss(n, sequences, count));
    return LastAccepted(settings.p_value, means, count, settings.promise);
  }
};

absl::StatusOr<Table> ReadAll(const std::string& measure, const TextReading& whole,
                              const Settings& settings, ThreadPool* pool) {
  Table table;
  table.thresholds = ThresholdsOf(measure);
  for (const double threshold : table.thresholds) {
    TFB_ASSIGN_OR_RETURN(const auto reader,
                         ReaderOf(measure, absl::StrCat(threshold), settings.sample,
                                  kSequencesAtATime, /*decodes=*/false, pool));
    TFB_ASSIGN_OR_RETURN(TextReading reading, reader->Read());
    table.losses.push_back(LossesOf(reading, whole, settings));
    std::fprintf(stderr, "%s %.4f: %.2f layers, agreement %.4f, %.4f bits per byte\n",
                 measure.c_str(), threshold, reading.layers, reading.Agreement(whole),
                 reading.BitsPerByte());
    table.readings.push_back(std::move(reading));
  }
  return table;
}

// Counts the splits that accept a threshold whose mean loss on the other half, and on all of the
// text, is above the risk.
struct Violations {
  int64_t of_other_half = 0;
  int64_t of_all = 0;
};
Violations CountViolations(const Table& table, const Settings& settings) {
  std::mt19937_64 random(absl::GetFlag(FLAGS_seed));
  std::vector<int64_t> order(settings.sample.sequences);
  std::iota(order.begin(), order.end(), 0);
  const int64_t count = settings.sample.sequences, half = count / 2;
  Violations violations;
  for (int64_t split = 0; split < absl::GetFlag(FLAGS_splits); ++split) {
    std::shuffle(order.begin(), order.end(), random);
    const int64_t chosen = table.Calibrate(settings, order.data(), half);
    if (chosen < 0) continue;
    const double risk = settings.promise.risk;
    violations.of_other_half +=
        table.MeanLoss(chosen, order.data() + half, count - half) > risk ? 1 : 0;
    violations.of_all += table.MeanLoss(chosen, order.data(), count) > risk ? 1 : 0;
  }
  return violations;
}

// Returns 1 less the ratio of the times with and without the layer's decisions, by alternating
// timings.
absl::StatusOr<double> TimeSaved(depth_adaptive::TextReader* reader, bool decodes) {
  using Leave = depth_adaptive::TextReader::Leave;
  const auto time = [&](Leave leave) {
    return decodes ? reader->TimeDecoding(leave) : reader->TimeReading(leave);
  };
  std::vector<double> decided, never;
  TFB_RETURN_IF_ERROR(time(Leave::kNever).status());  // warms
  for (int n = 0; n < absl::GetFlag(FLAGS_repetitions); ++n) {
    TFB_ASSIGN_OR_RETURN(never.emplace_back(), time(Leave::kNever));
    TFB_ASSIGN_OR_RETURN(decided.emplace_back(), time(Leave::kAsDecided));
  }
  return depth_adaptive::TimeSaved(decided, never);
}

struct Savings {
  double time;
  double flops;
};
absl::StatusOr<Savings> Measure(const std::string& measure, const std::string& threshold,
                                bool decodes, const Settings& settings, ThreadPool* pool) {
  depth_adaptive::TextSample sample = settings.sample;
  sample.sequences =
      std::min(decodes ? absl::GetFlag(FLAGS_decode_batch) : kSequencesAtATime, sample.sequences);
  TFB_ASSIGN_OR_RETURN(const auto reader,
                       ReaderOf(measure, threshold, sample, sample.sequences, decodes, pool));
  TFB_ASSIGN_OR_RETURN(const double time, TimeSaved(reader.get(), decodes));
  return Savings{time, reader->flops_saved()};
}

// Returns "31.2% of 35.0%": the shares of time and of FLOPs that are saved.
std::string ToString(const Savings& savings) {
  return absl::StrFormat("%5.1f%% of %5.1f%%", 100 * savings.time, 100 * savings.flops);
}

absl::Status PrintRow(const std::string& measure, const Table& table, const TextReading& whole,
                      const Settings& settings, ThreadPool* pool) {
  const std::vector<int64_t> half = EverySecond(settings.sample.sequences);
  const int64_t chosen = table.Calibrate(settings, half.data(), static_cast<int64_t>(half.size()));
  const Violations violations = CountViolations(table, settings);
  const double splits = static_cast<double>(absl::GetFlag(FLAGS_splits));
  const std::string broken = absl::StrFormat(
      "%5.1f%% %5.1f%%", 100 * static_cast<double>(violations.of_other_half) / splits,
      100 * static_cast<double>(violations.of_all) / splits);
  if (chosen < 0) {
    std::printf("%-10s  no threshold is accepted: the whole model  %s\n", measure.c_str(),
                broken.c_str());
    return absl::OkStatus();
  }
  const TextReading& reading = table.readings[chosen];
  const std::string threshold = absl::StrCat(table.thresholds[chosen]);
  TFB_ASSIGN_OR_RETURN(const Savings read,
                       Measure(measure, threshold, /*decodes=*/false, settings, pool));
  TFB_ASSIGN_OR_RETURN(const Savings decoded,
                       Measure(measure, threshold, /*decodes=*/true, settings, pool));
  TFB_ASSIGN_OR_RETURN(const Savings gate,
                       Measure(measure, kNothingLeaves, /*decodes=*/false, settings, pool));
  std::printf("%-10s %9.4f %7.2f %10.4f %9.4f   %s   %s   %s  %5.1f%%\n", measure.c_str(),
              table.thresholds[chosen], reading.layers, reading.Agreement(whole),
              reading.BitsPerByte(), broken.c_str(), ToString(read).c_str(),
              ToString(decoded).c_str(), -100 * gate.time);
  std::fflush(stdout);
  return absl::OkStatus();
}

// Plots bits per byte over layers, for every threshold of each measure.
void PrintPlot(const Settings& settings, const std::vector<Table>& tables,
               const TextReading& whole) {
  constexpr char kMarks[] = "oxv*#";
  TextPlot plot = {"mean layers", "bits per byte", {}};
  for (size_t n = 0; n < tables.size(); ++n) {
    PlotSeries& series = plot.series.emplace_back();
    series.mark = kMarks[n % (sizeof(kMarks) - 1)];
    series.name = settings.measures[n];
    for (const TextReading& reading : tables[n].readings) {
      series.points.emplace_back(reading.layers, reading.BitsPerByte());
    }
  }
  plot.series.push_back({'W', "the whole model", {{whole.layers, whole.BitsPerByte()}}});
  std::printf("\n%s", ToText(plot).c_str());
}

absl::StatusOr<int> CalibrateAll() {
  TFB_ASSIGN_OR_RETURN(const Settings settings, SettingsOfFlags());
  ThreadPool pool(absl::GetFlag(FLAGS_threads));
  TFB_ASSIGN_OR_RETURN(const auto reader,
                       ReaderOf("saturation", kNothingLeaves, settings.sample, kSequencesAtATime,
                                /*decodes=*/false, &pool));
  TFB_ASSIGN_OR_RETURN(const TextReading whole, reader->Read());
  std::vector<Table> tables;
  for (const std::string& measure : settings.measures) {
    TFB_ASSIGN_OR_RETURN(Table table, ReadAll(measure, whole, settings, &pool));
    tables.push_back(std::move(table));
  }
  std::printf(
      "%s <= %g with probability %g, %lld sequences of %lld bytes, half of them calibrate; the "
      "whole "
      "model: %.2f layers, %.4f bits per byte\n\n",
      settings.excess ? "excess bits per byte" : "disagreement", settings.promise.risk,
      1 - settings.promise.failure, static_cast<long long>(settings.sample.sequences),
      static_cast<long long>(settings.sample.tokens), whole.layers, whole.BitsPerByte());
  std::printf("%-10s %9s %7s %10s %9s   %13s   %15s   %15s  %6s\n", "", "", "layers", "agreement",
              "bits per", "splits broken", "time saved of", "time saved of", "gate,");
  std::printf("%-10s %9s %7s %10s %9s   %13s   %15s   %15s  %6s\n", "confidence", "threshold",
              "a token", "with whole", "byte", "half    all", "FLOPs, reading", "FLOPs, decoding",
              "time");
  for (size_t n = 0; n < tables.size(); ++n) {
    TFB_RETURN_IF_ERROR(PrintRow(settings.measures[n], tables[n], whole, settings, &pool));
  }
  std::printf(
      "\nsplits broken: of %lld random halves, those whose threshold loses more than promised "
      "on the other half,\nand on all of the text; allowed are %.1f%%\n",
      static_cast<long long>(absl::GetFlag(FLAGS_splits)), 100 * settings.promise.failure);
  PrintPlot(settings, tables, whole);
  return kExitDone;
}

}  // namespace
}  // namespace tfb::calm

int main(int argc, char** argv) {
  return tfb::RunMain(tfb::calm::kProgram, tfb::calm::kUsage, {argv, argv + argc},
                      tfb::calm::CalibrateAll);
}
