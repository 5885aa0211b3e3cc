#include "results/render.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "results/reader.h"
#include "results/synthetic.h"

namespace tfb {
namespace {

using ::nlohmann::json;
using ::tfb::synthetic::CaseSpec;
using ::tfb::synthetic::MakeCase;
using ::tfb::synthetic::MakeEnvironment;
using ::tfb::synthetic::MakeSweep;
using ::tfb::synthetic::MakeUnmeasured;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::string AsTerminal(const ResultSet& results, int width = 120) {
  RenderOptions options;
  options.style.width = width;
  return Render(results, options);
}

std::string AsFormat(const ResultSet& results, RenderFormat format) {
  RenderOptions options;
  options.format = format;
  options.details = true;
  return Render(results, options);
}

// Parses a CSV text by RFC 4180 into lines of fields.
std::vector<std::vector<std::string>> ParseCsv(const std::string& csv) {
  std::vector<std::vector<std::string>> lines(1, {""});
  bool quoted = false;
  for (size_t i = 0; i < csv.size(); ++i) {
    if (quoted) {
      if (csv[i] != '"') {
        lines.back().back() += csv[i];
      } else if (i + 1 < csv.size() && csv[i + 1] == '"') {
        lines.back().back() += csv[i++];
      } else {
        quoted = false;
      }
    } else if (csv[i] == '"') {
      quoted = true;
    } else if (csv[i] == ',') {
      lines.back().emplace_back();
    } else if (csv[i] == '\r' && i + 1 < csv.size() && csv[i + 1] == '\n') {
      ++i;
      lines.push_back({""});
    } else {
      lines.back().back() += csv[i];
    }
  }
  lines.pop_back();  // after the last line's end
  return lines;
}

// Returns the index of the named column in the header line.
size_t Column(const std::vector<std::vector<std::string>>& csv, const std::string& name) {
  for (size_t c = 0; c < csv[0].size(); ++c) {
    if (csv[0][c] == name) return c;
  }
  ADD_FAILURE() << "no column " << name;
  return 0;
}

TEST(RenderTerminal, ShowsASweepSoThatAPersonCanDecide) {
  ResultSet sweep = MakeSweep();
  CaseSpec cuda;
  cuda.technique = "near";
  cuda.device = DEVICE_TYPE_CUDA;
  *sweep.add_cases() = MakeUnmeasured(cuda, Outcome::STATUS_SKIPPED, "cuda: no device");
  RenderOptions options;
  options.paths = {"results/runs/now.pb"};
  EXPECT_EQ(
      Render(sweep, options),
      R"(bench-1 · Imaginary CPU 9000, 2 threads, AVX-512 · f32 peak 400 GFLOP/s, read 20 GB/s · commit 0123456789 (dirty)
GPU: none (no driver)

Accuracy: cpu f32, 512 tokens, 8 heads of 64, input real
                                           error against  against  kept  KL from  recall,
technique            mask    exactness    its definition    dense  mass    dense   top 32  verdict
plain                causal  exact        2e-7 (<= 2e-6)     2e-7   1.0        0      1.0  ok
near window=256      causal  exact        2e-7 (<= 2e-6)     0.18  0.87     0.14     0.78  ok
sketch features=128  causal  approximate  2e-7 (<= 2e-6)     0.61     -        -        -  ok

Scaling, ms at tokens: cpu f32, 8 heads of 64, causal, input gaussian
                                                        growth  speed-up  faster than   memory    of
technique              256   512  1024  2048  4096  (expected)   at 4096   dense from  at 4096  peak
plain                0.500  2.00  8.00  32.0   128    2.00 (2)         -            -    4 MiB   67%
near window=256       1.38  2.76  5.52  11.0  22.1    1.00 (1)      5.8x          707    4 MiB   24%
sketch features=128   10.0  20.0  40.0  80.0   160    1.00 (1)     0.80x  not to 4096    4 MiB  3.4%
medians of warm runs without setup; growth: exponent from 1024 to 4096 tokens; memory: workspace and parameters

Choices at 4096 tokens, cpu f32, 8 heads of 64, causal, input gaussian: of 3 held against plain, those that no other
  beats in both time and error on input real
                 error against
technique                dense         speed-up    ms  memory
plain                     2e-7  1.0x              128   4 MiB
near window=256           0.18  5.8x [5.7, 5.8]  22.1   4 MiB
error: median over the technique's cases on that input; near window=256 beats sketch features=128

-: not measured, or there is no such number

With an error of at most 0.3 against dense (with at most 0.1 none is surely faster than plain) the fastest technique is
  under the causal mask near window=256: 5.8x [5.7, 5.8] as fast as plain at 4096 tokens, error 0.18 (cpu, f32, errors
  on input real).
near window=256 is faster than plain from 707 [701, 713] tokens on under the causal mask and takes 4 MiB of memory at
  4096 tokens, where plain takes 4 MiB.

skipped, 1 case: cuda: no device
19 cases: 18 ok, 0 failed, 1 skipped
results: results/runs/now.pb
)");
}

TEST(RenderTerminal, AFastestOfTooFewSamplesIsSaidToBeUnsure) {
  ResultSet sweep = MakeSweep();
  for (Case& result : *sweep.mutable_cases()) {
    auto* samples = result.mutable_outcome()->mutable_timing()->mutable_run_ns();
    if (samples->size() > 3) samples->Truncate(3);
  }
  const std::string text = AsTerminal(sweep);
  EXPECT_TRUE(absl::StrContains(text, "error 0.18, of too few")) << text;
  EXPECT_TRUE(absl::StrContains(text, "near window=256 seems faster than plain")) << text;
}

TEST(Render, TheFastestIsLookedForWithinThreeErrorsAndMayBeNone) {
  // The error of the only technique that is faster, and the beginning of the recommendation.
  const struct {
    double error;
    const char* sentence;
  } kRows[] = {
      {0.1, "With an error of at most 0.1 against dense the fastest technique is under the causal"},
      {0.11,
       "With an error of at most 0.3 against dense (with at most 0.1 none is surely faster "
       "than plain) the fastest technique is under the causal mask near window=256: 5.8x"},
      {0.3, "With an error of at most 0.3 against dense (with"},
      {0.31, "With an error of at most 0.5 against dense (with at most 0.1 none"},
      {0.5, "With an error of at most 0.5 against dense (with"},
      {0.51,
       "No technique with an error of at most 0.5 against dense is measurably faster than "
       "plain at 4096 tokens (cpu, f32, errors on input real)."},
      {kNan, "No technique with an error of at most 0.5 against dense is measurably faster"},
  };
  for (const auto& row : kRows) {
    ResultSet sweep = MakeSweep();
    for (Case& result : *sweep.mutable_cases()) {
      if (result.key().technique() != "near" || !result.outcome().has_against_dense()) continue;
      result.mutable_outcome()->mutable_against_dense()->set_relative_frobenius(row.error);
    }
    const std::string text = AsFormat(sweep, RenderFormat::kMarkdown);
    EXPECT_TRUE(absl::StrContains(text, row.sentence)) << row.error << "\n" << text;
  }
}

TEST(RenderTerminal, ZeroCasesSaySo) {
  EXPECT_EQ(AsTerminal(ResultSet()),
            "\nNo cases: the sweep was stopped before its first case ended, or its selection was "
            "empty.\n0 cases: 0 ok, 0 failed\n");
}

TEST(RenderTerminal, ACaseWithoutDensePartnerHasNoSpeedUpAndNoCrossover) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  CaseSpec spec;
  spec.technique = "alone";
  *results.add_cases() = MakeCase(spec);
  EXPECT_TRUE(absl::StrContains(AsTerminal(results), "\nalone      1000       - (2)  512 KiB"))
      << AsTerminal(results);
}

TEST(RenderTerminal, FailedCasesStandInTheTablesAndAmongTheReasons) {
  ResultSet sweep = MakeSweep();
  for (Case& result : *sweep.mutable_cases()) {
    const Case::Key& key = result.key();
    if (key.technique() == "near" && key.purpose() == Case::PURPOSE_ACCURACY) {
      result.mutable_outcome()->set_status(Outcome::STATUS_FAILED);
      result.mutable_outcome()->set_reason("error 3e-3 exceeds the bound 2e-6");
      ErrorMeasure* error = result.mutable_outcome()->mutable_against_definition();
      error->set_relative_frobenius(3e-3);
      error->set_passed(false);
    } else if (key.technique() == "sketch" && key.problem().query_tokens() == 4096) {
      CaseSpec spec;
      spec.technique = "sketch";
      result.mutable_outcome()->Clear();
      result.mutable_outcome()->set_status(Outcome::STATUS_OUT_OF_MEMORY);
      result.mutable_outcome()->set_reason("needs 40 GiB, the limit is 8 GiB");
    }
  }
  const std::string text = AsTerminal(sweep);
  EXPECT_TRUE(absl::StrContains(text,
                                "3e-3 (<= 2e-6)     0.18  0.87     0.14     0.78  "
                                "FAILED"))
      << text;
  EXPECT_TRUE(absl::StrContains(text, "80.0  no memory")) << text;
  EXPECT_TRUE(absl::StrContains(text,
                                "failed, 1 case: error 3e-3 exceeds the bound 2e-6 (near "
                                "window=256, cpu f32, 512 tokens, 8 heads of 64, causal, real)"))
      << text;
  EXPECT_TRUE(absl::StrContains(text, "out of memory, 1 case: needs 40 GiB, the limit is 8 GiB"))
      << text;
  EXPECT_TRUE(absl::StrContains(text, "18 cases: 16 ok, 1 failed, 1 out of memory")) << text;
  EXPECT_FALSE(absl::StrContains(text, "Choices")) << text;  // a failed technique is no choice
}

TEST(RenderTerminal, InfinitiesAndNansAreShownAsWhatTheyAre) {
  ResultSet sweep = MakeSweep();
  ErrorMeasure* error = sweep.mutable_cases(1)->mutable_outcome()->mutable_against_definition();
  error->set_relative_frobenius(kNan);
  sweep.mutable_cases(1)->mutable_outcome()->mutable_against_dense()->set_relative_frobenius(
      kInfinity);
  sweep.mutable_cases(1)->mutable_outcome()->set_kl_divergence(kInfinity);
  const std::string text = AsTerminal(sweep);
  EXPECT_TRUE(absl::StrContains(text, "nan (<= 2e-6)      inf  0.87      inf")) << text;
  for (const RenderFormat format :
       {RenderFormat::kMarkdown, RenderFormat::kCsv, RenderFormat::kJson}) {
    AsFormat(sweep, format);
  }
}

TEST(RenderTerminal, VeryLongNamesAreCutAndLinesStayWithinTheWidth) {
  ResultSet sweep = MakeSweep();
  for (Case& result : *sweep.mutable_cases()) {
    if (result.key().technique() == "plain") continue;
    result.mutable_technique()->set_display_name(std::string(300, 'x'));
  }
  for (const absl::string_view line : absl::StrSplit(AsTerminal(sweep, 120), '\n')) {
    EXPECT_LE(DisplayWidth(line), 120) << line;
  }
}

TEST(RenderTerminal, WhatIsKnownOfAMachineIsFortyColumnsWideAtLeast) {
  ResultSet results = MakeSweep();
  results.mutable_environments(0)->set_compiler(std::string(60, 'x'));
  RenderOptions options;
  options.details = true;
  options.style.width = 20;
  const std::string text = Render(results, options);
  EXPECT_TRUE(absl::StrContains(text, "\ncompiler   " + std::string(39, 'x') + "…\n")) << text;
}

TEST(RenderTerminal, ManyLengthsAreShownInParts) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  for (int64_t tokens = 100; tokens <= 4000; tokens += 100) {
    CaseSpec spec;
    spec.tokens = tokens;
    *results.add_cases() = MakeCase(spec);
  }
  const std::string text = AsTerminal(results);
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    EXPECT_LE(DisplayWidth(line), 120) << line;
  }
  EXPECT_TRUE(absl::StrContains(text, " 4000")) << text;
}

TEST(RenderTerminal, DevicesHaveTablesOfTheirOwnAndThreadsRowsOfTheirOwn) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  CaseSpec spec;
  *results.add_cases() = MakeCase(spec);
  *results.add_cases() = MakeCase(spec);
  results.mutable_cases(1)->mutable_key()->set_threads(1);
  spec.device = DEVICE_TYPE_CUDA;
  *results.add_cases() = MakeCase(spec);
  const std::string text = AsTerminal(results);
  EXPECT_TRUE(absl::StrContains(text, "plain      cpu x2  1000")) << text;
  EXPECT_TRUE(absl::StrContains(text, "plain      cpu x1  1000")) << text;
  EXPECT_TRUE(absl::StrContains(text, "at tokens: cuda f32")) << text;
  EXPECT_TRUE(absl::StrContains(text, "plain      1000")) << text;
}

TEST(RenderTerminal, SeedsSharePlaceAndTheWorstErrorOfThemIsShown) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  for (const uint64_t seed : {1, 2, 3}) {
    CaseSpec spec;
    spec.technique = "sketch";
    spec.purpose = Case::PURPOSE_ACCURACY;
    spec.seed = seed;
    *results.add_cases() = MakeCase(spec);
    Outcome* outcome = results.mutable_cases(results.cases_size() - 1)->mutable_outcome();
    outcome->mutable_against_definition()->set_relative_frobenius(seed * 1e-7);
    outcome->mutable_against_dense()->set_relative_frobenius(seed * 0.1);
  }
  EXPECT_TRUE(absl::StrContains(AsTerminal(results),
                                "sketch (3 seeds)  causal  exact      3e-7 (<= 2e-6)     0.20"))
      << AsTerminal(results);
}

TEST(RenderTerminal, AResumedSweepIsOneTable) {
  ResultSet sweep = MakeSweep();
  *sweep.add_environments() = MakeEnvironment("resumed");
  for (int i = sweep.cases_size() / 2; i < sweep.cases_size(); ++i) {
    sweep.mutable_cases(i)->set_environment_id("resumed");
  }
  EXPECT_EQ(AsTerminal(sweep), AsTerminal(MakeSweep()));
}

TEST(RenderTerminal, ARepeatedCaseReplacesTheEarlierOneAndIsCounted) {
  ResultSet sweep = MakeSweep();
  Case again = sweep.cases(sweep.cases_size() - 1);
  again.mutable_outcome()->mutable_timing()->clear_run_ns();
  again.mutable_outcome()->mutable_timing()->add_run_ns(777e6);
  *sweep.add_environments() = MakeEnvironment("later");
  again.set_environment_id("later");
  *sweep.add_cases() = again;
  const std::string text = AsTerminal(sweep);
  EXPECT_TRUE(absl::StrContains(text, "80.0   777")) << text;
  EXPECT_TRUE(absl::StrContains(
      text, "18 cases: 18 ok, 0 failed; 1 repeated case left out for a later one"))
      << text;
}

// A sweep writes a case again when it has more samples of it.
TEST(RenderTerminal, ALaterRecordOfTheSameSweepIsNoRepeatedCase) {
  ResultSet sweep = MakeSweep();
  Case more = sweep.cases(sweep.cases_size() - 1);
  more.mutable_outcome()->mutable_timing()->clear_run_ns();
  more.mutable_outcome()->mutable_timing()->add_run_ns(777e6);
  *sweep.add_cases() = more;
  const std::string text = AsTerminal(sweep);
  EXPECT_TRUE(absl::StrContains(text, "80.0   777")) << text;
  EXPECT_TRUE(absl::StrContains(text, "18 cases: 18 ok, 0 failed\n")) << text;
}

// Appends the text to every string field of a message and of its submessages, empty ones included.
void AddToTexts(const std::string& text, google::protobuf::Message* message) {
  const google::protobuf::Descriptor& descriptor = *message->GetDescriptor();
  const google::protobuf::Reflection& reflection = *message->GetReflection();
  for (int f = 0; f < descriptor.field_count(); ++f) {
    const google::protobuf::FieldDescriptor* field = descriptor.field(f);
    if (field->is_map()) continue;
    if (field->type() == google::protobuf::FieldDescriptor::TYPE_STRING) {
      if (!field->is_repeated()) {
        reflection.SetString(message, field, reflection.GetString(*message, field) + text);
      } else if (reflection.FieldSize(*message, field) == 0) {
        reflection.AddString(message, field, text);
      } else {
        const std::string first = reflection.GetRepeatedString(*message, field, 0);
        reflection.SetRepeatedString(message, field, 0, first + text);
      }
    }
    if (field->type() != google::protobuf::FieldDescriptor::TYPE_MESSAGE) continue;
    if (!field->is_repeated()) {
      AddToTexts(text, reflection.MutableMessage(message, field));
      continue;
    }
    for (int i = 0; i < reflection.FieldSize(*message, field); ++i) {
      AddToTexts(text, reflection.MutableRepeatedMessage(message, field, i));
    }
  }
}

TEST(RenderTerminal, EscapeSequencesInAFileDoNotReachTheTerminal) {
  ResultSet sweep = MakeSweep();
  sweep.mutable_environments(0)->add_gpus();
  for (Case& result : *sweep.mutable_cases()) {
    (*result.mutable_outcome()->mutable_statistics())["\x1b[1m"] = 1;
  }
  AddToTexts("\x1b[31m", &sweep);
  RenderOptions options;
  options.details = true;
  options.paths = {"\x1b[0m.pb"};
  options.notes = {"\x1b[0m"};
  const std::string measured = Render(sweep, options);
  EXPECT_TRUE(absl::StrContains(measured, "?[31m"));
  EXPECT_FALSE(absl::StrContains(measured, "\x1b")) << measured;
  for (Case& result : *sweep.mutable_cases()) {
    result.mutable_outcome()->set_status(Outcome::STATUS_TIMEOUT);
  }
  const std::string failed = Render(sweep, options);
  EXPECT_TRUE(absl::StrContains(failed, "?[31m"));
  EXPECT_FALSE(absl::StrContains(failed, "\x1b")) << failed;
}

TEST(RenderTerminal, StreamingAndDecodingHaveTheirTables) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  CaseSpec spec;
  spec.technique = "memory";
  spec.median_ns = 0;
  Case streaming = MakeCase(spec);
  for (int i = 0; i < 4; ++i) {
    SegmentTiming* segment = streaming.mutable_outcome()->mutable_timing()->add_segments();
    segment->set_tokens_before(i * 128);
    segment->set_tokens(128);
    segment->add_append_ns(1e6 * (i + 1));
  }
  *results.add_cases() = streaming;
  spec.median_ns = 1e6;
  Case decoding = MakeCase(spec);
  decoding.mutable_key()->mutable_problem()->set_query_tokens(1);
  *results.add_cases() = decoding;
  const std::string text = AsTerminal(results);
  EXPECT_TRUE(absl::StrContains(text, "memory        512      128     1.00     4.00  0.0195"))
      << text;
  EXPECT_TRUE(absl::StrContains(text, "Scaling, µs at keys: cpu f32, 1 query, 8 heads of 64"))
      << text;
}

TEST(RenderTerminal, DetailsTellCostsApartAndGiveStatistics) {
  ResultSet sweep = MakeSweep();
  (*sweep.mutable_cases(2)->mutable_outcome()->mutable_statistics())["mean_layers_used"] = 3.5;
  RenderOptions options;
  options.details = true;
  const std::string text = Render(sweep, options);
  EXPECT_TRUE(absl::StrContains(text, "mean_layers_used 3.50")) << text;
  EXPECT_TRUE(absl::StrContains(text, "plain                  4096   12.8   128   +-0.80%"))
      << text;
  EXPECT_TRUE(absl::StrContains(text, "g++ 12.2.0")) << text;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    EXPECT_LE(DisplayWidth(line), 120) << line;
  }
}

TEST(RenderTerminal, AsciiStyleHasNoOtherCharacters) {
  RenderOptions options;
  options.style.unicode = false;
  for (const char c : Render(MakeSweep(), options)) {
    ASSERT_LT(static_cast<unsigned char>(c), 0x80);
  }
}

TEST(RenderTerminal, SixteenBitAccuracyFitsTheTerminalWithEveryColumn) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  CaseSpec spec;
  spec.purpose = Case::PURPOSE_ACCURACY;
  spec.dtype = ELEMENT_TYPE_BF16;
  spec.technique = "a_technique_with_a_rather_long_name";
  Case result = MakeCase(spec);
  result.mutable_outcome()->mutable_against_definition()->set_bound(1e-2);
  result.mutable_outcome()->mutable_against_definition()->set_relative_frobenius(2.3e-3);
  result.mutable_outcome()->mutable_ratio_to_dense_error()->set_value(1.14);
  result.mutable_outcome()->mutable_ratio_to_dense_error()->set_bound(2);
  result.mutable_outcome()->mutable_log_sum_exp_error()->set_value(1.2e-3);
  (*result.mutable_outcome()->mutable_statistics())["extrapolation_change"] = 0.42;
  *results.add_cases() = result;
  const std::string text = AsTerminal(results);
  EXPECT_TRUE(absl::StrContains(text, "2.3e-3 (<= 0.01)     0.18  1.1 (<= 2)  0.87")) << text;
  EXPECT_TRUE(absl::StrContains(text, "0.78    0.42  ok")) << text;
  EXPECT_FALSE(absl::StrContains(text, "1.2e-3")) << text;
  RenderOptions details;
  details.details = true;
  EXPECT_TRUE(absl::StrContains(Render(results, details), "1.2e-3"));
}

// Makes three layers of one file under both masks, of "plain" and "near".
ResultSet MakeLayers() {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  for (const char* technique : {"near", "plain"}) {
    for (const bool causal : {true, false}) {
      for (const int layer : {0, 2, 5}) {
        CaseSpec spec;
        spec.technique = technique;
        spec.purpose = Case::PURPOSE_ACCURACY;
        spec.median_ns = 0;
        Case result = MakeCase(spec);
        result.mutable_key()->mutable_problem()->set_causal(causal);
        InputProfile* input = result.mutable_key()->mutable_input();
        input->set_file("net.safetensors");
        input->set_model("maker/net: 6 layers; from a shop");
        input->set_layer(absl::StrCat("layer", layer));
        Outcome* outcome = result.mutable_outcome();
        outcome->mutable_against_definition()->set_relative_frobenius((layer + 1) * 1e-7);
        outcome->mutable_against_dense()->set_relative_frobenius((layer + 1) * 0.1);
        *results.add_cases() = result;
      }
    }
  }
  return results;
}

TEST(RenderTerminal, LayersAndMasksOfAFileAreOneTableWithTheWorstErrorAndMedians) {
  const std::string text = AsTerminal(MakeLayers());
  EXPECT_TRUE(absl::StrContains(text, R"(
input real (net.safetensors): maker/net

Accuracy: cpu f32, 512 tokens, 8 heads of 64, input real (net.safetensors), layers 0, 2, 5: worst error against the
  definition, medians of the rest
                               error against  against  kept  KL from  recall,
technique  mask    exactness  its definition    dense  mass    dense   top 32  verdict
plain      full    exact      6e-7 (<= 2e-6)     0.30   1.0        0      1.0  ok
plain      causal  exact      6e-7 (<= 2e-6)     0.30   1.0        0      1.0  ok
near       full    exact      6e-7 (<= 2e-6)     0.30  0.87     0.14     0.78  ok
near       causal  exact      6e-7 (<= 2e-6)     0.30  0.87     0.14     0.78  ok

12 cases)"))
      << text;
}

TEST(RenderTerminal, DetailsShowEachLayerAndTheWholeModel) {
  RenderOptions options;
  options.details = true;
  const std::string text = Render(MakeLayers(), options);
  EXPECT_TRUE(absl::StrContains(text, "maker/net: 6 layers; from a shop")) << text;
  EXPECT_TRUE(absl::StrContains(text, "\nplain      full    0      exact      1e-7")) << text;
  EXPECT_TRUE(absl::StrContains(text, "\nplain      full    5      exact      6e-7")) << text;
  EXPECT_FALSE(absl::StrContains(text, "worst error")) << text;
}

TEST(RenderTerminal, TheWorstLayerDecidesTheVerdictAndItsBoundIsShown) {
  ResultSet results = MakeLayers();
  ErrorMeasure* loose = results.mutable_cases(0)->mutable_outcome()->mutable_against_definition();
  loose->set_bound(1e-3);
  loose->set_relative_frobenius(1e-4);
  Outcome* failed = results.mutable_cases(1)->mutable_outcome();
  failed->mutable_against_definition()->set_relative_frobenius(3e-6);
  failed->set_status(Outcome::STATUS_FAILED);
  EXPECT_TRUE(absl::StrContains(AsTerminal(results),
                                "near       causal  exact      3e-6 (<= 2e-6)     0.30  0.87     "
                                "0.14     0.78  FAILED"))
      << AsTerminal(results);
}

TEST(RenderTerminal, TheVerdictIsThatOfTheLayersThatRanAndSaysHowMany) {
  ResultSet results = MakeLayers();
  Outcome* skipped = results.mutable_cases(0)->mutable_outcome();
  skipped->Clear();
  skipped->set_status(Outcome::STATUS_SKIPPED);
  skipped->set_reason("the time budget of 4:00 was spent");
  EXPECT_TRUE(absl::StrContains(AsTerminal(results), "0.78  ok, 2 of 3 ran\n"))
      << AsTerminal(results);
}

TEST(RenderTerminal, ARowThatLacksALayerSaysSo) {
  ResultSet results = MakeLayers();
  results.mutable_cases()->DeleteSubrange(0, 1);
  EXPECT_TRUE(absl::StrContains(AsTerminal(results), "near (2 of 3 layers)  causal"))
      << AsTerminal(results);
}

// "chain" remembers 128 tokens; its counterpart is "chain" with a memory of all tokens, which runs
// at each length but the longest.
ResultSet MakeChain() {
  ResultSet results = MakeSweep();
  for (const int64_t tokens : {256, 512, 1024, 2048, 4096}) {
    for (const bool whole : {false, true}) {
      CaseSpec spec;
      spec.technique = "chain";
      spec.option_name = "memory";
      spec.option_value = whole ? absl::StrCat(tokens) : "128";
      spec.tokens = tokens;
      spec.expected_growth = 1;
      const double scale = static_cast<double>(tokens) / 256;
      spec.median_ns = whole ? 1e6 * scale * scale : 1.5e6 * scale;
      Case result = whole && tokens == 4096
                        ? MakeUnmeasured(spec, Outcome::STATUS_TIMEOUT, "too slow")
                        : MakeCase(spec);
      TechniqueDescription* technique = result.mutable_technique();
      if (!whole) technique->set_display_name("chain");
      technique->set_options_are_default(!whole);
      technique->set_dense_counterpart("chain");
      (*technique->mutable_dense_counterpart_options())["memory"] = absl::StrCat(tokens);
      for (int i = 0; i < 8 && !whole; ++i) {
        SegmentTiming* segment = result.mutable_outcome()->mutable_timing()->add_segments();
        segment->set_tokens_before(i * tokens / 8);
        segment->set_tokens(tokens / 8);
        for (const double ns : synthetic::Samples(1e6 * scale)) segment->add_append_ns(ns);
      }
      *results.add_cases() = result;
    }
  }
  return results;
}

TEST(RenderTerminal, ACounterpartIsOneRowAfterItsTechniqueAndWhatThatIsHeldAgainst) {
  const std::string text = AsTerminal(MakeChain());
  EXPECT_TRUE(absl::StrContains(text, R"(
technique                    256   512  1024  2048     4096  (expected)      at 4096   dense from  at 4096  peak
plain                      0.500  2.00  8.00  32.0      128    2.00 (2)            -            -    4 MiB   67%
chain                       1.50  3.00  6.00  12.0     24.0    1.00 (1)  5.3x (2048)          384    4 MiB   22%
chain (dense counterpart)   1.00  4.00  16.0  64.0  timeout        2.00            -            -        -  4.2%
near window=256             1.38  2.76  5.52  11.0     22.1    1.00 (1)         5.8x          707    4 MiB   24%
)")) << text;
  EXPECT_TRUE(absl::StrContains(text, "x (n): at n tokens, the most\n  that both ran; ")) << text;
  EXPECT_FALSE(absl::StrContains(text, "\nchain memory=")) << text;
}

TEST(RenderTerminal, CounterpartsOfTwoConfigurationsAreToldApart) {
  ResultSet results = MakeChain();
  const int cases = results.cases_size();
  for (int i = 0; i < cases; ++i) {
    if (results.cases(i).key().technique() != "chain") continue;
    Case deep = results.cases(i);
    (*deep.mutable_key()->mutable_options())["layers"] = "4";
    (*deep.mutable_technique()->mutable_dense_counterpart_options())["layers"] = "4";
    deep.mutable_technique()->set_options_are_default(false);
    deep.mutable_technique()->set_display_name(deep.technique().display_name() + " layers=4");
    (*results.mutable_cases(i)->mutable_key()->mutable_options())["layers"] = "2";
    (*results.mutable_cases(i)
          ->mutable_technique()
          ->mutable_dense_counterpart_options())["layers"] = "2";
    *results.add_cases() = deep;
  }
  const std::string text = AsTerminal(results, 0);
  EXPECT_TRUE(absl::StrContains(text, "\nchain (dense counterpart)  ")) << text;
  EXPECT_TRUE(absl::StrContains(text, "\nchain layers=4 (dense counterpart)  ")) << text;
}

// A sweep in which a technique is as fast as a "plain" of other options, which it is held against.
ResultSet MakeApart(bool with_plain) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  for (const Case::Purpose purpose : {Case::PURPOSE_ACCURACY, Case::PURPOSE_SCALING}) {
    for (const char* name : {"plain", "plain scale=1", "biased"}) {
      const bool scaled = absl::StrContains(name, "scale");
      if (!with_plain && absl::string_view(name) == "plain") continue;
      CaseSpec spec;
      spec.technique = scaled ? "plain" : name;
      if (scaled) spec.option_name = "scale", spec.option_value = "1";
      spec.purpose = purpose;
      Case result = MakeCase(spec);
      TechniqueDescription* technique = result.mutable_technique();
      technique->set_options_are_default(!scaled);
      if (absl::string_view(name) != "plain") {
        (*technique->mutable_dense_counterpart_options())["scale"] = "1";
      }
      *results.add_cases() = result;
    }
  }
  return results;
}

TEST(RenderTerminal, ACounterpartIsShownWithItsOptionsAndIsNeverRecommended) {
  const std::string text = AsTerminal(MakeApart(true), 0);
  EXPECT_TRUE(absl::StrContains(text, "\nplain scale=1 (dense counterpart)  ")) << text;
  EXPECT_TRUE(absl::StrContains(
      text,
      "\nNo technique with an error of at most 0.5 against dense is measurably faster than its "
      "dense counterpart at 512 tokens (cpu, f32, errors on input real).\n"
      "At that length plain is the choice; other lengths are in the tables.\n"))
      << text;
  EXPECT_FALSE(absl::StrContains(text, "\nChoices at ")) << text;
  // Where only the counterpart ran, nothing is recommended.
  const std::string alone = AsTerminal(MakeApart(false), 0);
  EXPECT_TRUE(absl::StrContains(alone, "\nOther lengths are in the tables.\n")) << alone;
  EXPECT_FALSE(absl::StrContains(alone, "is the choice")) << alone;
}

TEST(RenderTerminal, WhatStandsApartIsListedWithoutTheCommonBaseline) {
  ResultSet results = MakeSweep();
  results.mutable_cases()->MergeFrom(MakeApart(false).cases());
  for (Case& result : *results.mutable_cases()) {
    if (result.key().purpose() != Case::PURPOSE_ACCURACY) {
      result.mutable_key()->mutable_problem()->set_query_tokens(512);
      result.mutable_key()->mutable_problem()->set_kv_tokens(512);
    }
  }
  const std::string text = AsTerminal(results, 0);
  EXPECT_TRUE(absl::StrContains(text, ": of 3 held against plain, those that")) << text;
  EXPECT_TRUE(absl::StrContains(text, "held against a dense counterpart of their own: biased\n"))
      << text;
}

TEST(RenderTerminal, TitlesNameMachineAndBuildWhereTheFileHasSeveral) {
  const auto titles_with = [](void (*change)(Environment*)) {
    ResultSet results = MakeSweep();
    Environment other = MakeEnvironment("other");
    change(&other);
    *results.add_environments() = other;
    for (const int cases = results.cases_size(); results.cases_size() < 2 * cases;) {
      Case result = results.cases(results.cases_size() - cases);
      result.set_environment_id("other");
      *results.add_cases() = result;
    }
    std::vector<std::string> titles;
    for (const absl::string_view line : absl::StrSplit(AsTerminal(results, 0), '\n')) {
      for (const absl::string_view begin : {"Accuracy: ", "Scaling, ", "Choices at "}) {
        if (absl::StartsWith(line, begin)) titles.emplace_back(line.substr(0, line.find(": of ")));
      }
    }
    std::sort(titles.begin(), titles.end());
    return titles;
  };
  const std::string accuracy = "Accuracy: cpu f32, 512 tokens, 8 heads of 64, input real";
  const std::string choices =
      "Choices at 4096 tokens, cpu f32, 8 heads of 64, causal, input gaussian";
  const std::string scaling =
      "Scaling, ms at tokens: cpu f32, 8 heads of 64, causal, input gaussian";
  const auto expected = [&](const std::string& first, const std::string& second) {
    std::vector<std::string> titles;
    for (const std::string& title : {accuracy, choices, scaling}) {
      titles.push_back(title + first);
      if (second != first) titles.push_back(title + second);
    }
    return titles;
  };
  EXPECT_EQ(titles_with([](Environment*) {}), expected("", ""));
  EXPECT_EQ(titles_with([](Environment* other) { other->set_host("bench-2"); }),
            expected(", on bench-1", ", on bench-2"));
  EXPECT_EQ(titles_with([](Environment* other) { other->set_git_commit("fedcba98765432"); }),
            expected(", commit 0123456789 (dirty)", ", commit fedcba9876 (dirty)"));
  EXPECT_EQ(titles_with([](Environment* other) { other->set_compile_flags("-O3"); }),
            expected(", flags -O2", ", flags -O3"));
}

TEST(RenderTerminal, SentencesNameTheirGroupWhereThereAreSeveral) {
  const auto sentence_with = [](void (*change)(Case*)) {
    ResultSet results = MakeSweep();
    for (const int cases = results.cases_size(); results.cases_size() < 2 * cases;) {
      Case result = results.cases(results.cases_size() - cases);
      if (result.key().purpose() != Case::PURPOSE_ACCURACY) change(&result);
      *results.add_cases() = result;
    }
    const std::string text = AsTerminal(results, 0);
    const size_t begin = text.find("(cpu, f32");
    return text.substr(begin, text.find(')', begin) + 1 - begin);
  };
  EXPECT_EQ(sentence_with([](Case*) {}), "(cpu, f32, errors on input real)");
  EXPECT_EQ(
      sentence_with([](Case* result) { result->mutable_key()->mutable_problem()->set_batch(4); }),
      "(cpu, f32, 8 heads of 64, errors on input real)");
  EXPECT_EQ(sentence_with(
                [](Case* result) { result->mutable_key()->mutable_input()->set_name("peaked"); }),
            "(cpu, f32, input gaussian, errors on input real)");
  // Among equal ones, those that ran at the longer lengths count.
  EXPECT_EQ(sentence_with([](Case* result) {
              ProblemSize* problem = result->mutable_key()->mutable_problem();
              problem->set_batch(4);
              problem->set_query_tokens(2 * problem->query_tokens());
              problem->set_kv_tokens(2 * problem->kv_tokens());
            }),
            "(cpu, f32, 8 heads of 64, batch 4, errors on input real)");
}

TEST(RenderTerminal, ChoicesNameTheThreadsWhereThereAreSeveral) {
  ResultSet results = MakeSweep();
  for (const int cases = results.cases_size(); results.cases_size() < 2 * cases;) {
    Case result = results.cases(results.cases_size() - cases);
    result.mutable_key()->set_threads(4);
    *results.add_cases() = result;
  }
  const std::string text = AsTerminal(results, 0);
  for (const char* threads : {"2", "4"}) {
    EXPECT_TRUE(absl::StrContains(text, absl::StrCat("\nChoices at 4096 tokens, cpu f32, ", threads,
                                                     " threads, 8 heads of 64, causal, ")))
        << text;
  }
  // The sentence is about the most threads.
  EXPECT_TRUE(absl::StrContains(text, "(cpu, f32, 4 threads, errors on input real)")) << text;
  EXPECT_FALSE(absl::StrContains(AsTerminal(MakeSweep(), 0), "2 threads, 8 heads"));
}

TEST(RenderTerminal, WhatStreamsStandsAmongTheOthersToo) {
  const std::string text = AsTerminal(MakeChain());
  EXPECT_TRUE(absl::StrContains(text, R"(
Streaming, ms per appended segment: cpu f32, 8 heads of 64, causal, input gaussian
                   segment    first     last    ms a
technique  tokens   tokens  segment  segment   token
chain         256       32     1.00     1.00  0.0312
chain         512       64     2.00     2.00  0.0312
chain        1024      128     4.00     4.00  0.0312
chain        2048      256     8.00     8.00  0.0312
chain        4096      512     16.0     16.0  0.0312
)")) << text;
}

TEST(RenderTerminal, StreamsOnCapturedInputsAreDetails) {
  ResultSet results = MakeChain();
  for (Case& result : *results.mutable_cases()) {
    if (result.key().technique() != "chain" || result.key().problem().query_tokens() != 512) {
      continue;
    }
    result.mutable_key()->set_purpose(Case::PURPOSE_ACCURACY);
    result.mutable_key()->mutable_input()->set_name("real");
  }
  constexpr absl::string_view kTitle =
      "Streaming, ms per appended segment: cpu f32, 512 tokens, 8 heads of 64, input real";
  RenderOptions options;
  EXPECT_FALSE(absl::StrContains(Render(results, options), kTitle));
  options.details = true;
  EXPECT_TRUE(absl::StrContains(Render(results, options), kTitle)) << Render(results, options);

  // One segment of another length is a stream; where there is none, captured inputs are shown.
  options.details = false;
  bool one_is_left = false;
  for (Case& result : *results.mutable_cases()) {
    if (result.key().purpose() == Case::PURPOSE_ACCURACY) continue;
    auto& segments = *result.mutable_outcome()->mutable_timing()->mutable_segments();
    if (segments.empty()) continue;
    segments.DeleteSubrange(one_is_left ? 0 : 1, segments.size() - (one_is_left ? 0 : 1));
    one_is_left = true;
  }
  ASSERT_TRUE(one_is_left);
  EXPECT_FALSE(absl::StrContains(Render(results, options), kTitle));
  for (Case& result : *results.mutable_cases()) {
    if (result.key().purpose() == Case::PURPOSE_ACCURACY) continue;
    result.mutable_outcome()->mutable_timing()->clear_segments();
  }
  EXPECT_TRUE(absl::StrContains(Render(results, options), kTitle)) << Render(results, options);
}

TEST(RenderTerminal, GrowthOfAStreamNeedsManySteadySegments) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  CaseSpec spec;
  spec.median_ns = 0;
  Case streaming = MakeCase(spec);
  for (int i = 0; i < 32; ++i) {
    SegmentTiming* segment = streaming.mutable_outcome()->mutable_timing()->add_segments();
    segment->set_tokens_before(i * 16);
    segment->set_tokens(16);
    for (const double ns : synthetic::Samples(1e6 * (i + 1e-3))) segment->add_append_ns(ns);
  }
  *results.add_cases() = streaming;
  EXPECT_TRUE(absl::StrContains(AsTerminal(results), "1.00\n")) << AsTerminal(results);
  for (SegmentTiming& segment :
       *results.mutable_cases(0)->mutable_outcome()->mutable_timing()->mutable_segments()) {
    segment.set_append_ns(0, segment.append_ns(0) * 0.5);
    segment.set_append_ns(1, segment.append_ns(1) * 0.5);
    segment.set_append_ns(9, segment.append_ns(9) * 1.5);
    segment.set_append_ns(10, segment.append_ns(10) * 1.5);
  }
  EXPECT_FALSE(absl::StrContains(AsTerminal(results), "1.00\n")) << AsTerminal(results);
}

TEST(RenderTerminal, RowsStandByFamilyAndNameBehindTheCommonBaselineInAnyOrderOfTheFile) {
  const ResultSet sweep = MakeSweep();
  ResultSet turned = sweep;
  turned.clear_cases();
  for (int i = sweep.cases_size() - 1; i >= 0; --i) *turned.add_cases() = sweep.cases(i);
  for (Case& result : *turned.mutable_cases()) {
    if (result.key().technique() == "sketch") result.mutable_technique()->set_family("a family");
  }
  const std::string text = AsTerminal(turned);
  const std::string scaling = text.substr(text.find("Scaling"));
  EXPECT_LT(scaling.find("\nplain"), scaling.find("\nsketch"));
  EXPECT_LT(scaling.find("\nsketch"), scaling.find("\nnear"));
}

TEST(RenderTerminal, ChoicesNameWhatTheyComeFromAndWhoIsBeaten) {
  const std::string text = AsTerminal(MakeChain());
  EXPECT_TRUE(absl::StrContains(text,
                                "Choices at 4096 tokens, cpu f32, 8 heads of 64, causal, input "
                                "gaussian: of 3 held against plain, those that no other\n"
                                "  beats in both time and error on input real\n"))
      << text;
  EXPECT_TRUE(absl::StrContains(text, "near window=256 beats sketch features=128")) << text;
}

// Of 4 heads there is one mask with four techniques, of 8 heads two masks with three each.
TEST(RenderTerminal, ChoicesAreOfTheSizesThatHaveTheMostOverTheirMasks) {
  const ResultSet sweep = MakeSweep();
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  CaseSpec other;
  other.technique = "other";
  other.purpose = Case::PURPOSE_ACCURACY;
  *results.add_cases() = MakeCase(other);
  const auto add = [&results](Case result, int heads, bool causal) {
    ProblemSize* problem = result.mutable_key()->mutable_problem();
    problem->set_query_heads(heads);
    problem->set_kv_heads(heads);
    problem->set_causal(causal);
    *results.add_cases() = result;
  };
  for (const Case& result : sweep.cases()) {
    if (result.key().purpose() == Case::PURPOSE_ACCURACY) {
      *results.add_cases() = result;
    } else {
      add(result, 4, true);
    }
  }
  other.purpose = Case::PURPOSE_SCALING;
  for (other.tokens = 256; other.tokens <= 4096; other.tokens *= 2) {
    add(MakeCase(other), 4, true);
    // It has no dense attention beside it there, so that it stands for itself.
    Case alone = MakeCase(other);
    alone.mutable_technique()->set_dense_counterpart("none");
    for (const bool causal : {false, true}) add(alone, 8, causal);
  }
  for (const Case& result : sweep.cases()) {
    if (result.key().purpose() == Case::PURPOSE_ACCURACY) continue;
    for (const bool causal : {false, true}) add(result, 8, causal);
  }
  const std::string text = AsTerminal(results);
  for (const char* title : {"Choices at 4096 tokens, cpu f32, 8 heads of 64, input gaussian: of 3",
                            "Choices at 4096 tokens, cpu f32, 8 heads of 64, causal, input "
                            "gaussian: of 3"}) {
    EXPECT_TRUE(absl::StrContains(text, title)) << text;
  }
  EXPECT_LT(text.find("Choices at 4096 tokens, cpu f32, 8 heads"),
            text.find("Choices at 4096 tokens, cpu f32, 4 heads"))
      << text;
  EXPECT_TRUE(absl::StrContains(text, "under the full mask near window=256")) << text;
}

TEST(RenderTerminal, ChoicesWithoutAccuracyCasesTakeTheErrorsBesideTheTimes) {
  ResultSet sweep = MakeSweep();
  for (Case& result : *sweep.mutable_cases()) {
    if (result.key().purpose() == Case::PURPOSE_SCALING) {
      result.mutable_outcome()->mutable_against_dense()->set_relative_frobenius(
          result.key().technique() == "plain" ? 1e-7 : 0.5);
    }
  }
  sweep.mutable_cases()->DeleteSubrange(0, 3);
  EXPECT_TRUE(absl::StrContains(AsTerminal(sweep), "time and error on input gaussian"))
      << AsTerminal(sweep);
}

TEST(Render, ALegendExplainsTheMarksThatAreThere) {
  ResultSet sweep = MakeSweep();
  EXPECT_TRUE(
      absl::StrContains(AsTerminal(sweep), "\n\n-: not measured, or there is no such number\n\n"));
  Timing* timing = sweep.mutable_cases(sweep.cases_size() - 1)->mutable_outcome()->mutable_timing();
  timing->clear_run_ns();
  timing->add_run_ns(1e6);
  timing->add_run_ns(3e6);
  constexpr absl::string_view kLegend =
      "\n~: the median's 95% interval is wider than +-5%; ]?: from the ranges of all samples, too "
      "few "
      "for an interval of 95%; -: not measured, or there is no such number\n";
  EXPECT_TRUE(absl::StrContains(AsTerminal(sweep, 0), kLegend)) << AsTerminal(sweep, 0);
  EXPECT_TRUE(absl::StrContains(AsFormat(sweep, RenderFormat::kMarkdown), kLegend));
}

// Makes "plain" and "rival" at three lengths, the latter `ratio` times as fast at the longest one.
ResultSet MakeRivals(double ratio) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  for (const char* technique : {"plain", "rival"}) {
    for (const int64_t tokens : {256, 512, 1024}) {
      CaseSpec spec;
      spec.technique = technique;
      spec.tokens = tokens;
      spec.median_ns = 20e6;
      if (spec.technique == "rival") spec.median_ns *= tokens == 1024 ? 1 / ratio : 1.2;
      *results.add_cases() = MakeCase(spec);
    }
  }
  return results;
}

TEST(Render, ASpeedUpWhoseIntervalHoldsOneIsNoneAndMakesNoCrossover) {
  const std::string equal = AsTerminal(MakeRivals(1.001));
  EXPECT_TRUE(absl::StrContains(equal, "1.0x=")) << equal;
  EXPECT_TRUE(absl::StrContains(equal, "unclear")) << equal;
  EXPECT_TRUE(absl::StrContains(equal, "=: the samples do not tell the two apart")) << equal;
  RenderOptions colours;
  colours.style.colour = true;
  EXPECT_TRUE(absl::StrContains(Render(MakeRivals(1.001), colours), "\x1b[2m1.0x=\x1b[0m"));
  const std::string faster = AsTerminal(MakeRivals(1.2));
  EXPECT_TRUE(absl::StrContains(faster, "1.2x")) << faster;
  EXPECT_FALSE(absl::StrContains(faster, "=:")) << faster;
  EXPECT_TRUE(absl::StrContains(faster, "724 [713, 735]")) << faster;
}

TEST(Render, MarkdownHasTheIntervalsOfSpeedUpsAndCrossovers) {
  const std::string text = AsFormat(MakeSweep(), RenderFormat::kMarkdown);
  EXPECT_TRUE(
      absl::StrContains(text, "| 22.1 5.8x | 1.00 (1) | 5.8x [5.7, 5.8] | 707 [701, 713] |"))
      << text;
}

TEST(Render, CrossoversHaveTwoDigitsOrAllBeforeThePoint) {
  const std::pair<int64_t, const char*> rows[] = {
      {1, "| 707 [701, 713] |"}, {16, "| 44 [44, 45] |"}, {128, "| 5.5 [5.5, 5.6] |"}};
  for (const auto& [divisor, cell] : rows) {
    ResultSet sweep = MakeSweep();  // the two cross at 707 tokens
    for (Case& result : *sweep.mutable_cases()) {
      ProblemSize* problem = result.mutable_key()->mutable_problem();
      problem->set_query_tokens(problem->query_tokens() / divisor);
      problem->set_kv_tokens(problem->kv_tokens() / divisor);
    }
    const std::string text = AsFormat(sweep, RenderFormat::kMarkdown);
    EXPECT_TRUE(absl::StrContains(text, cell)) << text;
  }
}

TEST(RenderTerminal, SpeedUpsStandBesideTimesWhereThereIsRoom) {
  const std::string wide = AsTerminal(MakeSweep(), 160);
  EXPECT_TRUE(absl::StrContains(wide, "near window=256       1.38  0.36x  2.76 0.72x")) << wide;
  EXPECT_FALSE(absl::StrContains(AsTerminal(MakeSweep(), 100), "0.72x"))
      << AsTerminal(MakeSweep(), 100);
  for (const int width : {80, 100, 120, 160, 200}) {
    for (const absl::string_view line : absl::StrSplit(AsTerminal(MakeSweep(), width), '\n')) {
      EXPECT_LE(DisplayWidth(line), std::max(width, 115)) << line;  // the machine's line is long
    }
  }
}

// Makes `count` techniques of two families beside "plain".
ResultSet MakeMany(int count) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  for (int i = -1; i < count; ++i) {
    CaseSpec spec;
    if (i >= 0) spec.technique = absl::StrCat("technique_", i);
    Case result = MakeCase(spec);
    result.mutable_technique()->set_family(i % 2 == 0 ? "attention" : "memory");
    *results.add_cases() = result;
  }
  return results;
}

int CountLines(const std::string& text, absl::string_view begin) {
  int count = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    count += absl::StartsWith(line, begin) ? 1 : 0;
  }
  return count;
}

TEST(RenderTerminal, LongTablesShowDenseAgainForEachFamily) {
  const std::string longer = AsTerminal(MakeMany(30));
  EXPECT_EQ(CountLines(longer, "plain "), 2) << longer;
  EXPECT_EQ(CountLines(longer, "attention"), 1);
  EXPECT_EQ(CountLines(longer, "memory"), 1);
  EXPECT_EQ(CountLines(AsTerminal(MakeMany(10)), "plain "), 1);
}

TEST(RenderTerminal, SkipsAreOneLineAReasonAndFailuresHaveNames) {
  ResultSet results = MakeMany(3);
  for (int i = 0; i < 3; ++i) {
    CaseSpec spec;
    spec.technique = absl::StrCat("technique_", i);
    spec.device = DEVICE_TYPE_CUDA;
    *results.add_cases() = MakeUnmeasured(spec, Outcome::STATUS_SKIPPED, "no CUDA device");
    spec.device = DEVICE_TYPE_CPU;
    spec.tokens = 64;
    *results.add_cases() = MakeUnmeasured(spec, Outcome::STATUS_FAILED, "error 3 > 2");
  }
  const std::string text = AsTerminal(results);
  EXPECT_TRUE(absl::StrContains(text, "\nskipped, 3 cases: no CUDA device\n")) << text;
  EXPECT_TRUE(absl::StrContains(
      text, "\nfailed, 3 cases: error 3 > 2 (technique_0, technique_1, technique_2)\n"))
      << text;
  RenderOptions details;
  details.details = true;
  EXPECT_TRUE(absl::StrContains(Render(results, details),
                                "\nskipped, 3 cases: no CUDA device (technique_0, "));
}

TEST(RenderTerminal, ChoicesAreAtTheLongestLengthThatMostTechniquesRan) {
  ResultSet sweep = MakeSweep();
  for (Case& result : *sweep.mutable_cases()) {
    const bool longest = result.key().problem().query_tokens() == 4096;
    if (longest && result.key().technique() != "near") {
      result.mutable_outcome()->Clear();
      result.mutable_outcome()->set_status(Outcome::STATUS_SKIPPED);
      result.mutable_outcome()->set_reason("the time budget of 4:00 was spent");
    }
  }
  const std::string text = AsTerminal(sweep);
  EXPECT_TRUE(absl::StrContains(text, "Choices at 2048 tokens")) << text;
  EXPECT_TRUE(absl::StrContains(text, "the longest run has 4096")) << text;
}

TEST(RenderTerminal, OtherLoadIsSaidWhereItIsWorthTelling) {
  ResultSet sweep = MakeSweep();
  EXPECT_FALSE(absl::StrContains(AsTerminal(sweep), "other load"));
  for (Case& result : *sweep.mutable_cases()) {
    MachineLoad* load = result.mutable_outcome()->mutable_machine_load();
    load->set_observed_seconds(2);
    load->set_cores(2);
    load->set_usable_cores(2);
    load->set_threads(2);
    load->set_other_core_seconds(0.01);
    load->set_stolen_core_seconds(0.01);
  }
  EXPECT_FALSE(absl::StrContains(AsTerminal(sweep), "other load"));
  for (Case& result : *sweep.mutable_cases()) {
    MachineLoad* load = result.mutable_outcome()->mutable_machine_load();
    load->set_other_core_seconds(0.76);
    load->set_stolen_core_seconds(0.08);
  }
  EXPECT_TRUE(absl::StrContains(AsTerminal(sweep, 0),
                                "\nother load: 38% of a core taken by other processes, 2.0% of all "
                                "cores stolen by other guests, during these measurements\n"))
      << AsTerminal(sweep, 0);
  sweep.mutable_cases(5)->mutable_outcome()->mutable_machine_load()->set_threads(4);
  EXPECT_TRUE(absl::StrContains(AsTerminal(sweep, 0), "more threads than usable cores"));
}

TEST(RenderMarkdown, WritesTables) {
  RenderOptions options;
  options.format = RenderFormat::kMarkdown;
  const std::string text = Render(MakeSweep(), options);
  EXPECT_TRUE(absl::StrContains(
      text,
      "### Accuracy: cpu f32, 512 tokens, 8 heads of 64, input real\n\n"
      "| technique | mask | exactness | error against its definition | against dense | "
      "kept mass | KL from dense | recall, top 32 | verdict |\n"
      "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- |\n"
      "| plain | causal | exact | 2e-7 (<= 2e-6) | 2e-7 | 1.0 | 0 | 1.0 | ok |\n"))
      << text;
}

TEST(RenderMarkdown, RecallSaysOfHowManyKeysItIsWhereAllCasesAgree) {
  const auto header_of = [](int k_of_plain, int k_of_near) {
    ResultSet sweep = MakeSweep();
    sweep.mutable_cases(0)->mutable_outcome()->set_recall_k(k_of_plain);
    sweep.mutable_cases(1)->mutable_outcome()->set_recall_k(k_of_near);
    const std::string text = AsFormat(sweep, RenderFormat::kMarkdown);
    const size_t begin = text.find("| recall, ") + 2;
    return text.substr(begin, text.find(" |", begin) - begin);
  };
  EXPECT_EQ(header_of(1, 1), "recall, top 1");
  EXPECT_EQ(header_of(2, 2), "recall, top 2");
  EXPECT_EQ(header_of(1, 2), "recall, top k");
  EXPECT_EQ(header_of(0, 0), "recall, top k");  // a file that does not say k
}

TEST(RenderMarkdown, NothingOfAFileIsMarkup) {
  ResultSet sweep = MakeSweep();
  sweep.mutable_environments(0)->set_host("<script>alert(1)</script>");
  Outcome* outcome = sweep.mutable_cases(0)->mutable_outcome();
  outcome->set_status(Outcome::STATUS_FAILED);
  outcome->set_reason("<img src=x> *loud* `code`");
  RenderOptions options;
  options.format = RenderFormat::kMarkdown;
  options.notes = {"<b>note</b>", "[good](http://bad) [good][0] [0]: http://bad"};
  options.paths = {"a_b_<i>.pb"};
  const std::string text = Render(sweep, options);
  for (const char* tag :
       {"<script", "<img", "<b>", "<i>", " *loud*", " `code`", "good](", "d][", "0]:"}) {
    EXPECT_FALSE(absl::StrContains(text, tag)) << tag << "\n" << text;
  }
  EXPECT_TRUE(absl::StrContains(text, "&lt;img src=x> \\*loud\\*")) << text;
}

TEST(RenderCsv, HasOneLineACaseWithEveryFieldOfTheHeader) {
  ResultSet sweep = MakeSweep();
  sweep.mutable_cases(1)->mutable_technique()->set_title("A \"quoted\", long\r\ntitle");
  const std::vector<std::vector<std::string>> csv = ParseCsv(AsFormat(sweep, RenderFormat::kCsv));
  ASSERT_EQ(csv.size(), 1u + sweep.cases_size());
  for (const auto& line : csv) EXPECT_EQ(line.size(), csv[0].size());
  EXPECT_EQ(csv[2][Column(csv, "title")], "A \"quoted\", long\r\ntitle");
  const auto& last_near = csv[csv.size() - 2];
  EXPECT_EQ(last_near[Column(csv, "technique")], "near");
  EXPECT_EQ(last_near[Column(csv, "options")], "window=256");
  EXPECT_EQ(last_near[Column(csv, "query_tokens")], "4096");
  EXPECT_EQ(std::stod(last_near[Column(csv, "run_median_ns")]), 0.5e6 * 2.7621 * 16);
  EXPECT_NEAR(std::stod(last_near[Column(csv, "speed_up_over_dense")]), 16 / 2.7621, 1e-9);
  EXPECT_EQ(last_near[Column(csv, "crossover")], "at");
  EXPECT_NEAR(std::stod(last_near[Column(csv, "crossover_tokens")]), 707.1, 0.1);
  EXPECT_NEAR(std::stod(last_near[Column(csv, "crossover_low_tokens")]), 701, 1);
  EXPECT_NEAR(std::stod(last_near[Column(csv, "crossover_high_tokens")]), 713, 1);
  EXPECT_EQ(last_near[Column(csv, "crossover_clear")], "1");
  EXPECT_LT(std::stod(last_near[Column(csv, "speed_up_low")]), 16 / 2.7621);
  EXPECT_GT(std::stod(last_near[Column(csv, "speed_up_high")]), 16 / 2.7621);
  EXPECT_EQ(last_near[Column(csv, "speed_up_distinct")], "1");
  EXPECT_NEAR(std::stod(last_near[Column(csv, "growth")]), 1, 1e-9);
  EXPECT_EQ(last_near[Column(csv, "kept_mass")], "");
  EXPECT_EQ(last_near[Column(csv, "key")], CaseKey(sweep.cases(sweep.cases_size() - 2)));
}

TEST(RenderCsv, PassesHaveColumnsWhereThereIsAnotherThanTheForwardOne) {
  ResultSet sweep = MakeSweep();
  const std::vector<std::vector<std::string>> forward =
      ParseCsv(AsFormat(sweep, RenderFormat::kCsv));
  EXPECT_EQ(std::count(forward[0].begin(), forward[0].end(), "pass"), 0);
  synthetic::CaseSpec spec;
  spec.pass = Case::PASS_BACKWARD;
  *sweep.add_cases() = synthetic::MakeCase(spec);
  for (const auto& [name, value] : {std::make_pair("q", 3e-7), {"k", 1e-7}}) {
    NamedError* gradient =
        sweep.mutable_cases(sweep.cases_size() - 1)->mutable_outcome()->add_gradient_errors();
    gradient->set_name(name);
    gradient->mutable_error()->set_value(value);
    gradient->mutable_error()->set_bound(6e-5);
    gradient->mutable_error()->set_passed(true);
  }
  spec.pass = Case::PASS_TRAINING;
  *sweep.add_cases() = synthetic::MakeCase(spec);
  const std::vector<std::vector<std::string>> csv = ParseCsv(AsFormat(sweep, RenderFormat::kCsv));
  EXPECT_EQ(csv[0].size(), forward[0].size() + 6);
  const std::vector<std::string>& backward = csv[csv.size() - 2];
  EXPECT_EQ(std::stod(backward[Column(csv, "gradient_error")]), 3e-7);
  EXPECT_EQ(std::stod(backward[Column(csv, "gradient_error_bound")]), 6e-5);
  EXPECT_EQ(backward[Column(csv, "gradient_error_passed")], "true");
  EXPECT_EQ(backward[Column(csv, "gradient_error_of")], "q");
  EXPECT_EQ(csv[1][Column(csv, "gradient_error")], "");
  EXPECT_EQ(csv[1][Column(csv, "pass")], "forward");
  EXPECT_EQ(csv[1][Column(csv, "kept_bytes")], "");
  EXPECT_EQ(csv.back()[Column(csv, "pass")], "training");
  EXPECT_EQ(std::stod(csv.back()[Column(csv, "kept_bytes")]), 8 * 512 * 65 * 4);
  const json parsed = json::parse(AsFormat(sweep, RenderFormat::kJson));
  EXPECT_EQ(parsed["cases"].front()["key"]["pass"], "forward");
  EXPECT_FALSE(parsed["cases"].front()["costs"].contains("kept_bytes"));
  EXPECT_EQ(parsed["cases"].back()["key"]["pass"], "training");
  EXPECT_EQ(parsed["cases"].back()["costs"]["kept_bytes"], 8 * 512 * 65 * 4);
  const std::string benchmark = AsFormat(sweep, RenderFormat::kBenchmarkJson);
  EXPECT_NE(benchmark.find("threads:2/training\""), std::string::npos);
  EXPECT_EQ(benchmark.find("forward"), std::string::npos);
}

TEST(RenderCsv, GraphsOfRunsHaveColumnsWhereThereAreSome) {
  ResultSet sweep = MakeSweep();
  const size_t columns = ParseCsv(AsFormat(sweep, RenderFormat::kCsv))[0].size();
  RenderOptions options;
  options.details = true;
  EXPECT_FALSE(absl::StrContains(Render(sweep, options), "graph"));
  Timing* timing = sweep.mutable_cases(sweep.cases_size() - 2)->mutable_outcome()->mutable_timing();
  for (const double ns : {1.5e6, 2.5e6, 3.5e6}) timing->add_graph_run_ns(ns);
  const std::vector<std::vector<std::string>> csv = ParseCsv(AsFormat(sweep, RenderFormat::kCsv));
  EXPECT_EQ(csv[0].size(), columns + 5);
  EXPECT_EQ(std::stod(csv[csv.size() - 2][Column(csv, "graph_run_median_ns")]), 2.5e6);
  EXPECT_EQ(csv[1][Column(csv, "graph_run_median_ns")], "");
  const json parsed = json::parse(AsFormat(sweep, RenderFormat::kJson));
  const json& graphs = parsed["cases"][sweep.cases_size() - 2];
  EXPECT_EQ(graphs["samples"]["graph_run_ns"], json({1.5e6, 2.5e6, 3.5e6}));
  EXPECT_FALSE(parsed["cases"].front()["samples"].contains("graph_run_ns"));
  const std::string text = Render(sweep, options);
  EXPECT_TRUE(absl::StrContains(text, "graph: a run that is launched as one CUDA graph")) << text;
  EXPECT_TRUE(absl::StrContains(text, "(0)   2.50\n")) << text;
}

TEST(RenderCsv, ZeroCasesAreAHeaderLine) {
  EXPECT_EQ(ParseCsv(AsFormat(ResultSet(), RenderFormat::kCsv)).size(), 1u);
}

TEST(RenderJson, IsValidAndHasWhatIsKnownAndNothingElse) {
  ResultSet sweep = MakeSweep();
  Outcome* outcome = sweep.mutable_cases(1)->mutable_outcome();
  outcome->mutable_against_dense()->set_max_abs(kInfinity);
  outcome->set_kl_divergence(kNan);
  (*outcome->mutable_statistics())["lowest"] = -kInfinity;
  for (const int samples : {5, 6}) {
    auto* visit = sweep.mutable_cases(3)->mutable_outcome()->mutable_timing()->add_visits();
    visit->set_start_unix_ns(1'790'000'000'000'000'000 + samples);
    visit->set_run_samples(samples);
  }
  const json parsed = json::parse(AsFormat(sweep, RenderFormat::kJson));
  EXPECT_EQ(parsed["format"], "tfb.results/1");
  ASSERT_EQ(parsed["cases"].size(), static_cast<size_t>(sweep.cases_size()));
  const json& near = parsed["cases"][1];
  EXPECT_EQ(near["key"]["options"]["window"], "256");
  EXPECT_EQ(near["key"]["query_tokens"], 512);
  EXPECT_EQ(near["errors"]["dense_max_abs"], "Infinity");
  EXPECT_EQ(near["errors"]["kl_divergence"], "NaN");
  EXPECT_EQ(near["statistics"]["lowest"], "-Infinity");
  EXPECT_FALSE(near["times"].contains("run_median_ns"));
  EXPECT_EQ(near["outcome"]["status"], "ok");
  const json& scaling = parsed["cases"][3];
  EXPECT_EQ(scaling["samples"]["run_ns"].size(), 11u);
  EXPECT_EQ(scaling["samples"]["visits"],
            json::parse(R"([{"run_samples": 5, "start_unix_ns": 1790000000000000005},
                            {"run_samples": 6, "start_unix_ns": 1790000000000000006}])"));
  EXPECT_FALSE(near["samples"].contains("visits"));
  EXPECT_EQ(parsed["environments"][0]["git_dirty"], true);
}

TEST(RenderJson, ZeroCasesAreValid) {
  const json parsed = json::parse(AsFormat(ResultSet(), RenderFormat::kJson));
  EXPECT_TRUE(parsed["cases"].empty());
}

TEST(ParseRenderFormat, NamesWhatIsAllowed) {
  const std::pair<const char*, RenderFormat> formats[] = {
      {"terminal", RenderFormat::kTerminal}, {"markdown", RenderFormat::kMarkdown},
      {"csv", RenderFormat::kCsv},           {"json", RenderFormat::kJson},
      {"html", RenderFormat::kHtml},         {"benchmark_json", RenderFormat::kBenchmarkJson}};
  for (const auto& [name, format] : formats) EXPECT_EQ(*ParseRenderFormat(name), format) << name;
  EXPECT_EQ(std::string(ParseRenderFormat("pdf").status().message()),
            "\"pdf\" is none of terminal, markdown, csv, json, html, benchmark_json, svg, png");
}

TEST(StyleFor, APipeHasNoColour) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const TextStyle style = StyleFor(ends[1]);
  EXPECT_FALSE(style.colour);
  EXPECT_EQ(style.width, 120);
}

// The style for a terminal of `columns`, of which `name` is $TERM and `no_colour` is $NO_COLOR.
TextStyle StyleOfTerminal(unsigned short columns, const char* name, const char* no_colour) {
  const int controller = posix_openpt(O_RDWR | O_NOCTTY);
  EXPECT_GE(controller, 0);
  EXPECT_EQ(grantpt(controller), 0);
  EXPECT_EQ(unlockpt(controller), 0);
  const int terminal = open(ptsname(controller), O_RDWR | O_NOCTTY);
  EXPECT_GE(terminal, 0);
  winsize size = {};
  size.ws_col = columns;
  EXPECT_EQ(ioctl(terminal, TIOCSWINSZ, &size), 0);
  setenv("TERM", name, 1);
  setenv("NO_COLOR", no_colour, 1);
  const TextStyle style = StyleFor(terminal);
  unsetenv("NO_COLOR");
  close(terminal);
  close(controller);
  return style;
}

TEST(StyleFor, ATerminalHasColourAndAtLeastEightyColumns) {
  EXPECT_TRUE(StyleOfTerminal(200, "xterm", "").colour);
  EXPECT_FALSE(StyleOfTerminal(200, "dumb", "").colour);
  EXPECT_FALSE(StyleOfTerminal(200, "xterm", "1").colour);
  const std::pair<unsigned short, int> widths[] = {{0, 120}, {1, 80},  {79, 80},
                                                   {80, 80}, {81, 81}, {200, 200}};
  for (const auto& [columns, width] : widths) {
    EXPECT_EQ(StyleOfTerminal(columns, "xterm", "").width, width);
  }
}

TEST(StyleFor, TheFirstVariableOfTheLocaleThatIsSetDecides) {
  const struct {
    const char *all, *type, *lang;
    bool unicode;
  } kRows[] = {{"", "", "", true},
               {"", "", "C", false},
               {"", "", "de_DE.utf8", true},
               {"", "C", "de_DE.UTF-8", false},
               {"", "de_DE.Utf-8", "C", true},
               {"C", "de_DE.UTF-8", "de_DE.UTF-8", false},
               {"C.UTF-8", "C", "C", true}};
  for (const auto& row : kRows) {
    setenv("LC_ALL", row.all, 1);
    setenv("LC_CTYPE", row.type, 1);
    setenv("LANG", row.lang, 1);
    EXPECT_EQ(StyleFor(1).unicode, row.unicode) << row.all << ", " << row.type << ", " << row.lang;
  }
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) unsetenv(name);
}

TEST(StyleFor, TheLocaleDecidesAboutUnicode) {
  setenv("LC_ALL", "C", 1);
  EXPECT_FALSE(StyleFor(1).unicode);
  setenv("LC_ALL", "en_GB.UTF-8", 1);
  EXPECT_TRUE(StyleFor(1).unicode);
  unsetenv("LC_ALL");
}

}  // namespace
}  // namespace tfb
