// Rows of float64, and the formulas of definitions on them: plain loops, which share nothing with an
// engine.
#ifndef TFB_CORE_LAYERS_DOUBLE_ROWS_H_
#define TFB_CORE_LAYERS_DOUBLE_ROWS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/types/span.h"
#include "core/tensor.h"
#include "core/thread_pool.h"

namespace tfb::layers {

class Rows {
 public:
  Rows(int64_t rows, int64_t channels) : channels_(channels), values_(rows * channels) {}
  // Copies a view [rows, channels].
  explicit Rows(const ConstTensorView& view);

  int64_t rows() const {
    return channels_ == 0 ? 0 : static_cast<int64_t>(values_.size()) / channels_;
  }
  int64_t channels() const { return channels_; }
  double* operator[](int64_t row) { return values_.data() + row * channels_; }
  const double* operator[](int64_t row) const { return values_.data() + row * channels_; }

  absl::Span<double> values() { return absl::MakeSpan(values_); }  // row by row

  void Append(const Rows& more) {
    values_.insert(values_.end(), more.values_.begin(), more.values_.end());
  }
  Rows Sub(int64_t begin, int64_t count) const;

  Rows Times(const Rows& matrix, ThreadPool* pool) const;  // see core/definition.h
  Rows Plus(const Rows& other) const;
  Rows PlusEach(const std::vector<double>& row) const;  // adds the same to each row
  Rows Map(const std::function<double(double)>& function) const;
  Rows Relu() const;
  // Returns the layer normalisation of each row, with an epsilon of 1e-5.
  Rows Normalized(const std::vector<double>& gamma, const std::vector<double>& beta) const;

 private:
  int64_t channels_;
  std::vector<double> values_;
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_DOUBLE_ROWS_H_
