#include "positional/rope/rope.h"

#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/cuda/device_array.h"
#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/flash/flash_technique.h"
#include "core/flash/rows.h"
#include "positional/rope/rope_cuda.h"

namespace tfb::rope {
namespace {

absl::StatusOr<int64_t> RotaryDims(const Problem& problem, const RopeOptions& options) {
  if (options.rotary_dims == 0) return problem.head_dim / 2 * 2;
  if (options.rotary_dims % 2 != 0 || options.rotary_dims > problem.head_dim) {
    return absl::InvalidArgumentError(absl::StrCat("rotary_dims is ", options.rotary_dims,
                                                   "; allowed are even numbers up to head_dim, ",
                                                   problem.head_dim));
  }
  return options.rotary_dims;
}

// Rotates queries and keys into copies of the problem's dtype. It computes in `Real`: float in fp32,
// and double in 16 bits, where the copies are rounded as in the definition: fp32 would round one of
// some 2^16 elements the other way.
template <class Real>
class Rotation : public FlashStep {
 public:
  Rotation(const Problem& problem, const RopeOptions& options, int64_t rotary_dims)
      : problem_(problem), options_(options), pairs_(rotary_dims / 2) {}

  double flops() const override {
    constexpr double kOfPair = 6;  // four products and two sums turn a pair of channels
    const Problem& p = problem_;
    const int64_t rows = p.query_heads * p.query_tokens + p.kv_heads * p.kv_tokens;
    return kOfPair * static_cast<double>(p.batch * rows * pairs_);
  }

  // Computes cos and sin of every position from the first of keys and queries to the last of both.
  absl::Status Setup(Device device, const Inputs&, const Execution&) override {
    device_ = device;
    first_ = std::min<int64_t>(0, problem_.causal_offset());
    const int64_t positions = std::max<int64_t>(problem_.kv_tokens - first_, 0);
    std::vector<Real> cos(positions * pairs_), sin(positions * pairs_);
    for (int64_t t = 0; t < pairs_; ++t) {
      const double frequency =
          std::pow(options_.base, -static_cast<double>(t) / static_cast<double>(pairs_));
      for (int64_t n = 0; n < positions; ++n) {
        const double angle = static_cast<double>(n + first_ + options_.position_offset) * frequency;
        cos[n * pairs_ + t] = static_cast<Real>(std::cos(angle));
        sin[n * pairs_ + t] = static_cast<Real>(std::sin(angle));
      }
    }
    TFB_ASSIGN_OR_RETURN(cos_, DeviceArray<Real>::Create(device, cos));
    TFB_ASSIGN_OR_RETURN(sin_, DeviceArray<Real>::Create(device, sin));
    return absl::OkStatus();
  }

  void LayOut(Workspace* workspace, Inputs* tensors) override {
    const auto take = [&](int64_t heads, int64_t tokens) {
      const Shape shape = {problem_.batch, heads, tokens, problem_.head_dim};
      const int64_t bytes = NumElements(shape) * SizeOf(problem_.dtype);
      return TensorView(workspace->Take<std::byte>(bytes), problem_.dtype, shape);
    };
    q_ = take(problem_.query_heads, problem_.query_tokens);
    k_ = take(problem_.kv_heads, problem_.kv_tokens);
    tensors->Set("q_rotated", q_);
    tensors->Set("k_rotated", k_);
  }

  absl::Status Run(const Inputs& tensors, const Outputs&, const Execution& execution) override {
    const ConstTensorView q = tensors.Get("q"), k = tensors.Get("k");
    if (device_ != Device::kCpu) return TurnOnCuda(q, q_, k, k_, execution);
    Turn(q, problem_.causal_offset(), q_, execution);
    Turn(k, 0, k_, execution);
    return absl::OkStatus();
  }

  absl::Status CheckBackward(Device) const override { return absl::OkStatus(); }
  // The gradient of a rotation's argument is the result's gradient, rotated back.
  absl::Status Backward(const Inputs&, const Outputs& gradients, const ParameterGradients&,
                        const Execution& execution) override {
    TFB_RETURN_IF_ERROR(AddTurnedBack(gradients.Get("q_rotated"), problem_.causal_offset(),
                                      gradients.Get("q"), execution));
    return AddTurnedBack(gradients.Get("k_rotated"), 0, gradients.Get("k"), execution);
  }

 private:
  static TurnedRows RowsFrom(const ConstTensorView& from, const TensorView& to, int64_t first) {
    return {ToDeviceView(from), ToDeviceView(to), from.dim(0), from.dim(1), from.dim(2), first};
  }
  absl::Status TurnOnCuda(const ConstTensorView& q, const TensorView& turned_q,
                          const ConstTensorView& k, const TensorView& turned_k,
                          const Execution& execution) const {
    TurnArguments<Real> arguments;
    arguments.queries = RowsFrom(q, turned_q, problem_.causal_offset() - first_);
    arguments.keys = RowsFrom(k, turned_k, -first_);
    arguments.cos = cos_.data();
    arguments.sin = sin_.data();
    arguments.channels = static_cast<int>(problem_.head_dim);
    arguments.pairs = static_cast<int>(pairs_);
    arguments.half = options_.layout == RopeOptions::Layout::kHalf;
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    return ToStatus(
        KernelsOn<RopeKernels<Real>>(runtime->target()).turn(arguments, execution.stream));
  }

  // Calls body(b, h, n, row) for each row of a tensor, loaded and turned by the position n + offset,
  // forth or back.
  template <class Body>
  void ForEachTurned(const ConstTensorView& from, int64_t offset, bool back,
                     const Execution& execution, const Body& body) const {
    constexpr int64_t kRows =
        64;  // rows of a task: 64 rows x 64 channels x 4 B = 16 KiB, enough to outweigh its start
    const int64_t heads = from.dim(1), tokens = from.dim(2), channels = from.dim(3);
    const int64_t blocks = (tokens + kRows - 1) / kRows;
    execution.pool->ParallelFor(from.dim(0) * heads * blocks, [&](int64_t task, int) {
      const int64_t b = task / blocks / heads, h = task / blocks % heads;
      const int64_t end = std::min(tokens, (task % blocks + 1) * kRows);
      float row[kMaxHeadDim];
      for (int64_t n = task % blocks * kRows; n < end; ++n) {
        LoadRow(from, from.Offset(b, h, n), from.stride(3), channels, row);
        TurnRow(n + offset - first_, back, row);
        body(b, h, n, row);
      }
    });
  }
  void Turn(const ConstTensorView& from, int64_t offset, const TensorView& to,
            const Execution& execution) const {
    ForEachTurned(from, offset, /*back=*/false, execution,
                  [&](int64_t b, int64_t h, int64_t n, const float* row) {
                    StoreRow(row, from.dim(3), to, to.Offset(b, h, n), to.stride(3));
                  });
  }
  // Adds the rows of `from`, turned back, to those of `to`, f32 or empty.
  absl::Status AddTurnedBack(const ConstTensorView& from, int64_t offset, const TensorView& to,
                             const Execution& execution) const {
    if (to.empty()) return absl::OkStatus();
    if (device_ != Device::kCpu) {
      const int cells = static_cast<int>(problem_.head_dim - pairs_);
      const TurnBack<Real> turn = {RowsFrom(from, to, offset - first_),
                                   cos_.data(),
                                   sin_.data(),
                                   cells,
                                   static_cast<int>(pairs_),
                                   options_.layout == RopeOptions::Layout::kHalf};
      return ForEach(device_, from.dim(0) * from.dim(1) * from.dim(2) * cells, turn, execution);
    }
    ForEachTurned(from, offset, /*back=*/true, execution,
                  [&](int64_t b, int64_t h, int64_t n, const float* row) {
                    float* sum = to.MutableAt<float>(b, h, n);
                    for (int64_t c = 0; c < to.dim(3); ++c) sum[c * to.stride(3)] += row[c];
                  });
    return absl::OkStatus();
  }

  void TurnRow(int64_t index, bool back, float* row) const {
    const Real* c = cos_.data() + index * pairs_;
    const Real* s = sin_.data() + index * pairs_;
    const bool half = options_.layout == RopeOptions::Layout::kHalf;
    float* second = row + (half ? pairs_ : 1);
    // To turn back is to exchange the two channels of a pair.
    if (back) {
      TurnPairs(c, s, second, row, half ? 1 : 2);
    } else {
      TurnPairs(c, s, row, second, half ? 1 : 2);
    }
  }
  void TurnPairs(const Real* c, const Real* s, float* first, float* second, int64_t step) const {
    for (int64_t t = 0; t < pairs_; ++t) {
      const Real a = first[t * step], b = second[t * step];
      first[t * step] = static_cast<float>(a * c[t] - b * s[t]);
      second[t * step] = static_cast<float>(a * s[t] + b * c[t]);
    }
  }

  Problem problem_;
  RopeOptions options_;
  int64_t pairs_;
  Device device_ = Device::kCpu;
  int64_t first_ = 0;      // position, less position_offset, of the tables' first row
  DeviceArray<Real> cos_;  // [positions][pairs]
  DeviceArray<Real> sin_;
  TensorView q_;  // the copies
  TensorView k_;
};

// Rotates one row in place, as the formula states it.
void RotateByDefinition(const RopeOptions& options, int64_t rotary_dims, int64_t position,
                        double* row) {
  for (int64_t t = 0; t < rotary_dims / 2; ++t) {
    const double angle =
        static_cast<double>(position) *
        std::pow(options.base, -2.0 * static_cast<double>(t) / static_cast<double>(rotary_dims));
    const bool half = options.layout == RopeOptions::Layout::kHalf;
    double& a = row[half ? t : 2 * t];
    double& b = row[half ? t + rotary_dims / 2 : 2 * t + 1];
    const double turned_a = a * std::cos(angle) - b * std::sin(angle);
    b = a * std::sin(angle) + b * std::cos(angle);
    a = turned_a;
  }
}

class Rope : public FlashTechnique<RopeOptions> {
 public:
  Rope()
      : FlashTechnique({"rope", "positional", "Rotary position embedding",
                        "Su et al. 2021, arXiv:2104.09864v5, section 3.2.2"}) {}

 private:
  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    TFB_ASSIGN_OR_RETURN(const int64_t rotary_dims, RotaryDims(job.problem, job.options));
    FlashPlan plan(job.problem);
    if (job.problem.dtype == DType::kF32) {
      plan.AddStep<Rotation<float>>(job.problem, job.options, rotary_dims);
    } else {
      plan.AddStep<Rotation<double>>(job.problem, job.options, rotary_dims);
    }
    return plan.Tensors("q_rotated", "k_rotated", "v");
  }

  absl::Status Definition(const Problem& problem, const RopeOptions& options, const NamedTensors&,
                          const Inputs& inputs, const DefinitionRequest& request,
                          NamedTensors* outputs) const override {
    TFB_ASSIGN_OR_RETURN(const int64_t rotary_dims, RotaryDims(problem, options));
    NamedTensors turned;
    for (const char* name : {"q", "k"}) {
      const ConstTensorView view = inputs.Get(name);
      Tensor& rows = turned[name] = Tensor(DType::kF64, view.shape());
      CopyElements(view, rows.view());
      const int64_t first =
          options.position_offset + (name[0] == 'q' ? problem.causal_offset() : 0);
      const int64_t count = view.dim(0) * view.dim(1) * view.dim(2);
      for (int64_t n = 0; n < count; ++n) {
        RotateByDefinition(options, rotary_dims, first + n % view.dim(2),
                           rows.span<double>().data() + n * view.dim(3));
      }
      if (problem.dtype != DType::kF32) rows = rows.CloneAs(problem.dtype);
    }
    Inputs rotated = inputs;
    rotated.Set("q", turned["q"].view());
    rotated.Set("k", turned["k"].view());
    DefineMaskedAttention(problem, rotated, request, PairScore(), outputs);
    return absl::OkStatus();
  }
};

const bool registered = RegisterTechnique<Rope>();

}  // namespace
}  // namespace tfb::rope
