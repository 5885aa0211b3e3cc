// Inline PTX that nvcc compiles and the simulator interprets, from one string; kernel.cuh includes
// it.
//
// TFB_PTX(text, outputs, inputs) is asm(text : outputs : inputs), with the lists in parentheses and
// each operand as TFB_PTX_OPERAND(constraint, expression); (TFB_PTX_NONE) is an empty list.
// TFB_PTX_MEMORY is asm volatile with "memory", for instructions that access it. The simulator knows
// the instructions that core/cuda/simulator/ptx.cc lists.
#ifndef TFB_CORE_CUDA_PTX_CUH_
#define TFB_CORE_CUDA_PTX_CUH_

// Only asm takes constraints and operands so, and only from literals, hence the macros.
#define TFB_PTX_LIST(...) __VA_ARGS__
#ifdef __CUDACC__
#define TFB_PTX_INLINE __forceinline__
#define TFB_PTX_OPERAND(constraint, x) constraint(x)
#define TFB_PTX_NONE
#define TFB_PTX(text, outputs, inputs) asm(text : TFB_PTX_LIST outputs : TFB_PTX_LIST inputs)
#define TFB_PTX_MEMORY(text, outputs, inputs) \
  asm volatile(text : TFB_PTX_LIST outputs : TFB_PTX_LIST inputs : "memory")
#else
// Findings name the line that calls a function of this file, which must be inlined for that.
#define TFB_PTX_INLINE inline __attribute__((always_inline))
#define TFB_PTX_OPERAND(constraint, x) cuda_simulator::PtxOperand(constraint, x)
#define TFB_PTX_NONE cuda_simulator::PtxOperand()
#define TFB_PTX(text, outputs, inputs) \
  cuda_simulator::ExecutePtx(text, TFB_PTX_LIST outputs, TFB_PTX_LIST inputs)
#define TFB_PTX_MEMORY(text, outputs, inputs) TFB_PTX(text, outputs, inputs)
#endif

// The texts of instructions, for kernels and for core/cuda/simulator/ptx_test.cc.
#define TFB_PTX_LDMATRIX "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
#define TFB_PTX_LDMATRIX_TRANSPOSED \
  "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
#define TFB_PTX_MMA(type)                                \
  "mma.sync.aligned.m16n8k16.row.col.f32." type "." type \
  ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "            \
  "{%8, %9}, {%0, %1, %2, %3};"
#define TFB_PTX_COPY_ASYNC "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
#define TFB_PTX_EXP2 "ex2.approx.ftz.f32 %0, %1;"
#define TFB_PTX_LOG2 "lg2.approx.ftz.f32 %0, %1;"

namespace tfb {
namespace {  // internal linkage, as in kernel.cuh

// ---- Matrices of a warp (sm_80 on) ----

// PTX ISA, ldmatrix.x4: lane l gives the address in shared memory of 16 bytes, row l % 8 of the 8 x
// 8 matrix l / 8. Register i receives the elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1) of
// matrix i; `Transposed` gives it (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4).
__device__ TFB_PTX_INLINE void LdMatrixX4(unsigned registers[4], const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  TFB_PTX_MEMORY(TFB_PTX_LDMATRIX,
                 (TFB_PTX_OPERAND("=r", registers[0]), TFB_PTX_OPERAND("=r", registers[1]),
                  TFB_PTX_OPERAND("=r", registers[2]), TFB_PTX_OPERAND("=r", registers[3])),
                 (TFB_PTX_OPERAND("r", address)));
}
__device__ TFB_PTX_INLINE void LdMatrixX4Transposed(unsigned registers[4], const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  TFB_PTX_MEMORY(TFB_PTX_LDMATRIX_TRANSPOSED,
                 (TFB_PTX_OPERAND("=r", registers[0]), TFB_PTX_OPERAND("=r", registers[1]),
                  TFB_PTX_OPERAND("=r", registers[2]), TFB_PTX_OPERAND("=r", registers[3])),
                 (TFB_PTX_OPERAND("r", address)));
}

// PTX ISA, mma.sync.m16n8k16, row.col, f32 accumulators: d += a b. With g = lane / 4, t = lane % 4:
//   a[0] = A[g][2t..], a[1] = A[g + 8][2t..], a[2] = A[g][2t + 8..], a[3] = A[g + 8][2t + 8..]
//   b[0] = B[2t..][g], b[1] = B[2t + 8..][g]      (each two elements, along A's row and B's column)
//   d[0], d[1] = D[g][2t..], d[2], d[3] = D[g + 8][2t..]
#define TFB_PTX_MMA_OUTPUTS(d)                                                            \
  (TFB_PTX_OPERAND("+f", d[0]), TFB_PTX_OPERAND("+f", d[1]), TFB_PTX_OPERAND("+f", d[2]), \
   TFB_PTX_OPERAND("+f", d[3]))
#define TFB_PTX_MMA_INPUTS(a, b)                                                       \
  (TFB_PTX_OPERAND("r", a[0]), TFB_PTX_OPERAND("r", a[1]), TFB_PTX_OPERAND("r", a[2]), \
   TFB_PTX_OPERAND("r", a[3]), TFB_PTX_OPERAND("r", b[0]), TFB_PTX_OPERAND("r", b[1]))
__device__ TFB_PTX_INLINE void MmaM16N8K16Bf16(float d[4], const unsigned a[4],
                                               const unsigned b[2]) {
  TFB_PTX(TFB_PTX_MMA("bf16"), TFB_PTX_MMA_OUTPUTS(d), TFB_PTX_MMA_INPUTS(a, b));
}
__device__ TFB_PTX_INLINE void MmaM16N8K16F16(float d[4], const unsigned a[4],
                                              const unsigned b[2]) {
  TFB_PTX(TFB_PTX_MMA("f16"), TFB_PTX_MMA_OUTPUTS(d), TFB_PTX_MMA_INPUTS(a, b));
}

// ---- Copies and functions ----

// Starts an asynchronous copy of 16 bytes to shared memory, past the L1 cache: see
// __pipeline_commit. It writes zeros where the source does not exist. Both addresses are multiples
// of 16.
__device__ TFB_PTX_INLINE void CopyAsync(void* to, const void* from, bool exist) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const unsigned bytes = exist ? 16 : 0;
  TFB_PTX_MEMORY(
      TFB_PTX_COPY_ASYNC, (TFB_PTX_NONE),
      (TFB_PTX_OPERAND("r", address), TFB_PTX_OPERAND("l", from), TFB_PTX_OPERAND("r", bytes)));
}

// Returns 2^x, to two units in the last place; results below 2^-126 are 0.
__device__ TFB_PTX_INLINE float Exp2(float x) {
  float y;
  TFB_PTX(TFB_PTX_EXP2, (TFB_PTX_OPERAND("=f", y)), (TFB_PTX_OPERAND("f", x)));
  return y;
}
// Returns log2(x), with an error of 2^-22 near 1.
__device__ TFB_PTX_INLINE float Log2(float x) {
  float y;
  TFB_PTX(TFB_PTX_LOG2, (TFB_PTX_OPERAND("=f", y)), (TFB_PTX_OPERAND("f", x)));
  return y;
}

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_CUDA_PTX_CUH_
