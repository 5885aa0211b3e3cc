#include "harness/measure/check_forecast.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "harness/plan/cases.h"
#include "harness/plan/check_time.h"

namespace tfb {
namespace {

// Gradients ask the definition for its value at 8 points a direction (harness/judge/gradients.h), of
// which there are some 4, where outputs ask for it and for that of dense attention.
constexpr double kGradientsOverOutputs = 16;

// Checks of one key take times that say something of each other. The options of an added counterpart
// may depend on the length. All rows of a text are checked, whatever the purpose.
std::string KeyOf(const Job& job, Case::Purpose purpose, bool of_gradients) {
  const bool is_text = job.input.text != nullptr;
  return absl::StrCat(
      job.added ? absl::StrCat(job.technique->info().name, " added") : job.DisplayName(), " ",
      is_text ? "text" : Case::Purpose_Name(purpose), of_gradients ? " gradients" : "");
}

bool IsOfGradients(const Job& job) { return job.pass != Case::PASS_FORWARD; }

}  // namespace

void CheckForecast::Note(const Job& job, double seconds) {
  last_[KeyOf(job, job.purpose, IsOfGradients(job))] = {LengthOf(job), seconds};
}

// Foretells from the last check of the technique, or, for its first scaling case, from the check of
// an accuracy case, and for its first gradients from that of outputs. Returns 0 where there was none.
double CheckForecast::ExpectedSeconds(const Job& job) const {
  for (const bool of_gradients : {true, false}) {
    if (of_gradients && !IsOfGradients(job)) continue;
    for (const Case::Purpose purpose : {job.purpose, Case::PURPOSE_ACCURACY}) {
      const auto found = last_.find(KeyOf(job, purpose, of_gradients));
      if (found == last_.end()) continue;
      const auto [tokens, seconds] = found->second;
      const double factor = of_gradients == IsOfGradients(job) ? 1 : kGradientsOverOutputs;
      return factor * MostCheckSeconds(seconds, static_cast<double>(tokens),
                                       static_cast<double>(LengthOf(job)));
    }
  }
  return 0;
}

std::string CheckForecast::WhyNotChecked(const Job& job, const Visit::Item& wishes,
                                         double case_timeout) const {
  if (job.pass == Case::PASS_TRAINING) {
    return "a training step's are those of its forward and its backward pass";
  }
  if (!job.check) {
    return absl::StrCat("--accuracy=false leaves out those of more than ", kRealTokens,
                        " tokens of text");
  }
  if (!wishes.check()) return "that took longer than --case_timeout";
  double limit = CheckLimitSeconds(job.purpose, wishes);
  if (case_timeout > 0) limit = std::min(limit, case_timeout / 2);
  const double expected = ExpectedSeconds(job);
  if (expected <= limit) return "";
  return absl::StrFormat("that would take about %.2g s", expected);
}

}  // namespace tfb
