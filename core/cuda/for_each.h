// Calls of functors over elements or rows, on every device: see core/cuda/functor.h.
#ifndef TFB_CORE_CUDA_FOR_EACH_H_
#define TFB_CORE_CUDA_FOR_EACH_H_

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "core/cuda/functor.h"
#include "core/cuda/runtime.h"
#include "core/problem.h"
#include "core/status.h"
#include "core/technique.h"

namespace tfb {

// A few columns of a row, on the CPU.
class HostPiece {
 public:
  static constexpr int kMost = 256;
  HostPiece(int64_t first, int count) : first_(first), count_(count) {}
  int64_t first() const { return first_; }
  int64_t end() const { return first_ + count_; }
  int count() const { return count_; }

  void Load(const DeviceView& view, int64_t offset, int64_t stride, float* to) const;
  void Store(const float* from, const DeviceView& view, int64_t offset, int64_t stride) const;
  void Copy(const float* from, float* to) const { std::copy_n(from + first_, count_, to + first_); }

 private:
  int64_t first_;
  int count_;
};

// Enqueues the kernel of a functor on the execution's stream.
template <class Functor>
absl::Status LaunchFunctor(Device device, int64_t rows, int64_t columns, const Functor& functor,
                           const Execution& execution) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  const ForEachKernel<Functor>& kernel = KernelsOn<ForEachKernel<Functor>>(runtime->target());
  return ToStatus(kernel.run(functor, rows, columns, execution.stream));
}

// Calls functor(n) for 0 <= n < count: on the CPU in the execution's pool before it returns, on
// CUDA in a kernel that it enqueues. It allocates nothing and uses no workspace. Returns the errors
// of CudaRuntime::For and of the launch.
template <class Functor>
absl::Status ForEach(Device device, int64_t count, const Functor& functor,
                     const Execution& execution) {
  if (device != Device::kCpu) return LaunchFunctor(device, count, 1, functor, execution);
  const int64_t elements =  // of a task
      std::clamp<int64_t>(count / (8 * execution.pool->threads()), 1, 256);
  execution.pool->ParallelForRanges(count, elements, [&](int64_t begin, int64_t end, int) {
    const Functor own = functor;  // a local, which what it writes is known not to overlap
    for (int64_t n = begin; n < end; ++n) own(n);
  });
  return absl::OkStatus();
}

// Calls functor(row, piece) for 0 <= row < rows and pieces that cover 0 to columns - 1, likewise.
template <class Functor>
absl::Status ForEachInRows(Device device, int64_t rows, int64_t columns, const Functor& functor,
                           const Execution& execution) {
  if (device != Device::kCpu) return LaunchFunctor(device, rows, columns, functor, execution);
  const int64_t rows_of_task = std::max<int64_t>(4096 / std::max<int64_t>(columns, 1), 1);
  execution.pool->ParallelForRanges(rows, rows_of_task, [&](int64_t begin, int64_t end, int) {
    const Functor own = functor;
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t first = 0; first < columns; first += HostPiece::kMost) {
        const int64_t count = std::min<int64_t>(columns - first, HostPiece::kMost);
        own(row, HostPiece(first, static_cast<int>(count)));
      }
    }
  });
  return absl::OkStatus();
}

}  // namespace tfb

#endif  // TFB_CORE_CUDA_FOR_EACH_H_
