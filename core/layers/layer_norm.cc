#include "core/layers/layer_norm.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "core/layers/rows_of.h"
#include "core/workspace.h"

namespace tfb {
namespace {

constexpr int64_t kRowsOfTask = 16;

// Eight sums side by side, which is one vector of doubles and hides the latency of the addition.
template <class Term>
double Sum(int64_t count, Term term) {
  constexpr int kLanes = 8;
  double part[kLanes] = {};
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) part[lane] += term(c + lane);
  }
  for (; c < count; ++c) part[0] += term(c);
  return ((part[0] + part[4]) + (part[1] + part[5])) + ((part[2] + part[6]) + (part[3] + part[7]));
}

void Normalize(const LayerNormCall& call, int64_t channels, float* row) {
  const double mean =
      Sum(channels, [=](int64_t c) -> double { return row[c]; }) / static_cast<double>(channels);
  const double variance = Sum(channels,
                              [=](int64_t c) {
                                const double difference = row[c] - mean;
                                return difference * difference;
                              }) /
                          static_cast<double>(channels);
  const float scale = static_cast<float>(1 / std::sqrt(variance + call.epsilon));
  for (int64_t c = 0; c < channels; ++c) {
    const float centred = static_cast<float>(row[c] - mean);
    row[c] = call.gamma[c] * (centred * scale) + call.beta[c];
  }
}

}  // namespace

size_t LayerNormWorkspaceBytes(int64_t channels, int threads) {
  return threads *
         Workspace::Measure([=](Workspace& workspace) { workspace.Take<float>(channels); });
}

absl::Status LayerNorm(const LayerNormCall& call, const Execution& execution) {
  if (call.x.shape() != call.y.shape()) {
    return absl::InternalError(absl::StrCat("layer norm of x ", ShapeString(call.x.shape()),
                                            " does not give y ", ShapeString(call.y.shape())));
  }
  const RowsOf<ConstTensorView> x(call.x);
  const RowsOf<TensorView> y(call.y);
  const int64_t rows = x.rows(), channels = x.channels();
  const size_t thread_bytes = LayerNormWorkspaceBytes(channels, 1);
  execution.pool->ParallelFor(
      (rows + kRowsOfTask - 1) / kRowsOfTask, [&](int64_t task, int worker) {
        Workspace workspace(execution.workspace.subspan(worker * thread_bytes, thread_bytes));
        float* row = workspace.Take<float>(channels);
        const int64_t end = std::min((task + 1) * kRowsOfTask, rows);
        for (int64_t r = task * kRowsOfTask; r < end; ++r) {
          x.Load(r, 0, channels, row);
          Normalize(call, channels, row);
          y.Store(r, 0, channels, row);
        }
      });
  return absl::OkStatus();
}

}  // namespace tfb
