// Parses and formats durations and sizes.
#ifndef TFB_HARNESS_PLAN_QUANTITIES_H_
#define TFB_HARNESS_PLAN_QUANTITIES_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tfb {

// Parses "90", "90s", "1.5m", "2h" or "250ms" to seconds, at least 0. Error messages begin with
// `flag`.
absl::StatusOr<double> ParseSeconds(absl::string_view flag, absl::string_view text);
// Parses "1048576", "512MiB", "16G" or "1.5GB" to bytes, at least 0. K, M, G, T and KiB ... are
// powers of 1024, KB ... of 1000.
absl::StatusOr<int64_t> ParseBytes(absl::string_view flag, absl::string_view text);
// Returns "9 s", "1:05" or "2:01:09".
std::string FormatClock(double seconds);

}  // namespace tfb

#endif  // TFB_HARNESS_PLAN_QUANTITIES_H_
