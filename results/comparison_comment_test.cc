#include "results/comparison_comment.h"

#include <cmath>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "results/comparison.h"
#include "results/synthetic.h"

namespace tfb {
namespace {

using ::tfb::synthetic::MakeEnvironment;
using ::tfb::synthetic::MakeSweep;

// Removes code spans, between single backticks, from a line.
std::string WithoutSpans(absl::string_view line) {
  const std::vector<std::string> parts = absl::StrSplit(line, '`');
  std::string out;
  for (size_t i = 0; i < parts.size(); i += 2) out += parts[i];
  return out;
}

size_t Count(absl::string_view text, absl::string_view part) {
  size_t count = 0;
  for (size_t at = 0; (at = text.find(part, at)) != absl::string_view::npos; at += part.size()) {
    ++count;
  }
  return count;
}

// Returns what a line outside of blocks of code has that Markdown or GitHub would interpret, beside
// what every comment has.
std::string ProblemOfLine(const std::string& line) {
  if (Count(line, "`") % 2 != 0) return "an open code span";
  const std::string rest = absl::StrReplaceAll(WithoutSpans(line), {{"<details>", ""},
                                                                    {"</details>", ""},
                                                                    {"<summary>", ""},
                                                                    {"</summary>", ""},
                                                                    {"**SLOWER**", ""},
                                                                    {"**WORSE**", ""}});
  if (rest.find_first_of("<>&@[]\\*_~$") != std::string::npos) return "markup";
  if (absl::StrContains(rest, "://") || absl::StrContains(rest, "www.")) return "a link";
  const size_t hash = absl::StartsWith(rest, "### ") ? rest.find('#', 3) : rest.find('#');
  return hash == std::string::npos ? "" : "a reference";
}

// Returns what is wrong with a comment, or "".
std::string ProblemOf(const std::string& comment) {
  if (comment.size() > kMostCommentBytes) return absl::StrCat(comment.size(), " bytes");
  try {
    nlohmann::json(comment).dump();
  } catch (const nlohmann::json::exception& error) {
    return error.what();  // no UTF-8
  }
  const std::vector<std::string> lines = absl::StrSplit(comment, '\n');
  if (lines[0] != kCommentMarker) return "no marker";
  if (!absl::StartsWith(lines[1], "### ")) return "no heading";
  int open = 0;
  for (size_t i = 1; i < lines.size(); ++i) {
    const std::string& line = lines[i];
    const std::string where = absl::StrCat(" in line ", i + 1, ": ", line);
    if (absl::StartsWith(line, "    ")) {
      if (!lines[i - 1].empty() && !absl::StartsWith(lines[i - 1], "    "))
        return "no code" + where;
      continue;
    }
    const std::string problem = ProblemOfLine(line);
    if (!problem.empty()) return problem + where;
    const std::string outside = WithoutSpans(line);
    open += static_cast<int>(Count(outside, "<details>"));
    open -= static_cast<int>(Count(outside, "</details>"));
    if (open < 0 || open > 1) return "unbalanced details" + where;
    if (absl::StrContains(outside, "details>") && !lines[i + 1].empty()) return "no gap" + where;
    if (!absl::StartsWith(line, "|")) continue;
    if (!absl::StartsWith(line, "| ") || !absl::EndsWith(line, " |")) return "no row" + where;
    const bool first = !absl::StartsWith(lines[i - 1], "|");
    if (first && !lines[i - 1].empty()) return "a table without a gap" + where;
    if (first && !absl::StartsWith(lines[i + 1], "| ---")) return "no rule" + where;
    if (!first && Count(line, "|") != Count(lines[i - 1], "|")) return "a broken row" + where;
  }
  return open == 0 ? "" : "open details";
}

// Returns how many rows the tables of findings show, by their verdict's word.
std::map<std::string, int> RowsOf(const std::string& comment) {
  std::map<std::string, int> rows;
  for (const absl::string_view line : absl::StrSplit(comment, '\n')) {
    const std::vector<std::string> cells = absl::StrSplit(line, " | ");
    const bool of_finding = absl::StartsWith(line, "| ") && cells.size() > 5 &&
                            cells[0] != "| verdict" && !absl::StartsWith(line, "| ---");
    if (of_finding) ++rows[cells[0].substr(2)];
  }
  return rows;
}

// Returns how many rows a comment says that it leaves out.
int LeftOut(const std::string& comment) {
  int all = 0;
  for (const absl::string_view line : absl::StrSplit(comment, '\n')) {
    if (!absl::StrContains(line, " not shown here: `bazel run //tools:compare -- ")) continue;
    int count = 0;
    EXPECT_TRUE(absl::SimpleAtoi(line.substr(0, line.find(' ')), &count)) << line;
    all += count;
  }
  return all;
}

Finding FindingOf(Verdict verdict, const std::string& text) {
  Finding finding;
  finding.what = "run time over dense";
  finding.subject = text;
  finding.is_time = true;
  finding.base = "1.00";
  finding.now = "1.50";
  finding.change = 1.5;
  finding.interval = RatioInterval{1.5, 1.4, 1.6};
  finding.verdict = verdict;
  return finding;
}

TEST(ComparisonComment, TextFromFilesIsNeitherMarkupNorAMention) {
  const std::pair<const char*, const char*> kTexts[] = {
      {"near@mine", "`near@mine`"},
      {"@team", "`@team`"},
      {"a|b", "`a¦b`"},
      {"a\\|b", "`a\\¦b`"},
      {"a`b``c", "`a'b''c`"},
      {"![x](https://example.org/p.png)", "`![x](https://example.org/p.png)`"},
      {"<img src=x onerror=y>", "`<img src=x onerror=y>`"},
      {"</details><h1>", "`</details><h1>`"},
      {"a\r\nb\tc", "`a  b c`"},
      {"a\x1b[31m\x01", "`a?[31m?`"},
      {"\xe2\x80\xae"
       "evil\xe2\x80\x8b",
       "`?evil?`"},
      {"\xff\xc0\xaf\xed\xa0\x80\xf5", "`???????`"},
      {"größe 長さ \xf0\x9f\x98\x80", "`größe 長さ \xf0\x9f\x98\x80`"},
      {"plain words", "`plain words`"}};
  for (const auto& [text, shown] : kTexts) {
    Comparison comparison;
    comparison.findings = {FindingOf(Verdict::kRegressed, text)};
    const std::string comment = RenderComment(comparison);
    EXPECT_EQ(ProblemOf(comment), "");
    EXPECT_TRUE(absl::StrContains(comment, absl::StrCat("| **SLOWER** | ", shown, " | ")))
        << comment;
  }
}

TEST(ComparisonComment, ALongTextLacksItsMiddle) {
  Comparison comparison;
  comparison.findings = {
      FindingOf(Verdict::kRegressed, absl::StrCat("begin ", std::string(5000, 'n'), " end"))};
  const std::string comment = RenderComment(comparison);
  EXPECT_EQ(ProblemOf(comment), "");
  EXPECT_LT(comment.size(), 3000u);
  EXPECT_TRUE(absl::StrContains(comment, "| `begin nnn")) << comment;
  EXPECT_TRUE(absl::StrContains(comment, "nnn…nnn")) << comment;
  EXPECT_TRUE(absl::StrContains(comment, "nnn end` |")) << comment;
  // Two thirds of what stays are from the beginning.
  const size_t first = comment.find("begin nnn"), gap = comment.find("…", first);
  const size_t begin = gap - first, end = comment.find('`', gap) - gap - std::string("…").size();
  EXPECT_NEAR(static_cast<double>(begin), 2.0 * static_cast<double>(end), 2) << comment;
}

// Makes a text of pieces that have a meaning somewhere.
std::string NastyText(std::mt19937* random, int most_pieces) {
  static const auto* const pieces =
      new std::vector<std::string>{"near",      " ",         "@octocat",
                                   "|",         "`",         "``",
                                   "\n",        "\r\n\r\n",  "</details>",
                                   "<!-- ",     "-->",       "![a](http://b.c)",
                                   "[a]: //b",  "#1",        "GH-1",
                                   "www.a.b",   "\\",        "\\|",
                                   "\xff",      "\xe2\x80",  "\xe2\x80\xae",
                                   "e\xcc\x81", "長",        "\xf0\x9f\x98\x80",
                                   "    ",      "| --- |",   "***",
                                   "___",       "&lt;",      "```",
                                   "~~~",       "$x$",       std::string("\0", 1),
                                   "\x1b]0;",   "123456789", "- ",
                                   "<b>"};
  std::string text;
  for (int i = (*random)() % (most_pieces + 1); i > 0; --i) {
    text += (*pieces)[(*random)() % pieces->size()];
  }
  return text;
}

Environment NastyEnvironment(std::mt19937* random, int most_pieces) {
  const auto text = [&] { return NastyText(random, most_pieces); };
  Environment environment;
  environment.set_cpu_model(text());
  environment.set_os(text());
  environment.set_compiler(text());
  environment.set_compile_flags(text());
  environment.set_git_commit(text());
  environment.add_command_line(text());
  environment.add_simd(text());
  environment.add_gpus()->set_name(text());
  return environment;
}

TEST(ComparisonComment, StaysWholeAndShortWhateverTheFindingsAre) {
  constexpr Verdict kVerdicts[] = {Verdict::kRegressed, Verdict::kImproved, Verdict::kSame,
                                   Verdict::kAmbiguous, Verdict::kNotJudged};
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE(round);
    std::mt19937 random(round);
    const int most_pieces = round % 4 == 0 ? 2000 : 12;
    const auto text = [&] { return NastyText(&random, most_pieces); };
    const int count = round % 4 == 0 ? 60 : random() % 3000;
    Comparison comparison;
    std::map<Verdict, int> counts;
    for (int i = 0; i < count; ++i) {
      // In some rounds, all are of one verdict.
      const Verdict verdict = kVerdicts[(round < 10 ? round : random()) % 5];
      Finding finding = FindingOf(verdict, text());
      finding.is_time = random() % 2 == 0;
      finding.what = text();
      finding.base = text();
      finding.now = text();
      finding.reason = random() % 3 == 0 ? text() : "";
      finding.change = random() % 9 == 0 ? HUGE_VAL : random() % 9 == 0 ? std::nan("") : 1.25;
      if (random() % 2 == 0) finding.interval.reset();
      comparison.findings.push_back(finding);
      ++counts[verdict];
    }
    for (int i = random() % 40; i > 0; --i) comparison.environment_differences.push_back(text());
    for (auto* environments : {&comparison.base_environments, &comparison.now_environments}) {
      for (int i = random() % 9; i > 0; --i) {
        environments->push_back(NastyEnvironment(&random, most_pieces));
      }
    }
    const std::string comment = RenderComment(comparison);
    EXPECT_EQ(ProblemOf(comment), "");
    int shown = LeftOut(comment);
    std::map<std::string, int> rows = RowsOf(comment);
    for (const auto& [word, number] : rows) shown += number;
    EXPECT_EQ(shown, count);
    // Regressions have the room before all others have any.
    const int regressions = rows["**SLOWER**"] + rows["**WORSE**"];
    if (regressions < counts[Verdict::kRegressed]) {
      EXPECT_EQ(rows["FASTER"] + rows["BETTER"], 0);
      EXPECT_GE(regressions, 20);
    }
  }
}

TEST(ComparisonComment, RoomIsUsedAndTheRestIsCounted) {
  Comparison comparison;
  for (int i = 0; i < 5000; ++i) {
    comparison.findings.push_back(
        FindingOf(i < 300 ? Verdict::kRegressed : Verdict::kSame, absl::StrCat("case ", i)));
  }
  const std::string comment = RenderComment(comparison);
  EXPECT_EQ(ProblemOf(comment), "");
  EXPECT_GT(comment.size(), kMostCommentBytes - 300);
  const std::map<std::string, int> rows = RowsOf(comment);
  EXPECT_EQ(rows.at("**SLOWER**"), 300);
  EXPECT_TRUE(absl::StrContains(
      comment, absl::StrCat(4700 - rows.at("SAME"),
                            " more rows are not shown here: `bazel run //tools:compare -- base.pb "
                            "new.pb --all` lists everything.\n\n</details>")));
}

TEST(ComparisonComment, TheHeadingSaysTheVerdictAndCounts) {
  const auto heading = [](const std::vector<Finding>& findings) {
    Comparison comparison;
    comparison.findings = findings;
    const std::string comment = RenderComment(comparison);
    EXPECT_EQ(ProblemOf(comment), "");
    const std::vector<std::string> lines = absl::StrSplit(comment, '\n');
    return lines[1];
  };
  const Finding worse = FindingOf(Verdict::kRegressed, "a");
  const Finding better = FindingOf(Verdict::kImproved, "a");
  const Finding same = FindingOf(Verdict::kSame, "a");
  const Finding ambiguous = FindingOf(Verdict::kAmbiguous, "a");
  Finding same_memory = same;
  same_memory.is_time = false;
  EXPECT_EQ(heading({worse, better, same, same, ambiguous, FindingOf(Verdict::kNotJudged, "a")}),
            "### Regressed: 1 slower or worse, 1 faster or better, 2 the same, 1 ambiguous, 1 not "
            "judged");
  const auto verdict = [&](const std::vector<Finding>& findings) {
    const std::string line = heading(findings);
    return line.substr(0, line.find(':'));
  };
  EXPECT_EQ(verdict({better, same, ambiguous}), "### Improved");
  EXPECT_EQ(verdict({same, ambiguous}), "### Unchanged");
  EXPECT_EQ(verdict({same_memory}), "### Unchanged");
  // That memory is the same says nothing about times.
  EXPECT_EQ(verdict({same_memory, ambiguous}), "### Cannot be judged");
  EXPECT_EQ(verdict({FindingOf(Verdict::kNotJudged, "a")}), "### Cannot be judged");
  EXPECT_EQ(verdict({}), "### Cannot be judged");
}

TEST(ComparisonComment, SaysWhichCommitsWereBuiltAndHowToMeasureThemAgain) {
  const ResultSet base = MakeSweep();
  ResultSet now = base;
  now.mutable_environments(0)->set_git_commit("fedcba9876543210fedcba9876543210fedcba98");
  now.mutable_environments(0)->set_git_dirty(false);
  const absl::StatusOr<Comparison> comparison = Compare(base, now, CompareOptions());
  ASSERT_TRUE(comparison.ok()) << comparison.status();
  const std::string comment = RenderComment(*comparison);
  EXPECT_EQ(ProblemOf(comment), "");
  EXPECT_TRUE(absl::StrContains(
      comment,
      "| commit | `0123456789abcdef0123456789abcdef01234567 with uncommitted changes` | "
      "`fedcba9876543210fedcba9876543210fedcba98` |\n"))
      << comment;
  EXPECT_TRUE(absl::StrContains(
      comment,
      "\n    tools/ci/compare_builds --base=0123456789abcdef0123456789abcdef01234567 --output="))
      << comment;
  // A commit that is no hash does not become part of a command.
  Comparison other = *comparison;
  other.base_environments[0].set_git_commit("$(reboot)");
  EXPECT_TRUE(absl::StrContains(RenderComment(other), "--base=BASE_COMMIT --output="));
}

TEST(ComparisonComment, SaysWhyTwoResultsCannotBeCompared) {
  std::mt19937 random(1);
  for (const int pieces : {1, 20, 100000}) {
    EXPECT_EQ(ProblemOf(RenderIncomparable(NastyText(&random, pieces))), "");
  }
  EXPECT_EQ(RenderIncomparable("the environments differ: compiler: a / b"),
            "<!-- transformer-family-bench -->\n"
            "### Cannot be judged: the two results cannot be compared\n\n"
            "`the environments differ: compiler: a / b`\n");
}

}  // namespace
}  // namespace tfb
