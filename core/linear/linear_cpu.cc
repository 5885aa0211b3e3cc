// Engine linear on the CPU.
//
// Features are kept with tokens in columns, [features][64], so that maxima, sums and exponentials
// of 64 tokens are vertical vector operations, W is read in place, and every product is the GEMM
// kernel with a B operand of 64 columns and 64 rows (16 KiB, half of a 32 KiB L1). For a chunk of
// 64 tokens of one head, head_dim = value_dim = 64, m = 256 features:
//
//   project keys      W [256 x 64] K^T [64 x 64]           1.05 M FMA
//   add to the sums   E [256 x 64] V [64 x 64]             1.05 M FMA
//   project queries   as for keys                              1.05 M FMA
//   read the sums     F^T [64 x 256] A [256 x 64]          1.05 M FMA
//   exponentials      2 x 16 K
//   causal, twice     F^T [32 x 256] E [256 x 32]          0.26 M FMA, less what is right of the
//                     weights [32 x 32] V [32 x 64]        0.07 M FMA  diagonal
//
// Causal chunks are added and read in two parts, which halves the pairs within them: adding 32 keys at
// a time costs 5% more than 64 for the sums that are read and written twice, the pairs of 64 cost 40%
// more than those of two 32.
//
// W, E, F and A, of 64 KiB each, stay in a 1 MiB L2. Inputs and outputs do not: between their blocks
// the products ask for the rows of this chunk's outputs and of the next one's inputs, which takes up to
// 9% off a forward pass and 6% off a backward pass of 4,096 tokens (an Intel Xeon).
//
// Tasks. Not causal: the sums of each key-value head, in groups of keys where there are few heads,
// then one task per 256 queries. Causal: one task per key-value head walks its chunks; where threads
// would wait for each other's heads, several chunks at once: their features, the running sums before
// each, then their queries. Both ways compute the same numbers in the same order.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/cpu/kernels.h"
#include "core/flash/rows.h"
#include "core/linear/linear.h"
#include "core/linear/linear_memory.h"
#include "core/linear/linear_pass.h"
#include "core/workspace.h"

namespace tfb {
namespace linear_cpu {
namespace {

constexpr int64_t kTaskChunks = 4;  // chunks of queries in a task
constexpr int64_t kPairRows = 16;   // rows of a triangle of pairs at a time

// The whole call; it does not change while its tasks run.
class LinearRun : public Pass {
 public:
  // `kept` has no states where nothing is kept.
  LinearRun(const Problem& problem, const LinearCall& call, const Sizes& sizes, const Kept& kept)
      : Pass(problem, call, sizes),
        call_(call),
        kept_(kept),
        floor_(static_cast<float>(map_.denominator_floor / (map_.constant * map_.constant))),
        log_constants_(2 * std::log(map_.constant)) {}

  // Sets the S of the causal rows of all heads to the maximum of the sequence, instead of each
  // row's own.
  void set_sequence_maximum(const float* maximum) { sequence_maximum_ = maximum; }

  // Returns max_j M_j over all keys of a head.
  float SequenceMaximum(int64_t kv_head, Scratch& scratch) const {
    float maximum = kNegativeInfinity;
    int64_t maximum_key = -1;
    for (int64_t first = 0; first < problem_.kv_tokens; first += kChunk) {
      LoadKeys(kv_head, first, scratch.keys, scratch);
      const Keys& keys = scratch.keys;
      for (int64_t j = 0; j < keys.count; ++j) {
        if (keys.seen[j] == 0 || !(keys.tokens.max[j] > maximum)) continue;
        maximum = keys.tokens.max[j];
        maximum_key = first + j;
      }
    }
    if (kept_.states != nullptr) {
      kept_.maximum[kv_head] = maximum;
      kept_.maximum_key[kv_head] = maximum_key;
    }
    return maximum;
  }

  // Adds keys [begin, end) of a head.
  void SumKeys(int64_t kv_head, int64_t begin, int64_t end, const Sums& sums,
               Scratch& scratch) const {
    for (int64_t first = begin; first < end; first += kChunk) {
      LoadKeys(kv_head, first, scratch.keys, scratch);
      ExpectNothing(scratch);
      ExpectKeys(kv_head, first + kChunk, scratch);
      Add(scratch.keys, 0, scratch.keys.count, sums, scratch);
    }
  }

  void ExpectKeys(int64_t kv_head, int64_t first, Scratch& scratch) const {
    const int64_t b = kv_head / problem_.kv_heads, h = kv_head % problem_.kv_heads;
    Expect(call_.k, b, h, first, scratch);
    Expect(call_.v, b, h, first, scratch);
  }

  // Adds keys [begin, end) of the chunk to the sums.
  void Add(Keys& keys, int64_t begin, int64_t end, const Sums& sums, Scratch& scratch) const {
    AdvanceHeader(sums.header(), begin, end, keys);
    AddToSlice(AddendOf(keys, begin, end), sums, sums, 0, sizes_.features, scratch);
  }

  // Computes slice `slice` of the running sums of one head, adding the keys of each of its chunks,
  // which are those from `first_chunk` on, in turn. The sums before part p of chunk n are left in
  // `before` kParts n + p. AdvanceHeader has computed the headers.
  void AdvanceSlice(const Keys* keys, int64_t kv_head, int64_t first_chunk, int64_t chunks,
                    int64_t slice, const Sums& running, const Sums& before,
                    Scratch& scratch) const {
    const int64_t first = SliceBegin(slice), last = SliceBegin(slice + 1);
    if (first == last) return;
    for (int64_t n = 0; n < chunks; ++n) {
      if (Keeps(first_chunk + n)) {
        CopySlice(running, first, last, KeptSums(kv_head, first_chunk + n));
      }
      for (int64_t begin = 0; begin < keys[n].count; begin += kPart) {
        CopySlice(running, first, last, before.Next(n * kParts + begin / kPart));
        AddToSlice(AddendOf(keys[n], begin, EndOfPart(keys[n], begin)), running, running, first,
                   last, scratch);
      }
    }
  }
  // Tells whether the sums before that chunk are kept for the backward pass, and where.
  bool Keeps(int64_t chunk) const { return kept_.states != nullptr && chunk % kKeptChunks == 0; }
  Sums KeptSums(int64_t kv_head, int64_t chunk) const {
    return Sums(sizes_, kept_.states +
                            (kv_head * KeptBlocks(problem_) + chunk / kKeptChunks) * sizes_.state);
  }
  // Keeps the sums over all keys of a head for the backward pass.
  void Keep(int64_t kv_head, const Sums& sums) const {
    if (Keeps(0)) KeptSums(kv_head, 0).Copy(sums);
  }
  static int64_t EndOfPart(const Keys& keys, int64_t begin) {
    return std::min(begin + kPart, keys.count);
  }

  // Computes rows [begin, end) of query head `h`, which see all keys of the sums.
  void ReadRows(int64_t b, int64_t h, int64_t begin, int64_t end, const Sums& sums,
                Scratch& scratch) const {
    const Sums::Header& header = sums.header();
    for (int64_t first = begin; first < end; first += kChunk) {
      const int64_t rows = std::min(kChunk, end - first);
      std::fill_n(scratch.factors.reference, kChunk, header.reference);
      std::fill_n(scratch.factors.key_maximum, kChunk, header.maximum);
      ExpectNothing(scratch);
      Expect(call_.out, b, h, first, scratch);
      Expect(call_.q, b, h, first + kChunk, scratch);
      LoadQueries(b, h, first, rows, sums, nullptr, scratch);
      ReadSums(rows, sums, scratch);
      Finish(b, h, first, rows, scratch);
    }
  }

  // Finds the running maxima of a chunk's keys after those in the sums.
  void RunMaximaOf(int64_t kv_head, const Sums& sums, Keys& keys) const {
    RunMaxima(sums.header(), sequence_maximum_ == nullptr ? nullptr : sequence_maximum_ + kv_head,
              keys);
  }

  // Computes the queries of head h at the places from `begin` on of the chunk of keys from
  // `first_key`: they see the sums and the keys of the part up to their own.
  void AttendPart(int64_t b, int64_t h, int64_t first_key, int64_t begin, const Keys& keys,
                  const Sums& sums, Scratch& scratch) const {
    const int64_t offset = problem_.causal_offset(), end = EndOfPart(keys, begin);
    const int64_t first = std::max<int64_t>(first_key + begin - offset, 0);
    const int64_t rows = std::min(first_key + end - offset, problem_.query_tokens) - first;
    if (rows <= 0) return;
    float tokens = static_cast<float>(sums.header().tokens), sees_token[kChunk];
    int64_t next = begin;
    for (int64_t t = 0; t < kChunk; ++t) {
      // Rows beyond the last are computed in whole vectors and not stored.
      const int64_t last = std::min(first + t + offset - first_key, end - 1);
      while (next <= last) tokens += keys.seen[next++];
      sees_token[t] = tokens > 0 ? 1.0f : 0.0f;
      scratch.visible[t] = static_cast<int32_t>(last + 1 - begin);
      scratch.factors.reference[t] = keys.running_reference[last];
      scratch.factors.key_maximum[t] = keys.running_maximum[last];
      if (map_.gated) scratch.factors.decay[t] = keys.decay[last];
    }
    LoadQueries(b, h, first, rows, sums, sees_token, scratch);
    ReadSums(rows, sums, scratch);
    AddPairs(rows, begin, keys, scratch);
    Finish(b, h, first, rows, scratch);
  }

  // Goes through all chunks of one head in order, starting from `sums`. Where `keeps`, the last
  // keys are added to the sums as well.
  void Scan(int64_t kv_head, const Sums& sums, bool keeps, Scratch& scratch) const {
    const int64_t b = kv_head / problem_.kv_heads, h = kv_head % problem_.kv_heads;
    for (int64_t first = 0; first < problem_.kv_tokens; first += kChunk) {
      if (Keeps(first / kChunk)) KeptSums(kv_head, first / kChunk).Copy(sums);
      LoadKeys(kv_head, first, scratch.keys, scratch);
      ExpectNothing(scratch);
      const int64_t first_query = std::max<int64_t>(first - problem_.causal_offset(), 0);
      Expect(call_.out, b, h * problem_.group(), first_query, scratch);
      ExpectKeys(kv_head, first + kChunk, scratch);
      Expect(call_.q, b, h * problem_.group(), first_query + kChunk, scratch);
      RunMaximaOf(kv_head, sums, scratch.keys);
      for (int64_t begin = 0; begin < scratch.keys.count; begin += kPart) {
        for (int64_t g = 0; g < problem_.group(); ++g) {
          AttendPart(b, h * problem_.group() + g, first, begin, scratch.keys, sums, scratch);
        }
        const int64_t end = EndOfPart(scratch.keys, begin);
        if (keeps || first + end < problem_.kv_tokens) Add(scratch.keys, begin, end, sums, scratch);
      }
    }
  }

  // Clears rows [begin, end) of a head that see no key.
  void ClearRows(int64_t b, int64_t h, int64_t begin, int64_t end, Scratch& scratch) const {
    std::memset(scratch.rows, 0, sizes_.value_row * sizeof(float));
    for (int64_t i = begin; i < end; ++i) {
      StoreRow(scratch.rows, problem_.value_dim, call_.out, call_.out.Offset(b, h, i),
               call_.out.stride(3));
      KeepRow(b, h, i, 0, false);
      if (call_.log_sum_exp.empty()) continue;
      *call_.log_sum_exp.MutableAt<float>(b, h, i) = kNegativeInfinity;
    }
  }

 private:
  // Computes features of rows of queries, and the factors of the four terms against what the rows
  // see. A row that sees no token is not read, where `sees_token` tells.
  void LoadQueries(int64_t b, int64_t h, int64_t first, int64_t rows, const Sums& sums,
                   const float* sees_token, Scratch& scratch) const {
    const Rows inputs = LoadInputs(call_.q, b, h, first, rows, sees_token, scratch);
    MakeFeatures(inputs, rows, h / problem_.group(), sums.normaliser(), scratch.queries, scratch);
    ComputeCarry(rows, sums, scratch);
    const QueryFactors& factors = scratch.factors;
    ComputeFactors(rows, scratch.queries, scratch.factors);
    const float features = static_cast<float>(sizes_.features);
    for (int64_t t = 0; t < RoundUp(rows, kColumnQuantum); ++t) {
      const float query = factors.query[t], query_epsilon = factors.query_epsilon[t];
      scratch.product[t] = query * factors.key[t];
      scratch.key[t] = query_epsilon * factors.key[t];
      scratch.constant[t] =
          factors.key_epsilon[t] * (query * scratch.queries.total[t] + query_epsilon * features);
    }
  }

  void ComputeCarry(int64_t rows, const Sums& sums, Scratch& scratch) const {
    const float reference = sums.header().reference;
    if (reference == kNegativeInfinity) {
      std::fill_n(scratch.carry, rows, 0.0f);
      return;
    }
    for (int64_t t = 0; t < kChunk; ++t)
      scratch.carry[t] = reference - scratch.factors.reference[t];
    const float no_shift = 0;
    kernels_.exp({scratch.carry, 0, 1, RoundUp(rows, kColumnQuantum)}, &no_shift);
  }

  // Computes output and denominator of the rows from the sums alone.
  void ReadSums(int64_t rows, const Sums& sums, Scratch& scratch) const {
    const Sums::Header& header = sums.header();
    if (header.tokens == 0) {
      std::fill_n(scratch.output, kChunk * sizes_.value_row, 0.0f);
      std::fill_n(scratch.denominator, kChunk, 0.0f);
      return;
    }
    ForEachPanel([&](int64_t panel, int64_t width) {
      float* output = scratch.output + panel * kChunk;
      const float* products = sums.products() + panel * sizes_.features;
      for (int64_t r = 0; r < sizes_.features; r += kDepthBlock) {
        Multiply(rows, width, std::min(kDepthBlock, sizes_.features - r),
                 scratch.queries.features + r * kChunk, 1, kChunk, products + r * width, width,
                 output, width, r > 0, scratch);
      }
      for (int64_t t = 0; t < rows; ++t) {
        const float product = scratch.carry[t] * scratch.product[t];
        const float key = scratch.carry[t] * scratch.key[t];
        float* row = output + t * width;
        if (epsilon_ == 0) {
          for (int64_t c = 0; c < width; ++c) row[c] *= product;
          continue;
        }
        for (int64_t c = 0; c < width; ++c) {
          row[c] = product * row[c] + key * sums.scaled_values()[panel + c] +
                   scratch.constant[t] * sums.values()[panel + c];
        }
      }
    });
    for (int64_t t = 0; t < rows; ++t) {
      scratch.denominator[t] = scratch.carry[t] * (scratch.product[t] * scratch.queries.dot[t] +
                                                   scratch.key[t] * header.scaled_feature) +
                               scratch.constant[t] * static_cast<float>(header.tokens);
    }
  }

  // Adds the keys of the part itself, which begins at `begin`, pair by pair. Rows go in blocks, so
  // that the keys right of the diagonal are skipped.
  void AddPairs(int64_t rows, int64_t begin, const Keys& keys, Scratch& scratch) const {
    for (int64_t t = 0; t < rows; ++t) scratch.shift[t] = Shift(scratch.factors.reference[t]);
    // A hidden value that is not finite must not be multiplied by its weight of 0.
    const int64_t block = keys.finite ? kPairRows : 1;
    for (int64_t first = 0; first < rows; first += block) {
      const int64_t count = std::min(block, rows - first);
      const int64_t depth = scratch.visible[first + count - 1];
      const int64_t columns = RoundUp(depth, kColumnQuantum);
      float* weights = scratch.weights + first * kChunk;
      for (int64_t r = 0; r < sizes_.features; r += kDepthBlock) {
        kernels_.gemm(count, columns, std::min(kDepthBlock, sizes_.features - r),
                      scratch.queries.features + r * kChunk + first, 1, kChunk,
                      keys.tokens.features + r * kChunk + begin, kChunk, weights, kChunk, r > 0);
      }
      kernels_.pair_weights(
          {weights, kChunk, count, columns},
          {keys.log_scale + begin, keys.tokens.total + begin, keys.seen + begin,
           scratch.shift + first, scratch.product + first, scratch.key + first,
           scratch.constant + first, scratch.visible + first, scratch.sum + first});
      ForEachPanel([&](int64_t panel, int64_t width) {
        kernels_.gemm(count, width, depth, weights, kChunk, 1,
                      keys.values + panel * kChunk + begin * width, width,
                      scratch.output + panel * kChunk + first * width, width, true);
      });
    }
    for (int64_t t = 0; t < rows; ++t) scratch.denominator[t] += scratch.sum[t];
  }

  // Divides by the denominators and writes the rows.
  void Finish(int64_t b, int64_t h, int64_t first, int64_t rows, Scratch& scratch) const {
    int64_t without_weight = 0;
    for (int64_t t = 0; t < rows; ++t) {
      bool is_held = false;
      const float denominator = Denominator(t, scratch, &without_weight, &is_held);
      const float inverse = denominator == 0 ? 0 : 1 / denominator;
      KeepRow(b, h, first + t, inverse, is_held);
      ForEachPanel([&](int64_t panel, int64_t width) {
        float* row = scratch.output + panel * kChunk + t * width;
        for (int64_t c = 0; c < width; ++c) row[c] *= inverse;
        StoreRow(row, std::min(width, problem_.value_dim - panel), call_.out,
                 call_.out.Offset(b, h, first + t, panel), call_.out.stride(3));
      });
      if (call_.log_sum_exp.empty()) continue;
      *call_.log_sum_exp.MutableAt<float>(b, h, first + t) = LogSumExp(t, denominator, scratch);
    }
    if (without_weight != 0 && call_.rows_without_weight != nullptr) {
      call_.rows_without_weight->fetch_add(without_weight, std::memory_order_relaxed);
    }
  }

  // Tells also whether the floor holds the denominator.
  float Denominator(int64_t t, const Scratch& scratch, int64_t* without_weight,
                    bool* is_held) const {
    const QueryFactors& factors = scratch.factors;
    float denominator = scratch.denominator[t];
    const bool seen = factors.reference[t] != kNegativeInfinity;
    if (map_.denominator_epsilon != 0 && seen) {
      // This is d sum_r phi_q(q_i)_r, divided as the four terms are.
      denominator +=
          static_cast<float>(QuerySum(t, scratch.queries, factors) * QuerySumFactor(t, factors));
    }
    const float floor = map_.gated ? floor_ * std::exp(-factors.log_scale[t]) : floor_;
    if (!seen || !(denominator <= floor)) return denominator;
    ++*without_weight;
    *is_held = std::abs(denominator) <= floor;
    return *is_held ? std::copysign(floor, denominator) : denominator;
  }

  // Keeps what the backward pass needs of a row.
  void KeepRow(int64_t b, int64_t h, int64_t i, float inverse, bool is_held) const {
    if (kept_.states == nullptr) return;
    const int64_t row = (b * problem_.query_heads + h) * problem_.query_tokens + i;
    kept_.inverse[row] = inverse;
    kept_.slope[row] = is_held ? 0 : inverse;
  }

  float LogSumExp(int64_t t, float denominator, const Scratch& scratch) const {
    const QueryFactors& factors = scratch.factors;
    if (factors.reference[t] == kNegativeInfinity && denominator == 0) return kNegativeInfinity;
    return static_cast<float>(std::log(std::abs(denominator)) + log_constants_ +
                              factors.log_scale[t]);
  }

  const LinearCall& call_;
  const Kept& kept_;
  const float floor_;           // relative to c^2
  const double log_constants_;  // 2 log c
  const float* sequence_maximum_ = nullptr;
};

// Sums all keys of each head, then computes all queries.
void RunAll(const Problem& problem, const LinearRun& run, const Sizes& sizes, const Plan& plan,
            const Memory& memory, ThreadPool& pool) {
  const int64_t group_tokens = RoundUp(CeilDivide(problem.kv_tokens, plan.groups), kChunk);
  const int64_t tiles = CeilDivide(problem.query_tokens, kTaskChunks * kChunk);
  const auto sums = [&](int64_t slot, int64_t group) {
    return Sums(sizes, memory.states + (slot * plan.groups + group) * sizes.state);
  };
  for (int64_t first = 0; first < plan.heads; first += plan.held_heads) {
    const int64_t heads = std::min(plan.held_heads, plan.heads - first);
    pool.ParallelFor(heads * plan.groups, [&](int64_t task, int worker) {
      const int64_t slot = task / plan.groups, group = task % plan.groups;
      sums(slot, group).Reset();
      run.SumKeys(first + slot, group * group_tokens,
                  std::min((group + 1) * group_tokens, problem.kv_tokens), sums(slot, group),
                  memory.scratch[worker]);
    });
    pool.ParallelFor(heads, [&](int64_t slot, int) {
      for (int64_t group = 1; group < plan.groups; ++group)
        run.Merge(sums(slot, 0), sums(slot, group));
      run.Keep(first + slot, sums(slot, 0));
    });
    pool.ParallelFor(heads * problem.group() * tiles, [&](int64_t task, int worker) {
      const int64_t slot = task / (problem.group() * tiles);
      const int64_t b = (first + slot) / problem.kv_heads;
      const int64_t h =
          (first + slot) % problem.kv_heads * problem.group() + task / tiles % problem.group();
      const int64_t begin = task % tiles * kTaskChunks * kChunk;
      run.ReadRows(b, h, begin, std::min(begin + kTaskChunks * kChunk, problem.query_tokens),
                   sums(slot, 0), memory.scratch[worker]);
    });
  }
}

// Goes through several chunks of each head at a time, for few heads. `states` [heads] holds the
// running sums.
void RunSteps(const Problem& problem, const LinearRun& run, const Sizes& sizes, const Plan& plan,
              const Memory& memory, float* states, ThreadPool& pool) {
  const int64_t heads = plan.heads, group = problem.group();
  for (int64_t step = 0; step < plan.chunks; step += plan.step_chunks) {
    const int64_t chunks = std::min(plan.step_chunks, plan.chunks - step);
    const auto first_key = [&](int64_t slot) { return (step + slot % chunks) * kChunk; };
    // Returns the sums before the part from `begin` on.
    const auto sums = [&](int64_t slot, int64_t begin) {
      return Sums(sizes, memory.chunk_states + (slot * kParts + begin / kPart) * sizes.state);
    };
    const auto running = [&](int64_t head) { return Sums(sizes, states + head * sizes.state); };

    pool.ParallelFor(heads * chunks, [&](int64_t slot, int worker) {
      run.LoadKeys(slot / chunks, first_key(slot), memory.chunk_keys[slot], memory.scratch[worker]);
    });
    for (int64_t slot = 0; slot < heads * chunks; ++slot) {
      Keys& keys = memory.chunk_keys[slot];
      Sums::Header& header = running(slot / chunks).header();
      run.RunMaximaOf(slot / chunks, running(slot / chunks), keys);
      const int64_t chunk = step + slot % chunks;
      if (run.Keeps(chunk)) run.KeptSums(slot / chunks, chunk).header() = header;
      for (int64_t begin = 0; begin < keys.count; begin += kPart) {
        sums(slot, begin).header() = header;
        run.AdvanceHeader(header, begin, run.EndOfPart(keys, begin), keys);
      }
    }
    pool.ParallelFor(heads * kSumSlices, [&](int64_t task, int worker) {
      const int64_t head = task / kSumSlices;
      run.AdvanceSlice(memory.chunk_keys + head * chunks, head, step, chunks, task % kSumSlices,
                       running(head), sums(head * chunks, 0), memory.scratch[worker]);
    });
    pool.ParallelFor(heads * chunks * group, [&](int64_t task, int worker) {
      const int64_t slot = task / group;
      const int64_t b = slot / chunks / problem.kv_heads, h = slot / chunks % problem.kv_heads;
      const Keys& keys = memory.chunk_keys[slot];
      for (int64_t begin = 0; begin < keys.count; begin += kPart) {
        run.AttendPart(b, h * group + task % group, first_key(slot), begin, keys, sums(slot, begin),
                       memory.scratch[worker]);
      }
    });
  }
}

// Runs a causal problem, starting from the sums in `states` [heads], or from none where it is null.
void RunCausal(const Problem& problem, const LinearRun& run, const Sizes& sizes, const Plan& plan,
               const Memory& memory, float* states, ThreadPool& pool) {
  const int64_t keyless_rows =
      std::clamp<int64_t>(-problem.causal_offset(), 0, problem.query_tokens);
  if (keyless_rows > 0) {
    pool.ParallelFor(problem.batch * problem.query_heads, [&](int64_t task, int worker) {
      run.ClearRows(task / problem.query_heads, task % problem.query_heads, 0, keyless_rows,
                    memory.scratch[worker]);
    });
  }
  if (plan.stepped) {
    for (int64_t head = 0; states == nullptr && head < plan.heads; ++head) {
      Sums(sizes, memory.states + head * sizes.state).Reset();
    }
    return RunSteps(problem, run, sizes, plan, memory, states == nullptr ? memory.states : states,
                    pool);
  }
  pool.ParallelFor(plan.heads, [&](int64_t head, int worker) {
    float* state =
        states == nullptr ? memory.states + worker * sizes.state : states + head * sizes.state;
    const Sums sums(sizes, state);
    if (states == nullptr) sums.Reset();
    run.Scan(head, sums, states != nullptr, memory.scratch[worker]);
  });
}

// `states` is null, or the sums that a causal problem starts from.
absl::Status Run(const Problem& problem, const LinearCall& call, float* states,
                 const Execution& execution) {
  TFB_RETURN_IF_ERROR(CheckLinearMap(problem, call.map, call.w));
  const Sizes sizes(problem, call.map);
  const Plan plan(problem, sizes, execution.pool->threads());
  Workspace workspace(execution.workspace);
  const Memory memory =
      LayOut(problem, sizes, plan, states != nullptr, execution.pool->threads(), workspace);
  Kept kept;
  if (states == nullptr && !execution.kept.empty()) {
    Workspace memory_kept(execution.kept);
    kept = LayOutKept(problem, sizes, memory_kept);
  }
  LinearRun run(problem, call, sizes, kept);
  if (!problem.causal) {
    RunAll(problem, run, sizes, plan, memory, *execution.pool);
    return absl::OkStatus();
  }
  if (call.map.stabiliser == KeyStabiliser::kSequence) {
    execution.pool->ParallelFor(plan.heads, [&](int64_t head, int worker) {
      memory.sequence_maximum[head] = run.SequenceMaximum(head, memory.scratch[worker]);
    });
    run.set_sequence_maximum(memory.sequence_maximum);
  }
  RunCausal(problem, run, sizes, plan, memory, states, *execution.pool);
  return absl::OkStatus();
}

// Returns the problem of self-attention over the next `tokens` tokens.
Problem SegmentOf(const Problem& problem, int64_t tokens) {
  Problem segment = problem;
  segment.query_tokens = segment.kv_tokens = tokens;
  segment.causal = true;
  return segment;
}

}  // namespace
}  // namespace linear_cpu

absl::Status CheckLinearMap(const Problem& problem, const FeatureMap& map,
                            const ConstTensorView& w) {
  const Shape shape = map.per_head ? Shape{problem.kv_heads, map.projections, problem.head_dim}
                                   : Shape{map.projections, problem.head_dim};
  if (map.projections < 1 || w.shape() != shape || w.dtype != DType::kF32 || !w.is_contiguous()) {
    return absl::InternalError(absl::StrCat("W is ", Name(w.dtype), " ", ShapeString(w.shape()),
                                            "; expected is contiguous f32 ", ShapeString(shape)));
  }
  if (map.denominator_floor != 0 && IsExponential(map.feature)) {
    return absl::InternalError("a floor of the denominator is not for exponential features");
  }
  if (!map.gated) return absl::OkStatus();
  if (!problem.causal || IsExponential(map.feature) || map.epsilon != 0 ||
      map.denominator_epsilon != 0) {
    return absl::InternalError("gates are for causal problems, without epsilon or exponentials");
  }
  return absl::OkStatus();
}

size_t LinearWorkspaceBytes(const Problem& problem, const FeatureMap& map, int threads) {
  const linear_cpu::Sizes sizes(problem, map);
  const linear_cpu::Plan plan(problem, sizes, threads);
  return Workspace::Measure([&](Workspace& workspace) {
    linear_cpu::LayOut(problem, sizes, plan, false, threads, workspace);
  });
}

size_t LinearKeptBytes(const Problem& problem, const FeatureMap& map) {
  const linear_cpu::Sizes sizes(problem, map);
  return Workspace::Measure(
      [&](Workspace& workspace) { linear_cpu::LayOutKept(problem, sizes, workspace); });
}

absl::Status LinearCpu(const Problem& problem, const LinearCall& call, const Execution& execution) {
  return linear_cpu::Run(problem, call, nullptr, execution);
}

size_t LinearStateBytes(const Problem& problem, const FeatureMap& map) {
  return problem.batch * problem.kv_heads * linear_cpu::Sizes(problem, map).state * sizeof(float);
}

void LinearReset(const Problem& problem, const FeatureMap& map, absl::Span<std::byte> state) {
  const linear_cpu::Sizes sizes(problem, map);
  float* sums = reinterpret_cast<float*>(state.data());
  for (int64_t head = 0; head < problem.batch * problem.kv_heads; ++head) {
    linear_cpu::Sums(sizes, sums + head * sizes.state).Reset();
  }
}

absl::Status LinearAppend(const Problem& problem, int64_t tokens, const LinearCall& call,
                          absl::Span<std::byte> state, const Execution& execution) {
  if (call.map.stabiliser == KeyStabiliser::kSequence) {
    return absl::InvalidArgumentError(
        "the keys' maximum over the whole sequence is not known while tokens are appended");
  }
  return linear_cpu::Run(linear_cpu::SegmentOf(problem, tokens), call,
                         reinterpret_cast<float*>(state.data()), execution);
}

}  // namespace tfb
