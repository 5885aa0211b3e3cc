// Sums of many terms as functors (core/cuda/functor.h): a GPU has a thread for each of many runs of
// the terms instead of one for a whole sum, which would wait for one term after the other.
//
//   partial sum r  = the terms r length, ..., (r + 1) length - 1, in their order
//   sum            = the partial sums, in their order
//
// The length follows from sizes alone, so that sums have the same bits on any number of threads and in
// every run. With n terms no thread adds more than some 2 sqrt(n) numbers.
//
// Sums are those of columns of rows, and all of them have equally many terms. A struct of plain data
// says what the terms are, and takes the sums to where they belong:
//
//   struct SumsOfTokens {
//     using Number = double;           // of the sums
//     static constexpr int kSums = 2;  // of a column
//     // Adds terms begin to end - 1 to sums[s][i], those of column piece.first() + i.
//     template <class Piece>
//     TFB_HOST_DEVICE void AddTerms(int64_t row, int64_t begin, int64_t end, const Piece& piece,
//                                   Number (&sums)[kSums][Piece::kMost]) const;
//     template <class Piece>
//     TFB_HOST_DEVICE void Take(int64_t row, const Piece& piece,
//                               const Number (&sums)[kSums][Piece::kMost]) const;
//   };
//
// Beside its header, it takes a line in a .cu source (sum_in_runs.cuh), and its calls (sum_in_runs.h):
//
//   TFB_SUM_IN_RUNS(SumsOfTokens);    SumInRuns(device, {rows, columns, terms}, SumsOfTokens{...},
//                                               execution)
#ifndef TFB_CORE_CUDA_RUN_SUMS_H_
#define TFB_CORE_CUDA_RUN_SUMS_H_

#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb {

struct SumShape {
  int64_t rows;
  int64_t columns;
  int64_t terms;  // of each sum
};

// The runs that the terms of sums are cut into.
struct TermRuns {
  int64_t terms;
  int64_t length;

  TFB_HOST_DEVICE int64_t count() const { return (terms + length - 1) / length; }
  TFB_HOST_DEVICE int64_t Begin(int64_t run) const { return run * length; }
  TFB_HOST_DEVICE int64_t End(int64_t run) const {
    return (run + 1) * length < terms ? (run + 1) * length : terms;
  }
};

// The indices outer = n / size and inner = n % size of terms that follow each other, which are divided once.
// Next tells whether the outer one has moved on; an index of that may follow it:
//
//   TermIndex token(begin, tokens), head(token.outer, heads);
//   for (int64_t n = begin; n < end; ++n, head.Next(token.Next())) ...
struct TermIndex {
  int64_t size;
  int64_t outer;
  int64_t inner;

  TFB_HOST_DEVICE TermIndex(int64_t n, int64_t inner_size)
      : size(inner_size), outer(n / inner_size), inner(n % inner_size) {}
  TFB_HOST_DEVICE bool Next(bool moves = true) {
    if (!moves || ++inner < size) return false;
    inner = 0;
    ++outer;
    return true;
  }
};

// The least terms of a run, and the most partial sums of all sums together: 512 KiB in float64.
constexpr int64_t kLeastRun = 16;
constexpr int64_t kMostPartialSums = 64 << 10;

// Returns the least number whose square is not below n, of 1 and more.
constexpr int64_t RootOf(int64_t n) {
  int64_t below = 0;
  for (int64_t bit = int64_t{1} << 30; bit > 0; bit /= 2) {
    if ((below + bit) * (below + bit) < n) below += bit;
  }
  return below + 1;
}

// Returns the most runs that any number of terms up to `terms` is cut into, for each of `sums` sums.
constexpr int64_t MostRuns(int64_t sums, int64_t terms) {
  const int64_t root = RootOf(terms), least_runs = (terms + kLeastRun - 1) / kLeastRun,
                allowed = sums <= kMostPartialSums ? kMostPartialSums / (sums > 0 ? sums : 1) : 1;
  const int64_t most = root < least_runs ? root : least_runs;
  return most < allowed ? most : allowed;
}

// Returns runs of sqrt(terms) terms, or of more where these would be too many or too short.
constexpr TermRuns RunsOf(int64_t sums, int64_t terms) {
  const int64_t most = MostRuns(sums, terms);
  const int64_t length = most > 0 ? (terms + most - 1) / most : 0;
  return {terms, length < kLeastRun ? kLeastRun : length};
}

template <class Terms, class Piece>
TFB_HOST_DEVICE void SetToZero(const Piece& piece,
                               typename Terms::Number (&sums)[Terms::kSums][Piece::kMost]) {
  for (int s = 0; s < Terms::kSums; ++s) {
    for (int i = 0; i < piece.count(); ++i) sums[s][i] = 0;
  }
}

// Writes the partial sums of run n % runs of row n / runs.
template <class Terms>
struct PartialSums {
  using Number = typename Terms::Number;
  Terms terms;
  TermRuns runs;
  int64_t columns;
  Number* partial;  // [rows][runs][kSums][columns]

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t n, const Piece& piece) const {
    const int64_t row = n / runs.count(), run = n % runs.count();
    Number sums[Terms::kSums][Piece::kMost];
    SetToZero<Terms>(piece, sums);
    terms.AddTerms(row, runs.Begin(run), runs.End(run), piece, sums);
    for (int s = 0; s < Terms::kSums; ++s) {
      Number* const to = partial + (n * Terms::kSums + s) * columns + piece.first();
      for (int i = 0; i < piece.count(); ++i) to[i] = sums[s][i];
    }
  }
};

// Adds up the partial sums of a row, or, where they are null, its terms, and lets the terms take the
// sums.
template <class Terms>
struct TotalSums {
  using Number = typename Terms::Number;
  Terms terms;
  TermRuns runs;
  int64_t columns;
  const Number* partial;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    Number sums[Terms::kSums][Piece::kMost];
    SetToZero<Terms>(piece, sums);
    // Where there is no term, what terms are counted by may be 0, too.
    if (partial == nullptr && runs.terms > 0) terms.AddTerms(row, 0, runs.terms, piece, sums);
    for (int64_t run = 0; partial != nullptr && run < runs.count(); ++run) {
      for (int s = 0; s < Terms::kSums; ++s) {
        const Number* const from =
            partial + ((row * runs.count() + run) * Terms::kSums + s) * columns + piece.first();
        for (int i = 0; i < piece.count(); ++i) sums[s][i] += from[i];
      }
    }
    terms.Take(row, piece, sums);
  }
};

// The kernels of such a struct (core/cuda/kernel_table.h). They enqueue on the stream and return null,
// or a text that says why they could not.
template <class Terms>
struct RunSumKernels {
  const char* (*partial)(const PartialSums<Terms>& functor, int64_t rows, int64_t columns,
                         void* stream);
  const char* (*total)(const TotalSums<Terms>& functor, int64_t rows, int64_t columns,
                       void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_RUN_SUMS_H_
