// Makes a table of the cases that each technique runs, and of those that it does not support and
// why, from a run of all cases.
#ifndef TFB_HARNESS_CONFORMANCE_CASE_TABLE_H_
#define TFB_HARNESS_CONFORMANCE_CASE_TABLE_H_

#include <map>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace tfb::conformance {

// Listens to the tests that RegisterTests makes.
class CaseTable : public ::testing::EmptyTestEventListener {
 public:
  void OnTestPartResult(const ::testing::TestPartResult& result) override;
  void OnTestEnd(const ::testing::TestInfo& test) override;

  // Returns two tables: by technique, how many cases it runs and why not the others; and by case,
  // which techniques do not run it. A case counts as run where it ran on one of its problems.
  // Reasons lack numbers and names of techniques, so that equal reasons have equal texts.
  std::string ToMarkdown() const;

 private:
  struct Entry {
    bool ran = false;
    std::set<std::string> reasons;
  };
  std::string ByTechnique() const;
  std::string ByCase() const;
  const Entry& EntryOf(const std::string& technique, const std::string& one) const;

  std::string reason_;              // reason of the current test
  std::vector<std::string> cases_;  // in the order of their first test
  std::map<std::string, std::map<std::string, Entry>> techniques_;
};

}  // namespace tfb::conformance

#endif  // TFB_HARNESS_CONFORMANCE_CASE_TABLE_H_
