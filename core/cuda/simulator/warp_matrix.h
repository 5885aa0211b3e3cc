// Matrix instructions of a warp, which lanes meet for.
#ifndef TFB_CORE_CUDA_SIMULATOR_WARP_MATRIX_H_
#define TFB_CORE_CUDA_SIMULATOR_WARP_MATRIX_H_

#include <cstdint>

namespace cuda_simulator {

// Executes ldmatrix.x4: lane l gives the address of 16 bytes, row l % 8 of matrix l / 8. Register i
// receives the elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1) of matrix i; with
// `transposed` it receives (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4). `name` appears in
// findings.
void LoadMatrices(const char* name, bool transposed, unsigned* const registers[4], const void* row,
                  const void* site);

// Executes mma.sync.m16n8k16, row.col: d = a b + c, with PTX's distribution over the lanes.
struct MmaOperands {
  float* d[4];
  unsigned a[4];
  unsigned b[2];
  float c[4];
};
void MultiplyMatrices(const char* name, bool is_bf16, const MmaOperands& operands,
                      const void* site);

// Returns the number of 16 bits, bf16 or f16, as a float.
float WidenHalf(bool is_bf16, unsigned short bits);
// Adds to sums[n], for each n < columns, the products of a[k] and b[k * b_stride + n], as mma does
// under the settings. Columns are a multiple of 8; numbers were bf16 or f16.
void MultiplyRow(bool is_bf16, const float a[16], const float* b, int b_stride, int columns,
                 float* sums);

// A term of the sums of mma: a product, or the accumulator.
struct MmaTerm {
  double value;
  int exponent;  // the sum of the factors' exponents, each of a significand from 1 to below 2
};
// Returns the sum of a step of MmaSums::kTruncated that keeps so many bits after the binary point.
float TruncatedSum(const MmaTerm* terms, int count, int fraction_bits);

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_WARP_MATRIX_H_
