#include "core/denormals.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace tfb {
namespace {

// Bits of the MXCSR register (Intel SDM, volume 1, section 10.2.3).
constexpr uint32_t kExceptionFlags = 0x3f;
constexpr uint32_t kDenormalsAreZero = 1u << 6;
constexpr uint32_t kFlushToZero = 1u << 15;
constexpr uint32_t kFlushing = kDenormalsAreZero | kFlushToZero;

}  // namespace

FloatingPointControl FloatingPointControl::Current() {
#ifdef __x86_64__
  return FloatingPointControl(_mm_getcsr() & ~kExceptionFlags);
#else
  return FloatingPointControl(0);
#endif
}

FloatingPointControl FloatingPointControl::WithDenormalsFlushed() const {
#ifdef __x86_64__
  return FloatingPointControl(bits_ | kFlushing);
#else
  return *this;
#endif
}

bool FloatingPointControl::flushes_denormals() const { return (bits_ & kFlushing) == kFlushing; }

void FloatingPointControl::Apply() const {
#ifdef __x86_64__
  // The flags of exceptions that have occurred stay as they are.
  _mm_setcsr((_mm_getcsr() & kExceptionFlags) | bits_);
#endif
}

}  // namespace tfb
