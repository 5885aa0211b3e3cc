#include "memory/compressive/row_operations.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "Eigen/Core"
#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/status.h"
#include "memory/compressive/compressive_cuda.h"
#include "memory/compressive/compressive_functors.h"

namespace tfb::compressive {
namespace {

// Runs one of the kernels.
template <class Arguments>
absl::Status Launch(Device device,
                    const char* (*CompressiveKernels::*kernel)(const Arguments&, void*),
                    const Arguments& arguments, const Execution& execution) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  const CompressiveKernels& kernels = KernelsOn<CompressiveKernels>(runtime->target());
  return ToStatus((kernels.*kernel)(arguments, execution.stream));
}

float ReceivedBy(const ReceivedCall& call, int64_t b, int64_t key) {
  using Vector = Eigen::Map<const Eigen::ArrayXf>;
  const int64_t heads = call.q.dim(1), tokens = call.q.dim(2), e = call.q.dim(3);
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(e)));
  double sum = 0;
  for (int64_t h = 0; h < heads; ++h) {
    const Vector k(call.k.At<float>(b, h, key), e);
    const float content_bias = (Vector(call.u + h * e, e) * k).sum();
    const float* log_sum_exp = call.log_sum_exp.At<float>(b, h);
    for (int64_t i = std::max<int64_t>(0, key - call.first_distance); i < tokens; ++i) {
      const int64_t distance = std::min(call.first_distance + i - key, call.distance_rows - 1);
      const int64_t row = distance * heads + h;
      const Vector r(call.distances + row * e, e), q(call.q.At<float>(b, h, i), e);
      const float score = (q * (k + r)).sum() + content_bias + call.distance_biases[row];
      sum += std::exp(scale * score - log_sum_exp[i]);
    }
  }
  const float mean = static_cast<float>(sum / static_cast<double>(heads * tokens));
  return std::isnan(mean) ? std::numeric_limits<float>::infinity() : mean;
}

void SelectOfBatch(const SelectRowsCall& call, int64_t b) {
  const float* use = call.use.At<float>(b);
  const int64_t places = call.use.dim(1);
  int32_t* rows = call.scratch + b * call.rows;
  std::iota(rows, rows + call.rows, 0);
  std::sort(rows, rows + call.rows, [&](int32_t x, int32_t y) {
    const float of_x = use[(call.first + x) % places], of_y = use[(call.first + y) % places];
    return of_x != of_y ? of_x > of_y : x < y;
  });
  std::sort(rows, rows + call.count);
  std::copy_n(rows, call.count, call.selected + b * call.count);
  for (int64_t n = 0; !call.kept.empty() && n < call.kept.dim(1); ++n) {
    *call.kept.MutableAt<int32_t>(b, n) = n < call.count ? rows[n] : -1;
  }
}

}  // namespace

absl::Status PoolRows(Device device, bool max, int64_t rate, const TensorView& from,
                      const TensorView& to, const Execution& execution) {
  const PooledRows pooled = {ToDeviceView(from), ToDeviceView(to), to.dim(1), rate, max};
  return ForEachInRows(device, to.dim(0) * to.dim(1), to.dim(2), pooled, execution);
}

absl::Status MergeParts(Device device, const AttentionPart& own, const AttentionPart& other,
                        const Execution& execution) {
  const int64_t batch = own.out.dim(0), heads = own.out.dim(1);
  const int64_t tokens = own.out.dim(2), channels = own.out.dim(3);
  if (device == Device::kCpu) {
    execution.pool->ParallelFor(batch * heads, [&](int64_t task, int) {
      const int64_t b = task / heads, h = task % heads;
      for (int64_t i = 0; i < tokens; ++i) {
        float& log_sum_exp = *own.log_sum_exp.MutableAt<float>(b, h, i);
        const float theirs = *other.log_sum_exp.At<float>(b, h, i);
        const float share = 1 / (1 + std::exp(theirs - log_sum_exp));
        float* out = own.out.MutableAt<float>(b, h, i);
        const float* more = other.out.At<float>(b, h, i);
        for (int64_t c = 0; c < channels; ++c) out[c] = share * out[c] + (1 - share) * more[c];
        log_sum_exp =
            std::max(log_sum_exp, theirs) + std::log1p(std::exp(-std::abs(log_sum_exp - theirs)));
      }
    });
    return absl::OkStatus();
  }
  MergePartsArguments arguments = {};
  arguments.out = ToDeviceView(own.out);
  arguments.other = ToDeviceView(other.out);
  arguments.log_sum_exp = own.log_sum_exp.MutableAt<float>(0);
  arguments.other_log_sum_exp = other.log_sum_exp.At<float>(0);
  arguments.batch = batch;
  arguments.heads = heads;
  arguments.tokens = tokens;
  arguments.channels = channels;
  return Launch(device, &CompressiveKernels::merge_parts, arguments, execution);
}

absl::Status ReceivedAttention(Device device, const ReceivedCall& call,
                               const Execution& execution) {
  const int64_t batch = call.k.dim(0), keys = call.k.dim(2), places = call.use.dim(1);
  if (device == Device::kCpu) {
    execution.pool->ParallelFor(batch * keys, [&](int64_t task, int) {
      const int64_t b = task / keys, key = task % keys;
      *call.use.MutableAt<float>(b, (call.first + key) % places) = ReceivedBy(call, b, key);
    });
    return absl::OkStatus();
  }
  ReceivedArguments arguments = {};
  arguments.q = ToDeviceView(call.q);
  arguments.k = ToDeviceView(call.k);
  arguments.log_sum_exp = call.log_sum_exp.At<float>(0);
  arguments.distances = call.distances;
  arguments.distance_biases = call.distance_biases;
  arguments.u = call.u;
  arguments.use = call.use.MutableAt<float>(0);
  arguments.batch = batch;
  arguments.heads = call.q.dim(1);
  arguments.tokens = call.q.dim(2);
  arguments.keys = keys;
  arguments.head_dim = call.q.dim(3);
  arguments.distance_rows = call.distance_rows;
  arguments.first_distance = call.first_distance;
  arguments.first = call.first;
  arguments.places = places;
  arguments.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(call.q.dim(3))));
  return Launch(device, &CompressiveKernels::received, arguments, execution);
}

absl::Status SelectRows(Device device, const SelectRowsCall& call, const Execution& execution) {
  const int64_t batch = call.use.dim(0);
  if (device == Device::kCpu) {
    execution.pool->ParallelFor(batch, [&](int64_t b, int) { SelectOfBatch(call, b); });
    return absl::OkStatus();
  }
  SelectRowsArguments arguments = {};
  arguments.use = call.use.At<float>(0);
  arguments.first = call.first;
  arguments.places = call.use.dim(1);
  arguments.batch = batch;
  arguments.rows = call.rows;
  arguments.count = call.count;
  arguments.flags = call.scratch;
  arguments.selected = call.selected;
  if (!call.kept.empty()) {
    arguments.kept = call.kept.MutableAt<int32_t>(0);
    arguments.kept_batch_stride = call.kept.stride(0);
    arguments.kept_stride = call.kept.stride(1);
    arguments.kept_size = call.kept.dim(1);
  }
  return Launch(device, &CompressiveKernels::select_rows, arguments, execution);
}

absl::Status LossOfDifference(Device device, bool mean_square, const TensorView& a,
                              const TensorView& b, int64_t repeat, const TensorView& to,
                              const Execution& execution) {
  if (device == Device::kCpu) {
    execution.pool->ParallelFor(a.dim(0), [&](int64_t batch, int) {
      double sum = 0;
      for (int64_t row = 0; row < a.dim(1); ++row) {
        const float *of_a = a.At<float>(batch, row), *of_b = b.At<float>(batch, row / repeat);
        for (int64_t c = 0; c < a.dim(2); ++c) {
          const double difference = static_cast<double>(of_a[c]) - of_b[c];
          sum += difference * difference;
        }
      }
      const double elements = static_cast<double>(std::max<int64_t>(a.dim(1) * a.dim(2), 1));
      to.Set(to.Offset(batch), mean_square ? sum / elements : std::sqrt(sum));
    });
    return absl::OkStatus();
  }
  const LossOfDifferenceArguments arguments = {ToDeviceView(a), ToDeviceView(b), ToDeviceView(to),
                                               a.dim(0),        a.dim(1),        a.dim(2),
                                               repeat,          mean_square};
  return Launch(device, &CompressiveKernels::loss_of_difference, arguments, execution);
}

}  // namespace tfb::compressive
