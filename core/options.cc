#include "core/options.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace tfb {
namespace {

std::string RealText(double value) {
  // Finds the shortest text that reads back as the same number.
  for (int digits = 6; digits <= 17; ++digits) {
    char buffer[40];
    snprintf(buffer, sizeof(buffer), "%.*g", digits, value);
    if (std::stod(buffer) == value || std::isnan(value)) return buffer;
  }
  return absl::StrCat(value);
}

bool ParseInt(absl::string_view text, int64_t min, int64_t max, int64_t* value) {
  int64_t parsed;
  if (!absl::SimpleAtoi(text, &parsed) || parsed < min || parsed > max) return false;
  *value = parsed;
  return true;
}

int EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<int> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

bool IsIdentifier(absl::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isalnum(c) || c == '_' || c == '*' || c == '?';
  });
}

// Splits at the commas that are not in brackets. Returns false where brackets do not match.
bool SplitAtCommas(absl::string_view text, std::vector<absl::string_view>* items) {
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    depth += (text[i] == '[') - (text[i] == ']');
    if (depth < 0) return false;
    if (text[i] != ',' || depth > 0) continue;
    items->push_back(text.substr(begin, i - begin));
    begin = i + 1;
  }
  items->push_back(text.substr(begin));
  return depth == 0;
}

// Adds "name=value" to the options of `spec`.
absl::Status AddOption(absl::string_view item, TechniqueSpec* spec) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(item, absl::MaxSplits('=', 1));
  if (!absl::StrContains(item, '=') || !IsIdentifier(parts.first) || parts.second.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", item, "\" in the options of ", spec->technique, " is not option=value"));
  }
  if (!spec->options.emplace(std::string(parts.first), std::string(parts.second)).second) {
    return absl::InvalidArgumentError(
        absl::StrCat("option \"", parts.first, "\" of ", spec->technique, " is given twice"));
  }
  return absl::OkStatus();
}

// Parses a text such as "longformer[window=64,dilation=1/2]".
bool ParseBracketed(absl::string_view text, TechniqueSpec* spec) {
  const size_t open = text.find('[');
  TechniqueSpec parsed;
  parsed.technique = std::string(text.substr(0, open));
  if (!IsIdentifier(parsed.technique)) return false;
  if (open != absl::string_view::npos) {
    if (!absl::EndsWith(text, "]")) return false;
    std::vector<absl::string_view> items;
    if (!SplitAtCommas(text.substr(open + 1, text.size() - open - 2), &items)) return false;
    for (const absl::string_view item : items) {
      if (!AddOption(item, &parsed).ok()) return false;
    }
  }
  *spec = std::move(parsed);
  return true;
}

}  // namespace

void OptionBinder::Add(OptionSpec spec, std::function<bool(absl::string_view)> parse,
                       std::function<std::string()> print) {
  spec.default_value = print();
  entries_.push_back({std::move(spec), std::move(parse), std::move(print), nullptr});
}

void OptionBinder::Int(absl::string_view name, int64_t* value, int64_t min, int64_t max,
                       absl::string_view help, const std::vector<int64_t>& sweep) {
  OptionSpec spec{std::string(name), "int", "", absl::StrCat(min, " to ", max),
                  std::string(help), {}};
  for (int64_t v : sweep) spec.sweep.push_back(absl::StrCat(v));
  Add(
      std::move(spec), [=](absl::string_view text) { return ParseInt(text, min, max, value); },
      [=] { return absl::StrCat(*value); });
}

void OptionBinder::Real(absl::string_view name, double* value, double min, double max,
                        absl::string_view help, const std::vector<double>& sweep) {
  OptionSpec spec{std::string(name), "real", "", absl::StrCat(RealText(min), " to ", RealText(max)),
                  std::string(help), {}};
  for (double v : sweep) spec.sweep.push_back(RealText(v));
  Add(
      std::move(spec),
      [=](absl::string_view text) {
        double parsed;
        if (!absl::SimpleAtod(text, &parsed) || !(parsed >= min && parsed <= max)) return false;
        *value = parsed;
        return true;
      },
      [=] { return RealText(*value); });
}

void OptionBinder::Bool(absl::string_view name, bool* value, absl::string_view help) {
  Add(
      {std::string(name), "bool", "", "true | false", std::string(help), {}},
      [=](absl::string_view text) {
        if (text != "true" && text != "false") return false;
        *value = text == "true";
        return true;
      },
      [=] { return *value ? "true" : "false"; });
}

void OptionBinder::Ints(absl::string_view name, std::vector<int64_t>* value, int64_t min,
                        int64_t max, absl::string_view help) {
  Add(
      {std::string(name),
       "ints",
       "",
       absl::StrCat("a/b/..., each ", min, " to ", max),
       std::string(help),
       {}},
      [=](absl::string_view text) {
        std::vector<int64_t> parsed;
        for (absl::string_view item : absl::StrSplit(text, '/')) {
          if (!ParseInt(item, min, max, &parsed.emplace_back())) return false;
        }
        *value = std::move(parsed);
        return true;
      },
      [=] { return absl::StrJoin(*value, "/"); });
}

void OptionBinder::Technique(absl::string_view name, TechniqueSpec* value, absl::string_view range,
                             const std::function<absl::Status(TechniqueSpec*)>& check,
                             absl::string_view help) {
  Add(
      {std::string(name), "technique", "", std::string(range), std::string(help), {}},
      [=](absl::string_view text) { return ParseBracketed(text, value); },
      [=] { return ToBracketedString(*value); });
  entries_.back().check = [=] { return check(value); };
}

void OptionBinder::AddChoice(absl::string_view name, const std::vector<std::string>& names,
                             absl::string_view help, std::function<void(size_t)> set,
                             std::function<size_t()> get) {
  Add(
      {std::string(name), "choice", "", absl::StrJoin(names, " | "), std::string(help), {}},
      [=](absl::string_view text) {
        const auto found = std::find(names.begin(), names.end(), text);
        if (found == names.end()) return false;
        set(static_cast<size_t>(found - names.begin()));
        return true;
      },
      [=] { return names[get()]; });
}

absl::Status OptionBinder::Parse(const Options& options) {
  for (const auto& [name, value] : options) {
    const auto entry = std::find_if(entries_.begin(), entries_.end(),
                                    [&name = name](const Entry& e) { return e.spec.name == name; });
    if (entry == entries_.end()) {
      std::vector<std::string> known;
      for (const Entry& e : entries_) known.push_back(e.spec.name);
      return absl::InvalidArgumentError(
          absl::StrCat("unknown option \"", name, "\"; ",
                       known.empty() ? "there are none"
                                     : absl::StrCat("known are ", absl::StrJoin(known, ", "))));
    }
    if (!entry->parse(value)) {
      return absl::InvalidArgumentError(
          absl::StrCat("option ", name, " is \"", value, "\"; allowed are ", entry->spec.range));
    }
    const absl::Status status = entry->check ? entry->check() : absl::OkStatus();
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("option ", name, " is \"", value,
                                                     "\"; allowed are ", entry->spec.range, "; ",
                                                     status.message()));
    }
  }
  return absl::OkStatus();
}

std::vector<OptionSpec> OptionBinder::Specs() const {
  std::vector<OptionSpec> specs;
  for (const Entry& entry : entries_) specs.push_back(entry.spec);
  return specs;
}

Options OptionBinder::Values() const {
  Options values;
  for (const Entry& entry : entries_) values[entry.spec.name] = entry.print();
  return values;
}

absl::StatusOr<TechniqueSpec> ParseTechniqueSpec(absl::string_view text) {
  TFB_ASSIGN_OR_RETURN(std::vector<TechniqueSpec> specs, ParseTechniqueSpecs(text));
  if (specs.size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\" names ", specs.size(), " techniques; one is asked for"));
  }
  return specs[0];
}

absl::StatusOr<std::vector<TechniqueSpec>> ParseTechniqueSpecs(absl::string_view text) {
  std::vector<TechniqueSpec> specs;
  std::vector<absl::string_view> items;
  if (!SplitAtCommas(text, &items)) {
    return absl::InvalidArgumentError(absl::StrCat("the brackets in \"", text, "\" do not match"));
  }
  for (absl::string_view item : items) {
    item = absl::StripAsciiWhitespace(item);
    if (item.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("empty item in \"", text, "\""));
    }
    const size_t equals = item.find('=');
    const size_t colon = item.substr(0, equals).find(':');
    if (colon == absl::string_view::npos && equals != absl::string_view::npos) {
      if (specs.empty()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "option \"", item, "\" has no technique before it: write technique:", item));
      }
      TFB_RETURN_IF_ERROR(AddOption(item, &specs.back()));
      continue;
    }
    const absl::string_view name = item.substr(0, colon);
    if (!IsIdentifier(name)) {
      return absl::InvalidArgumentError(absl::StrCat("\"", name, "\" is not a technique's name"));
    }
    specs.push_back({std::string(name), {}});
    if (colon != absl::string_view::npos) {
      TFB_RETURN_IF_ERROR(AddOption(item.substr(colon + 1), &specs.back()));
    }
  }
  return specs;
}

std::string ToString(const Options& options) {
  return absl::StrJoin(options, ",", absl::PairFormatter("="));
}

std::string ToString(const TechniqueSpec& spec) {
  return spec.options.empty() ? spec.technique
                              : absl::StrCat(spec.technique, ":", ToString(spec.options));
}

std::string ToBracketedString(const TechniqueSpec& spec) {
  return spec.options.empty() ? spec.technique
                              : absl::StrCat(spec.technique, "[", ToString(spec.options), "]");
}

std::vector<std::string> NearestNames(absl::string_view name, const std::vector<std::string>& known,
                                      size_t count) {
  std::vector<std::pair<int, std::string>> ranked;
  const std::string lower = absl::AsciiStrToLower(name);
  for (const std::string& candidate : known) {
    ranked.emplace_back(EditDistance(lower, absl::AsciiStrToLower(candidate)), candidate);
  }
  std::sort(ranked.begin(), ranked.end());
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(count, ranked.size()); ++i) names.push_back(ranked[i].second);
  return names;
}

}  // namespace tfb
