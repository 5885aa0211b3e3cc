// Implements the warp's matrix instructions: PTX ISA, "Matrix multiply-accumulate operation using
// mma instruction" (fragments of m16n8k16) and "ldmatrix".
#include "core/cuda/simulator/warp_matrix.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>

#include "core/cuda/simulator/cuda_runtime.h"
#include "core/cuda/simulator/device.h"
#include "core/cuda/simulator/hooks.h"

namespace cuda_simulator {
namespace {

struct LoadedMatrices {
  const unsigned short* row;
  unsigned* const* registers;

  template <bool kTransposed>
  static void Complete(void* const arguments[kWarp], unsigned) {
    const auto at = [&](int matrix, int row, int column) {
      return static_cast<LoadedMatrices*>(arguments[matrix * 8 + row])->row[column];
    };
    for (int lane = 0; lane < kWarp; ++lane) {
      unsigned* const* registers = static_cast<LoadedMatrices*>(arguments[lane])->registers;
      for (int matrix = 0; matrix < 4; ++matrix) {
        const int a = lane / 4, b = lane % 4 * 2;
        const unsigned low = kTransposed ? at(matrix, b, a) : at(matrix, a, b);
        const unsigned high = kTransposed ? at(matrix, b + 1, a) : at(matrix, a, b + 1);
        *registers[matrix] = low | high << 16;
      }
    }
  }
};

}  // namespace

void LoadMatrices(const char* name, bool transposed, unsigned* const registers[4], const void* row,
                  const void* site) {
  CheckAlignment(row, name, 16, site);
  Note(AccessKind::kRead, row, 16, site);
  LoadedMatrices load{static_cast<const unsigned short*>(row), registers};
  MeetInWholeWarp(name, &load,
                  transposed ? &LoadedMatrices::Complete<true> : &LoadedMatrices::Complete<false>,
                  site);
}

namespace {

// Returns the exponent of x = s 2^exponent with 1 <= |s| < 2, but at least `least`.
int ExponentOf(double x, int least) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return std::max(static_cast<int>(bits >> 52 & 0x7ff) - 1023, least);
}

// Returns 2^exponent, from 2^-1022 to 2^1023.
double PowerOfTwo(int exponent) {
  const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof(power));
  return power;
}

constexpr int kLeastOfFloat = -126;  // the exponent of the least normal number
constexpr int kLeastOfHalf = -14;

}  // namespace

float TruncatedSum(const MmaTerm* terms, int count, int fraction_bits) {
  double plain = 0;
  int largest = INT_MIN;
  for (int n = 0; n < count; ++n) {
    plain += terms[n].value;
    if (terms[n].value != 0) largest = std::max(largest, terms[n].exponent);
  }
  // Infinities, NaN and zeros give the same in any order.
  if (!std::isfinite(plain) || largest == INT_MIN) return static_cast<float>(plain);
  const int last = largest - fraction_bits;
  const double inverse = PowerOfTwo(-last);
  double sum = 0;  // in units of 2^last
  for (int n = 0; n < count; ++n) sum += std::trunc(terms[n].value * inverse);
  sum *= PowerOfTwo(last);
  const int last_bit = ExponentOf(sum, kLeastOfFloat) - 23;
  return static_cast<float>(std::trunc(sum * PowerOfTwo(-last_bit)) * PowerOfTwo(last_bit));
}

namespace {

// Returns c + sum_k a_k b_k in the steps of the GPU's tensor cores. Factors of the least exponent
// or more are normal numbers.
float SumInSteps(const Gpu& gpu, const float a[16], const float b[16], float c, int least) {
  for (int first = 0; first < 16; first += gpu.mma_step_products) {
    MmaTerm terms[17];
    for (int n = 0; n < gpu.mma_step_products; ++n) {
      const double x = a[first + n], y = b[first + n];
      terms[n] = {x * y, ExponentOf(x, least) + ExponentOf(y, least)};
    }
    terms[gpu.mma_step_products] = {c, ExponentOf(c, kLeastOfFloat)};
    c = TruncatedSum(terms, gpu.mma_step_products + 1, gpu.mma_fraction_bits);
  }
  return c;
}

}  // namespace

float WidenHalf(bool is_bf16, unsigned short bits) {
  return is_bf16 ? __bfloat162float(__nv_bfloat16{bits}) : __half2float(__half{bits});
}

void MultiplyRow(bool is_bf16, const float a[16], const float* b, int b_stride, int columns,
                 float* sums) {
  const Settings& settings = running_machine->settings;
  if (settings.mma_sums == MmaSums::kTruncated) {
    for (int n = 0; n < columns; ++n) {
      float column[16];
      for (int k = 0; k < 16; ++k) column[k] = b[k * b_stride + n];
      sums[n] =
          SumInSteps(settings.gpu, a, column, sums[n], is_bf16 ? kLeastOfFloat : kLeastOfHalf);
    }
    return;
  }
  for (int first = 0; first < columns; first += 8) {  // exact to float64, rounded once
    double eight[8];
    for (int n = 0; n < 8; ++n) eight[n] = sums[first + n];
    for (int k = 0; k < 16; ++k) {
      const double factor = a[k];
      const float* row = b + k * b_stride + first;
      for (int n = 0; n < 8; ++n) eight[n] += factor * row[n];
    }
    for (int n = 0; n < 8; ++n) sums[first + n] = static_cast<float>(eight[n]);
  }
}

namespace {

// Returns the low or the high number of a register, as a float.
template <bool kIsBf16>
float HalfOf(unsigned pair, int which) {
  return WidenHalf(kIsBf16, static_cast<unsigned short>(pair >> 16 * which));
}

template <bool kIsBf16>
void CompleteProduct(void* const arguments[kWarp], unsigned) {
  float a[16][16], b[16][8], sums[16][8];
  for (int lane = 0; lane < kWarp; ++lane) {
    const auto& operands = *static_cast<const MmaOperands*>(arguments[lane]);
    const int g = lane / 4, t = lane % 4 * 2;
    for (int which = 0; which < 2; ++which) {
      for (int r = 0; r < 4; ++r) {
        a[g + r % 2 * 8][t + r / 2 * 8 + which] = HalfOf<kIsBf16>(operands.a[r], which);
      }
      for (int r = 0; r < 2; ++r) b[t + r * 8 + which][g] = HalfOf<kIsBf16>(operands.b[r], which);
    }
    for (int r = 0; r < 4; ++r) sums[g + r / 2 * 8][t + r % 2] = operands.c[r];
  }
  for (int row = 0; row < 16; ++row) MultiplyRow(kIsBf16, a[row], b[0], 8, 8, sums[row]);
  for (int lane = 0; lane < kWarp; ++lane) {
    const auto& operands = *static_cast<const MmaOperands*>(arguments[lane]);
    for (int r = 0; r < 4; ++r) {
      *operands.d[r] = sums[lane / 4 + r / 2 * 8][lane % 4 * 2 + r % 2];
    }
  }
}

}  // namespace

void MultiplyMatrices(const char* name, bool is_bf16, const MmaOperands& operands,
                      const void* site) {
  MeetInWholeWarp(name, const_cast<MmaOperands*>(&operands),
                  is_bf16 ? &CompleteProduct<true> : &CompleteProduct<false>, site);
}

}  // namespace cuda_simulator
