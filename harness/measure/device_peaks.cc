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
      return ToStatus(kernels().multiply_add(blocks, iterations, 0.5f, results_.As<float>()));
    });
  }
  absl::StatusOr<double> MatrixProducts(Element type) {
    const int blocks = multiprocessors() * kMatrixBlocks;
    const int warps = blocks * PeakKernels::kThreads / 32;
    const double flops = 2.0 * 16 * 16 * 8 * warps * PeakKernels::kTiles;
    return BestRate(flops, [&](int64_t iterations) {
      return ToStatus(
          kernels().matrix_products(blocks, iterations, type, 0.5f, results_.As<float>()));
    });
  }
  // Returns FLOP/s of products of square matrices by the library.
  absl::StatusOr<double> LibraryProducts(const PeakLibrary& library, Element type) {
    // 2^40 operations, 1 ms at 1 PFLOP/s; the simulator's library is for tests.
    const int64_t side = runtime_->target() == CudaTarget::kGpu ? 8192 : 16;
    SixteenBitGemmCall call;
    call.rows = call.columns = call.depth = side;
    call.a_stride = call.b_stride = call.c_stride = side;
    call.element = call.c_element = type;
    const size_t bytes = static_cast<size_t>(side * side) * sizeof(uint16_t);
    TFB_ASSIGN_OR_RETURN(const DeviceBuffer operand, runtime_->Allocate(bytes));
    TFB_ASSIGN_OR_RETURN(const DeviceBuffer product, runtime_->Allocate(bytes));
    TFB_ASSIGN_OR_RETURN(const DeviceBuffer workspace, runtime_->Allocate(library.workspace_bytes));
    constexpr int kByte = 0x3C;  // 0x3C3C is 0.01 in bf16 and 1.06 in f16
    TFB_RETURN_IF_ERROR(runtime_->Fill(operand.data(), kByte, bytes));
    call.a = call.b = operand.data();
    call.c = product.data();
    const double cube = static_cast<double>(side) * static_cast<double>(side * side);
    return BestRate(2 * cube, [&](int64_t iterations) {
      absl::Status status;
      for (int64_t i = 0; i < iterations && status.ok(); ++i) {
        status = library.multiply(call, workspace.data(), /*stream=*/nullptr);
      }
      return status;
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
      return ToStatus(error);
    });
  }

 private:
  explicit PeakMeter(CudaRuntime* runtime) : runtime_(runtime) {}

  const PeakKernels& kernels() const { return KernelsOn<PeakKernels>(runtime_->target()); }
  int multiprocessors() const { return runtime_->properties().multiprocessors; }

  // Returns the rate of work that is `amount` an iteration: the best of many passes, since a peak
  // is the device's rate when nothing disturbs it.
  absl::StatusOr<double> BestRate(double amount, absl::FunctionRef<absl::Status(int64_t)> launch) {
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
                                 absl::FunctionRef<absl::Status(int64_t)> launch) {
    TFB_RETURN_IF_ERROR(begin_.Record());
    TFB_RETURN_IF_ERROR(launch(iterations));
    TFB_RETURN_IF_ERROR(end_.Record());
    return end_.SecondsSince(begin_);
  }

  CudaRuntime* runtime_;
  DeviceEvent begin_, end_;
  DeviceBuffer results_;
};

void AddPeak(const CudaRuntime& runtime, const std::string& name, double value, Peak::Kind kind,
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

std::optional<PeakLibrary> CublasPeakLibrary(Device device) {
  const absl::StatusOr<CudaBlas*> blas = CudaBlas::For(device);
  if (!blas.ok()) return std::nullopt;
  const auto multiply = [blas = *blas](const SixteenBitGemmCall& call, void* workspace,
                                       void* stream) {
    return blas->Multiply(call, workspace, stream);
  };
  return PeakLibrary{(*blas)->name(), (*blas)->workspace_bytes(), multiply};
}

absl::Status MeasureDevicePeaks(CudaRuntime* runtime, const std::optional<PeakLibrary>& library,
                                Environment* environment) {
  TFB_ASSIGN_OR_RETURN(PeakMeter meter, PeakMeter::Make(runtime));
  const auto add_flops = [&](const std::string& name, double value, ElementType dtype) {
    AddPeak(*runtime, name, value, Peak::KIND_COMPUTE, dtype, environment);
  };
  TFB_ASSIGN_OR_RETURN(const double adds, meter.MultiplyAdds());
  add_flops("f32 fma", adds, ELEMENT_TYPE_F32);
  TFB_ASSIGN_OR_RETURN(const double bf16, meter.MatrixProducts(Element::kBf16));
  add_flops("bf16 mma.sync", bf16, ELEMENT_TYPE_BF16);
  TFB_ASSIGN_OR_RETURN(const double f16, meter.MatrixProducts(Element::kF16));
  add_flops("f16 mma.sync", f16, ELEMENT_TYPE_F16);
  if (library.has_value()) {
    TFB_ASSIGN_OR_RETURN(const double bf16_products,
                         meter.LibraryProducts(*library, Element::kBf16));
    add_flops("bf16 " + library->name, bf16_products, ELEMENT_TYPE_BF16);
    TFB_ASSIGN_OR_RETURN(const double f16_products, meter.LibraryProducts(*library, Element::kF16));
    add_flops("f16 " + library->name, f16_products, ELEMENT_TYPE_F16);
  }
  TFB_ASSIGN_OR_RETURN(const double copies, meter.Copies());
  AddPeak(*runtime, "copy", copies, Peak::KIND_COPY_BANDWIDTH, ELEMENT_TYPE_UNSPECIFIED,
          environment);
  return absl::OkStatus();
}

}  // namespace tfb
