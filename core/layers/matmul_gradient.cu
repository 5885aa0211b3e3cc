// The products x^T dy of a product's gradients, on tensor cores: mma.sync m16n8k16 with f32 sums, sm_80
// and later.
//
// A block of 2 x 2 warps makes a tile of dW for one chunk of rows. There are two kinds of operands, of
// which LaunchMatMulGradient chooses:
//
//   Whole   x and dy have one type of 16 bits and lie in 16-byte chunks: products of pairs are exact,
//           and cp.async copies rows as they are
//   Split   everything else. A number is the sum of its bf16, of the bf16 of what that leaves, and so
//           on: one of a bf16, two of an f16, three of an f32, with which no bit is lost above 2^-133.
//           Of the products of these planes those are added that matter to f32: plane p of x with q of
//           dy where p + q <= 2, so six of f32 with f32, three of bf16 with f32, one of bf16 with bf16.
//           What is left out is hardly more than 2^-26 |x dy|. An infinity gives NaN, since what its
//           bf16 leaves is none, and so does a number beyond bf16's largest, 3.39e38
//
// Layers of 16 bits have both: projections around an attention (projected_attention.cc) and gradients
// of what it reads are in 16 bits, where list_attention.cc, feed_forward.cc and gate.cc have hidden
// states and gradients in f32 in their scratch, whatever the problem's type.
//
// Tensor cores cut sums towards zero. So the products of a step, 16 or 32 rows, are a sum of their own,
// to which the smallest products are added first: it is cut once or twice at its own size. An f32
// addition, which rounds to nearest, adds it to the sum over the steps.
//
//                    Whole                          Split
//   tile of dW       128 x 128, a warp 64 x 64      64 x 128, a warp 32 x 64
//   a step           32 rows                        16 rows
//   on their way     two steps, by cp.async         one step, in 24 registers of a thread
//   shared memory    3 stages of 16 KiB, 49.5 KiB   2 stages of 18 KiB, 36.5 KiB with where rows begin
//   registers        250 of sm_90a, 252 of sm_80    201 of sm_90a, 200 of sm_80 and sm_89,
//                    and sm_89, without spills      without spills
//   blocks of an SM  2; 1 of sm_89                  2
//   multiply-adds    403 cycles a step, of 1,300    605 cycles of f32 with f32, 303 of bf16 with f32
//                    that mma.sync does in one
//                    on an H100
//   shared memory    48 KiB a step, 384 cycles      54 KiB, 432 cycles; 42 KiB, 336 cycles
//   read from L2     16 KiB a step                  12 KiB; 10 KiB
//
// Expected on an H100, and not measured: about half of what the multiply-adds allow with whole operands,
// 250 to 300 TFLOP/s, for which L2 gives 4 TB/s; and two thirds with split ones, 60 to 70 TFLOP/s of
// f32 with f32 and 90 to 120 of bf16 with f32, beside conversions of some 300 instructions of a thread a
// step. FMA units would do 32 of f32 (64 x 64 of dW by 128 threads, half of their peak). GeForce GPUs of
// sm_89, whose tensor cores do 256 multiply-adds a cycle, lose by it: 27 TFLOP/s against 40.
//
// A row of dy that is 0 in the columns of a tile adds nothing to it: where a warp meets a number of x
// that is not finite, it puts zeros in the place of the rows of its operand to which this applies.
//
// All sums are in the order of the rows, and chunks are added in theirs (SumOfChunks), so that the bits
// are the same in every run. Which rows a chunk has depends on their number alone. That of a list is in
// device memory, and each block reads it; a thread has the next step's index on its way in a register
// while it multiplies.
#include "core/cuda/for_each.cuh"
#include "core/cuda/sixteen.cuh"
#include "core/layers/layer_rows.cuh"
#include "core/layers/matmul_gradient_kernels.h"

namespace tfb {
namespace {

constexpr int kThreads = 128;
constexpr int kTileOut = 128;    // columns of a tile of dW
constexpr int kColumnTiles = 8;  // mma tiles of a warp's 64 columns
constexpr int64_t kNoRow = INT64_MIN;

template <class T>
struct Whole {
  using Number = T;
  static constexpr int kPlanes = 1;
  static constexpr int kRowTiles = 4;  // mma tiles of a warp's rows of dW
  static constexpr int kDepth = 32;    // rows of x and dy in a step
  static constexpr int kStages = 3;
  static constexpr int kBlocks = 2;  // of a multiprocessor
};
struct Split {
  using Number = __nv_bfloat16;
  static constexpr int kPlanes = 3;
  static constexpr int kRowTiles = 2;
  static constexpr int kDepth = 16;
  static constexpr int kStages = 2;
  static constexpr int kBlocks = 2;
};

template <class Operands>
constexpr int kTileIn = 2 * Operands::kRowTiles * 16;  // rows of a tile of dW

// Rows of x and dy, in chunks as core/cuda/sixteen.cuh has them.
template <class Operands>
struct Stage {
  unsigned char x[Operands::kPlanes][Operands::kDepth * kTileIn<Operands> * 2];
  unsigned char dy[Operands::kPlanes][Operands::kDepth * kTileOut * 2];
};
template <class Operands>
struct Shared {
  Stage<Operands> stages[Operands::kStages];  // of step n at n % kStages
  // Where the rows of x and of dy begin, or kNoRow; of step n at n % kStages.
  int64_t x_rows[Operands::kStages][Operands::kDepth];
  int64_t dy_rows[Operands::kStages][Operands::kDepth];
};

__device__ inline int PlanesOf(Element element) {
  return element == Element::kBf16 ? 1 : element == Element::kF16 ? 2 : 3;
}

// Tells whether every row begins at a multiple of `count` elements' bytes and is whole vectors of
// `count`.
bool IsInVectors(const DeviceRows& rows, int64_t channels, int count) {
  const int bytes = count * (rows.element == Element::kF32 ? 4 : 2);
  return rows.channel_stride == 1 && channels % count == 0 && rows.token_stride % count == 0 &&
         rows.batch_stride % count == 0 && reinterpret_cast<uintptr_t>(rows.data) % bytes == 0;
}

// The rows of a chunk: the begin-th to the (end - 1)-th of all or of the list.
struct Chunk {
  int64_t begin;
  int64_t end;
};
// Chunks have equally many rows, in whole steps of either kind of operands, as far as there are rows.
__device__ inline Chunk ChunkOf(const MatMulGradientArguments& a, int64_t index) {
  constexpr int64_t kSteps = 32;
  const int64_t count = RowsOfList(a.list, a.rows);
  const int64_t rows = CeilDiv(CeilDiv(count, a.chunks), kSteps) * kSteps;
  return {min(index * rows, count), min((index + 1) * rows, count)};
}

// A thread's part of a tile of kRows rows and kColumns columns: kCount columns side by side of several
// rows.
template <int kRows, int kColumns, int kCount>
struct PartOfTile {
  static constexpr int kRowThreads = kColumns / kCount;
  static constexpr int kEach = kRows * kRowThreads / kThreads;
  static_assert(kRows * kRowThreads % kThreads == 0, "the threads have equal parts");
  __device__ static int Row(int n) {
    return static_cast<int>(threadIdx.x) / kRowThreads + n * (kThreads / kRowThreads);
  }
  __device__ static int Column() { return static_cast<int>(threadIdx.x) % kRowThreads * kCount; }
};

// ---- Whole operands ----

// Starts copies of rows, from channel `first` on, with zeros where there is no row or channel.
template <class T, int kRows, int kColumns>
__device__ inline void StartRows(const DeviceRows& view, const int64_t* rows, int64_t first,
                                 int64_t channels, unsigned char* to) {
  using Part = PartOfTile<kRows, kColumns, 8>;
  const T* const data = static_cast<const T*>(view.data);
  const int64_t channel = first + Part::Column();
#pragma unroll
  for (int n = 0; n < Part::kEach; ++n) {
    const int64_t row = rows[Part::Row(n)];
    const bool exists = row != kNoRow && channel < channels;
    CopyAsync(to + ChunkOffset<kColumns>(Part::Row(n), Part::Column() / 8),
              data + (exists ? row + channel : 0), exists);
  }
}

// ---- Split operands ----

// Loads the bits of four channels of a row, with zeros where there is no row or channel: a word each,
// or two words where numbers have 16 bits. Nothing here needs what is loaded, so that threads go on.
__device__ inline void LoadFour(const DeviceRows& view, bool in_fours, int64_t row, int64_t channel,
                                int64_t channels, unsigned (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = 0;
  if (row == kNoRow || channel >= channels) return;
  const int64_t first = row + channel * view.channel_stride;
  if (view.element == Element::kF32) {
    const unsigned* const from = static_cast<const unsigned*>(view.data) + first;
    if (in_fours) {
      const uint4 four = *reinterpret_cast<const uint4*>(from);
      words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (channel + i < channels) words[i] = from[i * view.channel_stride];
    }
  } else {
    const unsigned short* const from = static_cast<const unsigned short*>(view.data) + first;
    if (in_fours) {
      const uint2 four = *reinterpret_cast<const uint2*>(from);
      words[0] = four.x, words[1] = four.y;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (channel + i >= channels) continue;
      words[i / 2] |= unsigned{from[i * view.channel_stride]} << i % 2 * 16;
    }
  }
}
__device__ inline float NumberOf(const unsigned (&words)[4], Element element, int i) {
  if (element == Element::kF32) return __uint_as_float(words[i]);
  return element == Element::kBf16 ? Half<__nv_bfloat16>(words[i / 2], i % 2)
                                   : Half<__half>(words[i / 2], i % 2);
}

// Rows on their way to shared memory, in registers.
template <int kRows, int kColumns>
class RowsToSplit {
 public:
  __device__ void Load(const DeviceRows& view, bool in_fours, const int64_t* rows, int64_t first,
                       int64_t channels) {
#pragma unroll
    for (int n = 0; n < Part::kEach; ++n) {
      LoadFour(view, in_fours, rows[Part::Row(n)], first + Part::Column(), channels, words_[n]);
    }
  }
  // Stores the planes that numbers of this type have.
  template <int kPlanes, int kBytes>
  __device__ void Store(Element element, unsigned char (&to)[kPlanes][kBytes]) const {
    using T = Split::Number;
#pragma unroll
    for (int n = 0; n < Part::kEach; ++n) {
      const int offset =
          ChunkOffset<kColumns>(Part::Row(n), Part::Column() / 8) + Part::Column() % 8 * 2;
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = NumberOf(words_[n], element, i);
#pragma unroll
      for (int p = 0; p < kPlanes; ++p) {
        if (p >= PlanesOf(element)) continue;
        const uint2 plane = make_uint2(Pair<T>(x[0], x[1]), Pair<T>(x[2], x[3]));
        *reinterpret_cast<uint2*>(to[p] + offset) = plane;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] -= Half<T>(i < 2 ? plane.x : plane.y, i % 2);
      }
    }
  }

 private:
  using Part = PartOfTile<kRows, kColumns, 4>;
  unsigned words_[Part::kEach][4];
};

// ---- A tile ----

template <class Operands>
class Product {
 public:
  using T = typename Operands::Number;
  static constexpr int kPlanes = Operands::kPlanes, kRowTiles = Operands::kRowTiles;
  static constexpr int kDepth = Operands::kDepth, kStages = Operands::kStages;
  static constexpr int kIn = kTileIn<Operands>;
  static constexpr int kSlices = kDepth / 16;  // a product of mma is over 16 rows

  // Makes the `index`-th tile of all chunks.
  __device__ Product(const MatMulGradientArguments& a, bool x_in_fours, bool dy_in_fours,
                     int64_t index, Shared<Operands>& shared)
      : a_(a), x_in_fours_(x_in_fours), dy_in_fours_(dy_in_fours), shared_(shared) {
    const int64_t across = CeilDiv(a.out, kTileOut), tiles = CeilDiv(a.in, kIn) * across;
    chunk_ = index / tiles;
    first_in_ = index % tiles / across * kIn;
    first_out_ = index % across * kTileOut;
    rows_ = ChunkOf(a, chunk_);
    steps_ = static_cast<int>(CeilDiv(rows_.end - rows_.begin, kDepth));
  }

  __device__ void Run() {
    for (int n = 0; n < kStages - 1; ++n) {
      NameRow(n);
      FindRows(n);
    }
    NameRow(kStages - 1);
    __syncthreads();
    for (int n = 0; n < kStages - 1; ++n) Start(n);
#pragma unroll 1
    for (int n = 0; n < steps_; ++n) {
      Finish(n);
      FindRows(n + kStages - 1);
      __syncthreads();  // the step has arrived; the one before has been read
      NameRow(n + kStages);
      Start(n + kStages - 1);
      if (has_work()) Multiply(shared_.stages[n % kStages]);
    }
    Write();
  }

 private:
  // A warp has rows warp_in() on of the tile of dW, and 64 columns from warp_out() on.
  __device__ static int warp_in() { return Warp() / 2 * kRowTiles * 16; }
  __device__ static int warp_out() { return Warp() % 2 * kColumnTiles * 8; }
  __device__ bool has_work() const {
    return first_in_ + warp_in() < a_.in && first_out_ + warp_out() < a_.out;
  }

  // Loads which row the thread finds of step n, or kNoRow.
  __device__ void NameRow(int n) {
    const int64_t place = rows_.begin + int64_t{n} * kDepth + threadIdx.x % kDepth;
    row_ = kNoRow;
    if (threadIdx.x < 2 * kDepth && place < rows_.end) row_ = RowOfList(a_.list, place);
  }
  // Finds where the rows of step n begin, which NameRow has named.
  __device__ void FindRows(int n) const {
    const int r = static_cast<int>(threadIdx.x) % kDepth;
    if (threadIdx.x < kDepth) {
      shared_.x_rows[n % kStages][r] = row_ == kNoRow ? kNoRow : RowOffset(a_.x, row_);
    } else if (threadIdx.x < 2 * kDepth) {
      shared_.dy_rows[n % kStages][r] = row_ == kNoRow ? kNoRow : RowOffset(a_.dy, row_);
    }
  }

  // Starts to bring the rows of step n, which FindRows has found, to their stage; a step that does not
  // exist has none.
  __device__ void Start(int n) {
    const int64_t *x_rows = shared_.x_rows[n % kStages], *dy_rows = shared_.dy_rows[n % kStages];
    if constexpr (kPlanes == 1) {
      Stage<Operands>& stage = shared_.stages[n % kStages];
      if (n < steps_) {
        StartRows<T, kDepth, kIn>(a_.x, x_rows, first_in_, a_.in, stage.x[0]);
        StartRows<T, kDepth, kTileOut>(a_.dy, dy_rows, first_out_, a_.out, stage.dy[0]);
      }
      __pipeline_commit();
    } else if (n < steps_) {
      x_.Load(a_.x, x_in_fours_, x_rows, first_in_, a_.in);
      dy_.Load(a_.dy, dy_in_fours_, dy_rows, first_out_, a_.out);
    }
  }
  // Completes the thread's part of step n in its stage.
  __device__ void Finish(int n) {
    if constexpr (kPlanes == 1) {
      __pipeline_wait_prior(kStages - 2);
    } else {
      x_.Store(a_.x.element, shared_.stages[n % kStages].x);
      dy_.Store(a_.dy.element, shared_.stages[n % kStages].dy);
    }
  }

  // Tells whether the operands have plane p of x and q of dy.
  __device__ bool HasPlanes(int p, int q) const {
    return kPlanes == 1 || (p < PlanesOf(a_.x.element) && q < PlanesOf(a_.dy.element));
  }

  using Left = unsigned[kSlices][kPlanes][kRowTiles][4];
  using Right = unsigned[kSlices][kPlanes][4];  // of 16 columns

  __device__ void Multiply(const Stage<Operands>& stage) {
    Left left;
    LoadLeft(stage, left);
    if (HasNonFinite(left)) ClearRowsWithoutGradient(stage, left);
#pragma unroll
    for (int c = 0; c < kColumnTiles; c += 2) {
      if (first_out_ + warp_out() + c * 8 >= a_.out) break;
      Right right;
      LoadRight(stage, c, right);
      float products[kRowTiles][2][4] = {};
#pragma unroll
      for (int order = kPlanes - 1; order >= 0; --order) {
#pragma unroll
        for (int p = 0; p <= order; ++p) {
          if (!HasPlanes(p, order - p)) continue;
#pragma unroll
          for (int s = 0; s < kSlices; ++s) {
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
              Sixteen<T>::Multiply(products[m][0], left[s][p][m], right[s][order - p]);
              Sixteen<T>::Multiply(products[m][1], left[s][p][m], right[s][order - p] + 2);
            }
          }
        }
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sums_[m][c][e] += products[m][0][e];
          sums_[m][c + 1][e] += products[m][1][e];
        }
      }
    }
  }

  // x^T is stored as x, so that ldmatrix transposes: lanes 8 i to 8 i + 7 give rows of its i-th matrix,
  // which are 8 rows of x, here 8 (i / 2) on, and 8 columns, 8 (i % 2) on.
  __device__ void LoadLeft(const Stage<Operands>& stage, Left& left) const {
    const int row = Lane() / 16 * 8 + Lane() % 8, chunk = warp_in() / 8 + Lane() / 8 % 2;
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
#pragma unroll
      for (int p = 0; p < kPlanes; ++p) {
        if (!HasPlanes(p, 0)) continue;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          LdMatrixX4Transposed(left[s][p][m],
                               stage.x[p] + ChunkOffset<kIn>(s * 16 + row, chunk + m * 2));
        }
      }
    }
  }
  // Here i % 2 is of rows and i / 2 of columns.
  __device__ void LoadRight(const Stage<Operands>& stage, int column_tile, Right& right) const {
    const int row = Lane() % 16, chunk = warp_out() / 8 + column_tile + Lane() / 16;
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
#pragma unroll
      for (int q = 0; q < kPlanes; ++q) {
        if (!HasPlanes(0, q)) continue;
        LdMatrixX4Transposed(right[s][q], stage.dy[q] + ChunkOffset<kTileOut>(s * 16 + row, chunk));
      }
    }
  }

  // Tells whether any number of the warp's operand is infinite or NaN: its first plane is, then.
  __device__ static bool HasNonFinite(const Left& left) {
    unsigned found = 0;
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) found |= NonFinite<T>(left[s][0][m][i]);
      }
    }
    return __any_sync(kAllLanes, found != 0) != 0;
  }
  // A number is 0 where its first plane is.
  __device__ void ClearRowsWithoutGradient(const Stage<Operands>& stage, Left& left) const {
    unsigned magnitudes = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < kTileOut / 8; ++chunk) {
      const uint4 eight = *reinterpret_cast<const uint4*>(
          stage.dy[0] + ChunkOffset<kTileOut>(Lane() % kDepth, chunk));
      magnitudes |= (eight.x | eight.y | eight.z | eight.w) & 0x7fff7fffu;
    }
    const unsigned zeros = __ballot_sync(kAllLanes, magnitudes == 0);  // bit r: of row r
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned of_pair = zeros >> (s * 16 + i / 2 * 8 + Lane() % 4 * 2);
        const unsigned kept =
            ((of_pair & 1) != 0 ? 0 : 0xffffu) | ((of_pair & 2) != 0 ? 0 : 0xffff0000u);
#pragma unroll
        for (int p = 0; p < kPlanes; ++p) {
          if (!HasPlanes(p, 0)) continue;
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) left[s][p][m][i] &= kept;
        }
      }
    }
  }

  __device__ void Write() const {
    float* const to = a_.sums + chunk_ * (a_.in + 1) * a_.out;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t k = first_in_ + warp_in() + m * 16 + half * 8 + Lane() / 4;
        if (k >= a_.in) continue;
#pragma unroll
        for (int c = 0; c < kColumnTiles; ++c) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int64_t column = first_out_ + warp_out() + c * 8 + Lane() % 4 * 2 + e;
            if (column < a_.out) to[k * a_.out + column] = sums_[m][c][half * 2 + e];
          }
        }
      }
    }
  }

  const MatMulGradientArguments& a_;
  const bool x_in_fours_;
  const bool dy_in_fours_;
  Shared<Operands>& shared_;
  int64_t chunk_;
  int64_t first_in_;
  int64_t first_out_;
  Chunk rows_;
  int steps_;
  int64_t row_;  // the one that the thread finds next
  float sums_[kRowTiles][kColumnTiles][4] = {};
  // The rows of the step that is on its way, where operands are split.
  RowsToSplit<kDepth, kIn> x_;
  RowsToSplit<kDepth, kTileOut> dy_;
};

// ---- The bias ----

constexpr int kWarps = kThreads / kWarp;

// Adds up 32 columns of dy over a chunk: a warp every fourth row, eight at a time, and then the sums of
// warps. Each lane finds one of the warp's next 32 rows.
__device__ inline void SumColumns(const MatMulGradientArguments& a, int64_t index,
                                  float (&of_warps)[kWarps][kWarp]) {
  constexpr int kAtOnce = 8;
  const int64_t across = CeilDiv(a.out, kWarp), chunk = index / across;
  const int64_t column = index % across * kWarp + Lane();
  const Chunk rows = ChunkOf(a, chunk);
  float sum = 0;
  for (int64_t first = rows.begin + Warp(); first < rows.end; first += kWarp * kWarps) {
    const int64_t own = first + Lane() * kWarps;
    const int64_t begins = own < rows.end ? RowOffset(a.dy, RowOfList(a.list, own)) : kNoRow;
    for (int m = 0; m < kWarp && first + m * kWarps < rows.end; m += kAtOnce) {
      float dy[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int64_t row = __shfl_sync(kAllLanes, begins, m + n);
        dy[n] = row != kNoRow && column < a.out ? Load(a.dy, row, column) : 0;
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) sum += dy[n];
    }
  }
  of_warps[Warp()][Lane()] = sum;
  __syncthreads();
  if (Warp() > 0 || column >= a.out) return;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += of_warps[w][Lane()];
  a.sums[(chunk * (a.in + 1) + a.in) * a.out + column] = sum;
}

// ---- The kernel ----

// The blocks of the bias come first.
template <class Operands>
__global__ void __launch_bounds__(kThreads, Operands::kBlocks)
    MatMulGradient(const MatMulGradientArguments a, const bool x_in_fours, const bool dy_in_fours,
                   const int64_t bias_blocks) {
  unsigned char* const memory = DynamicShared<sizeof(Shared<Operands>)>();
  const int64_t block = blockIdx.x;
  if (block < bias_blocks) {
    SumColumns(a, block, *reinterpret_cast<float(*)[kWarps][kWarp]>(memory));
  } else {
    Product<Operands>(a, x_in_fours, dy_in_fours, block - bias_blocks,
                      *reinterpret_cast<Shared<Operands>*>(memory))
        .Run();
  }
}

template <class Operands>
const char* LaunchProduct(const MatMulGradientArguments& a, void* stream) {
  const int64_t bias_blocks = a.wants_bias ? CeilDiv(a.out, kWarp) * a.chunks : 0;
  const int64_t tiles = CeilDiv(a.in, kTileIn<Operands>) * CeilDiv(a.out, kTileOut);
  return Launch("MatMulGradient", &MatMulGradient<Operands>,
                {bias_blocks + tiles * a.chunks, kThreads, sizeof(Shared<Operands>)}, stream, a,
                IsInVectors(a.x, a.in, 4), IsInVectors(a.dy, a.out, 4), bias_blocks);
}

const char* LaunchMatMulGradient(const MatMulGradientArguments& a, void* stream) {
  const bool is_whole =
      a.x.element == a.dy.element && IsInVectors(a.x, a.in, 8) && IsInVectors(a.dy, a.out, 8);
  if (is_whole && a.x.element == Element::kBf16)
    return LaunchProduct<Whole<__nv_bfloat16>>(a, stream);
  if (is_whole && a.x.element == Element::kF16) return LaunchProduct<Whole<__half>>(a, stream);
  return LaunchProduct<Split>(a, stream);
}

}  // namespace

TFB_KERNEL_TABLE(MatMulGradientKernels, {&LaunchMatMulGradient});
TFB_FOR_EACH_IN_ROWS(SumOfChunks);

}  // namespace tfb
