// Denormal (subnormal) floating-point numbers, which every engine treats as zero.
//
// Magnitudes below 2^-126 in fp32 and bf16 are denormal. Many processors take over a hundred cycles
// for an operation on one, so that a layer whose inputs or softmax tails are that small would run up
// to fifty times longer. Layer::Setup, Layer::Run and StreamingLayer::Append therefore compute with
// flush-to-zero (a denormal result becomes 0) and denormals-are-zero (a denormal operand counts as
// 0) in force, on the calling thread and on every thread of the pool, and leave the caller's
// floating-point state as it was. CUDA kernels are compiled with the same rule (nvcc --ftz=true), and
// the simulator follows it. cuBLAS and cuDNN do not: on a GPU, which is as fast on denormal numbers as
// on others, their products may be denormal. An fp32 result is thereby off by up to 2^-126 for each operation that
// would have been denormal. Definitions in float64 run in the caller's state and are not affected.
#ifndef TFB_CORE_DENORMALS_H_
#define TFB_CORE_DENORMALS_H_

#include <cstdint>

namespace tfb {

// The control bits of the calling thread's floating-point unit: rounding, exception masks, and the
// treatment of denormals. On processors other than x86-64 it is always 0, and setting does nothing.
class FloatingPointControl {
 public:
  // The state of the calling thread, without the flags of exceptions that have occurred.
  static FloatingPointControl Current();

  FloatingPointControl WithDenormalsFlushed() const;
  bool flushes_denormals() const;
  // Makes this the state of the calling thread.
  void Apply() const;

  friend bool operator==(FloatingPointControl a, FloatingPointControl b) {
    return a.bits_ == b.bits_;
  }
  friend bool operator!=(FloatingPointControl a, FloatingPointControl b) { return !(a == b); }

 private:
  explicit FloatingPointControl(uint32_t bits) : bits_(bits) {}

  uint32_t bits_;
};

// Puts a state into force on the calling thread, and the one that it found back at its end.
class ScopedFloatingPointControl {
 public:
  explicit ScopedFloatingPointControl(FloatingPointControl control)
      : found_(FloatingPointControl::Current()), changes_(control != found_) {
    if (changes_) control.Apply();
  }
  ~ScopedFloatingPointControl() {
    if (changes_) found_.Apply();
  }
  ScopedFloatingPointControl(const ScopedFloatingPointControl&) = delete;
  ScopedFloatingPointControl& operator=(const ScopedFloatingPointControl&) = delete;

 private:
  const FloatingPointControl found_;
  const bool changes_;
};

// Flushes denormals on the calling thread while it lives.
class ScopedFlushDenormals {
 public:
  ScopedFlushDenormals() : scope_(FloatingPointControl::Current().WithDenormalsFlushed()) {}

 private:
  ScopedFloatingPointControl scope_;
};

}  // namespace tfb

#endif  // TFB_CORE_DENORMALS_H_
