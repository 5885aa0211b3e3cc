#include "core/flash/flash_mma_testing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>

#include "core/cuda/simulator/simulator.h"
#include "core/flash/rest_testing.h"
#include "core/random.h"
#include "core/schedule/pattern_testing.h"
#include "core/status.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb::flash_mma {

Problem Make(DType dtype, const Sizes& sizes, bool causal) {
  Problem problem = Problem::SelfAttention(sizes.batch, sizes.heads, sizes.queries, sizes.head_dim,
                                           causal, dtype);
  problem.kv_tokens = sizes.keys;
  problem.value_dim = sizes.value_dim;
  problem.kv_heads = sizes.kv_heads;
  return problem;
}

Subject::Subject(const Problem& p, const Pattern* of_keys)
    : problem(p), pattern_(of_keys != nullptr ? of_keys : &full_) {
  inputs_ = RandomInputs(QkvInputs(p), 5);
  outputs_ = NanOutputs(AttentionOutputs(p));
  schedule_ = BuildSchedule(p, *pattern_, kFlashQueries16);
  call.q = inputs_["q"].view();
  call.k = inputs_["k"].view();
  call.v = inputs_["v"].view();
  call.out = outputs_["out"].view();
  call.log_sum_exp = outputs_["log_sum_exp"].view();
}

void Subject::Run(uint64_t seed) {
  cuda_simulator::Settings settings;
  settings.seed = seed;
  cuda_simulator::Configure(settings);
  const absl::Status status = RunOnDevice();
  ASSERT_TRUE(status.ok()) << status << " " << problem.ToString();
  ASSERT_TRUE(cuda_simulator::Findings().empty());
}

void Subject::ExpectRest() {
  const TensorView out = call.out, given = call.out_rest;
  Tensor exact(DType::kF32, out.shape()), rest(problem.dtype, out.shape());
  Fill(exact.view(), NAN);
  Fill(rest.view(), NAN);
  call.out = exact.view();
  call.out_rest = {};
  Run();
  call.out = out;
  call.out_rest = given.empty() ? rest.view() : given;
  Run();
  EXPECT_LE(LargestErrorOfRest(exact.view(), out, call.out_rest), 1) << problem.ToString();
  call.out_rest = given;
}

void Subject::ExpectMatchesLoops(double fp32_factor) {
  Run();
  const NamedTensors expected = Loops();
  const double unit = UnitRoundoff(problem.dtype);
  const double out_unit = UnitRoundoff(call.out.dtype);
  const double fp32 = fp32_factor * Fp32Bound(call.v) +
                      // The spacing of f16's smallest numbers is 2^-24.
                      std::ldexp(MaxAbs(call.v), -25) * static_cast<double>(problem.kv_tokens) +
                      std::ldexp(1, -25);
  const DoubleTensor v(call.v), y(expected.at("out").view()), p(expected.at("weights").view());
  double worst = 0;  // the largest error as a share of the bound
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t h = 0; h < problem.query_heads; ++h) {
      for (int64_t i = 0; i < problem.query_tokens; ++i) {
        std::vector<double> sizes(problem.value_dim, 0.0);
        for (int64_t j = 0; j < problem.kv_tokens; ++j) {
          const double weight = p.Row(b, h, i)[j];
          if (!(weight > 0)) continue;
          const double* row = v.Row(b, h / problem.group(), j);
          for (int64_t c = 0; c < problem.value_dim; ++c) sizes[c] += weight * std::abs(row[c]);
        }
        for (int64_t c = 0; c < problem.value_dim; ++c) {
          const double value = y.Row(b, h, i)[c], size = sizes[c];
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

void Subject::ExpectOrdersGatherAndScatter() {
  constexpr int64_t kEvery = 3;
  const int64_t tokens = problem.query_tokens, keys = problem.kv_tokens;
  Tensor k(problem.dtype, {problem.batch, problem.kv_heads, kEvery * keys, problem.head_dim});
  Tensor v(problem.dtype, {problem.batch, problem.kv_heads, kEvery * keys, problem.value_dim});
  FillNormal(&k, 9, "k");
  FillNormal(&v, 9, "v");
  Tensor mask(DType::kU8, {problem.batch, kEvery * keys}),
      own_mask(DType::kU8, {problem.batch, keys});
  for (int64_t n = 0; n < mask.num_elements(); ++n) mask.span<uint8_t>()[n] = n % 11 != 0;
  CopyElements(Slice(std::as_const(mask).view(), 1, 0, keys, kEvery), own_mask.view());
  call.k = Slice(std::as_const(k).view(), 2, 0, keys, kEvery);
  call.v = Slice(std::as_const(v).view(), 2, 0, keys, kEvery);
  call.key_mask = own_mask.view();
  ExpectMatchesLoops();
  const Tensor expected = out().Clone(), sums = log_sum_exp().Clone();

  std::vector<int32_t> query_order(tokens), key_order(keys);
  for (int64_t n = 0; n < tokens; ++n) query_order[n] = static_cast<int32_t>(tokens - 1 - n);
  for (int64_t n = 0; n < keys; ++n) key_order[n] = static_cast<int32_t>(kEvery * n);
  Tensor q(problem.dtype, call.q.shape());
  for (int64_t i = 0; i < tokens; ++i) {
    CopyElements(Slice(call.q, 2, i, 1), Slice(q.view(), 2, tokens - 1 - i, 1));
  }
  call.q = q.view();
  call.k = k.view();
  call.v = v.view();
  call.key_mask = mask.view();
  call.query_order = {query_order.data(), 0, 0, 1};
  call.key_order = {key_order.data(), 0, 0, 1};
  Fill(out().view(), NAN);
  Run();
  const auto row = [](const Tensor& tensor, int64_t i) { return Slice(tensor.view(), 2, i, 1); };
  for (int64_t i = 0; i < tokens; ++i) {
    EXPECT_EQ(MaxDifference(row(expected, i), row(out(), tokens - 1 - i)), 0) << i;
    EXPECT_EQ(MaxDifference(row(sums, i), row(log_sum_exp(), tokens - 1 - i)), 0) << i;
  }
}

void Subject::ExpectRingsGiveTheSame() {
  ExpectMatchesLoops();
  const Tensor expected = out().Clone();
  const int64_t tiles = (problem.kv_tokens + 63) / 64 + 1;
  for (const int64_t first : {int64_t{2}, tiles - 1, tiles}) {
    Tensor rings[2];
    for (auto [name, view, ring] :
         {std::tuple{"k", &call.k, &rings[0]}, {"v", &call.v, &rings[1]}}) {
      const ConstTensorView own = std::as_const(input(name)).view();
      *ring = Tensor(problem.dtype, {own.dim(0), own.dim(1), tiles * 64, own.dim(3)});
      Fill(ring->view(), NAN);
      for (int64_t j = 0; j < problem.kv_tokens; ++j) {
        const int64_t place = (j / 64 + first) % tiles * 64 + j % 64;
        CopyElements(Slice(own, 2, j, 1), Slice(ring->view(), 2, place, 1));
      }
      *view = ring->view();
    }
    call.ring = {tiles, first};
    Fill(out().view(), NAN);
    Run();
    EXPECT_EQ(MaxDifference(expected.view(), call.out), 0) << first;
  }
}

NamedTensors Subject::Loops() const {
  NamedTensors expected;
  const double scale = call.scale != 0 ? call.scale : 1 / std::sqrt(problem.head_dim);
  Inputs inputs{{"q", call.q}, {"k", call.k}, {"v", call.v}};
  if (!call.key_mask.empty()) inputs.Set("key_mask", call.key_mask);
  const KeyMask is_token(inputs);
  const ShownPairs shows(*pattern_, problem.query_tokens, problem.kv_tokens);
  const DoubleTensor q(call.q), k(call.k);
  DefinitionRequest request;
  request.weights = true;
  DefineAttention(
      problem, inputs, request,
      [&](int64_t b, int64_t h, int64_t i, int64_t j) {
        const bool causal = !problem.causal || j <= i + problem.causal_offset();
        if (!causal || !is_token(b, j) || !shows(h % pattern_->heads(), i, j)) return kNotSeen;
        const double dot = Dot(q.Row(b, h, i), k.Row(b, h / problem.group(), j), problem.head_dim);
        return change(b, h, i, j, scale * dot);
      },
      &expected);
  return expected;
}

// ---- On the device ----

absl::StatusOr<DeviceView> Subject::UploadView(const ConstTensorView& view) {
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

absl::StatusOr<float*> Subject::UploadFloats(const ConstTensorView& view) {
  TFB_ASSIGN_OR_RETURN(const float* data, Upload(view.At<float>(), view.num_elements()));
  return const_cast<float*>(data);
}

absl::StatusOr<TokenOrder> Subject::UploadOrder(TokenOrder order, int64_t count) {
  TFB_ASSIGN_OR_RETURN(order.tokens, Upload(order.tokens, count));
  return order;
}

absl::StatusOr<DeviceIds> Subject::UploadIds(const ConstTensorView& ids) {
  if (ids.empty()) return DeviceIds{};
  TFB_ASSIGN_OR_RETURN(const int32_t* data, Upload(ids.At<int32_t>(), ids.num_elements()));
  return DeviceIds{data, ids.stride(0), ids.stride(1)};
}

absl::Status Subject::Download(const DeviceView& device, const TensorView& view) {
  int64_t elements = view.num_elements() == 0 ? 0 : 1;
  for (int axis = 0; axis < view.rank && elements > 0; ++axis) {
    elements += (view.dim(axis) - 1) * view.stride(axis);
  }
  return runtime_->CopyToHost(view.mutable_data(), device.data, elements * SizeOf(view.dtype));
}

absl::Status Subject::FillRule(ScoreRule* device) {
  *device = call.rule;
  const auto upload = [this](const float** array, int64_t count) -> absl::Status {
    TFB_ASSIGN_OR_RETURN(*array, Upload(*array, count));
    return absl::OkStatus();
  };
  const int64_t bias = problem.query_heads * problem.head_dim;
  TFB_RETURN_IF_ERROR(upload(&device->content_bias, bias));
  TFB_RETURN_IF_ERROR(upload(&device->position_bias, bias));
  for (DistanceEntries* entries : {&device->relu_multiplier, &device->bias}) {
    TFB_RETURN_IF_ERROR(upload(&entries->values, entries->heads * entries->row));
  }
  TFB_RETURN_IF_ERROR(upload(&device->soft_span.span, device->soft_span.count));
  LabelKeys& labels = device->label_keys;
  TFB_RETURN_IF_ERROR(upload(&labels.keys, labels.heads * 2 * problem.head_dim));
  TFB_RETURN_IF_ERROR(upload(&labels.biases, labels.heads * 2));
  if (relative_keys.empty()) return absl::OkStatus();
  RelativeKeyRows& keys = device->relative_key_rows;
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

absl::Status Subject::FillSchedule(ScheduleView* view) {
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

absl::Status Subject::RunOnDevice() {
  TFB_ASSIGN_OR_RETURN(runtime_, CudaRuntime::For(KernelDevice()));
  buffers_.clear();
  FlashArguments a = {};
  TFB_ASSIGN_OR_RETURN(a.q, UploadView(call.q));
  TFB_ASSIGN_OR_RETURN(a.k, UploadView(call.k));
  TFB_ASSIGN_OR_RETURN(a.v, UploadView(call.v));
  TFB_ASSIGN_OR_RETURN(a.out, UploadView(call.out));
  if (!call.out_rest.empty()) {
    TFB_ASSIGN_OR_RETURN(a.out_rest, UploadView(call.out_rest));
  }
  if (!call.key_mask.empty()) {
    TFB_ASSIGN_OR_RETURN(a.key_mask,
                         Upload(call.key_mask.At<uint8_t>(), call.key_mask.num_elements()));
    std::copy_n(call.key_mask.strides.begin(), 2, a.key_mask_strides);
  }
  if (!call.log_sum_exp.empty()) {
    TFB_ASSIGN_OR_RETURN(a.log_sum_exp, UploadFloats(call.log_sum_exp));
    std::copy_n(call.log_sum_exp.strides.begin(), 3, a.log_sum_exp_strides);
  }
  TFB_ASSIGN_OR_RETURN(a.query_ids, UploadIds(call.query_ids));
  TFB_ASSIGN_OR_RETURN(a.key_ids, UploadIds(call.key_ids));
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
  a.decode_queries = kFlashQueries16;
  const int64_t rows = problem.batch * problem.query_heads * problem.query_tokens;
  TFB_ASSIGN_OR_RETURN(
      const DeviceBuffer partial,
      runtime_->Allocate(splits == 1 ? 0
                                     : splits * rows * (problem.value_dim + 2) * sizeof(float)));
  a.partial = partial.As<float>();
  a.max_blocks = max_blocks;
  const CudaDevice& device = runtime_->properties();
  a.multiprocessors = device.multiprocessors;
  a.compute_capability = device.compute_capability_major * 10 + device.compute_capability_minor;
  const auto forward = decodes ? KernelsOn<FlashDecodeMmaKernels>(runtime_->target()).forward
                       : problem.dtype == DType::kBF16
                           ? KernelsOn<FlashBf16Kernels>(runtime_->target()).forward
                           : KernelsOn<FlashF16Kernels>(runtime_->target()).forward;
  TFB_RETURN_IF_ERROR(ToStatus(forward(a, nullptr)));
  if (splits > 1) {
    TFB_RETURN_IF_ERROR(
        ToStatus(KernelsOn<FlashF32Kernels>(runtime_->target()).combine(a, nullptr)));
  }
  TFB_RETURN_IF_ERROR(Download(a.out, call.out));
  if (!call.out_rest.empty()) TFB_RETURN_IF_ERROR(Download(a.out_rest, call.out_rest));
  DeviceView sums = {a.log_sum_exp, {}, Element::kF32};
  return Download(sums, call.log_sum_exp);
}

}  // namespace tfb::flash_mma
