// Parses the values of command line flags: sizes, and techniques with options.
#ifndef TFB_HARNESS_PLAN_CHOICE_H_
#define TFB_HARNESS_PLAN_CHOICE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/options.h"
#include "core/technique.h"

namespace tfb {

// Returns an error "--flag: message".
absl::Status FlagError(absl::string_view flag, absl::string_view message);
absl::Status FlagError(absl::string_view flag, const absl::Status& status);

// Returns the words of a comma-separated list, each once; empty words are an error.
absl::StatusOr<std::vector<std::string>> ParseWords(absl::string_view flag, absl::string_view text);

// Returns the sizes of "1,256:1024", which is 1, 256, 512, 1024: in the order given, without
// repetition. `min` is at least 1.
absl::StatusOr<std::vector<int64_t>> ParseSizes(absl::string_view flag, absl::string_view text,
                                                int64_t min, int64_t max);

// The techniques that `text` (CaseFlags::techniques) names, with canonical options.
struct ChosenTechnique {
  const Technique* technique;
  Options options;
  Options given;      // the options that `text` contains
  bool named = true;  // whether `text` has the technique's name, not a glob that it matches
};
absl::StatusOr<std::vector<ChosenTechnique>> ChooseTechniques(absl::string_view text,
                                                              const Registry& registry);

}  // namespace tfb

#endif  // TFB_HARNESS_PLAN_CHOICE_H_
