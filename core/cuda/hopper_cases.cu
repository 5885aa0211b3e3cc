#include "core/cuda/hopper.cuh"
#include "core/cuda/hopper_cases.h"
#include "core/cuda/tensor_map.cuh"

namespace tfb::hopper_test {
namespace {

using Place = HopperCases::Place;

constexpr int kRowBytes = 128;  // of a panel
constexpr int kRowNumbers = 64;
constexpr int kPanelBytes = 128 * kRowBytes;
constexpr size_t kAlignment = 1024;

struct Factors {
  const uint16_t* a;
  const uint16_t* b;
  TensorMap a_map;
  TensorMap b_map;
};

// Other GPUs have no use for these functions.
#if TFB_IS_HOPPER
__device__ inline unsigned char* Aligned(unsigned char* memory) {
  return memory + (kAlignment - SharedAddress(memory) % kAlignment) % kAlignment;
}

// Stores rows of 64 numbers, of which one begins every `stride` numbers, as CopyBox does: their
// 16-byte chunks are exchanged by the row's number.
__device__ inline void StorePanel(unsigned char* panel, const uint16_t* from, int rows,
                                  int stride) {
  for (int n = static_cast<int>(threadIdx.x); n < rows * kRowNumbers; n += kWarpGroup) {
    const int row = n / kRowNumbers, column = n % kRowNumbers;
    const int chunk = (column / 8) ^ (row % 8);
    reinterpret_cast<uint16_t*>(panel + row * kRowBytes + chunk * 16)[column % 8] =
        from[row * stride + column];
  }
}

// Calls at(n, place) for each of the thread's `count` sums, of which `place` is in rows of `columns`.
template <class At>
__device__ inline void ForEachSum(int count, int columns, const At& at) {
  const int warp = static_cast<int>(threadIdx.x) % kWarpGroup / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int n = 0; n < count; ++n) {
    const int row = warp * 16 + n / 2 % 2 * 8 + lane / 4;
    const int column = n / 4 * 8 + lane % 4 * 2 + n % 2;
    at(n, row * columns + column);
  }
}

// Fills the panels of b, `b_rows` rows in each, and that of a where there is one.
__device__ inline void Fill(const Factors& factors, bool by_copy_box, unsigned char* a,
                            unsigned char* b, int b_rows, int b_panels, uint64_t* full) {
  if (!by_copy_box) {
    if (a != nullptr) StorePanel(a, factors.a, 128, kRowNumbers);
    for (int p = 0; p < b_panels; ++p) {
      StorePanel(b + p * kPanelBytes, factors.b + p * kRowNumbers, b_rows, b_panels * kRowNumbers);
    }
    FenceAsync();
    __syncthreads();
    return;
  }
  if (threadIdx.x == 0) {
    InitBarrier(full, 1);
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const int a_bytes = a == nullptr ? 0 : kPanelBytes;
    ArriveAndExpect(full, static_cast<unsigned>(a_bytes + b_panels * b_rows * kRowBytes));
    if (a != nullptr) CopyBox(a, factors.a_map, 0, 0, 0, 0, full);
    for (int p = 0; p < b_panels; ++p) {
      CopyBox(b + p * kPanelBytes, factors.b_map, p * kRowNumbers, 0, 0, 0, full);
    }
  }
  Wait(full, 0);
}
#endif

__global__ void IsCompiled(int* compiled) { *compiled = TFB_IS_HOPPER; }

// ---- One product ----

template <class T, int kAdds>
__global__ void __launch_bounds__(kWarpGroup)
    Multiply(const __grid_constant__ Factors factors, Place place, float* sums) {
#if TFB_IS_HOPPER
  __shared__ uint64_t full;
  unsigned char* a = Aligned(DynamicShared());
  unsigned char* b = a + kPanelBytes;
  Fill(factors, place.by_copy_box, a, b, 128, 1, &full);
  float d[64];
  ForEachSum(64, 128, [&](int n, int at) { d[n] = sums[at]; });
  const uint64_t a_matrix = DescribeMatrix(a + place.first_row * kRowBytes);
  const uint64_t b_matrix = DescribeMatrix(b);
  const unsigned on = static_cast<unsigned>(place.first_channel) * 2;
  Pin(d);
  BeginProducts();
  MultiplyN128<T, kAdds>(d, MatrixOn(a_matrix, on), MatrixOn(b_matrix, on));
  EndProducts();
  WaitForProducts<0>();
  Pin(d);
  ForEachSum(64, 128, [&](int n, int at) { sums[at] = d[n]; });
#endif
}

template <class T, int kColumns>
__global__ void __launch_bounds__(kWarpGroup)
    MultiplyTransposed(const __grid_constant__ Factors factors, Place place, float* sums) {
#if TFB_IS_HOPPER
  __shared__ uint64_t full;
  unsigned char* b = Aligned(DynamicShared());
  Fill(factors, place.by_copy_box, nullptr, b, 48, kColumns / 64, &full);
  float d[kColumns / 2];
  ForEachSum(kColumns / 2, kColumns, [&](int n, int at) { d[n] = sums[at]; });
  // As of mma.m16n8k16: registers 0 to 3 are rows g, g + 8, g, g + 8, the last two of columns 8 on.
  unsigned a[4];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int n = 0; n < 4; ++n) {
    const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4 + n % 2 * 8;
    const int column = lane % 4 * 2 + n / 2 * 8;
    const uint16_t* pair = factors.a + row * 16 + column;
    a[n] = static_cast<unsigned>(pair[0]) | static_cast<unsigned>(pair[1]) << 16;
  }
  const uint64_t b_matrix = DescribeMatrix(b, kPanelBytes);
  Pin(d);
  Pin(a);
  BeginProducts();
  tfb::MultiplyTransposed<T>(
      d, a, MatrixOn(b_matrix, static_cast<unsigned>(place.first_row * kRowBytes)));
  EndProducts();
  WaitForProducts<0>();
  Pin(d);
  ForEachSum(kColumns / 2, kColumns, [&](int n, int at) { sums[at] = d[n]; });
#endif
}

// ---- Copies ----

__global__ void Copy(const __grid_constant__ TensorMap map, int c0, int c1, int c2, int c3,
                     int box_rows, uint16_t* to) {
#if TFB_IS_HOPPER
  __shared__ uint64_t full;
  unsigned char* box = Aligned(DynamicShared());
  if (threadIdx.x == 0) {
    InitBarrier(&full, 1);
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ArriveAndExpect(&full, static_cast<unsigned>(box_rows * kRowBytes));
    CopyBox(box, map, c0, c1, c2, c3, &full);
  }
  Wait(&full, 0);
  for (int n = static_cast<int>(threadIdx.x); n < box_rows * kRowNumbers; n += kWarpGroup) {
    const int row = n / kRowNumbers, column = n % kRowNumbers;
    const int chunk = (column / 8) ^ (row % 8);
    to[n] = reinterpret_cast<const uint16_t*>(box + row * kRowBytes + chunk * 16)[column % 8];
  }
#endif
}

// ---- The pipeline ----

constexpr int kStages = 2;

template <class T>
__global__ void __launch_bounds__(3 * kWarpGroup)
    MultiplyInStages(const __grid_constant__ TensorMap a_map,
                     const __grid_constant__ TensorMap b_map, int depth, float* c) {
#if TFB_IS_HOPPER
  constexpr int kGroups = 2;        // that multiply
  constexpr int kEveryoneDone = 1;  // a barrier of the block
  __shared__ uint64_t full[kStages], empty[kStages];
  unsigned char* stages = Aligned(DynamicShared());  // of a and b
  const int t = static_cast<int>(threadIdx.x), group = t / kWarpGroup;
  if (t == 0) {
    for (int s = 0; s < kStages; ++s) {
      InitBarrier(&full[s], 1);
      InitBarrier(&empty[s], kGroups * 4);  // warps
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (group == kGroups) {
    FewerRegisters<40>();
    for (int k = 0; t == kGroups * kWarpGroup && k < depth / kRowNumbers; ++k) {
      const int stage = k % kStages;
      unsigned char* a = stages + stage * 2 * kPanelBytes;
      Wait(&empty[stage], (static_cast<unsigned>(k / kStages) & 1) ^ 1);
      ArriveAndExpect(&full[stage], 2 * kPanelBytes);
      CopyBox(a, a_map, k * kRowNumbers, 0, 0, 0, &full[stage]);
      CopyBox(a + kPanelBytes, b_map, k * kRowNumbers, 0, 0, 0, &full[stage]);
    }
    __syncwarp();
    NamedArrive(kEveryoneDone, 3 * kWarpGroup);
    return;
  }
  MoreRegisters<232>();
  float d[64];
  for (float& sum : d) sum = 0;
  for (int k = 0; k < depth / kRowNumbers; ++k) {
    const int stage = k % kStages;
    const unsigned char* a = stages + stage * 2 * kPanelBytes;
    Wait(&full[stage], static_cast<unsigned>(k / kStages) & 1);
    const uint64_t a_matrix = DescribeMatrix(a + group * 64 * kRowBytes);
    const uint64_t b_matrix = DescribeMatrix(a + kPanelBytes);
    Pin(d);
    BeginProducts();
#pragma unroll
    for (unsigned on = 0; on < kRowBytes; on += 32) {
      MultiplyN128<T, 1>(d, MatrixOn(a_matrix, on), MatrixOn(b_matrix, on));
    }
    EndProducts();
    WaitForProducts<0>();
    Pin(d);
    __syncwarp();
    if (t % 32 == 0) Arrive(&empty[stage]);
  }
  ForEachSum(64, 128, [&](int n, int at) { c[group * 64 * 128 + at] = d[n]; });
  // Each of the two groups learns whether one of its sums is negative.
  bool is_negative = false;
  for (const float sum : d) is_negative |= sum < 0;
  is_negative = NamedAny(2 + group, kWarpGroup, is_negative ? 1 : 0);
  NamedSync(kEveryoneDone, 3 * kWarpGroup);
  if (t % kWarpGroup == 0) c[128 * 128 + group] = is_negative ? 1 : 0;
#endif
}

// ---- Launches ----

const char* LaunchIsCompiled(int* compiled) {
  return Launch("IsCompiled", &IsCompiled, KernelShape(1, 1), nullptr, compiled);
}

// Describes a matrix [rows][columns] whose boxes have all rows.
const char* DescribeRows(const void* data, Element element, int rows, int64_t columns,
                         TensorMap* map) {
  const int64_t all = rows * columns;
  const BoxedTensor tensor = {
      const_cast<void*>(data), {columns, rows, 1, 1}, {1, columns, all, all}, rows};
  return EncodeTensorMap(tensor, element, map);
}

const char* LaunchMultiply(const void* a, const void* b, Element element, const Place& place,
                           bool adds, float* sums) {
  Factors factors = {static_cast<const uint16_t*>(a), static_cast<const uint16_t*>(b), {}, {}};
  const char* error = DescribeRows(a, element, 128, kRowNumbers, &factors.a_map);
  if (error == nullptr) error = DescribeRows(b, element, 128, kRowNumbers, &factors.b_map);
  if (error != nullptr) return error;
  const bool is_bf16 = element == Element::kBf16;
  const auto kernel = adds      ? is_bf16 ? &Multiply<__nv_bfloat16, 1> : &Multiply<__half, 1>
                           : is_bf16 ? &Multiply<__nv_bfloat16, 0>
                                : &Multiply<__half, 0>;
  return Launch("Multiply", kernel, KernelShape(1, kWarpGroup, kAlignment + 2 * kPanelBytes),
                nullptr, factors, place, sums);
}

const char* LaunchMultiplyTransposed(const void* a, const void* b, Element element,
                                     const Place& place, int columns, float* sums) {
  Factors factors = {static_cast<const uint16_t*>(a), static_cast<const uint16_t*>(b), {}, {}};
  const char* error = DescribeRows(b, element, 48, columns, &factors.b_map);
  if (error != nullptr) return error;
  const bool is_bf16 = element == Element::kBf16;
  const auto kernel = columns == 64 ? is_bf16 ? &MultiplyTransposed<__nv_bfloat16, 64>
                                              : &MultiplyTransposed<__half, 64>
                      : is_bf16 ? &MultiplyTransposed<__nv_bfloat16, 128>
                                    : &MultiplyTransposed<__half, 128>;
  return Launch("MultiplyTransposed", kernel,
                KernelShape(1, kWarpGroup, kAlignment + 2 * kPanelBytes), nullptr, factors, place,
                sums);
}

const char* LaunchCopy(const BoxedTensor& tensor, Element element, const int (&at)[4],
                       uint16_t* to) {
  TensorMap map;
  const char* error = EncodeTensorMap(tensor, element, &map);
  if (error != nullptr) return error;
  return Launch("Copy", &Copy, KernelShape(1, kWarpGroup, kAlignment + 256 * kRowBytes), nullptr,
                map, at[0], at[1], at[2], at[3], tensor.box_rows, to);
}

const char* LaunchMultiplyInStages(const void* a, const void* b, Element element, int depth,
                                   float* c) {
  TensorMap a_map, b_map;
  const char* error = DescribeRows(a, element, 128, depth, &a_map);
  if (error == nullptr) error = DescribeRows(b, element, 128, depth, &b_map);
  if (error != nullptr) return error;
  const auto kernel =
      element == Element::kBf16 ? &MultiplyInStages<__nv_bfloat16> : &MultiplyInStages<__half>;
  return Launch("MultiplyInStages", kernel,
                KernelShape(1, 3 * kWarpGroup, kAlignment + kStages * 2 * kPanelBytes), nullptr,
                a_map, b_map, depth, c);
}

}  // namespace

TFB_KERNEL_TABLE(HopperCases, {&LaunchIsCompiled, &LaunchMultiply, &LaunchMultiplyTransposed,
                               &LaunchCopy, &LaunchMultiplyInStages});

}  // namespace tfb::hopper_test
