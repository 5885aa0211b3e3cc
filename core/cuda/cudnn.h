// cuDNN, which is opened at run time: it compiles a graph of operations into one kernel.
//
// A graph is built of tensors and operations and planned for a GPU. The plan is executed with
// pointers to those of its tensors that are not virtual. See NVIDIA's "cuDNN backend API".
#ifndef TFB_CORE_CUDA_CUDNN_H_
#define TFB_CORE_CUDA_CUDNN_H_

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/cuda/cudnn_functions.h"
#include "core/problem.h"

namespace tfb {

// The library. It stays open as long as the program.
class Cudnn {
 public:
  // Returns Unavailable, with the missing name, where the library cannot be opened.
  static absl::StatusOr<const Cudnn*> Open();

  const CudnnFunctions& functions() const { return functions_; }
  std::string name() const;                 // Returns, say, "cuDNN 9.19.0".
  int version() const { return version_; }  // 10000 major + 100 minor + patch
  // Converts the result of a call to a status: Unimplemented where cuDNN says that it does not
  // support something, and Internal for other errors; with cuDNN's reason, after `doing`:
  // "finalizing the plan".
  absl::Status ToStatus(absl::string_view doing, int status) const;
  // Returns why the last call of this thread failed, or found nothing.
  std::string LastReason() const;

 private:
  explicit Cudnn(const CudnnFunctions& functions)
      : functions_(functions), version_(static_cast<int>(functions.get_version())) {}
  static absl::StatusOr<const Cudnn*> Load();

  CudnnFunctions functions_;
  int version_;
};

// Returns the innermost reason of cuDNN's message about an error: a chain of calls with the innermost
// first, in lines such as "Warning: STATUS; Reason: ...". Without a reason it is the first line.
std::string CudnnReason(absl::string_view message);

// A descriptor and its ownership. It is movable.
class CudnnDescriptor {
 public:
  CudnnDescriptor() = default;
  static absl::StatusOr<CudnnDescriptor> Create(const Cudnn* cudnn, int type);
  CudnnDescriptor(CudnnDescriptor&& other) noexcept { *this = std::move(other); }
  CudnnDescriptor& operator=(CudnnDescriptor&& other) noexcept;
  ~CudnnDescriptor();

  void* get() const { return descriptor_; }
  absl::Status Set(int name, int type, int64_t count, const void* elements);
  // Sets an attribute of one element.
  template <class T>
  absl::Status Set(int name, int type, const T& element) {
    return Set(name, type, 1, &element);
  }
  absl::Status SetDescriptor(int name, void* descriptor);
  // Finalizes the descriptor; call it once, after all Sets.
  absl::Status Finalize();

 private:
  const Cudnn* cudnn_ = nullptr;
  void* descriptor_ = nullptr;
};

// The GPU that a graph is planned for.
struct CudnnTarget {
  void* handle = nullptr;  // a GPU
  // Properties of a GPU that need not be present, instead of a handle, as cuDNN 9.8 and later write
  // and read them (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION). Such a plan cannot be executed.
  std::string device_properties;
};

// A planned graph. It is movable.
class CudnnPlan {
 public:
  CudnnPlan() = default;
  size_t workspace_bytes() const { return workspace_bytes_; }

  // Enqueues the plan. `pointers` belong to the tensors `ids`; they point to device memory, or to
  // host memory for a single value. With the same pointers as in the last call, it allocates
  // nothing.
  absl::Status Execute(void* handle, absl::Span<const int64_t> ids,
                       absl::Span<void* const> pointers, void* workspace);

 private:
  friend class CudnnGraph;
  const Cudnn* cudnn_ = nullptr;
  CudnnDescriptor plan_;
  size_t workspace_bytes_ = 0;
  // the last call's variant pack
  CudnnDescriptor pack_;
  std::vector<void*> pointers_;  // the last call's pointers and the workspace
};

// A graph of operations on tensors. It keeps the first error, and Plan returns that.
class CudnnGraph {
 public:
  // A tensor of the graph, which owns it; null after an error.
  using Tensor = void*;

  explicit CudnnGraph(const Cudnn* cudnn) : cudnn_(cudnn) {}

  // The alignment of memory in bytes, which cuDNN trusts the given addresses to have.
  static constexpr int64_t kAlignment = 16;

  // Adds memory that the caller gives, by id, aligned to kAlignment. Strides are in elements.
  Tensor Memory(int64_t id, int dtype, std::vector<int64_t> dims, std::vector<int64_t> strides);
  // Adds one number in host memory that the caller gives, by id, as [1, 1, 1, 1].
  Tensor Value(int64_t id, int dtype);
  // Adds a tensor between two operations.
  Tensor Virtual(int dtype, std::vector<int64_t> dims);

  // y = a b over the last two dimensions, computed in fp32. Returns y.
  Tensor MatMul(Tensor a, Tensor b, Tensor y);
  // y = the reduction of x over the dimensions that are 1 in y, computed in fp32. Returns y.
  Tensor Reduce(int operation, Tensor x, Tensor y);
  // y = mode(x), mode(x, b), or b_t: x where t, else b. Computed in `dtype`. Returns y.
  Tensor Pointwise(int mode, int dtype, Tensor x, Tensor b, Tensor y, Tensor t = nullptr);
  // y = the index of each element of x along the axis. Returns y.
  Tensor Index(int64_t axis, Tensor x, Tensor y);

  // Returns the best plan by cuDNN's heuristics, or Unimplemented, with the library's reason, where
  // cuDNN supports none.
  absl::StatusOr<CudnnPlan> Plan(const CudnnTarget& target);

 private:
  // Keeps a descriptor and returns it, or keeps its error.
  void* Keep(absl::StatusOr<CudnnDescriptor> descriptor);
  Tensor Add(absl::StatusOr<CudnnDescriptor> operation, Tensor y);

  absl::StatusOr<CudnnDescriptor> MakeTensor(int64_t id, int dtype,
                                             const std::vector<int64_t>& dims,
                                             const std::vector<int64_t>& strides, bool is_virtual,
                                             bool is_value) const;
  absl::StatusOr<CudnnDescriptor> MakeMatMul(Tensor a, Tensor b, Tensor y);
  absl::StatusOr<CudnnDescriptor> MakeReduction(int operation, Tensor x, Tensor y);
  absl::StatusOr<CudnnDescriptor> MakePointwise(int mode, int dtype, int64_t axis, Tensor x,
                                                Tensor b, Tensor y, Tensor t);
  absl::StatusOr<CudnnPlan> PlanWith(int heuristic, void* graph, const CudnnTarget& target,
                                     void* device_properties) const;

  const Cudnn* cudnn_;
  absl::Status status_;
  std::vector<CudnnDescriptor> descriptors_;
  std::vector<void*> operations_;
  int64_t next_virtual_id_ = int64_t{1} << 32;  // ids below this are the caller's
};

// A GPU's handle. It is thread-safe: it runs one call at a time.
class CudnnDevice {
 public:
  // Returns the handle of the first GPU, which lives as long as the program. Returns Unavailable,
  // with the reason, where the library or the GPU is not present.
  static absl::StatusOr<CudnnDevice*> Get();

  const Cudnn& cudnn() const { return *cudnn_; }
  absl::StatusOr<CudnnPlan> Plan(CudnnGraph* graph);
  absl::Status Execute(CudnnPlan* plan, absl::Span<const int64_t> ids,
                       absl::Span<void* const> pointers, void* workspace, void* stream);

 private:
  CudnnDevice(const Cudnn* cudnn, void* handle) : cudnn_(cudnn), handle_(handle) {}
  static absl::StatusOr<CudnnDevice*> Create();

  const Cudnn* cudnn_;
  void* handle_;
  std::mutex mutex_;  // guards the handle
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_CUDNN_H_
