#include "harness/judge/accuracy_record.h"

#include <cmath>
#include <map>
#include <string>

#include "gtest/gtest.h"

namespace tfb {
namespace {

// Returns an error whose numbers are `first` and those that follow it.
OutputError Numbered(int first) {
  OutputError error;
  error.relative_frobenius = first;
  error.max_abs = first + 1;
  error.max_abs_over_max_value = first + 2;
  error.mean_cosine = first + 3;
  error.rows_checked = first + 4;
  error.rows = first + 5;
  return error;
}

TEST(AccuracyRecord, HasEveryNumberWithItsBound) {
  Accuracy accuracy;
  accuracy.against_definition = Numbered(10);
  accuracy.against_definition.not_finite = 1;
  accuracy.definition_bound = 12;
  accuracy.log_sum_exp_error = {1, 2};
  accuracy.ratio_to_dense_precision = {2.5, 2};
  accuracy.against_dense = Numbered(20);
  accuracy.kept = {0.75, 0.5, 0.25};
  accuracy.extrapolation = {0.5, 0.125};
  accuracy.other_errors["halting"] = {0.5, 1};
  accuracy.statistics["mean_span"] = 17;
  accuracy.cost = {100, 200};
  accuracy.workspace_bytes = 64;
  accuracy.parameter_bytes = 32;
  accuracy.failure = "ratio is too large";
  Outcome outcome;
  RecordAccuracy(accuracy, &outcome);
  const std::map<std::string, double> statistics(outcome.statistics().begin(),
                                                 outcome.statistics().end());
  EXPECT_EQ(statistics, (std::map<std::string, double>{{"mean_span", 17},
                                                       {"error_halting", 0.5},
                                                       {"extrapolation_change", 0.5},
                                                       {"extrapolation_reshape", 0.125},
                                                       {"elements_not_finite", 1}}));
  outcome.clear_statistics();
  EXPECT_EQ(
      outcome.ShortDebugString(),
      "status: STATUS_FAILED reason: \"ratio is too large\" flops: 100 bytes_moved: 200 "
      "peak_workspace_bytes: 64 parameter_bytes: 32 against_definition { relative_frobenius: 10 "
      "max_abs: 11 max_abs_over_max_value: 12 mean_cosine: 13 "
      "bounded_metric: METRIC_MAX_ABS_OVER_MAX_VALUE bound: 12 rows_checked: 14 rows: 15 "
      "passed: true } against_dense { relative_frobenius: 20 max_abs: 21 "
      "max_abs_over_max_value: 22 mean_cosine: 23 rows_checked: 24 rows: 25 } "
      "ratio_to_dense_error { value: 2.5 bound: 2 passed: false } "
      "log_sum_exp_error { value: 1 bound: 2 passed: true } kept_mass: 0.75 kl_divergence: 0.5 "
      "recall_top_k: 0.25 recall_k: 32");
}

TEST(AccuracyRecord, WhatCouldNotBeComputedIsAbsentAndDoesNotPass) {
  Accuracy accuracy;
  accuracy.against_definition.relative_frobenius = std::nan("");
  accuracy.against_definition.mean_cosine = std::nan("");
  accuracy.against_definition.max_abs_over_max_value = 2;
  accuracy.definition_bound = 1;
  Outcome outcome;
  RecordAccuracy(accuracy, &outcome);
  EXPECT_EQ(outcome.ShortDebugString(),
            "status: STATUS_FAILED against_definition { max_abs: 0 max_abs_over_max_value: 2 "
            "bounded_metric: METRIC_MAX_ABS_OVER_MAX_VALUE bound: 1 passed: false }");
}

TEST(AccuracyRecord, WhatIsNotKnownIsAbsent) {
  Accuracy accuracy;
  accuracy.passed = true;
  Outcome outcome;
  RecordAccuracy(accuracy, &outcome);
  EXPECT_EQ(outcome.status(), Outcome::STATUS_OK);
  EXPECT_FALSE(outcome.has_against_dense());
  EXPECT_FALSE(outcome.has_kept_mass());
  EXPECT_TRUE(outcome.statistics().empty());
  EXPECT_FALSE(outcome.has_ratio_to_dense_error());
  EXPECT_FALSE(outcome.has_flops());
  EXPECT_FALSE(outcome.has_peak_workspace_bytes());
  EXPECT_FALSE(outcome.has_parameter_bytes());
}

}  // namespace
}  // namespace tfb
