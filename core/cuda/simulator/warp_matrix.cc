// Implements the warp's matrix instructions: PTX ISA, "Matrix multiply-accumulate operation using
// mma instruction" (fragments of m16n8k16) and "ldmatrix".
#include "core/cuda/simulator/warp_matrix.h"

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

float Widen(__nv_bfloat16 x) { return __bfloat162float(x); }
float Widen(__half x) { return __half2float(x); }

// Returns c + sum_k a_k b_k, exact to float64 and rounded once, since the order of a GPU's sums is
// not documented.
float SumOfProducts(const float a[16], const float (&b)[16][8], int column, float c) {
  double sum = c;
  for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[k]) * b[k][column];
  return static_cast<float>(sum);
}

template <class T>
float Half(unsigned pair, int which) {
  return Widen(T{static_cast<unsigned short>(pair >> 16 * which)});
}

template <class T>
void CompleteProduct(void* const arguments[kWarp], unsigned) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < kWarp; ++lane) {
    const auto& operands = *static_cast<const MmaOperands*>(arguments[lane]);
    const int g = lane / 4, t = lane % 4 * 2;
    for (int which = 0; which < 2; ++which) {
      for (int r = 0; r < 4; ++r) {
        a[g + r % 2 * 8][t + r / 2 * 8 + which] = Half<T>(operands.a[r], which);
      }
      for (int r = 0; r < 2; ++r) b[t + r * 8 + which][g] = Half<T>(operands.b[r], which);
    }
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    const auto& operands = *static_cast<const MmaOperands*>(arguments[lane]);
    for (int r = 0; r < 4; ++r) {
      const int row = lane / 4 + r / 2 * 8, column = lane % 4 * 2 + r % 2;
      *operands.d[r] = SumOfProducts(a[row], b, column, operands.c[r]);
    }
  }
}

}  // namespace

void MultiplyMatrices(const char* name, bool is_bf16, const MmaOperands& operands,
                      const void* site) {
  MeetInWholeWarp(name, const_cast<MmaOperands*>(&operands),
                  is_bf16 ? &CompleteProduct<__nv_bfloat16> : &CompleteProduct<__half>, site);
}

}  // namespace cuda_simulator
