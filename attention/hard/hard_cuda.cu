#include "attention/hard/hard_tiles.cuh"

namespace tfb::hard {
namespace {

// A block chooses for 64 queries of one head. The 16 threads that share queries each keep the best
// of the keys that they see, and agree at the end: the larger score, and of equal ones the lower
// key.

constexpr unsigned kNoKey = 0xffffffffu;  // -1 as int32, and above all keys

template <HardSample kSample>
__device__ void TakeMaxima(const HardArguments& a, const Task& task, Tiles (&tiles)[2],
                           unsigned (&index)[kRows]) {
  float max[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) max[r] = -INFINITY;
  ForEachTile<kSample>(a, task, tiles,
                       [&](int64_t first_key, const float(&scores)[kRows][kColumns]) {
#pragma unroll
                         for (int r = 0; r < kRows; ++r) {
#pragma unroll
                           for (int n = 0; n < kColumns; ++n) {
                             if (scores[r][n] > max[r]) {
                               max[r] = scores[r][n];
                               index[r] = static_cast<unsigned>(first_key) + n;
                             }
                           }
                         }
                       });
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int lanes = kTeam / 2; lanes > 0; lanes /= 2) {
      const float other_max = __shfl_xor_sync(~0u, max[r], lanes);
      const unsigned other = __shfl_xor_sync(~0u, index[r], lanes);
      if (other_max > max[r] || (other_max == max[r] && other < index[r])) {
        max[r] = other_max;
        index[r] = other;
      }
    }
  }
}

// Goes over the keys twice: for the sum of their weights, and up to u of it.
__device__ void Draw(const HardArguments& a, const Task& task, Tiles (&tiles)[2],
                     unsigned (&index)[kRows]) {
  float largest[kRows], sum[kRows];
  SumWeights(a, task, tiles, largest, sum);
  double target[kRows], passed[kRows];
  unsigned last[kRows];  // key + 1 of a weight above 0; 0 for none
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t i = min(task.first_query + ThreadRow() + r, a.query_tokens - 1);
    const float u = LoadElement(
        a.noise.data, a.noise.element,
        task.batch * a.noise.strides[0] + task.head * a.noise.strides[1] + i * a.noise.strides[2]);
    target[r] = (u < 0 ? 0.0 : static_cast<double>(u)) * sum[r];
    passed[r] = 0;
    last[r] = 0;
  }
  ForEachTile<HardSample::kInverseCdf>(
      a, task, tiles, [&](int64_t first_key, const float(&scores)[kRows][kColumns]) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float weights[kColumns], own = 0;
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
            weights[n] = sum[r] == 0 ? 0 : Weight(scores[r][n] - largest[r]);
            own += weights[n];
          }
          float upto = own;  // the sum of this thread's weights and those of earlier threads
#pragma unroll
          for (int lanes = 1; lanes < kTeam; lanes *= 2) {
            const float below = __shfl_up_sync(~0u, upto, lanes, kTeam);
            if (TeamMember() >= lanes) upto += below;
          }
          const float below = __shfl_up_sync(~0u, upto, 1, kTeam);
          double before = passed[r] + (TeamMember() == 0 ? 0.0 : static_cast<double>(below));
#pragma unroll
          for (int n = 0; n < kColumns; ++n) {
            const unsigned key = static_cast<unsigned>(first_key) + n;
            before += weights[n];
            if (weights[n] > 0) last[r] = key + 1;
            if (weights[n] > 0 && before > target[r] && index[r] == kNoKey) index[r] = key;
          }
          passed[r] += __shfl_sync(~0u, upto, kTeam - 1, kTeam);
        }
      });
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int lanes = kTeam / 2; lanes > 0; lanes /= 2) {
      index[r] = min(index[r], __shfl_xor_sync(~0u, index[r], lanes));
      last[r] = max(last[r], __shfl_xor_sync(~0u, last[r], lanes));
    }
    if (index[r] == kNoKey) index[r] = last[r] - 1;  // for u = 1, or just below it
  }
}

// Copies a value as bits, so that no conversion changes it; 0 for no key.
template <class Bits>
__device__ void CopyValue(const HardArguments& a, const Task& task, int64_t i, unsigned key) {
  const Bits* v = static_cast<const Bits*>(a.v.data);
  Bits* out = static_cast<Bits*>(a.out.data);
  const int64_t from = task.batch * a.v.strides[0] + task.head / a.group * a.v.strides[1] +
                       static_cast<int64_t>(key) * a.v.strides[2];
  const int64_t to =
      task.batch * a.out.strides[0] + task.head * a.out.strides[1] + i * a.out.strides[2];
  for (int c = TeamMember(); c < a.value_dim; c += kTeam) {
    out[to + c * a.out.strides[3]] = key == kNoKey ? Bits{0} : v[from + c * a.v.strides[3]];
  }
}

template <HardSample kSample>
__global__ void __launch_bounds__(kThreads) Choose(HardArguments a) {
  __shared__ Tiles tiles[2];
  const Task task = QueriesOf(a, blockIdx.x);
  unsigned index[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) index[r] = kNoKey;
  if (kSample == HardSample::kInverseCdf) {
    Draw(a, task, tiles, index);
  } else {
    TakeMaxima<kSample>(a, task, tiles, index);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t i = task.first_query + ThreadRow() + r;
    if (i >= a.query_tokens) break;
    if (a.kept_index != nullptr && TeamMember() == 0) {
      a.kept_index[(task.batch * a.query_heads + task.head) * a.query_tokens + i] =
          static_cast<int32_t>(index[r]);
    }
    if (a.index != nullptr && TeamMember() == 0) {
      a.index[task.batch * a.index_strides[0] + task.head * a.index_strides[1] +
              i * a.index_strides[2]] = static_cast<int32_t>(index[r]);
    }
    if (a.v.element == Element::kF32) {
      CopyValue<uint32_t>(a, task, i, index[r]);
    } else {
      CopyValue<uint16_t>(a, task, i, index[r]);
    }
  }
}

const char* LaunchChoose(const HardArguments& a, void* stream) {
  const KernelShape shape = {a.batch * a.query_heads * CeilDiv(a.query_tokens, kTile), kThreads};
  switch (a.sample) {
    case HardSample::kInverseCdf:
      return Launch("Choose", &Choose<HardSample::kInverseCdf>, shape, stream, a);
    case HardSample::kGumbel:
      return Launch("Choose", &Choose<HardSample::kGumbel>, shape, stream, a);
    default:
      return Launch("Choose", &Choose<HardSample::kNone>, shape, stream, a);
  }
}

}  // namespace

TFB_KERNEL_TABLE(HardKernels, {&LaunchChoose});

}  // namespace tfb::hard
