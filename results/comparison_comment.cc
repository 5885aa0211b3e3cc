#include "results/comparison_comment.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "results/comparison_report.h"
#include "results/table.h"

namespace tfb {
namespace {

constexpr char kListAll[] = "bazel run //tools:compare -- base.pb new.pb --all";

// The most bytes of a text in a cell, so that a row has at most about 1,200 bytes and tens of rows
// always fit.
constexpr size_t kMostWord = 60, kMostName = 100, kMostCase = 240, kMostReason = 300;
// The most bytes of a text that stands alone, such as a command.
constexpr size_t kMostText = 1500;
// The most differences between the environments that are shown.
constexpr size_t kMostDifferences = 12;

// Returns the length of the character in UTF-8 at the beginning of `text`, and stores its code; 0
// where there is none: an invalid byte, an overlong form, a surrogate, or a code beyond Unicode.
size_t CharacterLength(absl::string_view text, uint32_t* code) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  *code = at(0);
  if (at(0) < 0x80) return 1;
  const size_t length = at(0) < 0xc2 ? 0 : at(0) < 0xe0 ? 2 : at(0) < 0xf0 ? 3 : 4;
  if (length == 0 || text.size() < length) return 0;
  *code = at(0) & (0xff >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if ((at(i) & 0xc0) != 0x80) return 0;
    *code = *code << 6 | (at(i) & 0x3f);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = *code >= 0xd800 && *code < 0xe000;
  return *code < kLeast[length] || *code > 0x10ffff || is_surrogate ? 0 : length;
}

// Whether a character is invisible, ends a line, or changes the direction of the text around it.
bool IsHidden(uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0xad || code == 0x61c ||
         (code >= 0x200b && code <= 0x200f) || (code >= 0x2028 && code <= 0x202e) ||
         (code >= 0x2060 && code <= 0x206f) || code == 0xfeff || code >= 0xe0000;
}

// Returns the characters of `text` as they may stand in a code span of a table.
std::vector<std::string> SpanCharacters(absl::string_view text) {
  std::vector<std::string> characters;
  while (!text.empty()) {
    uint32_t code = 0;
    const size_t length = CharacterLength(text, &code);
    const bool space = length == 1 && absl::ascii_isspace(static_cast<unsigned char>(text[0]));
    characters.push_back(space                           ? " "
                         : length == 0 || IsHidden(code) ? "?"
                         : code == '`'                   ? "'"
                         : code == '|'                   ? "¦"
                                                         : std::string(text.substr(0, length)));
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return characters;
}

// Returns the text without its middle where it has more than `most` bytes. Two thirds of what stays
// are from its beginning.
std::string Shortened(absl::string_view text, size_t most) {
  const std::vector<std::string> characters = SpanCharacters(text);
  const std::string whole = absl::StrJoin(characters, "");
  if (whole.size() <= most) return whole;
  constexpr absl::string_view kGap = "…";
  const size_t begin_bytes = (most - kGap.size()) * 2 / 3;
  const size_t end_bytes = most - kGap.size() - begin_bytes;
  std::string begin, end;
  for (auto next = characters.begin(); begin.size() + next->size() <= begin_bytes; ++next) {
    begin += *next;
  }
  for (auto next = characters.rbegin(); end.size() + next->size() <= end_bytes; ++next) {
    end = absl::StrCat(*next, end);
  }
  return absl::StrCat(begin, kGap, end);
}

// Returns the text as a code span; nothing where it is empty.
std::string Code(absl::string_view text, size_t most) {
  return text.empty() ? "" : absl::StrCat("`", Shortened(text, most), "`");
}

// Returns a text of words and numbers as it is, and any other one as a code span. "www." and "GH-"
// begin links.
std::string Words(absl::string_view text, size_t most) {
  const auto is_plain = [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
           absl::string_view(" .,+-%/").find(c) != absl::string_view::npos;
  };
  const std::string lower = absl::AsciiStrToLower(text);
  const bool link = absl::StrContains(lower, "www.") || absl::StrContains(lower, "gh-");
  const bool plain =
      !link && text.size() <= most && std::all_of(text.begin(), text.end(), is_plain);
  return plain ? std::string(text) : Code(text, most);
}

std::string WordsOrDash(absl::string_view text) {
  return text.empty() ? "-" : Words(text, kMostWord);
}

std::string Row(const std::vector<std::string>& cells) {
  return absl::StrCat("| ", absl::StrJoin(cells, " | "), " |\n");
}

// A table of findings under a line that opens it, with room for what does not fit.
struct Section {
  std::string open;
  std::string header;  // of the table
  std::vector<std::string> rows;
  std::string close;
  size_t shown = 0;  // rows that fit, from the first on

  std::string LeftOut(size_t count) const {
    return absl::StrCat(count, count == rows.size() ? "" : " more",
                        count == 1 ? " row is" : " rows are", " not shown here: `", kListAll,
                        "` lists everything.\n");
  }
  // Returns the bytes of the section without its table.
  size_t FrameBytes() const {
    return open.size() + LeftOut(rows.size()).size() + 10 + close.size();
  }
  std::string Text() const {
    std::string text = open;
    if (shown > 0) text += header;
    for (size_t i = 0; i < shown; ++i) text += rows[i];
    if (shown > 0) text += "\n";
    if (shown < rows.size()) absl::StrAppend(&text, LeftOut(rows.size() - shown), "\n");
    return text + close;
  }
};

// Returns a section that is folded under `summary`.
Section Folded(absl::string_view summary) {
  Section section;
  section.open = absl::StrCat("<details><summary>", summary, "</summary>\n\n");
  section.close = "</details>\n\n";
  return section;
}

// Adds a table of these findings, with the columns that they fill.
void AddTable(const std::vector<const Finding*>& findings, Section* section) {
  const bool intervals = std::any_of(findings.begin(), findings.end(), [](const Finding* finding) {
    return finding->interval.has_value();
  });
  const bool reasons = std::any_of(findings.begin(), findings.end(),
                                   [](const Finding* finding) { return !finding->reason.empty(); });
  std::vector<std::string> names = {"verdict", "case", "what", "base", "new", "change"};
  std::vector<std::string> rules = {"---", "---", "---", "---:", "---:", "---:"};
  if (intervals) names.push_back("95 % interval"), rules.push_back("---:");
  if (reasons) names.push_back("reason"), rules.push_back("---");
  section->header = Row(names) + Row(rules);
  for (const Finding* finding : findings) {
    const bool bad = finding->verdict == Verdict::kRegressed;
    std::vector<std::string> cells = {
        absl::StrCat(bad ? "**" : "", VerdictWord(*finding), bad ? "**" : ""),
        Code(finding->subject, kMostCase),
        Words(finding->what, kMostName),
        WordsOrDash(finding->base),
        WordsOrDash(finding->now),
        finding->change == 1 ? "-" : FormatSignificant(finding->change) + "x"};
    if (intervals) {
      cells.push_back(finding->interval.has_value()
                          ? absl::StrCat(FormatSignificant(finding->interval->low), " to ",
                                         FormatSignificant(finding->interval->high))
                          : "-");
    }
    if (reasons) cells.push_back(Code(finding->reason, kMostReason));
    section->rows.push_back(Row(cells));
  }
}

std::vector<const Finding*> FindingsOf(const Comparison& comparison, Verdict verdict) {
  std::vector<const Finding*> chosen;
  for (const Finding& finding : comparison.findings) {
    if (finding.verdict == verdict) chosen.push_back(&finding);
  }
  return chosen;
}

// --- The heading

absl::string_view VerdictOfAll(const Comparison& comparison) {
  if (comparison.regressed()) return "Regressed";
  if (comparison.Count(Verdict::kImproved) > 0) return "Improved";
  return comparison.judged() ? "Unchanged" : "Cannot be judged";
}

std::string Heading(const Comparison& comparison) {
  return absl::StrCat(
      kCommentMarker, "\n### ", VerdictOfAll(comparison), ": ",
      comparison.Count(Verdict::kRegressed), " slower or worse, ",
      comparison.Count(Verdict::kImproved), " faster or better, ", comparison.Count(Verdict::kSame),
      " the same, ", comparison.Count(Verdict::kAmbiguous), " ambiguous, ",
      comparison.Count(Verdict::kNotJudged), " not judged\n\n",
      comparison.judged()
          ? ""
          : absl::StrCat("There is no verdict: ", comparison.WhyNotJudged(), ".\n\n"));
}

// --- The builds and the machine

using TextOf = std::string (*)(const Environment&);

std::string CommitOf(const Environment& environment) {
  if (environment.git_commit().empty()) return "";
  return absl::StrCat(environment.git_commit(),
                      environment.git_dirty() ? " with uncommitted changes" : "");
}

std::string ProcessorOf(const Environment& environment) {
  if (environment.cpu_model().empty()) return "";
  return absl::StrCat(environment.cpu_model(), ", ", environment.logical_cores(), " usable cores, ",
                      absl::StrJoin(environment.simd(), " "));
}

std::string GpusOf(const Environment& environment) {
  return absl::StrJoin(environment.gpus(), " + ", [](std::string* out, const Gpu& gpu) {
    absl::StrAppend(out, gpu.name(), ", driver ", gpu.driver());
  });
}

// Returns the distinct texts of the environments, each as a code span, or a dash.
std::string Joined(const std::vector<Environment>& environments, TextOf text_of) {
  constexpr size_t kMostTexts = 3;
  std::vector<std::string> texts;
  for (const Environment& environment : environments) {
    const std::string text = Code(text_of(environment), kMostReason);
    if (text.empty() || std::count(texts.begin(), texts.end(), text) > 0) continue;
    texts.push_back(text);
  }
  const size_t more = texts.size() > kMostTexts ? texts.size() - kMostTexts : 0;
  texts.resize(texts.size() - more);
  if (texts.empty()) return "-";
  return absl::StrCat(absl::StrJoin(texts, ", "),
                      more > 0 ? absl::StrCat(" and ", more, " more") : "");
}

std::string Builds(const Comparison& comparison) {
  static constexpr std::pair<const char*, TextOf> kRows[] = {
      {"commit", CommitOf},
      {"processor", ProcessorOf},
      {"GPU", GpusOf},
      {"system", [](const Environment& environment) { return environment.os(); }},
      {"compiler", [](const Environment& environment) { return environment.compiler(); }},
      {"flags",
       [](const Environment& environment) {
         return absl::StrJoin({environment.compilation_mode(), environment.compile_flags()}, " ");
       }},
      {"command", [](const Environment& environment) {
         return absl::StrJoin(environment.command_line(), " ");
       }}};
  std::string text = "<details><summary>The two builds and the machine</summary>\n\n";
  absl::StrAppend(&text, Row({"", "base", "new"}), Row({"---", "---", "---"}));
  for (const auto& [name, text_of] : kRows) {
    const std::string base = Joined(comparison.base_environments, text_of);
    const std::string now = Joined(comparison.now_environments, text_of);
    if (base != "-" || now != "-") text += Row({name, base, now});
  }
  const std::vector<std::string>& differences = comparison.environment_differences;
  if (!differences.empty()) text += "\nThe environments differ, and were compared all the same:\n";
  for (size_t i = 0; i < std::min(differences.size(), kMostDifferences); ++i) {
    absl::StrAppend(&text, "\n", Code(differences[i], kMostReason), "\n");
  }
  if (differences.size() > kMostDifferences) {
    absl::StrAppend(&text, "\nand ", differences.size() - kMostDifferences, " more.\n");
  }
  return text + "\n</details>\n\n";
}

// --- The rule, and how to repeat it

std::string Rule(const Comparison& comparison) {
  using Metric = CompareOptions::Metric;
  const CompareOptions& options = comparison.options;
  const char* what = "Times are compared as they are.";
  if (options.metric == Metric::kInstructions) {
    what = "Retired instructions are compared in place of times.";
  } else if (options.metric == Metric::kRelativeToDense) {
    what =
        "A time is divided by that of dense attention in the same run, which cancels the speed of "
        "the machine; dense attention's own time is divided by that of fixed arithmetic measured "
        "beside it.";
  }
  return absl::StrCat(
      what, " It is SLOWER where the whole 95 % interval of its change, by the bootstrap over all ",
      "samples, lies above ", options.threshold,
      " and a rank sum test and, where dense or another divisor is noisy as well, a test of ",
      "trimmed means agree, corrected for the number of times; FASTER where the interval lies ",
      "below 1 / ", options.threshold,
      "; SAME where it lies between the two, and AMBIGUOUS otherwise. Memory is WORSE from ",
      options.memory_threshold, " times on, an error against dense from ", options.error_threshold,
      " times on, and an error against its definition where it exceeds a bound that it met.");
}

std::string Repeat(const Comparison& comparison) {
  std::string base = "BASE_COMMIT";
  if (!comparison.base_environments.empty()) {
    const std::string& commit = comparison.base_environments[0].git_commit();
    const bool is_hash = !commit.empty() && commit.size() <= 64 &&
                         std::all_of(commit.begin(), commit.end(), [](char c) {
                           return absl::ascii_isxdigit(static_cast<unsigned char>(c));
                         });
    if (is_hash) base = commit;
  }
  return absl::StrCat(
      "<details><summary>How this is judged, and how to repeat it</summary>\n\n", Rule(comparison),
      "\n\n", comparison.cases, comparison.cases == 1 ? " case is" : " cases are", " in both, ",
      comparison.missing, " only in base, ", comparison.added, " only in new.\n\n    ", kListAll,
      "\n\nlists every number. Here or elsewhere,\n\n    tools/ci/compare_builds --base=", base,
      " --output=build/comparison\n\nbuilds both and lets them take turns on one machine.\n\n"
      "</details>\n");
}

}  // namespace

std::string RenderComment(const Comparison& comparison) {
  std::vector<Section> sections(1);
  std::vector<const Finding*> changed = FindingsOf(comparison, Verdict::kRegressed);
  for (const Finding* finding : FindingsOf(comparison, Verdict::kImproved)) {
    changed.push_back(finding);
  }
  if (changed.empty()) sections.clear();
  if (!changed.empty()) AddTable(changed, &sections[0]);
  const std::pair<Verdict, const char*> kFolded[] = {{Verdict::kAmbiguous, "ambiguous"},
                                                     {Verdict::kNotJudged, "not judged"},
                                                     {Verdict::kSame, "the same"}};
  for (const auto& [verdict, name] : kFolded) {
    const std::vector<const Finding*> findings = FindingsOf(comparison, verdict);
    if (findings.empty()) continue;
    Section section = Folded(absl::StrCat(findings.size(), " ", name));
    AddTable(findings, &section);
    const std::string advice = AmbiguityAdvice(comparison);
    if (verdict == Verdict::kAmbiguous && !advice.empty()) {
      const std::pair<std::string, std::string> lines =
          absl::StrSplit(absl::StripSuffix(advice, "\n"), absl::MaxSplits('\n', 1));
      section.close =
          absl::StrCat(lines.first, "\n\n", Code(lines.second, kMostText), "\n\n", section.close);
    }
    sections.push_back(std::move(section));
  }

  // Both, and all that frames the tables, take less than 30,000 bytes: the largest part is the table
  // of the builds with 7 rows of 6 texts.
  const std::string head = Heading(comparison);
  const std::string tail = absl::StrCat(Builds(comparison), Repeat(comparison));
  size_t room = kMostCommentBytes - head.size() - tail.size();
  for (const Section& section : sections) room -= section.FrameBytes();
  for (Section& section : sections) {
    size_t needed = section.header.size() + 1;
    while (section.shown < section.rows.size() &&
           needed + section.rows[section.shown].size() <= room) {
      needed += section.rows[section.shown++].size();
    }
    if (section.shown > 0) room -= needed;
  }
  std::string text = head;
  for (const Section& section : sections) text += section.Text();
  return text + tail;
}

std::string RenderIncomparable(absl::string_view reason) {
  return absl::StrCat(kCommentMarker,
                      "\n### Cannot be judged: the two results cannot be compared\n\n",
                      Code(reason, kMostText), "\n");
}

}  // namespace tfb
