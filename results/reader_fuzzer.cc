// libFuzzer's entry to the result reader, and to what shows and compares its results.
// (tools/fuzz/fuzz.bzl says how to run it).
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/strings/string_view.h"
#include "results/appender.h"
#include "results/comparison.h"
#include "results/comparison_report.h"
#include "results/reader.h"
#include "results/render.h"
#include "results/well_formed.h"
#include "results/wire.h"

namespace {

void Expect(bool holds) {
  if (!holds) std::abort();
}

// Checks that nothing in a file controls the reader's terminal.
void ExpectHarmless(absl::string_view text) {
  Expect(text.find('\x1b') == absl::string_view::npos);
}

// Renders the comparison of two sets.
bool NothingIsWorse(const tfb::ResultSet& base, const tfb::ResultSet& now, bool allow_different) {
  tfb::CompareOptions options;
  options.allow_different_environment = allow_different;
  const absl::StatusOr<tfb::Comparison> comparison = tfb::Compare(base, now, options);
  if (!comparison.ok()) {
    ExpectHarmless(comparison.status().message());
    return true;
  }
  for (const tfb::ComparisonFormat format :
       {tfb::ComparisonFormat::kTerminal, tfb::ComparisonFormat::kComment,
        tfb::ComparisonFormat::kJson}) {
    ExpectHarmless(tfb::RenderComparison(*comparison, format, /*all=*/true, tfb::TextStyle()));
  }
  return !comparison->regressed();
}

// Returns the same cases on another machine, where all have failed.
tfb::ResultSet Elsewhere(tfb::ResultSet results) {
  for (tfb::Environment& environment : *results.mutable_environments()) {
    environment.clear_simd();
    environment.clear_compiler();
  }
  for (tfb::Case& result : *results.mutable_cases()) {
    result.mutable_outcome()->set_status(tfb::Outcome::STATUS_FAILED);
  }
  return results;
}

void Read(absl::string_view bytes) {
  const absl::StatusOr<tfb::ResultFile> file = tfb::ReadResultBytes(bytes, "fuzzed");
  if (!file.ok()) return ExpectHarmless(file.status().message());
  Expect(file->whole_bytes + file->torn_bytes == static_cast<int64_t>(bytes.size()));
  // Results that were read can be written and read again, and are then the same.
  const std::string written = tfb::SerializeResults(file->results);
  const absl::StatusOr<tfb::ResultFile> again = tfb::ReadResultBytes(written, "written");
  Expect(again.ok() && tfb::SerializeResults(again->results) == written);

  tfb::RenderOptions options;
  options.details = true;
  for (const tfb::RenderFormat format :
       {tfb::RenderFormat::kTerminal, tfb::RenderFormat::kMarkdown, tfb::RenderFormat::kCsv,
        tfb::RenderFormat::kJson, tfb::RenderFormat::kHtml, tfb::RenderFormat::kBenchmarkJson}) {
    options.format = format;
    const std::string text = tfb::Render(file->results, options);
    if (format == tfb::RenderFormat::kTerminal) ExpectHarmless(text);
    if (format == tfb::RenderFormat::kHtml) Expect(tfb::MarkupProblem(text, true).empty());
  }
  Expect(NothingIsWorse(file->results, file->results, false));
  const tfb::ResultSet elsewhere = Elsewhere(file->results);
  NothingIsWorse(file->results, elsewhere, false);
  NothingIsWorse(file->results, elsewhere, true);
  NothingIsWorse(elsewhere, file->results, true);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  Read(bytes);
  // The same bytes as a file with its signature, and as the cases of one with right checksums, so
  // that the fuzzer gets past both.
  Read(tfb::wire::Signature() + std::string(bytes));
  if (size < 1) return 0;
  std::string file = tfb::wire::Signature();
  absl::string_view rest = bytes.substr(1);
  while (!rest.empty()) {
    std::string record;
    const absl::string_view payload = rest.substr(0, 1 + size_t{data[0]} * 4);
    tfb::wire::AppendLengthDelimited(tfb::wire::kCasesField, payload, &record);
    tfb::wire::AppendChecksum(std::string(record), &record);
    file += record;
    rest.remove_prefix(payload.size());
  }
  Read(file);
  return 0;
}
