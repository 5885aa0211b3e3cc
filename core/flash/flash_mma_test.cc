// The tensor-core kernels, called through their tables in the simulator, against float64 loops over
// the same 16-bit numbers. The engine around them: flash_test.cc.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda/runtime.h"
#include "core/cuda/simulator/simulator.h"
#include "core/definition.h"
#include "core/flash/flash.h"
#include "core/flash/flash_kernels.h"
#include "core/random.h"
#include "core/schedule/block_schedule.h"
#include "core/status.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

struct Sizes {
  int64_t queries;
  int64_t keys;
  int64_t head_dim;
  int64_t value_dim;
  int64_t heads = 1;
  int64_t kv_heads = 1;
  int64_t batch = 1;
};
Problem Make(DType dtype, const Sizes& sizes, bool causal = false) {
  Problem problem = Problem::SelfAttention(sizes.batch, sizes.heads, sizes.queries, sizes.head_dim,
                                           causal, dtype);
  problem.kv_tokens = sizes.keys;
  problem.value_dim = sizes.value_dim;
  problem.kv_heads = sizes.kv_heads;
  return problem;
}

// A call with its tensors on the host, and what it gives on the simulated device.
class Subject {
 public:
  explicit Subject(const Problem& p, const Pattern* of_keys = nullptr)
      : problem(p), full_(p.kv_tokens), pattern_(of_keys != nullptr ? of_keys : &full_) {
    inputs_ = RandomInputs(QkvInputs(p), 5);
    outputs_ = NanOutputs(AttentionOutputs(p));
    schedule_ = BuildSchedule(p, *pattern_, kFlashQueries16);
    call.q = inputs_["q"].view();
    call.k = inputs_["k"].view();
    call.v = inputs_["v"].view();
    call.out = outputs_["out"].view();
    call.log_sum_exp = outputs_["log_sum_exp"].view();
  }

  const Problem problem;
  FlashCall call;  // no packed keys, no relative keys
  // Relative keys [table heads, high - low + 1, head_dim] of the problem's dtype, for offsets from
  // `low` on.
  Tensor relative_keys;
  int64_t low = 0;
  const Band* band = nullptr;  // in the place of the pattern's schedule
  int splits = 1;
  int64_t max_blocks = 1 << 20;
  int64_t shift = 0;  // elements that tensors begin behind an aligned address
  // Adds to, or replaces, the score of a pair that the pattern lets be seen.
  std::function<double(int64_t b, int64_t h, int64_t i, int64_t j, double score)> change =
      [](int64_t, int64_t, int64_t, int64_t, double score) { return score; };

  Tensor& input(const char* name) { return inputs_[name]; }
  Tensor& out() { return outputs_["out"]; }
  Tensor& log_sum_exp() { return outputs_["log_sum_exp"]; }
  double Out(int64_t b, int64_t h, int64_t i, int64_t c) const {
    return call.out.Get(call.out.Offset(b, h, i, c));
  }

  // `seed` is of the order of blocks and threads. Fails where the simulator finds anything.
  void Run(uint64_t seed = 1) {
    cuda_simulator::Settings settings;
    settings.seed = seed;
    cuda_simulator::Configure(settings);
    const absl::Status status = RunOnDevice();
    ASSERT_TRUE(status.ok()) << status << " " << problem.ToString();
    ASSERT_TRUE(cuda_simulator::Findings().empty());
  }

  // Rounding probabilities changes an output by at most the unit roundoff times sum_j p_ij |v_j|,
  // rounding it by as much of itself: the error of plain attention with 16-bit probabilities. The
  // rest is fp32's.
  void ExpectMatchesLoops(double fp32_factor = 1) {
    Run();
    const NamedTensors expected = Loops();
    const double unit = UnitRoundoff(problem.dtype);
    const double out_unit = UnitRoundoff(call.out.dtype);
    const double fp32 = fp32_factor * Fp32Bound(call.v) +
                        // f16's smallest numbers are 2^-24 apart.
                        std::ldexp(MaxAbs(call.v), -25) * static_cast<double>(problem.kv_tokens) +
                        std::ldexp(1, -25);
    const DoubleTensor v(call.v), y(expected.at("out").view()), p(expected.at("weights").view());
    double worst = 0;  // as a share of the bound
    for (int64_t b = 0; b < problem.batch; ++b) {
      for (int64_t h = 0; h < problem.query_heads; ++h) {
        for (int64_t i = 0; i < problem.query_tokens; ++i) {
          for (int64_t c = 0; c < problem.value_dim; ++c) {
            double size = 0;
            for (int64_t j = 0; j < problem.kv_tokens; ++j) {
              const double weight = p.Row(b, h, i)[j];
              if (weight > 0) size += weight * std::abs(v.Row(b, h / problem.group(), j)[c]);
            }
            const double value = y.Row(b, h, i)[c];
            const double bound = unit * size + out_unit * (std::abs(value) + unit * size) + fp32;
            const double error = std::abs(Out(b, h, i, c) - value);
            worst = std::max(worst, std::isnan(error) ? INFINITY : error / bound);
          }
        }
      }
    }
    EXPECT_LE(worst, 1) << problem.ToString();
    double size = 1;
    for (double lse : expected.at("log_sum_exp").span<double>()) {
      if (std::isfinite(lse)) size = std::max(size, std::abs(lse));
    }
    EXPECT_LE(MaxDifference(call.log_sum_exp, expected.at("log_sum_exp").view()),
              fp32_factor * 2e-5 * size)
        << problem.ToString();
  }

 private:
  NamedTensors Loops() const {
    NamedTensors expected;
    const double scale = call.scale != 0 ? call.scale : 1 / std::sqrt(problem.head_dim);
    Inputs inputs{{"q", call.q}, {"k", call.k}, {"v", call.v}};
    if (!call.key_mask.empty()) inputs.Set("key_mask", call.key_mask);
    const KeyMask is_token(inputs);
    const DoubleTensor q(call.q), k(call.k);
    DefinitionRequest request;
    request.weights = true;
    DefineAttention(
        problem, inputs, request,
        [&](int64_t b, int64_t h, int64_t i, int64_t j) {
          const bool causal = !problem.causal || j <= i + problem.causal_offset();
          const int64_t head = pattern_->heads() == 1 ? 0 : h;
          if (!causal || !is_token(b, j) || !pattern_->Allows(head, i, j)) return kNotSeen;
          const double dot =
              Dot(q.Row(b, h, i), k.Row(b, h / problem.group(), j), problem.head_dim);
          return change(b, h, i, j, scale * dot);
        },
        &expected);
    return expected;
  }

  // ---- On the device ----

  template <class T>
  absl::StatusOr<const T*> Upload(const T* from, int64_t count) {
    if (from == nullptr) return nullptr;
    TFB_ASSIGN_OR_RETURN(DeviceBuffer buffer, runtime_->Upload(from, count * sizeof(T)));
    buffers_.push_back(std::move(buffer));
    return buffers_.back().As<T>();
  }
  absl::StatusOr<DeviceView> UploadView(const ConstTensorView& view) {
    DeviceView device = ToDeviceView(view);
    int64_t elements = view.num_elements() == 0 ? 0 : 1;
    for (int axis = 0; axis < view.rank && elements > 0; ++axis) {
      elements += (view.dim(axis) - 1) * view.stride(axis);
    }
    std::vector<std::byte> bytes((elements + shift) * SizeOf(view.dtype));
    if (elements > 0) {
      std::memcpy(bytes.data() + shift * SizeOf(view.dtype), view.data,
                  elements * SizeOf(view.dtype));
    }
    TFB_ASSIGN_OR_RETURN(const std::byte* data,
                         Upload(bytes.data(), static_cast<int64_t>(bytes.size())));
    device.data = const_cast<std::byte*>(data) + shift * SizeOf(view.dtype);
    return device;
  }
  absl::Status Download(const DeviceView& device, const TensorView& view) {
    int64_t elements = view.num_elements() == 0 ? 0 : 1;
    for (int axis = 0; axis < view.rank && elements > 0; ++axis) {
      elements += (view.dim(axis) - 1) * view.stride(axis);
    }
    return runtime_->CopyToHost(view.mutable_data(), device.data, elements * SizeOf(view.dtype));
  }
  absl::StatusOr<DeviceTokenOrder> UploadOrder(const TokenOrder& order, int64_t count) {
    TFB_ASSIGN_OR_RETURN(const int32_t* tokens, Upload(order.tokens, count));
    return DeviceTokenOrder{tokens, order.batch_stride, order.head_stride, order.group};
  }
  absl::StatusOr<DeviceDistanceTable> UploadTable(const DistanceTable* table) {
    if (table == nullptr) return DeviceDistanceTable{};
    TFB_ASSIGN_OR_RETURN(const float* values, Upload(table->values().data(),
                                                     static_cast<int64_t>(table->values().size())));
    return DeviceDistanceTable{values, table->heads(), table->row(), table->zero()};
  }

  absl::Status FillRule(DeviceScoreRule* device) {
    const ScoreRule& rule = call.rule;
    const int64_t bias = problem.query_heads * problem.head_dim;
    TFB_ASSIGN_OR_RETURN(device->content_bias, Upload(rule.content_bias, bias));
    TFB_ASSIGN_OR_RETURN(device->position_bias, Upload(rule.position_bias, bias));
    TFB_ASSIGN_OR_RETURN(device->relu_multiplier, UploadTable(rule.relu_multiplier));
    TFB_ASSIGN_OR_RETURN(device->bias, UploadTable(rule.bias));
    const SoftSpan& span = rule.soft_span;
    TFB_ASSIGN_OR_RETURN(device->span, Upload(span.span, span.count));
    device->span_batch_stride = span.batch_stride;
    device->span_head_stride = span.head_stride;
    device->span_query_stride = span.query_stride;
    device->ramp = span.ramp;
    device->query_position = rule.query_position;
    if (relative_keys.empty()) return absl::OkStatus();
    DeviceRelativeKeys& keys = device->relative_keys;
    keys.heads = relative_keys.dim(0);
    keys.low = low;
    keys.high = low + relative_keys.dim(1) - 1;
    keys.row = (problem.head_dim + 31) / 32 * 32;
    Tensor rows(problem.dtype, {keys.heads, relative_keys.dim(1), keys.row});
    Fill(rows.view(), 0);
    for (int64_t h = 0; h < keys.heads; ++h) {
      for (int64_t n = 0; n < relative_keys.dim(1); ++n) {
        for (int64_t c = 0; c < problem.head_dim; ++c) {
          rows.view().Set(rows.view().Offset(h, n, RelativeKeyPlace16(c)),
                          relative_keys.view().Get(relative_keys.view().Offset(h, n, c)));
        }
      }
    }
    TFB_ASSIGN_OR_RETURN(keys.rows, Upload(static_cast<const std::byte*>(rows.raw()),
                                           static_cast<int64_t>(rows.bytes())));
    return absl::OkStatus();
  }

  absl::Status FillSchedule(ScheduleView* view) {
    view->query_tiles = schedule_.query_tiles();
    view->heads = schedule_.heads;
    if (band != nullptr) {
      view->band = *band;
      return absl::OkStatus();
    }
    const auto upload = [this](const auto& values) {
      return Upload(values.data(), static_cast<int64_t>(values.size()));
    };
    TFB_ASSIGN_OR_RETURN(view->row_begin, upload(schedule_.row_begin));
    TFB_ASSIGN_OR_RETURN(view->runs, upload(schedule_.runs));
    TFB_ASSIGN_OR_RETURN(view->masks, upload(schedule_.masks));
    TFB_ASSIGN_OR_RETURN(view->order, upload(schedule_.order));
    return absl::OkStatus();
  }

  absl::Status RunOnDevice() {
    TFB_ASSIGN_OR_RETURN(runtime_, CudaRuntime::For(Device::kSimulator));
    buffers_.clear();
    FlashArguments a = {};
    TFB_ASSIGN_OR_RETURN(a.q, UploadView(call.q));
    TFB_ASSIGN_OR_RETURN(a.k, UploadView(call.k));
    TFB_ASSIGN_OR_RETURN(a.v, UploadView(call.v));
    TFB_ASSIGN_OR_RETURN(a.out, UploadView(call.out));
    if (!call.key_mask.empty()) {
      TFB_ASSIGN_OR_RETURN(a.key_mask,
                           Upload(call.key_mask.At<uint8_t>(), call.key_mask.num_elements()));
      std::copy_n(call.key_mask.strides.begin(), 2, a.key_mask_strides);
    }
    if (!call.log_sum_exp.empty()) {
      TFB_ASSIGN_OR_RETURN(a.log_sum_exp, UploadFloats(call.log_sum_exp));
      std::copy_n(call.log_sum_exp.strides.begin(), 3, a.log_sum_exp_strides);
    }
    TFB_ASSIGN_OR_RETURN(a.query_order, UploadOrder(call.query_order, problem.query_tokens));
    TFB_ASSIGN_OR_RETURN(a.key_order, UploadOrder(call.key_order, problem.kv_tokens));
    a.ring_tiles = call.ring.tiles;
    a.first_tile = call.ring.first_tile;
    a.batch = problem.batch;
    a.query_heads = problem.query_heads;
    a.kv_heads = problem.kv_heads;
    a.query_tokens = problem.query_tokens;
    a.kv_tokens = problem.kv_tokens;
    a.head_dim = static_cast<int>(problem.head_dim);
    a.value_dim = static_cast<int>(problem.value_dim);
    a.causal_offset = problem.causal_offset();
    TFB_RETURN_IF_ERROR(FillSchedule(&a.schedule));
    TFB_RETURN_IF_ERROR(FillRule(&a.rule));
    a.scale = static_cast<float>(call.scale != 0 ? call.scale : 1 / std::sqrt(problem.head_dim));
    a.splits = splits;
    const int64_t rows = problem.batch * problem.query_heads * problem.query_tokens;
    TFB_ASSIGN_OR_RETURN(
        const DeviceBuffer partial,
        runtime_->Allocate(splits == 1 ? 0
                                       : splits * rows * (problem.value_dim + 2) * sizeof(float)));
    a.partial = partial.As<float>();
    a.max_blocks = max_blocks;
    const auto forward = problem.dtype == DType::kBF16
                             ? KernelsOn<FlashBf16Kernels>(CudaTarget::kSimulator).forward
                             : KernelsOn<FlashF16Kernels>(CudaTarget::kSimulator).forward;
    TFB_RETURN_IF_ERROR(ToStatus(forward(a, nullptr)));
    if (splits > 1) {
      TFB_RETURN_IF_ERROR(
          ToStatus(KernelsOn<FlashF32Kernels>(CudaTarget::kSimulator).combine(a, nullptr)));
    }
    TFB_RETURN_IF_ERROR(Download(a.out, call.out));
    DeviceView sums = {a.log_sum_exp, {}, Element::kF32};
    return Download(sums, call.log_sum_exp);
  }
  absl::StatusOr<float*> UploadFloats(const ConstTensorView& view) {
    TFB_ASSIGN_OR_RETURN(const float* data, Upload(view.At<float>(), view.num_elements()));
    return const_cast<float*>(data);
  }

  FullPattern full_;
  const Pattern* pattern_;
  NamedTensors inputs_;
  NamedTensors outputs_;
  BlockSchedule schedule_;
  CudaRuntime* runtime_ = nullptr;
  std::vector<DeviceBuffer> buffers_;
};

class FlashMma : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(In, FlashMma, testing::Values(DType::kBF16, DType::kF16),
                         [](const auto& dtype) { return std::string(Name(dtype.param)); });

TEST_P(FlashMma, MatchesLoopsForEveryHeadDim) {
  for (int64_t dim : {1, 7, 32, 40, 64, 80, 128, 256}) {
    Subject(Make(GetParam(), {70, 90, dim, dim})).ExpectMatchesLoops();
    Subject(Make(GetParam(), {70, 90, dim, 257 - dim})).ExpectMatchesLoops();
  }
}

}  // namespace
}  // namespace tfb
