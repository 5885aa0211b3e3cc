#include "harness/judge/accuracy_record.h"

#include "gtest/gtest.h"

namespace tfb {
namespace {

TEST(AccuracyRecord, HasEveryNumberWithItsBound) {
  Accuracy accuracy;
  accuracy.against_definition.max_abs_over_max_value = 1e-6;
  accuracy.against_definition.relative_frobenius = 1e-7;
  accuracy.against_definition.rows_checked = 5;
  accuracy.definition_bound = 2e-5;
  accuracy.log_sum_exp_error = {1e-6, 2e-5};
  accuracy.ratio_to_dense_precision = {2.5, 2};
  accuracy.against_dense = OutputError();
  accuracy.against_dense->relative_frobenius = 0.25;
  accuracy.kept = {0.75, 0.5, 0.25};
  accuracy.extrapolation = {0.5, 0.125};
  accuracy.other_errors["halting"] = {0.5, 1};
  accuracy.statistics["mean_span"] = 17;
  accuracy.cost.flops = 100;
  accuracy.workspace_bytes = 64;
  accuracy.failure = "ratio is too large";
  Outcome outcome;
  RecordAccuracy(accuracy, &outcome);
  EXPECT_EQ(outcome.status(), Outcome::STATUS_FAILED);
  EXPECT_EQ(outcome.reason(), "ratio is too large");
  EXPECT_EQ(outcome.against_definition().bound(), 2e-5);
  EXPECT_TRUE(outcome.against_definition().passed());
  EXPECT_EQ(outcome.against_definition().rows_checked(), 5);
  EXPECT_EQ(outcome.against_dense().relative_frobenius(), 0.25);
  EXPECT_FALSE(outcome.against_dense().has_bound());
  EXPECT_FALSE(outcome.ratio_to_dense_error().passed());
  EXPECT_EQ(outcome.log_sum_exp_error().value(), 1e-6);
  EXPECT_EQ(outcome.kept_mass(), 0.75);
  EXPECT_EQ(outcome.kl_divergence(), 0.5);
  EXPECT_EQ(outcome.recall_top_k(), 0.25);
  EXPECT_EQ(outcome.recall_k(), 32);
  EXPECT_EQ(outcome.statistics().at("mean_span"), 17);
  EXPECT_EQ(outcome.statistics().at("error_halting"), 0.5);
  EXPECT_EQ(outcome.statistics().at("extrapolation_change"), 0.5);
  EXPECT_EQ(outcome.statistics().at("extrapolation_reshape"), 0.125);
  EXPECT_EQ(outcome.flops(), 100);
  EXPECT_FALSE(outcome.has_bytes_moved());
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
