// Transformer-XL's relative positions as a score rule of engine flash, for all layers that score
// with them:
//
//   s_ij = ((q_i + u) . k_j + (q_i + v) . (r_(i-j) W_r)) / sqrt(head_dim)
//
// r_d W_r is computed once for every distance d that a call can have. The engine slides it past the
// queries, each of which reads it one distance further on: the paper's appendix B shifts a product
// of all tokens x tokens for that, which is never stored here.
#ifndef TFB_CORE_LAYERS_ATTENTION_RELATIVE_POSITIONS_H_
#define TFB_CORE_LAYERS_ATTENTION_RELATIVE_POSITIONS_H_

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "core/cuda/device_array.h"
#include "core/flash/flash.h"
#include "core/flash/flash_backward.h"
#include "core/flash/parameter_gradients.h"
#include "core/flash/score_terms.h"
#include "core/layers/attention/position_products.h"
#include "core/tensor.h"
#include "core/thread_pool.h"
#include "core/workspace.h"

namespace tfb::layers {

// The distances i - j from `first` to `last`, negative ones being those of later keys.
struct DistanceRange {
  int64_t first = 0;
  int64_t last = 0;
  int64_t clamp = 0;  // distances beyond +-clamp count as +-clamp; 0 clamps none

  int64_t Clamped(int64_t distance) const;
  // Returns the row of SinusoidsOf for a distance.
  int64_t Row(int64_t distance) const { return Clamped(distance) - Clamped(first); }
  int64_t rows() const { return last < first ? 0 : Row(last) + 1; }
};

// Returns r_d of the clamped distances, ascending, f32 [range.rows(), channels]. See
// core/layers/sinusoid.h; r_(-d) is r_d with the sines' signs reversed.
Tensor SinusoidsOf(const DistanceRange& range, int64_t channels);

// Returns `sinusoids` W_r, f32 [distances, heads * head_dim].
absl::StatusOr<Tensor> ProjectSinusoids(const ConstTensorView& sinusoids,
                                        const ConstTensorView& w_r, ThreadPool* pool);

class RelativePositions {
 public:
  // Parameters, f32, in host memory.
  struct Parameters {
    ConstTensorView w_r;  // [channels, heads * head_dim]
    ConstTensorView u;    // [heads, head_dim]
    ConstTensorView v;    // [heads, head_dim]
  };

  RelativePositions() = default;
  // Multiplies `sinusoids`, those of the range, by W_r, and rounds the product to `dtype`. A key at
  // the offset `here` from its query, in the engine's count, is at distance 0.
  static absl::StatusOr<RelativePositions> Create(const Parameters& parameters,
                                                  const DistanceRange& range,
                                                  const ConstTensorView& sinusoids, int64_t here,
                                                  DType dtype, ThreadPool* pool);

  // Takes the table f32 [range.rows(), heads * head_dim] in the place of that product: row Row(d)
  // has the vectors of distance d.
  static RelativePositions FromTable(const ConstTensorView& table, const ConstTensorView& u,
                                     const ConstTensorView& v, const DistanceRange& range,
                                     int64_t here);

  // Makes the rule point to u, v and the tables of this object, which may be moved.
  void AddTo(ScoreRule* rule) const;

  // The vectors of the distances, or null where there are none.
  const RelativeKeys* distances() const { return distances_.get(); }

 private:
  const float* u_ = nullptr;
  const float* v_ = nullptr;
  std::unique_ptr<RelativeKeys> distances_;
};

// The gradients of what a RelativePositions was created from, on the CPU: with the sums T_d of the
// gradients of r_d W_r, dW_r = sum_d r_d^T T_d, and T_d is that of a table's row.
class RelativePositionGradients {
 public:
  // Takes memory for the engine's sums, which are 0 at first, and for T, which is, too. The problem
  // has at least as many tokens and keys, less one, as the range has distances.
  void LayOut(const Problem& problem, const DistanceRange& range, int64_t channels,
              Workspace* workspace);
  void Bind(ScoreGradients* gradients) const;
  // Adds the sums that the engine made to the gradients of W_r, u and v.
  void AddTo(const RelativePositions::Parameters& parameters, const RelativePositions& positions,
             const ConstTensorView& sinusoids, int64_t here, const ParameterGradients& gradients,
             ThreadPool* pool) const;
  // Adds them to these, f32 views of the shapes of the parameters, of which empty ones are left out.
  // The table's are [rows, heads, head_dim].
  struct Destinations {
    TensorView w_r, table, u, v;
  };
  void AddTo(const RelativePositions& positions, const ConstTensorView& sinusoids, int64_t here,
             const Destinations& gradients, ThreadPool* pool) const;

 private:
  // Sums the gradients of the keys of each distance: T. It is called once.
  void SumByDistance(const RelativeKeys& keys, int64_t here, ThreadPool* pool) const;
  // Computes dW_r and calls visit(c, row) for each of its rows.
  void Multiply(const ConstTensorView& sinusoids, ThreadPool* pool,
                absl::FunctionRef<void(int64_t c, const float* row)> visit) const;

  DistanceRange range_;
  int64_t heads_ = 0;
  int64_t head_dim_ = 0;
  RelativeKeySums keys_;
  float* u_ = nullptr;
  float* v_ = nullptr;
  float* by_distance_ = nullptr;  // T, [range.rows()][row of heads * head_dim]
  float* product_ = nullptr;      // dW_r, [channels][row]
  int64_t channels_ = 0;
};

// The same on CUDA devices: sums of gradients go on by maps, and dW_r is formed in float64.
class DevicePositionGradients {
 public:
  // The engine's sums and T, which are 0 at first. They are plain data.
  class Sums {
   public:
    Sums() = default;
    Sums(const Problem& problem, const DistanceRange& range, Workspace* workspace);
    void Bind(ScoreGradients* gradients) const;

   private:
    friend class DevicePositionGradients;
    RelativeKeySums keys_;
    float* u_ = nullptr;
    float* v_ = nullptr;
    double* by_distance_ = nullptr;  // T, [range.rows()][heads * head_dim]
  };

  // Copies to the device what AddTo reads. The problem and the range are those of the sums.
  absl::Status SetUp(Device device, const Problem& problem, const DistanceRange& range,
                     const RelativePositions& positions, const ConstTensorView& sinusoids,
                     int64_t here);
  // Does the same, and finds the places of the parameters' gradients for an AddTo of these.
  absl::Status SetUp(Device device, const Problem& problem, const DistanceRange& range,
                     const RelativePositions::Parameters& parameters,
                     const RelativePositions& positions, const ConstTensorView& sinusoids,
                     int64_t here, const ParameterGradients& gradients);
  // Add the sums that the engine made to the gradients of W_r, u and v.
  absl::Status AddTo(const Sums& sums, const ParameterGradients& gradients,
                     const Execution& execution) const;
  absl::Status AddTo(const Sums& sums, const RelativePositionGradients::Destinations& gradients,
                     const Execution& execution) const;

 private:
  int64_t width() const { return heads_ * head_dim_; }
  // Returns the products that are dW_r, without a place for them.
  PositionProducts ProductsOf(const Sums& sums) const {
    return {sinusoids_.data(), sums.by_distance_, rows_, channels_, width(), nullptr, {}};
  }

  Device device_ = Device::kCpu;
  int64_t rows_ = 0;
  int64_t heads_ = 0;
  int64_t head_dim_ = 0;
  int64_t channels_ = 0;
  GradientMap u_map_, v_map_, key_map_;
  bool has_distances_ = false;
  DeviceArray<float> sinusoids_;  // empty where the vectors are a table's
  int64_t w_r_ = -1;              // the place of its first element
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_ATTENTION_RELATIVE_POSITIONS_H_
