#include "core/losses/label_smoothing.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/status.h"

namespace tfb {
namespace {

absl::Status OutOfRange(absl::string_view name, double value, absl::string_view range) {
  return absl::InvalidArgumentError(
      absl::StrCat("label smoothing: ", name, " is ", value, "; allowed is ", range));
}

absl::Status CheckClass(absl::string_view name, int64_t value, int64_t classes) {
  if (value >= 0 && value < classes) return absl::OkStatus();
  return OutOfRange(name, static_cast<double>(value), absl::StrCat("0 to ", classes - 1));
}

// How the probability of a label is spread.
struct Shares {
  double of_label;
  double of_others;
};

absl::StatusOr<Shares> SharesOf(const LabelSmoothing& options, int64_t classes) {
  const double e = options.smoothing;
  if (!(e >= 0 && e <= 1)) return OutOfRange("smoothing", e, "0 to 1");
  if (classes < 1) return OutOfRange("classes", static_cast<double>(classes), "1 or more");
  if (options.padding.has_value()) {
    TFB_RETURN_IF_ERROR(CheckClass("padding", *options.padding, classes));
  }
  const bool without = options.padding.has_value() && !options.spread_to_padding;
  const bool all = options.spread == LabelSmoothing::Spread::kAllClasses;
  const int64_t receivers = classes - (without ? 1 : 0) - (all ? 0 : 1);
  if (e == 0) return Shares{1, 0};
  if (receivers < 1) return OutOfRange("smoothing", e, "0, where it is spread over no class");
  const double share = e / static_cast<double>(receivers);
  return Shares{all ? 1 - e + share : 1 - e, share};
}

// Returns log(sum_k exp(logit_k)) of a row.
double LogSumExp(const std::vector<double>& logits) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit - largest);
  return largest + std::log(sum);
}

// Returns the cross-entropy of a row.
double CrossEntropy(const std::vector<double>& q, const std::vector<double>& logits) {
  const double log_sum_exp = LogSumExp(logits);
  double loss = 0;
  for (size_t k = 0; k < q.size(); ++k) {
    if (q[k] > 0) loss += q[k] * (log_sum_exp - logits[k]);
  }
  return loss;
}

double Entropy(const std::vector<double>& q) {
  double entropy = 0;
  for (const double share : q) entropy -= share > 0 ? share * std::log(share) : 0;
  return entropy;
}

}  // namespace

absl::StatusOr<std::vector<double>> SmoothedLabel(const LabelSmoothing& options, int64_t classes,
                                                  int64_t label) {
  TFB_ASSIGN_OR_RETURN(const Shares shares, SharesOf(options, classes));
  TFB_RETURN_IF_ERROR(CheckClass("a label", label, classes));
  if (options.padding == label) {
    return OutOfRange("a label", static_cast<double>(label), "any class but padding");
  }
  std::vector<double> q(classes, shares.of_others);
  if (options.padding.has_value() && !options.spread_to_padding) q[*options.padding] = 0;
  q[label] = shares.of_label;
  return q;
}

double SmoothedLoss::Sum() const { return std::accumulate(of_token.begin(), of_token.end(), 0.0); }
double SmoothedLoss::Mean() const { return tokens == 0 ? 0 : Sum() / static_cast<double>(tokens); }

absl::StatusOr<SmoothedLoss> SmoothedCrossEntropy(const LabelSmoothing& options,
                                                  const ConstTensorView& logits,
                                                  absl::Span<const int64_t> labels) {
  const int64_t tokens = static_cast<int64_t>(labels.size());
  if (logits.rank != 2 || logits.dim(0) != tokens) {
    return absl::InvalidArgumentError(absl::StrCat("label smoothing: logits are ",
                                                   ShapeString(logits.shape()), "; allowed are [",
                                                   tokens, ", classes], a row for each label"));
  }
  if (!IsFloating(logits.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "label smoothing: logits are ", Name(logits.dtype), "; a floating-point type is wanted"));
  }
  const int64_t classes = logits.dim(1);
  TFB_RETURN_IF_ERROR(SharesOf(options, classes).status());
  SmoothedLoss loss;
  loss.of_token.assign(tokens, 0);
  for (int64_t t = 0; t < tokens; ++t) {
    if (options.padding == labels[t]) continue;
    TFB_ASSIGN_OR_RETURN(const std::vector<double> q, SmoothedLabel(options, classes, labels[t]));
    std::vector<double> row;
    for (int64_t k = 0; k < classes; ++k) row.push_back(logits.Get(logits.Offset(t, k)));
    loss.of_token[t] = CrossEntropy(q, row) - (options.subtract_entropy ? Entropy(q) : 0);
    ++loss.tokens;
  }
  return loss;
}

}  // namespace tfb
