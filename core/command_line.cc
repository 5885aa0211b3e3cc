#include "core/command_line.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <numeric>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "core/status.h"

namespace tfb {
namespace {

constexpr size_t kHelpColumns = 100;
// An error that quotes much of its input is cut in the middle.
constexpr size_t kErrorHead = 1200, kErrorTail = 400;

// The flags that programs here define, without those of Abseil itself.
std::map<std::string, absl::CommandLineFlag*> OwnFlags() {
  std::map<std::string, absl::CommandLineFlag*> flags;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (absl::StrContains(flag->Filename(), "absl/")) continue;
    flags.emplace(std::string(name), flag);
  }
  return flags;
}

// Number of characters to insert, delete or replace to get from `a` to `b`.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

absl::Status UnknownFlag(absl::string_view name) {
  std::vector<std::string> known;
  for (const auto& [flag_name, flag] : OwnFlags()) known.push_back(flag_name);
  const std::string nearest = Nearest(name, known);
  return absl::InvalidArgumentError(
      absl::StrCat("unknown flag --", name,
                   nearest.empty() ? "" : absl::StrCat(", did you mean --", nearest, "?"),
                   nearest.empty() ? "; --help lists all" : ""));
}

absl::Status SetFlag(absl::CommandLineFlag& flag, absl::string_view value) {
  std::string error;
  if (flag.ParseFrom(value, &error)) return absl::OkStatus();
  // Abseil's message may have several lines.
  return absl::InvalidArgumentError(absl::StrCat(
      "--", flag.Name(), "=", value, ": ",
      error.empty() ? "not a value of this flag" : absl::StrReplaceAll(error, {{"\n", " "}})));
}

// Opens /dev/null as the standard input, output or error that the caller has closed. The next file
// that the program opens would otherwise take its place, and be written to as if it were that.
void OpenStandardStreams() {
  for (int descriptor = 0; descriptor <= 2; ++descriptor) {
    // The lowest free number is this one, since all below are open.
    if (fcntl(descriptor, F_GETFD) < 0) open("/dev/null", O_RDWR);
  }
}

// Returns `exit_status`, or where standard output could not be written says so and returns
// kExitBadUsage.
int FinishOutput(absl::string_view program, int exit_status) {
  errno = 0;
  std::cout.flush();
  const bool printed = fflush(stdout) == 0 && ferror(stdout) == 0 && std::cout.good();
  if (printed) return exit_status;
  PrintError(program, absl::StrCat("cannot write standard output",
                                   errno == 0 ? "" : absl::StrCat(": ", strerror(errno))));
  return kExitBadUsage;
}

// Replaces what a terminal would obey: control characters, C1 ones in UTF-8 among them.
std::string WithoutControls(const std::string& text) {
  std::string clean;
  for (size_t i = 0; i < text.size(); ++i) {
    const unsigned char c = static_cast<unsigned char>(text[i]);
    const unsigned char next = static_cast<unsigned char>(text[i + 1]);  // 0 at the end
    if (c == '\n') {
      clean += ' ';
    } else if (c < 0x20 || c == 0x7f) {
      clean += '?';
    } else if (c == 0xc2 && next >= 0x80 && next < 0xa0) {
      clean += '?';
      ++i;
    } else {
      clean += text[i];
    }
  }
  return clean;
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& argv) {
  CommandLine line;
  const std::map<std::string, absl::CommandLineFlag*> flags = OwnFlags();
  for (size_t i = 1; i < argv.size(); ++i) {
    absl::string_view word = argv[i];
    if (word == "--") {
      line.arguments.insert(line.arguments.end(), argv.begin() + i + 1, argv.end());
      break;
    }
    if (word.size() < 2 || word[0] != '-') {
      line.arguments.push_back(argv[i]);
      continue;
    }
    word.remove_prefix(word[1] == '-' ? 2 : 1);
    const size_t equals = word.find('=');
    const std::string name(word.substr(0, equals));
    if (name == "help" || name == "h") {
      line.help = true;
      continue;
    }
    auto found = flags.find(name);
    if (found == flags.end() && equals == absl::string_view::npos && absl::StartsWith(name, "no")) {
      const auto negated = flags.find(name.substr(2));
      if (negated != flags.end() && negated->second->IsOfType<bool>()) {
        if (absl::Status status = SetFlag(*negated->second, "false"); !status.ok()) return status;
        continue;
      }
    }
    if (found == flags.end()) return UnknownFlag(name);
    std::string value = "true";
    if (equals != absl::string_view::npos) {
      value = std::string(word.substr(equals + 1));
    } else if (!found->second->IsOfType<bool>()) {
      if (i + 1 == argv.size()) {
        return absl::InvalidArgumentError(absl::StrCat("--", name, " wants a value"));
      }
      value = argv[++i];
    }
    if (absl::Status status = SetFlag(*found->second, value); !status.ok()) return status;
  }
  return line;
}

std::string HelpText(absl::string_view usage) {
  std::string text = absl::StrCat(usage, "\n\nFlags:\n");
  for (const auto& [name, flag] : OwnFlags()) {
    const std::string fallback = flag->DefaultValue();
    absl::StrAppend(&text, "  --", name, "  (default: ", fallback.empty() ? "none" : fallback,
                    ")\n");
    std::string line = "     ";
    for (const absl::string_view word : absl::StrSplit(flag->Help(), ' ', absl::SkipEmpty())) {
      if (line.size() + 1 + word.size() > kHelpColumns) {
        absl::StrAppend(&text, line, "\n");
        line = "     ";
      }
      absl::StrAppend(&line, " ", word);
    }
    absl::StrAppend(&text, line, "\n");
  }
  return text;
}

int RunMain(absl::string_view program, absl::string_view usage,
            const std::vector<std::string>& argv,
            const std::function<absl::StatusOr<int>(const CommandLine&)>& run,
            const HelpPage& help) {
  OpenStandardStreams();
  // Beyond the limit of a file's size (ulimit -f) a write then fails, which is told with the path.
  signal(SIGXFSZ, SIG_IGN);
  const absl::StatusOr<CommandLine> line = ParseCommandLine(argv);
  const auto print_help = [&]() -> absl::StatusOr<int> {
    absl::StatusOr<std::string> page = help ? help() : "";
    if (!page.ok()) return page.status();
    fputs(page->empty() ? HelpText(usage).c_str() : page->c_str(), stdout);
    return kExitDone;
  };
  const absl::StatusOr<int> exit_status =
      line.ok() ? WithMemory([&] { return line->help ? print_help() : run(*line); })
                : line.status();
  if (exit_status.ok()) return FinishOutput(program, *exit_status);
  PrintError(program, exit_status.status().message());
  return kExitBadUsage;
}

int RunMain(absl::string_view program, absl::string_view usage,
            const std::vector<std::string>& argv, const std::function<absl::StatusOr<int>()>& run,
            const HelpPage& help) {
  const auto run_without_arguments = [&run](const CommandLine& line) -> absl::StatusOr<int> {
    if (line.arguments.empty()) return run();
    return absl::InvalidArgumentError(
        absl::StrCat("\"", line.arguments[0], "\" is no flag; --help lists the flags"));
  };
  return RunMain(program, usage, argv, run_without_arguments, help);
}

void PrintError(absl::string_view program, absl::string_view message) {
  std::string clean = WithoutControls(std::string(message));
  if (clean.size() > kErrorHead + kErrorTail) {
    const std::string gap =
        absl::StrCat(" ... ", clean.size() - kErrorHead - kErrorTail, " bytes ... ");
    clean.replace(kErrorHead, clean.size() - kErrorHead - kErrorTail, gap);
  }
  fputs(absl::StrCat(program, ": ", clean, "\n").c_str(), stderr);
}

std::string Nearest(absl::string_view given, const std::vector<std::string>& known) {
  std::string nearest;
  size_t least = std::max<size_t>(given.size() / 3, 1) + 1;
  for (const std::string& candidate : known) {
    const size_t distance = EditDistance(given, candidate);
    if (distance < least) {
      least = distance;
      nearest = candidate;
    }
  }
  return nearest;
}

}  // namespace tfb
