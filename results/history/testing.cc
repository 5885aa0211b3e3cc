#include "results/history/testing.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "results/history/store.h"

namespace tfb {

std::string CommitOfNumber(int number) { return absl::StrFormat("%08d%032x", number, 0xabc); }

HistoryRun MakeHistoryRun(int number, absl::string_view processor) {
  HistoryRun run;
  run.set_format(std::string(kHistoryRunFormat));
  run.set_file(absl::StrCat("run", number, ".pb"));
  run.set_commit_unix_s(1'700'000'000 + int64_t{3600} * number);
  run.set_commit_subject(absl::StrCat("Change ", number));
  Environment* environment = run.add_environments();
  environment->set_id(absl::StrCat("environment-", number, "-", processor));
  environment->set_cpu_model(std::string(processor));
  environment->set_logical_cores(2);
  environment->set_compiler("GCC 12.2.0");
  environment->set_git_commit(CommitOfNumber(number));
  environment->set_git_dirty(false);
  environment->set_start_unix_ns((1'700'000'000 + int64_t{3600} * number) * 1'000'000'000);
  return run;
}

HistoryCase* AddHistoryCase(HistoryRun* run, absl::string_view name, int64_t tokens) {
  HistoryCase* result = run->add_cases();
  result->set_key(absl::StrCat("technique=", name, " tokens=", tokens));
  result->set_name(std::string(name));
  result->set_problem(absl::StrCat("cpu f32, ", tokens, " tokens"));
  result->set_technique(std::string(name));
  result->set_family("attention");
  result->set_tokens(tokens);
  result->set_device(DEVICE_TYPE_CPU);
  result->set_status(Outcome::STATUS_OK);
  return result;
}

void AddHistoryValue(HistoryCase* result, HistoryMetric metric, double value) {
  HistoryValue* added = result->add_values();
  added->set_metric(metric);
  added->set_value(value);
}

}  // namespace tfb
