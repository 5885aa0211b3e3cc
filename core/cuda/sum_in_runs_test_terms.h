// The terms of sum_in_runs_test.
#ifndef TFB_CORE_CUDA_SUM_IN_RUNS_TEST_TERMS_H_
#define TFB_CORE_CUDA_SUM_IN_RUNS_TEST_TERMS_H_

#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb::sum_in_runs_test {

// Writes the sum of the numbers of a row and column, and of n + 1 over its terms n.
struct SumAndPlaces {
  using Number = double;
  static constexpr int kSums = 2;
  const float* numbers;  // [rows][terms][columns]
  int64_t terms;
  int64_t columns;
  double* sums;  // [rows][2][columns]

  template <class Piece>
  TFB_HOST_DEVICE void AddTerms(int64_t row, int64_t begin, int64_t end, const Piece& piece,
                                double (&to)[kSums][Piece::kMost]) const {
    for (int64_t n = begin; n < end; ++n) {
      const float* const from = numbers + (row * terms + n) * columns + piece.first();
      for (int i = 0; i < piece.count(); ++i) {
        to[0][i] += from[i];
        to[1][i] += static_cast<double>(n + 1);
      }
    }
  }
  template <class Piece>
  TFB_HOST_DEVICE void Take(int64_t row, const Piece& piece,
                            const double (&from)[kSums][Piece::kMost]) const {
    for (int s = 0; s < kSums; ++s) {
      double* const to = sums + (row * kSums + s) * columns + piece.first();
      for (int i = 0; i < piece.count(); ++i) to[i] = from[s][i];
    }
  }
};

// Adds the sums of numbers to what is there, in fp32.
struct AddSums {
  using Number = float;
  static constexpr int kSums = 1;
  const float* numbers;  // [rows][terms][columns]
  int64_t terms;
  int64_t columns;
  float* sums;  // [rows][columns]

  template <class Piece>
  TFB_HOST_DEVICE void AddTerms(int64_t row, int64_t begin, int64_t end, const Piece& piece,
                                float (&to)[kSums][Piece::kMost]) const {
    for (int64_t n = begin; n < end; ++n) {
      const float* const from = numbers + (row * terms + n) * columns + piece.first();
      for (int i = 0; i < piece.count(); ++i) to[0][i] += from[i];
    }
  }
  template <class Piece>
  TFB_HOST_DEVICE void Take(int64_t row, const Piece& piece,
                            const float (&from)[kSums][Piece::kMost]) const {
    float* const to = sums + row * columns + piece.first();
    for (int i = 0; i < piece.count(); ++i) to[i] += from[0][i];
  }
};

}  // namespace tfb::sum_in_runs_test

#endif  // TFB_CORE_CUDA_SUM_IN_RUNS_TEST_TERMS_H_
