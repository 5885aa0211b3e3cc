// Implements the warp's matrix instructions: PTX ISA, "Matrix multiply-accumulate operation using
// mma instruction" (fragments of m16n8k16) and "ldmatrix".
#include <cstring>

#include "core/cuda/simulator/cuda_runtime.h"
#include "core/cuda/simulator/device.h"
#include "core/cuda/simulator/hooks.h"

namespace cuda_simulator {
namespace {

struct LoadedMatrices {
  const unsigned short* row;
  unsigned* registers;

  template <bool kTransposed>
  static void Complete(void* const arguments[kWarp], unsigned) {
    const auto at = [&](int matrix, int row, int column) {
      return static_cast<LoadedMatrices*>(arguments[matrix * 8 + row])->row[column];
    };
    for (int lane = 0; lane < kWarp; ++lane) {
      unsigned* registers = static_cast<LoadedMatrices*>(arguments[lane])->registers;
      for (int matrix = 0; matrix < 4; ++matrix) {
        const int a = lane / 4, b = lane % 4 * 2;
        const unsigned low = kTransposed ? at(matrix, b, a) : at(matrix, a, b);
        const unsigned high = kTransposed ? at(matrix, b + 1, a) : at(matrix, a, b + 1);
        registers[matrix] = low | high << 16;
      }
    }
  }
};

template <bool kTransposed>
void LoadMatrices(const char* name, unsigned registers[4], const void* row, const void* site) {
  Machine& machine = *running_machine;
  if (!machine.checker.IsShared(row)) {
    machine.Report(FindingKind::kOutOfBounds, site,
                   [&] { return Format("%s of a row that is not in shared memory", name); });
    machine.block.Abandon();
  }
  CheckAlignment(row, name, 16, site);
  Note(AccessKind::kRead, row, 16, site);
  LoadedMatrices load{static_cast<const unsigned short*>(row), registers};
  MeetInWholeWarp(name, &load, &LoadedMatrices::Complete<kTransposed>, site);
}

float Widen(__nv_bfloat16 x) { return __bfloat162float(x); }
float Widen(__half x) { return __half2float(x); }

struct Product {
  float* d;
  const unsigned* a;
  const unsigned* b;

  template <class T>
  static float Half(unsigned pair, int which) {
    return Widen(T{static_cast<unsigned short>(pair >> 16 * which)});
  }

  // Sums are exact to float64 and rounded once, since the order of a GPU's sums is not documented.
  template <class T>
  static void Complete(void* const arguments[kWarp], unsigned) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < kWarp; ++lane) {
      const Product& product = *static_cast<Product*>(arguments[lane]);
      const int g = lane / 4, t = lane % 4 * 2;
      for (int which = 0; which < 2; ++which) {
        for (int r = 0; r < 4; ++r) {
          a[g + r % 2 * 8][t + r / 2 * 8 + which] = Half<T>(product.a[r], which);
        }
        for (int r = 0; r < 2; ++r) b[t + r * 8 + which][g] = Half<T>(product.b[r], which);
      }
    }
    for (int lane = 0; lane < kWarp; ++lane) {
      float* d = static_cast<Product*>(arguments[lane])->d;
      for (int r = 0; r < 4; ++r) {
        const int row = lane / 4 + r / 2 * 8, column = lane % 4 * 2 + r % 2;
        double sum = d[r];
        for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[row][k]) * b[k][column];
        d[r] = static_cast<float>(sum);
      }
    }
  }
};

template <class T>
void Multiply(const char* name, float d[4], const unsigned a[4], const unsigned b[2],
              const void* site) {
  Product product{d, a, b};
  MeetInWholeWarp(name, &product, &Product::Complete<T>, site);
}

}  // namespace

void LdMatrixX4(unsigned registers[4], const void* row) {
  LoadMatrices<false>("ldmatrix", registers, row, __builtin_return_address(0));
}
void LdMatrixX4Transposed(unsigned registers[4], const void* row) {
  LoadMatrices<true>("ldmatrix.trans", registers, row, __builtin_return_address(0));
}
void MmaM16N8K16Bf16(float d[4], const unsigned a[4], const unsigned b[2]) {
  Multiply<__nv_bfloat16>("mma.sync (bf16)", d, a, b, __builtin_return_address(0));
}
void MmaM16N8K16F16(float d[4], const unsigned a[4], const unsigned b[2]) {
  Multiply<__half>("mma.sync (f16)", d, a, b, __builtin_return_address(0));
}

}  // namespace cuda_simulator
