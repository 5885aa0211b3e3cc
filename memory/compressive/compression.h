// The compression f of rows, and the decoder g of the autoencoding loss: see compressive.h.
#ifndef TFB_MEMORY_COMPRESSIVE_COMPRESSION_H_
#define TFB_MEMORY_COMPRESSIVE_COMPRESSION_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/layers/matmul.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "memory/compressive/compressive.h"

namespace tfb::compressive {

// Packs the matrices of a decoder: those of the convolution w [c, d, d] side by side, each transposed.
absl::StatusOr<PackedMatrix> PackDecoder(Device device, const ConstTensorView& w);

class Compression {
 public:
  Compression() = default;
  // Copies the parameters of layer n to the device.
  static absl::StatusOr<Compression> Create(Device device, const CompressiveOptions& options,
                                            const NamedTensors& parameters, int64_t n);

  // Returns the workspace of either call on up to `blocks` blocks of each batch row.
  static size_t workspace_bytes(Device device, const CompressiveOptions& options, int64_t batch,
                                int64_t blocks, int64_t width, int threads);

  // Compresses f32, contiguous old [batch, blocks * rate, width] to compressed [batch, blocks,
  // width]. `selected` [batch][blocks], with most_used, are the rows that stay. It allocates
  // nothing.
  absl::Status Compress(const TensorView& old, const int32_t* selected,
                        const TensorView& compressed, const Execution& execution) const;
  // Computes to [batch] the loss of old - g(compressed).
  absl::Status AutoencodingLoss(const TensorView& old, const TensorView& compressed,
                                const TensorView& to, const Execution& execution) const;

 private:
  Device device_ = Device::kCpu;
  CompressiveOptions options_;
  PackedMatrix convolution_;  // [rate * width, width]
  PackedMatrix decoder_;      // [width, rate * width]
};

}  // namespace tfb::compressive

#endif  // TFB_MEMORY_COMPRESSIVE_COMPRESSION_H_
