#include "harness/plan/choice.h"

#include <fnmatch.h>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/status.h"

namespace tfb {
namespace {

constexpr char kSeeList[] = " (sweep --list shows all)";

bool HasOption(const TechniqueInfo& info, absl::string_view name) {
  return std::any_of(info.options.begin(), info.options.end(),
                     [&](const OptionSpec& spec) { return spec.name == name; });
}

// Returns the options with every * replaced by each of the option's sweep values: every
// combination.
absl::StatusOr<std::vector<Options>> ExpandSweeps(const TechniqueInfo& info,
                                                  const Options& options) {
  std::vector<Options> expanded = {options};
  for (const auto& [name, value] : options) {
    if (value != "*") continue;
    const auto spec = std::find_if(info.options.begin(), info.options.end(),
                                   [&name = name](const OptionSpec& s) { return s.name == name; });
    if (spec == info.options.end()) continue;  // Canonical returns the error
    if (spec->sweep.empty()) {
      std::vector<std::string> sweepable;
      for (const OptionSpec& s : info.options) {
        if (!s.sweep.empty()) sweepable.push_back(s.name);
      }
      return absl::InvalidArgumentError(absl::StrCat(
          "option ", name, " of ", info.name, " has no values for *; ",
          sweepable.empty()
              ? "none of its options has: give a value"
              : absl::StrCat("its options that have: ", absl::StrJoin(sweepable, ", "))));
    }
    std::vector<Options> longer;
    for (const Options& base : expanded) {
      for (const std::string& sweep_value : spec->sweep) {
        longer.push_back(base);
        longer.back()[name] = sweep_value;
      }
    }
    expanded = std::move(longer);
  }
  return expanded;
}

absl::StatusOr<std::vector<const Technique*>> Matching(const TechniqueSpec& spec,
                                                       const Registry& registry) {
  if (spec.technique.find_first_of("*?") == std::string::npos) {
    const absl::StatusOr<const Technique*> found = registry.Find(spec.technique);
    if (found.ok()) return std::vector<const Technique*>{*found};
    return absl::Status(found.status().code(), absl::StrCat(found.status().message(), kSeeList));
  }
  std::vector<const Technique*> matching;
  bool name_matches = false;
  for (const Technique* technique : registry.All()) {
    if (fnmatch(spec.technique.c_str(), technique->info().name.c_str(), 0) != 0) continue;
    name_matches = true;
    const bool has_all =
        std::all_of(spec.options.begin(), spec.options.end(),
                    [&](const auto& option) { return HasOption(technique->info(), option.first); });
    if (has_all) matching.push_back(technique);
  }
  if (!name_matches) {
    return absl::NotFoundError(
        absl::StrCat("no technique matches \"", spec.technique, "\"", kSeeList));
  }
  if (matching.empty()) {
    return absl::NotFoundError(absl::StrCat("no technique that matches \"", spec.technique,
                                            "\" has the options ", ToString(spec.options),
                                            kSeeList));
  }
  return matching;
}

}  // namespace

absl::Status FlagError(absl::string_view flag, absl::string_view message) {
  return absl::InvalidArgumentError(absl::StrCat("--", flag, ": ", message));
}
absl::Status FlagError(absl::string_view flag, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("--", flag, ": ", status.message()));
}

absl::StatusOr<std::vector<std::string>> ParseWords(absl::string_view flag,
                                                    absl::string_view text) {
  std::vector<std::string> words;
  for (absl::string_view word : absl::StrSplit(text, ',')) {
    word = absl::StripAsciiWhitespace(word);
    if (word.empty()) return FlagError(flag, absl::StrCat("empty item in \"", text, "\""));
    if (std::find(words.begin(), words.end(), word) == words.end()) words.emplace_back(word);
  }
  return words;
}

absl::StatusOr<std::vector<int64_t>> ParseSizes(absl::string_view flag, absl::string_view text,
                                                int64_t min, int64_t max) {
  std::vector<int64_t> sizes;
  TFB_ASSIGN_OR_RETURN(const std::vector<std::string> words, ParseWords(flag, text));
  for (const std::string& word : words) {
    const std::vector<std::string> ends = absl::StrSplit(word, ':');
    int64_t first = 0, last = 0;
    const bool whole = ends.size() <= 2 && absl::SimpleAtoi(ends.front(), &first) &&
                       absl::SimpleAtoi(ends.back(), &last);
    if (!whole) {
      return FlagError(
          flag, absl::StrCat("\"", word, "\" is neither a number nor a range like 256:4096"));
    }
    for (const int64_t end : {first, last}) {
      if (end < min || end > max) {
        return FlagError(flag, absl::StrCat(end, "; allowed are ", min, " to ", max));
      }
    }
    if (last < first) return FlagError(flag, absl::StrCat("the range ", word, " is empty"));
    for (int64_t size = first; size <= last; size *= 2) {
      if (std::find(sizes.begin(), sizes.end(), size) == sizes.end()) sizes.push_back(size);
    }
  }
  return sizes;
}

absl::StatusOr<std::vector<ChosenTechnique>> ChooseTechniques(absl::string_view text,
                                                              const Registry& registry) {
  const absl::StatusOr<std::vector<TechniqueSpec>> specs = ParseTechniqueSpecs(text);
  if (!specs.ok()) return FlagError("techniques", specs.status());
  std::vector<ChosenTechnique> chosen;
  for (const TechniqueSpec& spec : *specs) {
    const absl::StatusOr<std::vector<const Technique*>> matching = Matching(spec, registry);
    if (!matching.ok()) return FlagError("techniques", matching.status());
    for (const Technique* technique : *matching) {
      const absl::StatusOr<std::vector<Options>> expanded =
          ExpandSweeps(technique->info(), spec.options);
      if (!expanded.ok()) return FlagError("techniques", expanded.status());
      for (const Options& options : *expanded) {
        const absl::StatusOr<Options> canonical = technique->Canonical(options);
        if (!canonical.ok()) {
          return FlagError("techniques", absl::StrCat(technique->info().name, ": ",
                                                      canonical.status().message()));
        }
        const bool named = spec.technique == technique->info().name;
        chosen.push_back({technique, *canonical, options, named});
      }
    }
  }
  return chosen;
}

}  // namespace tfb
