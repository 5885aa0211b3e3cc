// Random numbers are a function of (seed, stream, index). There is no state, so a draw does not
// depend on the order, the tiling, the number of threads or the device that asks for it.
//
// The generator is Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011.
#ifndef TFB_CORE_RANDOM_H_
#define TFB_CORE_RANDOM_H_

#include <array>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "core/tensor.h"

namespace tfb {

// Ten rounds of Philox with 128 bits of counter and 64 of key.
std::array<uint32_t, 4> Philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// One stream of draws, named so that two tensors of one layer never share theirs.
class RandomStream {
 public:
  RandomStream(uint64_t seed, absl::string_view name);

  uint64_t Bits(uint64_t index) const;
  double Uniform(uint64_t index) const;  // in (0, 1): never 0, never 1
  double Normal(uint64_t index) const;   // mean 0, variance 1 (Box and Muller)

 private:
  std::array<uint32_t, 2> key_;
  std::array<uint32_t, 2> name_;
};

// Fills a tensor with normal numbers: element i (row-major) is draw i of the stream.
void FillNormal(Tensor* tensor, uint64_t seed, absl::string_view name, double mean = 0,
                double deviation = 1);
// The standard form of a distribution to draw from.
enum class Distribution : uint8_t {
  kNormal,   // mean 0, variance 1
  kUniform,  // between 0 and 1
  kGumbel,   // -log(-log u) of a uniform u
};
void FillDrawn(Tensor* tensor, Distribution distribution, uint64_t seed, absl::string_view name);
void FillUniform(Tensor* tensor, uint64_t seed, absl::string_view name, double min, double max);

}  // namespace tfb

#endif  // TFB_CORE_RANDOM_H_
