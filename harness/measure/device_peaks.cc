#include "harness/measure/device_peaks.h"

#include <algorithm>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "core/status.h"
#include "harness/measure/peak_kernels.h"

namespace tfb {
namespace {

// A pass is long compared with a launch, and short compared with the time a GPU takes to become
// hot.
constexpr double kPassSeconds = 0.005;
constexpr int kPasses = 20;

// Each multiprocessor gets 2048 threads of multiply-adds, as many as it holds, which more than
// hides the 4 cycles of each. For matrix products 16 warps of 4 tiles suffice.
constexpr int kAddBlocks = 8;
constexpr int kMatrixBlocks = 2;
constexpr int kCopyBlocks = 16;

class PeakMeter {
 public:
  static absl::StatusOr<PeakMeter> Make(CudaRuntime* runtime) {
    PeakMeter meter(runtime);
    TFB_ASSIGN_OR_RETURN(meter.begin_, DeviceEvent::Make(runtime));
    TFB_ASSIGN_OR_RETURN(meter.end_, DeviceEvent::Make(runtime));
    const int threads = meter.multiprocessors() * kAddBlocks * PeakKernels::kThreads;
    TFB_ASSIGN_OR_RETURN(meter.results_, runtime->Allocate(threads * sizeof(float)));
    return meter;
  }

  // Returns FLOP/s.
  absl::StatusOr<double> MultiplyAdds() {
    const int blocks = multiprocessors() * kAddBlocks;
    const double flops = 2.0 * blocks * PeakKernels::kThreads * PeakKernels::kChains;
    return BestRate(flops, [&](int64_t iterations) {
      return kernels().multiply_add(blocks, iterations, 0.5f, results_.As<float>());
    });
  }
  absl::StatusOr<double> MatrixProducts(Element type) {
    const int blocks = multiprocessors() * kMatrixBlocks;
    const int warps = blocks * PeakKernels::kThreads / 32;
    const double flops = 2.0 * 16 * 16 * 8 * warps * PeakKernels::kTiles;
    return BestRate(flops, [&](int64_t iterations) {
      return kernels().matrix_products(blocks, iterations, type, 0.5f, results_.As<float>());
    });
  }
  // Returns B/s, read and written.
  absl::StatusOr<double> Copies() {
    // The buffer is sixteen times the cache, so that almost none of it is read from the cache.
    const CudaDevice& gpu = runtime_->properties();
    const int64_t wanted = gpu.l2_cache_bytes > 0 ? 16 * gpu.l2_cache_bytes : int64_t{1} << 30;
    const size_t bytes = static_cast<size_t>(std::min(wanted, gpu.memory_bytes / 16)) / 16 * 16;
    TFB_ASSIGN_OR_RETURN(const DeviceBuffer from, runtime_->Allocate(bytes));
    TFB_ASSIGN_OR_RETURN(const DeviceBuffer to, runtime_->Allocate(bytes));
    TFB_RETURN_IF_ERROR(runtime_->Fill(from.data(), 1, bytes));
    return BestRate(2.0 * static_cast<double>(bytes), [&](int64_t iterations) {
      const char* error = nullptr;
      for (int64_t i = 0; i < iterations && error == nullptr; ++i) {
        error = kernels().copy(multiprocessors() * kCopyBlocks, to.data(), from.data(), bytes);
      }
      return error;
    });
  }

 private:
  explicit PeakMeter(CudaRuntime* runtime) : runtime_(runtime) {}

  const PeakKernels& kernels() const { return KernelsOn<PeakKernels>(runtime_->target()); }
  int multiprocessors() const { return runtime_->properties().multiprocessors; }

  // Returns the rate of work that is `amount` an iteration: the best of many passes, since a peak
  // is the device's rate when nothing disturbs it.
  absl::StatusOr<double> BestRate(double amount, absl::FunctionRef<const char*(int64_t)> launch) {
    int64_t iterations = 1;
    double seconds = 0;
    for (;; iterations *= 2) {
      TFB_ASSIGN_OR_RETURN(seconds, Seconds(iterations, launch));
      if (seconds >= kPassSeconds) break;
    }
    for (int pass = 1; pass < kPasses; ++pass) {
      TFB_ASSIGN_OR_RETURN(const double again, Seconds(iterations, launch));
      seconds = std::min(seconds, again);
    }
    return amount * static_cast<double>(iterations) / seconds;
  }
  absl::StatusOr<double> Seconds(int64_t iterations,
                                 absl::FunctionRef<const char*(int64_t)> launch) {
    TFB_RETURN_IF_ERROR(begin_.Record());
    TFB_RETURN_IF_ERROR(ToStatus(launch(iterations)));
    TFB_RETURN_IF_ERROR(end_.Record());
    return end_.SecondsSince(begin_);
  }

  CudaRuntime* runtime_;
  DeviceEvent begin_, end_;
  DeviceBuffer results_;
};

void AddPeak(const CudaRuntime& runtime, const char* name, double value, Peak::Kind kind,
             ElementType dtype, Environment* environment) {
  Peak* peak = environment->add_peaks();
  peak->set_name(name);
  peak->set_value(value);
  peak->set_unit(kind == Peak::KIND_COMPUTE ? "FLOP/s" : "B/s");
  peak->set_kind(kind);
  peak->set_device(runtime.target() == CudaTarget::kGpu ? DEVICE_TYPE_CUDA : DEVICE_TYPE_SIMULATOR);
  peak->set_dtype(dtype);
}

}  // namespace

absl::Status MeasureDevicePeaks(CudaRuntime* runtime, Environment* environment) {
  TFB_ASSIGN_OR_RETURN(PeakMeter meter, PeakMeter::Make(runtime));
  const auto add_flops = [&](const char* name, double value, ElementType dtype) {
    AddPeak(*runtime, name, value, Peak::KIND_COMPUTE, dtype, environment);
  };
  TFB_ASSIGN_OR_RETURN(const double adds, meter.MultiplyAdds());
  add_flops("f32 fma", adds, ELEMENT_TYPE_F32);
  TFB_ASSIGN_OR_RETURN(const double bf16, meter.MatrixProducts(Element::kBf16));
  add_flops("bf16 mma.sync", bf16, ELEMENT_TYPE_BF16);
  TFB_ASSIGN_OR_RETURN(const double f16, meter.MatrixProducts(Element::kF16));
  add_flops("f16 mma.sync", f16, ELEMENT_TYPE_F16);
  TFB_ASSIGN_OR_RETURN(const double copies, meter.Copies());
  AddPeak(*runtime, "copy", copies, Peak::KIND_COPY_BANDWIDTH, ELEMENT_TYPE_UNSPECIFIED,
          environment);
  return absl::OkStatus();
}

}  // namespace tfb
