#include "harness/judge/accuracy_record.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace tfb {
namespace {

void Record(const OutputError& error, ErrorMeasure* measure) {
  // The record lacks a number that could not be computed.
  if (!std::isnan(error.relative_frobenius)) {
    measure->set_relative_frobenius(error.relative_frobenius);
  }
  measure->set_max_abs(error.max_abs);
  measure->set_max_abs_over_max_value(error.max_abs_over_max_value);
  if (!std::isnan(error.mean_cosine)) measure->set_mean_cosine(error.mean_cosine);
  measure->set_rows_checked(error.rows_checked);
  measure->set_rows(error.rows);
}

void Record(const Bounded& error, BoundedNumber* number) {
  number->set_value(error.value);
  number->set_bound(error.bound);
  number->set_passed(error.passed());
}

}  // namespace

void RecordAccuracy(const Accuracy& accuracy, Outcome* outcome) {
  outcome->set_status(accuracy.passed ? Outcome::STATUS_OK : Outcome::STATUS_FAILED);
  outcome->set_reason(accuracy.failure);

  ErrorMeasure* own = outcome->mutable_against_definition();
  Record(accuracy.against_definition, own);
  const Bounded bounded = {accuracy.against_definition.max_abs_over_max_value,
                           accuracy.definition_bound};
  if (std::isfinite(bounded.bound)) {
    own->set_bounded_metric(ErrorMeasure::METRIC_MAX_ABS_OVER_MAX_VALUE);
    own->set_bound(bounded.bound);
    own->set_passed(bounded.passed());
  }
  if (accuracy.against_dense.has_value()) {
    Record(*accuracy.against_dense, outcome->mutable_against_dense());
  }
  if (accuracy.ratio_to_dense_precision.has_value()) {
    Record(*accuracy.ratio_to_dense_precision, outcome->mutable_ratio_to_dense_error());
  }
  if (accuracy.log_sum_exp_error.has_value()) {
    Record(*accuracy.log_sum_exp_error, outcome->mutable_log_sum_exp_error());
  }
  if (accuracy.kept.has_value()) {
    outcome->set_kept_mass(accuracy.kept->kept_mass);
    outcome->set_kl_divergence(accuracy.kept->kl_divergence);
    outcome->set_recall_top_k(accuracy.kept->recall);
    outcome->set_recall_k(kRecallKeys);
  }
  for (const auto& [name, value] : accuracy.statistics) {
    (*outcome->mutable_statistics())[name] = value;
  }
  if (accuracy.extrapolation.has_value()) {
    (*outcome->mutable_statistics())["extrapolation_change"] = accuracy.extrapolation->change;
    (*outcome->mutable_statistics())["extrapolation_reshape"] = accuracy.extrapolation->reshape;
  }
  if (const int64_t count = accuracy.against_definition.not_finite; count > 0) {
    (*outcome->mutable_statistics())["elements_not_finite"] = static_cast<double>(count);
  }
  for (const auto& [name, error] : accuracy.other_errors) {
    (*outcome->mutable_statistics())[absl::StrCat("error_", name)] = error.value;
  }
  if (accuracy.cost.flops.has_value()) outcome->set_flops(*accuracy.cost.flops);
  if (accuracy.cost.bytes.has_value()) outcome->set_bytes_moved(*accuracy.cost.bytes);
  if (accuracy.workspace_bytes.has_value()) {
    outcome->set_peak_workspace_bytes(*accuracy.workspace_bytes);
  }
  if (accuracy.parameter_bytes.has_value()) {
    outcome->set_parameter_bytes(*accuracy.parameter_bytes);
  }
}

}  // namespace tfb
