#include "core/layers/double_rows.h"

#include <algorithm>

#include "core/definition.h"
#include "core/layers/layer_definitions.h"

namespace tfb::layers {

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
  for (int64_t r = 0; r < rows(); ++r) {
    DefineNormOfRow(gamma.data(), beta.data(), channels_, result[r]);
  }
  return result;
}

}  // namespace tfb::layers
