// Keys or values compressed along the sequence, on every device: slots [batch, heads, slots,
// channels] of rows [batch, heads, tokens, channels], as linformer.h says.
//
// A product with E sums the tokens of a chunk in fp32 in their order, and then the chunks in
// theirs, so that the result depends neither on threads nor on the other sequences of a batch. Rows
// are read once, E once for each head and tensor. On the CPU,
//
//   a block of 128 tokens at 64 channels is 32 KiB of rows, which stay in L1 while E's 128 x slots
//   and the slots' sums, 64 KiB at 256 slots, pass by from L2
//
// The backward pass of sums over the sequence, x' = E x, is E^T dx' for the rows and dx' x^T for E,
// summed over the heads that share it; a maximum's gradient is the first largest row's.
//
// linformer_cuda.cu has the CUDA kernels.
#ifndef TFB_ATTENTION_LINFORMER_COMPRESSION_H_
#define TFB_ATTENTION_LINFORMER_COMPRESSION_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/linformer/linformer_cuda.h"
#include "core/cuda/device_array.h"
#include "core/cuda/run_sums.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"

namespace tfb::linformer {

enum class Compression : uint8_t { kProduct, kMean, kMax, kConvolution, kDepthwiseConvolution };

// The matrices E, or a convolution's, in the layout of the products: matrices
// [table][tokens][slots], convolutions [table][window][in][PackedValueRow(out)], depthwise ones
// [table][window][PackedValueRow(channels)].
class CompressionTables {
 public:
  // Makes tables from the parameters of linformer.h.
  static absl::StatusOr<std::shared_ptr<const CompressionTables>> Create(
      Device device, Compression kind, const ConstTensorView& parameters);

  const float* Table(int64_t table) const { return numbers_.data() + table * table_floats_; }
  int64_t table_floats() const { return table_floats_; }

 private:
  int64_t table_floats_ = 0;
  DeviceArray<float> numbers_;
};

class Compressor {
 public:
  struct Sizes {
    int64_t batch = 0;
    int64_t heads = 0;
    int64_t tokens = 0;
    int64_t channels = 0;
    int64_t slots = 0;
    int64_t window = 1;  // tokens of a slot, unless it is a product
  };

  Compressor() = default;
  Compressor(Device device, Compression kind, const Sizes& sizes);
  // Sets the tables: head h of batch row b has table b * of_batch + h * of_head.
  void set_tables(std::shared_ptr<const CompressionTables> tables, int64_t of_batch,
                  int64_t of_head) {
    tables_ = std::move(tables);
    table_of_batch_ = of_batch;
    table_of_head_ = of_head;
  }

  struct Memory {
    float* sums = nullptr;  // [chunks][batch * heads][slots][row]
    TensorView slots;       // f32, in the first chunk's memory
  };
  Memory LayOut(Workspace& workspace) const;
  // Returns the scratch of a Run besides that.
  size_t workspace_bytes(int threads) const;

  // Compresses x [batch, heads, tokens, channels] of any dtype and strides; key_mask is u8 [batch,
  // tokens], or empty. It allocates nothing; on CUDA it enqueues on the stream.
  absl::Status Run(const ConstTensorView& x, const ConstTensorView& key_mask, const Memory& memory,
                   const Execution& execution) const;
  double flops() const;

  // The tensors of a backward pass. Gradients that are empty are not computed.
  struct Gradients {
    ConstTensorView slots;  // f32 [batch, heads, slots, channels]: what is given
    TensorView x;           // f32 [batch, heads, tokens, channels], which is added to
    TensorView tables;      // f32, of the parameter's shape, which is written or added to
    bool adds_to_tables;
  };
  size_t backward_workspace_bytes(int threads) const;
  // Adds the gradients of a Run of x. It allocates nothing, and the result does not depend on the
  // number of threads; on CUDA it enqueues on the stream.
  absl::Status Backward(const ConstTensorView& x, const ConstTensorView& key_mask,
                        const Gradients& gradients, const Execution& execution) const;

 private:
  // Rows of floats.
  struct Rows {
    const float* first;
    int64_t stride;
  };
  struct Call {
    const ConstTensorView& x;
    const ConstTensorView& key_mask;
    const Memory& memory;
    bool is_plain;  // rows can be read in place
  };

  int64_t row() const;  // floats
  int64_t chunk_tokens() const;
  int64_t chunks() const;
  const float* TableOf(int64_t head) const;
  float* SlotRow(const Memory& memory, int64_t chunk, int64_t head, int64_t slot) const;
  bool IsToken(const Call& call, int64_t b, int64_t token) const;
  Rows TokenRows(const Call& call, int64_t head, int64_t first, int64_t step, int64_t count,
                 float* scratch) const;

  absl::Status RunCpu(const Call& call, const Execution& execution) const;
  void Multiply(const Call& call, int64_t chunk, int64_t head, float* scratch) const;
  void AddChunks(const Call& call, int64_t head) const;
  void Pool(const Call& call, int64_t head, int64_t slot, float* scratch) const;
  void Convolve(const Call& call, int64_t head, int64_t first_slot, float* scratch) const;
  CompressionArguments ArgumentsOf(const ConstTensorView& x, const ConstTensorView& key_mask) const;
  absl::Status RunCuda(const Call& call, const Execution& execution) const;

  // compression_backward.cc
  struct BackwardMemory;
  struct BackwardScratch;
  struct BackwardCall;
  static constexpr int64_t kBlockTokens = 128;
  static constexpr int64_t kBlockSlots = 64;
  bool HasMatrices() const {
    return kind_ == Compression::kProduct || kind_ == Compression::kConvolution;
  }
  CompressionGradientArguments ArgumentsOf(const ConstTensorView& x,
                                           const ConstTensorView& key_mask,
                                           const Gradients& gradients) const;
  absl::Status BackwardOfWindows(const CompressionGradientArguments& arguments,
                                 const Execution& execution) const;
  absl::Status BackwardOfConvolution(const CompressionGradientArguments& arguments,
                                     const Execution& execution) const;
  absl::Status BackwardOfProduct(const CompressionGradientArguments& arguments,
                                 const Execution& execution) const;
  void BackwardOfMatrices(const BackwardCall& call, const Execution& execution) const;
  BackwardMemory LayOutBackward(int threads, Workspace& workspace) const;
  void PackGradients(const BackwardCall& call, int64_t head) const;
  static void StoreSums(const float* sums, int64_t count, bool adds, int64_t stride, float* to);
  void AddToRow(const BackwardCall& call, int64_t head, int64_t token, const float* from) const;
  template <class Body>
  void ForEachHeadOf(int64_t table, const Body& body) const;
  int64_t Tables() const;
  SumShape ShapeOfDepthwise() const;  // of the sums that are the gradient of a kernel
  void GradientOfProductRows(const BackwardCall& call, int64_t head, int64_t first,
                             const BackwardScratch& scratch) const;
  void GradientOfProductTable(const BackwardCall& call, int64_t table, int64_t first,
                              const BackwardScratch& scratch) const;
  void GradientOfConvolvedRows(const BackwardCall& call, int64_t head, int64_t first_slot,
                               const BackwardScratch& scratch) const;
  void GradientOfConvolution(const BackwardCall& call, int64_t table, int64_t t,
                             const BackwardScratch& scratch) const;

  Device device_ = Device::kCpu;
  Compression kind_ = Compression::kProduct;
  Sizes sizes_;
  std::shared_ptr<const CompressionTables> tables_;  // null for mean and max, which have none
  int64_t table_of_batch_ = 0;
  int64_t table_of_head_ = 0;
};

}  // namespace tfb::linformer

#endif  // TFB_ATTENTION_LINFORMER_COMPRESSION_H_
