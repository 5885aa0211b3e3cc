#include "core/program_testing.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <regex>
#include <sstream>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

bool ReadFile(const std::string& path, std::string* text) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream contents;
  contents << file.rdbuf();
  *text = contents.str();
  return file.is_open();
}

// Returns the length of the match at the beginning of `text`, 0 where there is none.
size_t MatchLength(const char* text, const std::regex& pattern) {
  std::cmatch match;
  const bool found =
      std::regex_search(text, match, pattern, std::regex_constants::match_continuous);
  return found ? static_cast<size_t>(match.length()) : 0;
}

// Returns the number of characters behind the point.
size_t Decimals(absl::string_view number) {
  const size_t point = number.find('.');
  return point == number.npos ? 0 : number.size() - point - 1;
}

bool IsNear(const std::string& a, const std::string& b) {
  const double unit = std::pow(10, -static_cast<double>(Decimals(b)));
  return a.size() == b.size() && Decimals(a) == Decimals(b) &&
         std::abs(std::strtod(a.c_str(), nullptr) - std::strtod(b.c_str(), nullptr)) < 1.5 * unit;
}

bool IsSameLine(const std::string& text, const std::string& expected) {
  static const std::regex mask(" *\\?+(\\.\\?+)?"), decimal(" *-?[0-9]+\\.[0-9]+");
  size_t t = 0, e = 0;
  while (e < expected.size()) {
    if (const size_t masked = MatchLength(&expected[e], mask); masked > 0) {
      const size_t decimals = Decimals(expected.substr(e, masked));
      const std::string behind = decimals == 0 ? "" : absl::StrCat("\\.[0-9]{", decimals, "}");
      const size_t found = MatchLength(&text[t], std::regex(" *-?[0-9]+" + behind));
      if (found == 0) return false;
      t += found;
      e += masked;
    } else if (const size_t length = MatchLength(&expected[e], decimal); length > 0) {
      const size_t found = MatchLength(&text[t], decimal);
      if (!IsNear(text.substr(t, found), expected.substr(e, length))) return false;
      t += found;
      e += length;
    } else {
      if (text[t] != expected[e]) return false;
      ++t;
      ++e;
    }
  }
  return t == text.size();
}

}  // namespace

ProgramRun RunProgram(const std::string& command) {
  const std::string file = absl::StrCat(::testing::TempDir(), "/program.", getpid());
  const int status = system(absl::StrCat(command, " > ", file, ".out 2> ", file, ".err").c_str());
  ProgramRun run;
  if (WIFEXITED(status)) run.exit_status = WEXITSTATUS(status);
  for (const auto& [name, text] : {std::pair(".out", &run.out), std::pair(".err", &run.err)}) {
    ReadFile(file + name, text);
    unlink((file + name).c_str());
  }
  return run;
}

std::string GoldenText(const std::string& path) {
  std::string text;
  if (!ReadFile(path, &text)) {
    std::fprintf(stderr, "%s cannot be read\n", path.c_str());
    std::abort();
  }
  return text;
}

std::string TextDifference(absl::string_view text, absl::string_view expected) {
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  const std::vector<std::string> wanted = absl::StrSplit(expected, '\n');
  for (size_t n = 0; n < std::max(lines.size(), wanted.size()); ++n) {
    if (n < std::min(lines.size(), wanted.size()) && IsSameLine(lines[n], wanted[n])) continue;
    return absl::StrCat("line ", n + 1, ": expected is\n",
                        n < wanted.size() ? wanted[n] : "the end", "\nand not\n",
                        n < lines.size() ? lines[n] : "the end", "\nin\n", text);
  }
  return "";
}

std::vector<double> NumbersBehind(absl::string_view beginning, absl::string_view text) {
  std::vector<double> numbers;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (!absl::StartsWith(line, beginning)) continue;
    const std::string rest(line.substr(beginning.size()));
    static const std::regex number("-?[0-9]+(\\.[0-9]+)?");
    for (std::sregex_iterator at(rest.begin(), rest.end(), number), end; at != end; ++at) {
      numbers.push_back(std::stod(at->str()));
    }
    break;
  }
  return numbers;
}

std::string RefusalDifference(const std::string& program, const std::vector<Refusal>& refusals) {
  const std::string name = program.substr(program.rfind('/') + 1);
  for (const Refusal& refusal : refusals) {
    const ProgramRun run = RunProgram(absl::StrCat(program, " ", refusal.arguments));
    const std::string expected = absl::StrCat(name, ": ", refusal.message, "\n");
    if (run.exit_status == 2 && run.out.empty() && run.err == expected) continue;
    return absl::StrCat(refusal.arguments, ": exit status ", run.exit_status, ", output \"",
                        run.out, "\", message \"", run.err, "\"; expected is \"", expected, "\"");
  }
  return "";
}

}  // namespace tfb
