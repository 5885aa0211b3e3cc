#include "harness/judge/errors.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/definition.h"
#include "core/status.h"

namespace tfb {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double Difference(double y, double r) {
  if (std::isfinite(y) && std::isfinite(r)) return std::abs(y - r);
  const bool same = y == r || (std::isnan(y) && std::isnan(r));
  return same ? 0 : kInfinity;
}

// Returns |a - b| / |b| from sums of squares.
double Relative(double difference, double reference) {
  if (difference == 0) return 0;
  return reference == 0 ? kInfinity : std::sqrt(difference / reference);
}

// Sums over the finite elements of one row.
struct RowSums {
  double yy = 0, rr = 0, yr = 0;
  bool any = false;

  void Add(double y, double r) {
    if (!std::isfinite(y) || !std::isfinite(r)) return;
    any = true;
    yy += y * y;
    rr += r * r;
    yr += y * r;
  }
  double Cosine() const {
    if (yy == 0 && rr == 0) return 1;
    return yy == 0 || rr == 0 ? 0 : std::clamp(yr / std::sqrt(yy) / std::sqrt(rr), -1.0, 1.0);
  }
};

}  // namespace

absl::StatusOr<ComparedRows> ComparedRows::Of(const ConstTensorView& output,
                                              const ConstTensorView& reference,
                                              absl::Span<const int64_t> rows) {
  ComparedRows compared;
  compared.output_ = output;
  compared.reference_shape_ = reference.shape();
  compared.rows_ = rows;
  bool related = output.rank == reference.rank && reference.is_contiguous();
  for (int axis = 0; related && axis < output.rank; ++axis) {
    if (output.dim(axis) == reference.dim(axis)) continue;
    related = compared.axis_ < 0 && !rows.empty() &&
              reference.dim(axis) == static_cast<int64_t>(rows.size()) && rows.front() >= 0 &&
              rows.back() < output.dim(axis);
    compared.axis_ = axis;
  }
  if (!related) {
    return absl::InvalidArgumentError(
        absl::StrCat("output ", ShapeString(output.shape()), " cannot be held against reference ",
                     ShapeString(reference.shape()), " of ", rows.size(), " rows"));
  }
  return compared;
}

int64_t ComparedRows::OutputOffset(int64_t index) const {
  int64_t offset = 0;
  for (int axis = output_.rank - 1; axis >= 0; --axis) {
    const int64_t size = reference_shape_[axis];
    const int64_t position = index % size;
    index /= size;
    offset += (axis == axis_ ? rows_[position] : position) * output_.stride(axis);
  }
  return offset;
}

absl::StatusOr<OutputError> CompareOutput(const ConstTensorView& output,
                                          const ConstTensorView& reference,
                                          absl::Span<const int64_t> rows, double max_value) {
  TFB_ASSIGN_OR_RETURN(const ComparedRows compared, ComparedRows::Of(output, reference, rows));
  const int64_t channels = output.dim(output.rank - 1);
  OutputError error;
  if (channels == 0) return error;
  error.rows = output.num_elements() / channels;
  error.rows_checked = reference.num_elements() / channels;
  error.checked = reference.num_elements();
  double difference = 0, norm = 0, cosines = 0;
  int64_t finite_rows = 0;
  for (int64_t row = 0; row < error.rows_checked; ++row) {
    RowSums sums;
    const int64_t first = compared.OutputOffset(row * channels);
    for (int64_t c = 0; c < channels; ++c) {
      const double y = output.Get(first + c * output.stride(output.rank - 1));
      const double r = reference.Get(row * channels + c);
      const double off = Difference(y, r);
      error.max_abs = std::max(error.max_abs, off);
      difference += off * off;
      sums.Add(y, r);
      error.not_finite += !std::isfinite(y);
      error.unexpected += !std::isfinite(y) && std::isfinite(r);
    }
    norm += sums.rr;
    if (sums.any) cosines += sums.Cosine();
    finite_rows += sums.any;
  }
  error.relative_frobenius = Relative(difference, norm);
  const bool none = error.max_abs == 0;
  error.max_abs_over_max_value = none ? 0 : max_value == 0 ? kInfinity : error.max_abs / max_value;
  if (finite_rows > 0) {
    error.mean_cosine = cosines / static_cast<double>(finite_rows);
  } else if (error.checked > 0) {
    error.relative_frobenius = error.mean_cosine = std::numeric_limits<double>::quiet_NaN();
  }
  return error;
}

absl::StatusOr<double> MaxAbsError(const ConstTensorView& output, const ConstTensorView& reference,
                                   absl::Span<const int64_t> rows) {
  TFB_ASSIGN_OR_RETURN(const ComparedRows compared, ComparedRows::Of(output, reference, rows));
  double largest = 0;
  for (int64_t index = 0; index < reference.num_elements(); ++index) {
    largest = std::max(largest,
                       Difference(output.Get(compared.OutputOffset(index)), reference.Get(index)));
  }
  return largest;
}

double LargestMagnitude(const ConstTensorView& view) {
  double largest = 0;
  ForEachOffset(view, view, [&](int64_t offset, int64_t) {
    const double value = std::abs(view.Get(offset));
    if (std::isfinite(value)) largest = std::max(largest, value);
  });
  return largest;
}

namespace {

// Returns the `count` keys of largest weight above 0, or fewer where there are not so many,
// ascending. The lower index wins ties, so that the measure is the same everywhere.
std::vector<int64_t> HeaviestKeys(const double* weights, int64_t keys, int64_t count) {
  std::vector<int64_t> order;
  for (int64_t j = 0; j < keys; ++j) {
    if (weights[j] > 0) order.push_back(j);
  }
  count = std::min<int64_t>(count, static_cast<int64_t>(order.size()));
  std::partial_sort(order.begin(), order.begin() + count, order.end(), [=](int64_t a, int64_t b) {
    return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
  });
  order.resize(count);
  std::sort(order.begin(), order.end());
  return order;
}

// Returns the measures of one row, or nothing where either side sees no key.
std::optional<KeptAttention> CompareRow(const double* w, const double* p, int64_t keys,
                                        int64_t recall_keys) {
  const auto is_seen = [](double weight) { return weight > 0; };
  const int64_t seen = std::count_if(p, p + keys, is_seen);
  if (seen == 0 || std::none_of(w, w + keys, is_seen)) return std::nullopt;
  KeptAttention row;
  for (int64_t j = 0; j < keys; ++j) {
    if (w[j] <= 0) continue;
    row.kept_mass += p[j];
    row.kl_divergence += w[j] * std::log(w[j] / p[j]);
  }
  const int64_t top = std::min(recall_keys, seen);
  const std::vector<int64_t> dense_top = HeaviestKeys(p, keys, top);
  const std::vector<int64_t> own_top = HeaviestKeys(w, keys, top);
  std::vector<int64_t> found;
  std::set_intersection(dense_top.begin(), dense_top.end(), own_top.begin(), own_top.end(),
                        std::back_inserter(found));
  row.recall = static_cast<double>(found.size()) / static_cast<double>(top);
  return row;
}

}  // namespace

absl::StatusOr<std::optional<KeptAttention>> CompareWeights(const ConstTensorView& weights,
                                                            const ConstTensorView& dense,
                                                            int64_t recall_keys, ThreadPool* pool) {
  if (weights.rank != 4 || weights.shape() != dense.shape() || weights.dtype != DType::kF64 ||
      dense.dtype != DType::kF64 || !weights.is_contiguous() || !dense.is_contiguous()) {
    return absl::InvalidArgumentError(absl::StrCat("weights ", ShapeString(weights.shape()),
                                                   " cannot be held against dense weights ",
                                                   ShapeString(dense.shape())));
  }
  const int64_t keys = dense.dim(3);
  if (keys == 0 || dense.num_elements() == 0) return std::nullopt;
  std::vector<std::optional<KeptAttention>> rows(dense.num_elements() / keys);
  ForEachOf(pool, static_cast<int64_t>(rows.size()), [&](int64_t n) {
    rows[n] = CompareRow(weights.At<double>() + n * keys, dense.At<double>() + n * keys, keys,
                         recall_keys);
  });
  KeptAttention sum;
  double count = 0;
  for (const std::optional<KeptAttention>& row : rows) {
    if (!row.has_value()) continue;
    ++count;
    sum.kept_mass += row->kept_mass;
    sum.kl_divergence += row->kl_divergence;
    sum.recall += row->recall;
  }
  if (count == 0) return std::nullopt;
  return KeptAttention{sum.kept_mass / count, sum.kl_divergence / count, sum.recall / count};
}

double Fp32Bound(int64_t keys) {
  return 2e-5 * std::sqrt(std::max(1.0, static_cast<double>(keys) / 16384));
}

double HalfBound(DType dtype) { return 5 * UnitRoundoff(dtype); }

double AbsoluteBound(DType dtype, int64_t keys) {
  return Fp32Bound(keys) + (dtype == DType::kF32 ? 0 : HalfBound(dtype));
}

double RatioBound(DType dtype, double dense_error, double largest_output) {
  return std::max(2 * dense_error, UnitRoundoff(dtype) * largest_output);
}

double LogSumExpBound(int64_t keys, double largest_log_sum_exp) {
  return Fp32Bound(keys) + (8 + 3) * UnitRoundoff(DType::kF32) * largest_log_sum_exp;
}

}  // namespace tfb
