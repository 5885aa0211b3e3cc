#include "harness/plan/quantities.h"

#include <cmath>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/status.h"

namespace tfb {
namespace {

using Units = std::vector<std::pair<absl::string_view, double>>;

// Parses a number and one of the units in either case; without a unit the factor is 1.
absl::StatusOr<double> ParseQuantity(absl::string_view flag, absl::string_view text,
                                     const Units& units, absl::string_view examples) {
  absl::string_view number = text;
  double factor = 1;
  for (const auto& [unit, size] : units) {
    if (absl::EndsWithIgnoreCase(text, unit)) {
      number.remove_suffix(unit.size());
      factor = size;
      break;
    }
  }
  double value;
  if (!absl::SimpleAtod(absl::StripAsciiWhitespace(number), &value) || !std::isfinite(value) ||
      value < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, ": \"", text, "\"; write ", examples));
  }
  return value * factor;
}

}  // namespace

absl::StatusOr<double> ParseSeconds(absl::string_view flag, absl::string_view text) {
  static const Units& units = *new Units{{"ms", 1e-3}, {"s", 1}, {"m", 60}, {"h", 3600}};
  return ParseQuantity(flag, text, units, "a duration like 90s, 1.5m, 2h");
}

absl::StatusOr<int64_t> ParseBytes(absl::string_view flag, absl::string_view text) {
  static const Units& units =
      *new Units{{"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}, {"KB", 1e3},
                 {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12},    {"K", 0x1p10},   {"M", 0x1p20},
                 {"G", 0x1p30},   {"T", 0x1p40},   {"B", 1}};
  TFB_ASSIGN_OR_RETURN(const double bytes,
                       ParseQuantity(flag, text, units, "a size like 512MiB, 16GiB"));
  if (bytes >= 0x1p62) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, ": \"", text, "\" is more than any machine has"));
  }
  // A number alone is a slip for one of GiB.
  if (bytes > 0 && absl::ascii_isdigit(static_cast<unsigned char>(text.back()))) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, ": \"", text, "\" has no unit; write a size like 512MiB, 16GiB"));
  }
  return static_cast<int64_t>(bytes);
}

std::string FormatClock(double seconds) {
  const int64_t whole = static_cast<int64_t>(std::llround(std::max(seconds, 0.0)));
  if (whole < 60) return absl::StrCat(whole, " s");
  if (whole < 3600) return absl::StrFormat("%d:%02d", whole / 60, whole % 60);
  return absl::StrFormat("%d:%02d:%02d", whole / 3600, whole / 60 % 60, whole % 60);
}

}  // namespace tfb
