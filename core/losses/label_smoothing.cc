#include "core/losses/label_smoothing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/cpu/kernels.h"
#include "core/flash/rows.h"
#include "core/status.h"
#include "core/workspace.h"

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

absl::Status CheckLogits(const ConstTensorView& logits, int64_t tokens) {
  if (logits.rank != 2 || logits.dim(0) != tokens) {
    return absl::InvalidArgumentError(absl::StrCat("label smoothing: logits are ",
                                                   ShapeString(logits.shape()), "; allowed are [",
                                                   tokens, ", classes], a row for each label"));
  }
  if (!IsFloating(logits.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "label smoothing: logits are ", Name(logits.dtype), "; a floating-point type is wanted"));
  }
  return absl::OkStatus();
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
  TFB_RETURN_IF_ERROR(CheckLogits(logits, static_cast<int64_t>(labels.size())));
  const int64_t tokens = logits.dim(0);
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

// ---- The loss and its gradient in fp32 ----

namespace {

struct RowScratch {
  float* logits;        // [padded]
  float* exponentials;  // [padded]: 0 beyond the last class
};

RowScratch LayOutRow(int64_t classes, Workspace& workspace) {
  const int64_t padded = RoundUp(classes, kColumnQuantum);
  return {workspace.Take<float>(padded), workspace.Take<float>(padded)};
}

// One call; it does not change while its tasks run.
class SmoothedRows {
 public:
  SmoothedRows(const LabelSmoothing& options, const Shares& shares, const SmoothedLossCall& call)
      : options_(options), shares_(shares), call_(call), classes_(call.logits.dim(1)) {
    if (!options.subtract_entropy) return;
    const auto term = [](double share) { return share > 0 ? share * std::log(share) : 0; };
    const double others = static_cast<double>(classes_ - 1 - (excluded() >= 0 ? 1 : 0));
    least_ = -term(shares.of_label) - others * term(shares.of_others);
  }

  void Compute(int64_t token, const RowScratch& scratch) const {
    const int64_t label = call_.labels[token];
    const bool is_padding = options_.padding == label;
    double loss = 0;
    if (is_padding) {
      std::fill_n(scratch.exponentials, classes_, 0.0f);
    } else {
      loss = Row(token, label, scratch);
    }
    if (!call_.of_token.empty()) call_.of_token[token] = loss;
    if (call_.gradient.empty()) return;
    StoreRow(scratch.exponentials, classes_, call_.gradient, call_.gradient.Offset(token),
             call_.gradient.stride(1));
  }

 private:
  // Returns the class that has no share whatever the label is; -1 where there is none.
  int64_t excluded() const {
    return options_.padding.has_value() && !options_.spread_to_padding ? *options_.padding : -1;
  }

  // Returns the loss of a token, and turns the exponentials into its gradient.
  double Row(int64_t token, int64_t label, const RowScratch& scratch) const {
    const ConstTensorView& logits = call_.logits;
    LoadRow(logits, logits.Offset(token), logits.stride(1), classes_, scratch.logits);
    const int64_t padded = RoundUp(classes_, kColumnQuantum);
    constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
    float max = kNegativeInfinity, sum = 0, rescale = 1;
    std::fill_n(std::copy_n(scratch.logits, classes_, scratch.exponentials), padded - classes_,
                kNegativeInfinity);
    BestCpuKernels().softmax({scratch.exponentials, padded, 1, padded}, {&max, &sum, &rescale},
                             nullptr);
    const double log_sum_exp = max + std::log(double{sum});
    double loss =
        shares_.of_label > 0 ? shares_.of_label * (log_sum_exp - scratch.logits[label]) : 0;
    if (shares_.of_others > 0) {
      double others = 0;
      for (int64_t k = 0; k < classes_; ++k) {
        if (k != label && k != excluded()) others += log_sum_exp - scratch.logits[k];
      }
      loss += shares_.of_others * others;
    }
    const float of_sum = static_cast<float>(call_.scale / sum);
    const float of_others = static_cast<float>(call_.scale * shares_.of_others);
    float* const gradient = scratch.exponentials;
    const float of_label = gradient[label];
    for (int64_t k = 0; k < classes_; ++k) gradient[k] = gradient[k] * of_sum - of_others;
    gradient[label] = of_label * of_sum - static_cast<float>(call_.scale * shares_.of_label);
    if (excluded() >= 0) gradient[excluded()] += of_others;
    return loss - least_;
  }

  const LabelSmoothing& options_;
  const Shares& shares_;
  const SmoothedLossCall& call_;
  int64_t classes_;
  double least_ = 0;
};

}  // namespace

size_t SmoothedLossWorkspaceBytes(int64_t classes, int threads) {
  return threads * Workspace::Measure([=](Workspace& workspace) { LayOutRow(classes, workspace); });
}

absl::Status ComputeSmoothedLoss(const LabelSmoothing& options, const SmoothedLossCall& call,
                                 const Execution& execution) {
  const int64_t tokens = static_cast<int64_t>(call.labels.size());
  TFB_RETURN_IF_ERROR(CheckLogits(call.logits, tokens));
  const int64_t classes = call.logits.dim(1);
  TFB_ASSIGN_OR_RETURN(const Shares shares, SharesOf(options, classes));
  for (const int64_t label : call.labels)
    TFB_RETURN_IF_ERROR(CheckClass("a label", label, classes));
  if (!call.gradient.empty() &&
      (call.gradient.shape() != call.logits.shape() || !IsFloating(call.gradient.dtype))) {
    return absl::InvalidArgumentError(
        absl::StrCat("label smoothing: the gradient is ", ShapeString(call.gradient.shape()),
                     "; the logits are ", ShapeString(call.logits.shape())));
  }
  const SmoothedRows rows(options, shares, call);
  const size_t thread_bytes = SmoothedLossWorkspaceBytes(classes, 1);
  constexpr int64_t kRowsOfTask = 16;
  execution.pool->ParallelForRanges(
      tokens, kRowsOfTask, [&](int64_t begin, int64_t end, int worker) {
        Workspace workspace(execution.workspace.subspan(worker * thread_bytes, thread_bytes));
        const RowScratch scratch = LayOutRow(classes, workspace);
        for (int64_t token = begin; token < end; ++token) rows.Compute(token, scratch);
      });
  return absl::OkStatus();
}

}  // namespace tfb
