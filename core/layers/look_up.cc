#include "core/layers/look_up.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/flash/rows.h"
#include "core/layers/rows_of.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

constexpr int64_t kRowsOfTask = 16;
constexpr int64_t kChannels = 64;  // of a row at a time

absl::Status Check(const ConstTensorView& table, absl::Span<const int32_t> indices,
                   const ConstTensorView& y) {
  const bool has_rows = y.rank == 2 || y.rank == 3;
  if (table.rank != 2 || !has_rows || y.dim(y.rank - 1) != table.dim(1) ||
      RowsOf<ConstTensorView>(y).rows() != static_cast<int64_t>(indices.size())) {
    return absl::InternalError(absl::StrCat(indices.size(), " rows of a table ",
                                            ShapeString(table.shape()), " are not ",
                                            ShapeString(y.shape())));
  }
  for (const int32_t index : indices) {
    if (index >= table.dim(0)) {
      return absl::InvalidArgumentError(
          absl::StrCat("index is ", index, "; the table has ", table.dim(0), " rows"));
    }
  }
  return absl::OkStatus();
}

// The places of each row, by counting sort: those of row i are places[begins[i]] to
// places[begins[i + 1] - 1], ascending.
struct PlacesOfRows {
  int64_t* begins;  // [rows + 1]
  int64_t* places;  // [places]
};

PlacesOfRows LayOut(int64_t places, int64_t rows, Workspace& workspace) {
  return {workspace.Take<int64_t>(rows + 1), workspace.Take<int64_t>(places)};
}

void Sort(absl::Span<const int32_t> indices, int64_t rows, const PlacesOfRows& of) {
  std::fill_n(of.begins, rows + 1, 0);
  for (const int32_t index : indices) {
    if (index >= 0) ++of.begins[index];
  }
  // Each begin is first the end of its row's places, and moves down as they are put there.
  int64_t end = 0;
  for (int64_t row = 0; row < rows; ++row) end = of.begins[row] += end;
  of.begins[rows] = end;
  for (int64_t place = static_cast<int64_t>(indices.size()) - 1; place >= 0; --place) {
    if (indices[place] >= 0) of.places[--of.begins[indices[place]]] = place;
  }
}

}  // namespace

absl::Status LookUp(const ConstTensorView& table, absl::Span<const int32_t> indices,
                    const TensorView& y, const Execution& execution) {
  TFB_RETURN_IF_ERROR(Check(table, indices, y));
  const RowsOf<ConstTensorView> from(table);
  const RowsOf<TensorView> to(y);
  execution.pool->ParallelForRanges(to.rows(), kRowsOfTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t place = begin; place < end; ++place) {
      for (int64_t first = 0; first < to.channels(); first += kChannels) {
        const int64_t count = std::min(kChannels, to.channels() - first);
        float piece[kChannels] = {};
        if (indices[place] >= 0) from.Load(indices[place], first, count, piece);
        to.Store(place, first, count, piece);
      }
    }
  });
  return absl::OkStatus();
}

size_t LookUpGradientWorkspaceBytes(int64_t places, int64_t rows) {
  return Workspace::Measure([=](Workspace& workspace) { LayOut(places, rows, workspace); });
}

absl::Status LookUpGradient(const ConstTensorView& dy, absl::Span<const int32_t> indices,
                            const TensorView& table, bool accumulate, const Execution& execution) {
  TFB_RETURN_IF_ERROR(Check(table, indices, dy));
  Workspace workspace(execution.workspace);
  const PlacesOfRows of = LayOut(static_cast<int64_t>(indices.size()), table.dim(0), workspace);
  Sort(indices, table.dim(0), of);
  const RowsOf<ConstTensorView> from(dy);
  const RowsOf<TensorView> to(table);
  execution.pool->ParallelForRanges(to.rows(), kRowsOfTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t first = 0; first < to.channels(); first += kChannels) {
        const int64_t count = std::min(kChannels, to.channels() - first);
        float sum[kChannels] = {}, more[kChannels];
        if (accumulate) to.Load(row, first, count, sum);
        for (int64_t n = of.begins[row]; n < of.begins[row + 1]; ++n) {
          from.Load(of.places[n], first, count, more);
          for (int64_t c = 0; c < count; ++c) sum[c] += more[c];
        }
        to.Store(row, first, count, sum);
      }
    }
  });
  return absl::OkStatus();
}

}  // namespace tfb
