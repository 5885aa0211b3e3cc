#include <cstring>

#include "core/cpu/kernels.h"

namespace tfb {

extern const CpuKernels kCpuKernels_avx512;
extern const CpuKernels kCpuKernels_avx2;
extern const CpuKernels kCpuKernels_generic;

namespace {

bool HasAvx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace

const CpuKernels* FindCpuKernels(const char* name) {
  if (HasAvx512() && std::strcmp(name, "avx512") == 0) return &kCpuKernels_avx512;
  if (HasAvx2() && std::strcmp(name, "avx2") == 0) return &kCpuKernels_avx2;
  return std::strcmp(name, "generic") == 0 ? &kCpuKernels_generic : nullptr;
}

const CpuKernels& BestCpuKernels() {
  static const CpuKernels& best = HasAvx512() ? kCpuKernels_avx512
                                  : HasAvx2() ? kCpuKernels_avx2
                                              : kCpuKernels_generic;
  return best;
}

}  // namespace tfb
