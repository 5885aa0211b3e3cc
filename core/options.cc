#include "core/options.h"

#include <algorithm>
#include <cstddef>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace tfb {
namespace {

std::string RealText(double value) {
  // Finds the shortest text that reads back as the same number, which 17 digits always do.
  std::string text;
  for (int digits = 6; digits <= 17; ++digits) {
    std::ostringstream stream;
    stream.precision(digits);
    stream << value;
    text = stream.str();
    double back;
    if (absl::SimpleAtod(text, &back) && back == value) break;
  }
  return text;
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
    return absl::ascii_isalnum(c) || c == '_' || c == '@' || c == '*' || c == '?';
  });
}

// Splits at the separators that are in neither brackets nor, outside of these, in parentheses. Returns
// false where brackets or such parentheses do not match.
bool SplitOutsideBrackets(absl::string_view text, char separator,
                          std::vector<absl::string_view>* items) {
  int depth = 0, parentheses = 0;
  size_t begin = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    depth += (text[i] == '[') - (text[i] == ']');
    if (depth == 0) parentheses += (text[i] == '(') - (text[i] == ')');
    if (depth < 0 || parentheses < 0) return false;
    if (text[i] != separator || depth > 0 || parentheses > 0) continue;
    items->push_back(text.substr(begin, i - begin));
    begin = i + 1;
  }
  items->push_back(text.substr(begin));
  return depth == 0 && parentheses == 0;
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
    const absl::string_view inside = text.substr(open + 1, text.size() - open - 2);
    if (!SplitOutsideBrackets(inside, ',', &items)) return false;
    for (const absl::string_view item : items) {
      if (!AddOption(item, &parsed).ok()) return false;
    }
  }
  *spec = std::move(parsed);
  return true;
}

// Parses a list of techniques. Parentheses do not nest.
bool ParseTechniqueList(absl::string_view text, bool in_parentheses,
                        std::vector<TechniqueSpec>* specs) {
  std::vector<absl::string_view> items;
  if (!SplitOutsideBrackets(text, '/', &items)) return false;
  for (absl::string_view item : items) {
    int64_t count = 1;
    std::vector<TechniqueSpec> repeated;
    const size_t star = item.find('*');
    if (star < item.find_first_of("[(")) {
      if (!ParseInt(item.substr(0, star), 1, TechniqueList::kMaxSize, &count)) return false;
      item.remove_prefix(star + 1);
    }
    if (!in_parentheses && absl::StartsWith(item, "(") && absl::EndsWith(item, ")")) {
      const absl::string_view inside = item.substr(1, item.size() - 2);
      if (!ParseTechniqueList(inside, /*in_parentheses=*/true, &repeated)) return false;
    } else if (!ParseBracketed(item, &repeated.emplace_back())) {
      return false;
    }
    const int64_t size = static_cast<int64_t>(specs->size() + count * repeated.size());
    if (size > TechniqueList::kMaxSize) return false;
    for (int64_t n = 0; n < count; ++n) {
      specs->insert(specs->end(), repeated.begin(), repeated.end());
    }
  }
  return true;
}

// Returns the techniques from `begin` to `end`, those that follow each other as a count and one.
std::string RunsText(const std::vector<std::string>& techniques, size_t begin, size_t end) {
  std::string text;
  while (begin < end) {
    size_t next = begin;
    while (next < end && techniques[next] == techniques[begin]) ++next;
    if (!text.empty()) text += "/";
    if (next - begin > 1) absl::StrAppend(&text, next - begin, "*");
    text += techniques[begin];
    begin = next;
  }
  return text;
}

}  // namespace

absl::Status TechniqueList::CheckCount(absl::string_view option, absl::string_view of,
                                       const std::vector<int64_t>& counts) const {
  const int64_t size = static_cast<int64_t>(specs.size());
  if (size == 1 || std::find(counts.begin(), counts.end(), size) != counts.end()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("option ", option, " names ", size,
                                                 " techniques; allowed with ", of, " are 1 or ",
                                                 absl::StrJoin(counts, " or ")));
}

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

void OptionBinder::Techniques(absl::string_view name, TechniqueList* value, absl::string_view range,
                              const std::function<absl::Status(TechniqueSpec*)>& check,
                              absl::string_view help) {
  Add(
      {std::string(name), "techniques", "", std::string(range), std::string(help), {}},
      [=](absl::string_view text) {
        TechniqueList parsed;
        if (!ParseTechniqueList(text, /*in_parentheses=*/false, &parsed.specs)) return false;
        *value = std::move(parsed);
        return true;
      },
      [=] { return ToBracketedString(*value); });
  entries_.back().check = [=] {
    for (TechniqueSpec& spec : value->specs) TFB_RETURN_IF_ERROR(check(&spec));
    return absl::OkStatus();
  };
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
  if (!SplitOutsideBrackets(text, ',', &items)) {
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

std::string ToBracketedString(const TechniqueList& list) {
  std::vector<std::string> techniques;
  for (const TechniqueSpec& spec : list.specs) techniques.push_back(ToBracketedString(spec));
  const size_t size = techniques.size();
  size_t period = 1;
  const auto repeats = [&] {
    if (size % period != 0) return false;
    return std::equal(techniques.begin() + static_cast<std::ptrdiff_t>(period), techniques.end(),
                      techniques.begin());
  };
  while (period < size && !repeats()) ++period;
  const std::string once = RunsText(techniques, 0, period);
  if (period >= size) return once;
  return period == 1 ? absl::StrCat(size, "*", once) : absl::StrCat(size / period, "*(", once, ")");
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
