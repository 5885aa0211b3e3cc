#include "memory/transformer_xl/double_rows.h"

#include <algorithm>
#include <cmath>

#include "core/definition.h"

namespace tfb::transformer_xl {

Rows::Rows(const ConstTensorView& view) : Rows(view.dim(0), view.dim(1)) {
  CopyElements(view, TensorView(values_.data(), DType::kF64, view.shape()));
}

Rows Rows::Sub(int64_t begin, int64_t count) const {
  Rows sub(count, channels_);
  std::copy_n((*this)[begin], count * channels_, sub[0]);
  return sub;
}

Rows Rows::Times(const Rows& matrix, ThreadPool* pool) const {
  Rows product(rows(), matrix.channels());
  AddProduct({values_.data(), matrix.values_.data(), product.values_.data(), rows(), channels_,
              matrix.channels()},
             pool);
  return product;
}

Rows Rows::Plus(const Rows& other) const {
  Rows sum = *this;
  for (size_t n = 0; n < values_.size(); ++n) sum.values_[n] += other.values_[n];
  return sum;
}

Rows Rows::PlusEach(const std::vector<double>& row) const {
  Rows sum = *this;
  for (int64_t r = 0; r < rows(); ++r) {
    for (int64_t c = 0; c < channels_; ++c) sum[r][c] += row[c];
  }
  return sum;
}

Rows Rows::Map(const std::function<double(double)>& function) const {
  Rows result = *this;
  for (double& value : result.values_) value = function(value);
  return result;
}

Rows Rows::Relu() const {
  return Map([](double value) { return value < 0 ? 0 : value; });
}

Rows Rows::Normalized(const std::vector<double>& gamma, const std::vector<double>& beta) const {
  Rows result = *this;
  const double n = static_cast<double>(channels_);
  for (int64_t r = 0; r < rows(); ++r) {
    double* row = result[r];
    double mean = 0, variance = 0;
    for (int64_t c = 0; c < channels_; ++c) mean += row[c] / n;
    for (int64_t c = 0; c < channels_; ++c) variance += (row[c] - mean) * (row[c] - mean) / n;
    for (int64_t c = 0; c < channels_; ++c) {
      row[c] = gamma[c] * (row[c] - mean) / std::sqrt(variance + 1e-5) + beta[c];
    }
  }
  return result;
}

}  // namespace tfb::transformer_xl
