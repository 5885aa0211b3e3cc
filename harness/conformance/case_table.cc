#include "harness/conformance/case_table.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"

namespace tfb::conformance {
namespace {

constexpr char kIntroduction[] =
    "# Conformance cases\n\n"
    "Every technique runs the cases of this folder, on the CPU and in the simulator of GPUs, as "
    "its\n"
    "`:NAME_conformance_test` and `:NAME_cuda_conformance_test`. A case that a technique does not "
    "admit is\nskipped with the reason. This table is made from a run of all of them:\n\n"
    "```\n"
    "bazel run //harness:all_conformance -- --table=$PWD/harness/conformance/CASES.md\n"
    "```\n\n";

// One line, as it stands in a table.
std::string Flat(absl::string_view text) {
  return absl::StrReplaceAll(absl::StripAsciiWhitespace(text), {{"\n", " "}, {"|", "\\|"}});
}

// Of the reasons on several problems the one that says most: that a technique is only causal, or never,
// is said by the others as well.
std::string Choose(const std::set<std::string>& reasons) {
  for (const std::string& reason : reasons) {
    if (!absl::StrContains(reason, "causal only") && !absl::StrContains(reason, "no causal form")) {
      return reason;
    }
  }
  return reasons.empty() ? "" : *reasons.begin();
}

}  // namespace

void CaseTable::OnTestPartResult(const ::testing::TestPartResult& result) {
  if (result.skipped()) reason_ = Flat(result.summary());
}

void CaseTable::OnTestEnd(const ::testing::TestInfo& test) {
  const std::string name = test.name();
  const std::string one = name.substr(0, name.find('/'));
  if (std::find(cases_.begin(), cases_.end(), one) == cases_.end()) cases_.push_back(one);
  Entry& entry = techniques_[test.test_suite_name()][one];
  if (test.result()->Skipped()) {
    entry.reasons.insert(reason_);
  } else {
    entry.ran = true;
  }
  reason_.clear();
}

std::string CaseTable::ToMarkdown() const {
  std::string text = kIntroduction;
  absl::StrAppend(&text, "| technique | runs | does not admit |\n|---|---:|---|\n");
  for (const auto& [technique, entries] : techniques_) {
    int ran = 0;
    std::map<std::string, std::vector<std::string>> refused;  // cases by reason
    for (const std::string& one : cases_) {
      const auto entry = entries.find(one);
      if (entry == entries.end()) continue;
      ran += entry->second.ran;
      if (entry->second.ran) continue;
      refused[Choose(entry->second.reasons)].push_back(one);
    }
    std::vector<std::string> lines;
    for (const auto& [reason, cases] : refused) {
      lines.push_back(absl::StrCat("*", reason, "*: ", absl::StrJoin(cases, ", ")));
    }
    absl::StrAppend(&text, "| ", technique, " | ", ran, " of ", entries.size(), " | ",
                    absl::StrJoin(lines, "<br>"), " |\n");
  }
  absl::StrAppend(&text, "\nThe cases: ", absl::StrJoin(cases_, ", "), ".\n");
  return text;
}

}  // namespace tfb::conformance
