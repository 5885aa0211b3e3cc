#include "harness/conformance/case_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "harness/conformance/trial.h"

namespace tfb::conformance {
namespace {

constexpr char kIntroduction[] = R"(# Conformance cases

Every technique runs the cases of this folder as its `:NAME_conformance_test` on the CPU, and as its
`:NAME_cuda_conformance_test` in the simulator of GPUs and on a GPU where there is one. A case that a
technique does not admit is skipped with the reason. These tables are of a run of all of them on the
CPU:

```
bazel run //harness:all_conformance -- --table=$PWD/harness/conformance/CASES.md
```

`//harness:conformance_test` gives a small technique each fault of
[tiny_fault.h](../testing/tiny_fault.h) in turn, on the CPU and in the simulator, and fails where the
case that is named for the fault passes. Every case is named for a fault, but for those about calls
that the base classes refuse before a technique is asked, and two that are skipped where a technique
lacks what they are about; the test lists both.
)";

// Returns a reason in one line, without the sizes and name that differ between equal reasons.
std::string Generalized(std::string reason, const std::string& technique) {
  reason = absl::StrReplaceAll(absl::StripAsciiWhitespace(reason), {{"\n", " "}, {"|", "\\|"}});
  for (const char* detail : {": ", "; "}) reason = reason.substr(0, reason.find(detail));
  for (const std::string& name : {technique, std::string("the technique")}) {
    reason = std::string(absl::StripPrefix(reason, absl::StrCat(name, " ")));
    reason = std::string(absl::StripPrefix(reason, absl::StrCat("in ", name, " ")));
  }
  return reason;
}

// Returns the most informative of the reasons on several problems: a missing form, which the others
// imply.
std::string Choose(const std::set<std::string>& reasons) {
  for (const std::string& reason : reasons) {
    if (!absl::StrContains(reason, "causal only") && !absl::StrContains(reason, "no causal form")) {
      return reason;
    }
  }
  return reasons.empty() ? "it has no such test" : *reasons.begin();
}

}  // namespace

void CaseTable::OnTestPartResult(const ::testing::TestPartResult& result) {
  if (result.skipped()) reason_ = result.summary();
}

void CaseTable::OnTestEnd(const ::testing::TestInfo& test) {
  const std::string name = test.name();
  const std::string one = name.substr(0, name.find('/'));
  if (std::find(cases_.begin(), cases_.end(), one) == cases_.end()) cases_.push_back(one);
  Entry& entry = techniques_[test.test_suite_name()][one];
  if (test.result()->Skipped()) {
    entry.reasons.insert(Generalized(reason_, test.test_suite_name()));
  } else {
    entry.ran = true;
  }
  reason_.clear();
}

const CaseTable::Entry& CaseTable::EntryOf(const std::string& technique,
                                           const std::string& one) const {
  static const Entry& none = *new Entry;
  const auto& entries = techniques_.at(technique);
  const auto entry = entries.find(one);
  if (entry != entries.end()) return entry->second;
  // A technique without a backward pass has one test in the place of those about it.
  const auto backward = entries.find(kBackwardCase);
  return backward == entries.end() || backward->second.ran ? none : backward->second;
}

std::string CaseTable::ByTechnique() const {
  std::string text =
      "\n## By technique\n\n| technique | runs | does not admit, of the cases |\n|---|---:|---|\n";
  for (const auto& technique : techniques_) {
    size_t ran = 0;
    std::map<std::string, int> refused;  // cases by reason
    for (const std::string& one : cases_) {
      const Entry& entry = EntryOf(technique.first, one);
      ran += entry.ran;
      if (!entry.ran) ++refused[Choose(entry.reasons)];
    }
    std::vector<std::string> reasons;
    for (const auto& [reason, count] : refused) {
      reasons.push_back(absl::StrCat(count, " (", reason, ")"));
    }
    absl::StrAppend(&text, "| ", technique.first, " | ", ran, " of ", cases_.size(), " | ",
                    absl::StrJoin(reasons, ", "), " |\n");
  }
  return text;
}

std::string CaseTable::ByCase() const {
  // Cases that the same techniques refuse for the same reasons share a row.
  // Techniques that do not run the case, and cases.
  std::vector<std::pair<std::string, std::vector<std::string>>> rows;
  for (const std::string& one : cases_) {
    std::map<std::string, std::vector<std::string>> refusing;  // techniques by reason
    size_t ran = 0;
    for (const auto& technique : techniques_) {
      const Entry& entry = EntryOf(technique.first, one);
      ran += entry.ran;
      if (!entry.ran) refusing[Choose(entry.reasons)].push_back(technique.first);
    }
    std::string who = absl::StrCat(ran, " of ", techniques_.size(), " | ");
    const char* separator = "";
    for (const auto& [reason, names] : refusing) {
      absl::StrAppend(&who, separator, "*", reason, "*: ", absl::StrJoin(names, ", "));
      separator = "<br>";
    }
    const auto row =
        std::find_if(rows.begin(), rows.end(), [&](const auto& each) { return each.first == who; });
    if (row != rows.end()) {
      row->second.push_back(one);
    } else {
      rows.push_back({who, {one}});
    }
  }
  std::string text =
      "\n## By case\n\n| cases | run by | not admitted by, where the technique |\n|---|---:|---|\n";
  for (const auto& [who, cases] : rows) {
    absl::StrAppend(&text, "| ", absl::StrJoin(cases, ", "), " | ", who, " |\n");
  }
  return text;
}

std::string CaseTable::ToMarkdown() const {
  std::vector<std::string> of_devices;
  for (const Case& one : DeviceCases()) of_devices.push_back(one.name);
  return absl::StrCat(kIntroduction, ByTechnique(), ByCase(), "\nOn devices there are also ",
                      absl::StrJoin(of_devices, ", "), ".\n");
}

}  // namespace tfb::conformance
