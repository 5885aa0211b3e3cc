#include "core/cuda/for_each.cuh"
#include "core/cuda/warp.cuh"
#include "memory/spalm/spalm_cuda.h"
#include "memory/spalm/spalm_functors.h"

namespace tfb::spalm {
namespace {

// ---- The states: a block for each row of z ----
//
// The block's warps divide the scores of the neighbours and of the gate among them; the first warp
// turns the scores into weights; then each thread does one channel at a time, summing the neighbours in
// their order.
//   shared memory: k (4 + 4) B and the gate's score

constexpr int kThreads = 128;

// A row of x.
struct RowOfX {
  const DeviceView& x;
  int64_t offset;

  __device__ float operator[](int64_t c) const { return Load(x, offset + c * x.strides[2]); }
};
template <class Arguments>
__device__ RowOfX RowOf(const Arguments& a, int64_t row) {
  return {a.x, Offset(a.x, row / a.tokens, row % a.tokens, 0)};
}

// Returns a . b, computed by a warp.
template <class Row>
__device__ float DotOf(const Row& a, const float* b, int64_t dim) {
  float sum = 0;
  for (int64_t c = Lane(); c < dim; c += kWarp) sum += a[c] * b[c];
  return SumOfWarp(sum);
}

// Turns scores into weights that sum to 1, with 0 where there is no neighbour. Returns false where
// there is none at all. A warp calls it.
__device__ bool Softmax(const int* tokens, int k, float* scores) {
  float max = -INFINITY, sum = 0, found = 0;
  for (int n = Lane(); n < k; n += kWarp) {
    found = tokens[n] >= 0 ? 1 : found;
    max = fmaxf(max, scores[n]);
  }
  if (MaxOfWarp(found) == 0) return false;
  max = MaxOfWarp(max);
  for (int n = Lane(); n < k; n += kWarp) {
    scores[n] = tokens[n] < 0 ? 0 : expf(scores[n] - max);
    sum += scores[n];
  }
  sum = SumOfWarp(sum);
  for (int n = Lane(); n < k; n += kWarp) scores[n] /= sum;
  return true;
}

__global__ void __launch_bounds__(kThreads) Aggregate(SpalmArguments a) {
  __shared__ float gate;
  __shared__ bool has_neighbour;
  float* const weights = reinterpret_cast<float*>(DynamicShared());  // [k]
  int* const tokens = reinterpret_cast<int*>(weights + a.k);         // [k]: -1 for no neighbour
  const int64_t row = blockIdx.x;
  const RowOfX x = RowOf(a, row);

  for (int n = Warp(); n <= a.k; n += kThreads / kWarp) {
    const int64_t entry = n < a.k ? a.neighbours[row * a.k + n] : -1;
    const int token = entry >= 0 ? a.values[entry] : -1;
    const float* vector = n == a.k ? a.gate : a.embeddings + (token < 0 ? 0 : token) * a.dim;
    const float score = n < a.k && token < 0 ? -INFINITY : DotOf(x, vector, a.dim);
    if (Lane() != 0) continue;
    if (n == a.k) {
      gate = 1 / (1 + expf(-score));
    } else {
      weights[n] = score;
      tokens[n] = token;
    }
  }
  __syncthreads();
  if (Warp() == 0) {
    const bool found = Softmax(tokens, a.k, weights);
    if (Lane() == 0) {
      if (!found) gate = 1;
      has_neighbour = found;
      a.gates[row] = gate;
    }
  }
  __syncthreads();
  const float g = gate;
  const bool keeps = a.mean != nullptr;
  for (int64_t c = threadIdx.x; c < a.dim; c += kThreads) {
    const float of_x = x[c];
    float mean = has_neighbour ? 0 : of_x;
    for (int n = 0; n < a.k; ++n) {
      if (tokens[n] >= 0) mean += weights[n] * a.embeddings[tokens[n] * a.dim + c];
    }
    a.z[row * a.dim + c] = has_neighbour ? (1 - g) * mean + g * of_x : of_x;
    if (keeps) a.mean[row * a.dim + c] = mean;
  }
  for (int n = threadIdx.x; keeps && n < a.k; n += kThreads) {
    a.weights[row * a.k + n] = weights[n];
    a.places[row * a.k + n] = tokens[n];
  }
}

const char* LaunchAggregate(const SpalmArguments& a, void* stream) {
  const size_t shared_bytes = a.k * (sizeof(float) + sizeof(int));
  return Launch("Aggregate", &Aggregate, {a.rows, kThreads, shared_bytes}, stream, a);
}

// ---- The gradients of scores: a block for each row, whose warps divide the products among them ----
//
//   shared memory: (k + 2) 4 B

__global__ void __launch_bounds__(kThreads) DifferentiateScores(SpalmGradientArguments a) {
  float* const dots = reinterpret_cast<float*>(DynamicShared());  // [k + 2]: dz . y_i, x and m
  const int64_t row = blockIdx.x;
  const float* const dz = a.z_gradient + row * a.dim;
  const int32_t* const places = a.places + row * a.k;
  for (int n = Warp(); n < a.k + 2; n += kThreads / kWarp) {
    float dot = 0;
    if (n == a.k) {
      dot = DotOf(RowOf(a, row), dz, a.dim);
    } else if (n > a.k) {
      dot = DotOf(a.mean + row * a.dim, dz, a.dim);
    } else if (places[n] >= 0) {
      dot = DotOf(a.embeddings + places[n] * a.dim, dz, a.dim);
    }
    if (Lane() == 0) dots[n] = dot;
  }
  __syncthreads();
  const float g = a.gates[row], of_x = dots[a.k], of_mean = dots[a.k + 1];
  for (int n = threadIdx.x; n < a.k; n += kThreads) {
    const int64_t place = row * a.k + n;
    a.scores[place] = places[n] < 0 ? 0 : ScoreGradient(a.weights[place], dots[n], of_mean, g);
  }
  if (threadIdx.x == 0) a.gate_scores[row] = GateScoreGradient(of_x, of_mean, g);
}

const char* LaunchDifferentiateScores(const SpalmGradientArguments& a, void* stream) {
  const size_t shared_bytes = (a.k + 2) * sizeof(float);
  return Launch("DifferentiateScores", &DifferentiateScores, {a.rows, kThreads, shared_bytes},
                stream, a);
}

// ---- The gradients of embeddings ----
//
// A place is a neighbour of a row, and adds w dm + dc x to the embedding of its token. A block has the
// sums of 32 tokens and 64 of their channels. It looks at the tokens of all places, 256 at a time,
// and lists those that are its own, in their order. Then each of 4 groups of 64 threads takes every
// fourth of all the block's places; the groups' sums are added at the end, in the order of the groups.
// So a token that most places have, as that of a frequent word, keeps all groups busy, and no order of
// threads has an effect.
//   shared memory: 4 x 32 x 64 x 4 B = 32 KiB of sums, and a list of 256 x 32 B = 8 KiB
// With a vocabulary of 50,000 tokens, 1024 channels and 64 Ki places, all blocks read 1563 x 16 x
// 256 KiB = 6.1 GiB of tokens, which lie in the L2 cache; the products with `output` are 20 TFLOP
// where each of 64 Ki rows has one place.

constexpr int kTileTokens = 32;
constexpr int kTileChannels = 64;
constexpr int kGroups = 4;
constexpr int kListThreads = kGroups * kTileChannels;
constexpr int kListWarps = kListThreads / kWarp;

struct ListedPlace {
  int64_t row;
  int64_t x_offset;  // of the row
  float weight;
  float score;
  int token;  // of the tile's
};
struct EmbeddingTile {
  float sums[kGroups][kTileTokens][kTileChannels];
  ListedPlace list[kListThreads];
  int of_warps[kListWarps];  // how many of a warp's places are the block's
};

// Lists the block's places among kListThreads from `first` on, of which the thread looks at one.
// Returns their number. Other threads have then done with the list before.
__device__ int ListPlaces(const SpalmGradientArguments& a, int64_t first, int64_t first_token,
                          EmbeddingTile* tile) {
  const int64_t place = first + threadIdx.x;
  const int64_t token = place < a.rows * a.k ? a.places[place] - first_token : -1;
  const bool is_own = token >= 0 && token < kTileTokens;
  const unsigned own = __ballot_sync(kAllLanes, is_own);
  if (Lane() == 0) tile->of_warps[Warp()] = __popc(own);
  __syncthreads();
  int before = __popc(own & ((1u << Lane()) - 1)), count = 0;
  for (int w = 0; w < kListWarps; ++w) {
    before += w < Warp() ? tile->of_warps[w] : 0;
    count += tile->of_warps[w];
  }
  if (is_own) {
    const int64_t row = place / a.k;
    tile->list[before] = {row, RowOf(a, row).offset, a.weights[place], a.scores[place],
                          static_cast<int>(token)};
  }
  __syncthreads();
  return count;
}

__global__ void __launch_bounds__(kListThreads) AddToOutput(SpalmGradientArguments a) {
  __shared__ EmbeddingTile tile;
  const int64_t channel_tiles = CeilDiv(a.dim, kTileChannels);
  const int64_t first_token = blockIdx.x / channel_tiles * kTileTokens;
  const int own_channel = static_cast<int>(threadIdx.x) % kTileChannels;
  const int64_t c = blockIdx.x % channel_tiles * kTileChannels + own_channel;
  const int group = static_cast<int>(threadIdx.x) / kTileChannels;
  for (int t = 0; t < kTileTokens; ++t) tile.sums[group][t][own_channel] = 0;
  int64_t seen = 0;  // places of the block
  for (int64_t first = 0; first < a.rows * a.k; first += kListThreads) {
    const int count = ListPlaces(a, first, first_token, &tile);
    const int next = static_cast<int>(seen % kGroups);  // the group that takes the next place
    for (int n = (group - next + kGroups) % kGroups; n < count && c < a.dim; n += kGroups) {
      const ListedPlace& place = tile.list[n];
      const float x = RowOfX{a.x, place.x_offset}[c];
      tile.sums[group][place.token][own_channel] +=
          place.weight * a.z_gradient[place.row * a.dim + c] + place.score * x;
    }
    seen += count;
    __syncthreads();  // the list has been read
  }
  if (seen == 0) return;
  for (int t = group; t < kTileTokens; t += kGroups) {
    if (first_token + t >= a.vocabulary || c >= a.dim) continue;
    float sum = 0;
    for (int of = 0; of < kGroups; ++of) sum += tile.sums[of][t][own_channel];
    const int64_t offset = (first_token + t) * a.output.strides[0] + c * a.output.strides[1];
    static_cast<float*>(a.output.data)[offset] += sum;
  }
}

const char* LaunchAddToOutput(const SpalmGradientArguments& a, void* stream) {
  if (a.k == 0) return nullptr;
  const int64_t blocks = CeilDiv(a.vocabulary, kTileTokens) * CeilDiv(a.dim, kTileChannels);
  return Launch("AddToOutput", &AddToOutput, {blocks, kListThreads}, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(SpalmKernels, {&LaunchAggregate, &LaunchDifferentiateScores, &LaunchAddToOutput});
TFB_FOR_EACH_IN_ROWS(ThroughGate);

}  // namespace tfb::spalm
