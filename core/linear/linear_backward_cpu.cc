// The backward pass of engine linear on the CPU: how it is cut into tasks; linear_gradient.h has
// the formulas.
//
// A causal head goes by blocks of 8 chunks of 64 keys, from the last to the first; the forward pass
// has kept the sums before each block. Features are computed once. One thread takes a whole head: it
// loads a block's keys and sums them before each chunk, in order, and then, in reverse order, loads
// each chunk's queries, adds them to the sums over later queries, and differentiates the chunk while
// it is in the caches. Where threads would wait for each other's heads, all of them share a block:
// its features, then both kinds of sums, and then its chunks. Both ways compute the same numbers in
// the same order. For a chunk of 64 tokens, m features and r rows of W, in units of 64 m FMA:
//
//   project queries and keys            2 head_dim r / m
//   sums over keys, over queries        2 value_dim
//   dphi, dE, dv from the sums          3 value_dim
//   pairs: F . E, and to dphi, dE       48 and 2 x 40 of 64, without blocks right of the diagonal
//   dx of queries and keys              2 head_dim r / m
//   dW                                  2 head_dim r / m
//
// that is 11 of the forward pass's 4 products, and the pairs. Not causal: groups of queries read
// the head's sums, which were kept, and make sums of their own; then groups of keys read all of
// those.
#include <algorithm>

#include "core/linear/linear.h"
#include "core/linear/linear_backward_memory.h"
#include "core/linear/linear_gradient.h"
#include "core/linear/linear_memory.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace linear_cpu {
namespace {

// Copies W, each row of it padded to whole vectors.
void PadMatrix(const ConstTensorView& w, const Sizes& sizes, float* to) {
  const int64_t head_dim = w.dim(w.rank - 1);
  const float* from = w.At<float>();
  for (int64_t r = 0; r < sizes.matrices * sizes.projections; ++r) {
    std::copy_n(from + r * head_dim, head_dim, to + r * sizes.input_row);
    std::fill(to + r * sizes.input_row + head_dim, to + (r + 1) * sizes.input_row, 0.0f);
  }
}

// The whole call.
class Backward {
 public:
  Backward(const Problem& problem, const LinearGradient& run, const Sizes& sizes,
           const BackwardPlan& plan, const Kept& kept, const BackwardMemory& memory,
           ThreadPool& pool)
      : problem_(problem),
        run_(run),
        sizes_(sizes),
        plan_(plan),
        kept_(kept),
        memory_(memory),
        pool_(pool) {}

  void Run() {
    run_.ResetTotals(plan_);
    if (problem_.causal) ClearKeylessRows();
    for (first_ = 0; first_ < plan_.heads; first_ += plan_.held_heads) {
      heads_ = std::min(plan_.held_heads, plan_.heads - first_);
      if (!problem_.causal) {
        DifferentiateGroups();
      } else if (plan_.whole_heads) {
        DifferentiateHeads();
      } else {
        DifferentiateBlocks();
      }
      run_.AddParts(first_, heads_, plan_, pool_);
    }
    run_.StoreTotals();
  }

 private:
  // ---- Not causal ----

  // Differentiates groups of queries of each head, then groups of keys.
  void DifferentiateGroups() {
    pool_.ParallelFor(heads_ * plan_.groups,
                      [&](int64_t task, int worker) { DifferentiateQueries(task, worker); });
    pool_.ParallelFor(heads_, [&](int64_t slot, int) {
      for (int64_t task = slot * plan_.groups + 1; task < (slot + 1) * plan_.groups; ++task) {
        run_.Merge(QuerySums(slot * plan_.groups), QuerySums(task));
        memory_.maximum_gradients[slot * plan_.groups] += memory_.maximum_gradients[task];
      }
    });
    pool_.ParallelFor(heads_ * plan_.groups,
                      [&](int64_t task, int worker) { DifferentiateKeys(task, worker); });
  }

  // The sums over the queries of a group, and over all keys of a head.
  Sums QuerySums(int64_t task) const { return run_.StateAt(memory_.states + task * sizes_.state); }
  Sums KeySums(int64_t slot) const {
    return run_.StateAt(kept_.states + (first_ + slot) * sizes_.state);
  }
  // Calls body(first token, tokens) for the chunks of a task's group.
  template <class Body>
  void ForEachChunk(int64_t task, int64_t tokens, Body body) const {
    const int64_t size = RoundUp(CeilDivide(tokens, plan_.groups), kChunk);
    const int64_t begin = task % plan_.groups * size, end = std::min(begin + size, tokens);
    for (int64_t first = begin; first < end; first += kChunk) {
      body(first, std::min(kChunk, end - first));
    }
  }
  float* PartOfW(int64_t part) const { return memory_.w_parts + part * plan_.matrix_floats; }
  void AddToW(const Tokens& tokens, int64_t count, int64_t task) const {
    if (run_.wants_w()) run_.AddToW(tokens, count, 0, sizes_.projections, PartOfW(task));
  }

  void DifferentiateQueries(int64_t task, int worker) const {
    const int64_t slot = task / plan_.groups;
    BackwardScratch& scratch = memory_.scratch[worker];
    QueryChunk& queries = *memory_.chunks[worker].queries;
    const Sums sums = QuerySums(task), keys = KeySums(slot);
    sums.Reset();
    sums.header().reference = keys.header().tokens == 0 ? kInfinity : keys.header().reference;
    std::fill_n(PartOfW(task), plan_.matrix_floats, 0.0f);
    double& maximum_gradient = memory_.maximum_gradients[task];
    maximum_gradient = 0;
    ForEachChunk(task, problem_.query_tokens, [&](int64_t first, int64_t rows) {
      for (int64_t g = 0; g < problem_.group(); ++g) {
        const int64_t h = HeadOf(slot) * problem_.group() + g;
        run_.LoadChunkQueries(BatchOf(slot), h, first, rows, queries, scratch);
        run_.ExpectNothing(scratch);
        run_.ExpectQueryGradients(BatchOf(slot), h, first, scratch);
        const bool is_last = g + 1 == problem_.group();
        run_.ExpectQueries(BatchOf(slot), is_last ? h + 1 - problem_.group() : h + 1,
                           is_last ? first + kChunk : first, scratch);
        run_.SetVisible(keys.header(), queries);
        run_.ComputeRowFactors(queries);
        run_.AdvanceQueryHeader(sums.header(), &queries, 1);
        run_.AddQueries(queries, sums, sums, 0, sizes_.features, scratch);
        run_.DifferentiateRows(queries, keys, scratch);
        for (int64_t t = 0; t < rows; ++t) maximum_gradient += queries.maximum_gradient[t];
        run_.StoreQueryGradients(BatchOf(slot), h, queries, scratch);
        AddToW(queries.tokens, rows, task);
      }
    });
  }

  void DifferentiateKeys(int64_t task, int worker) const {
    const int64_t slot = task / plan_.groups, merged = slot * plan_.groups;
    BackwardScratch& scratch = memory_.scratch[worker];
    Chunk& chunk = memory_.chunks[worker];
    const int64_t maximum_key = KeySums(slot).header().maximum_key;
    ForEachChunk(task, problem_.kv_tokens, [&](int64_t first, int64_t count) {
      run_.LoadChunkKeys(first_ + slot, first, chunk, scratch);
      run_.ExpectNothing(scratch);
      run_.ExpectKeyGradients(BatchOf(slot), HeadOf(slot), first, scratch);
      run_.ExpectKeys(BatchOf(slot), HeadOf(slot), first + kChunk, scratch);
      run_.DifferentiateKeys(BatchOf(slot), HeadOf(slot), QuerySums(merged), chunk, scratch);
      if (run_.has_maximum_gradient() && maximum_key >= first && maximum_key < first + count) {
        run_.AddMaximumGradient(memory_.maximum_gradients[merged], maximum_key - first, chunk);
      }
      run_.StoreKeyGradients(BatchOf(slot), HeadOf(slot), chunk, nullptr, scratch);
      AddToW(chunk.keys.tokens, count, task);
    });
  }

  // ---- Causal ----

  void ClearKeylessRows() const {
    const int64_t rows = std::clamp<int64_t>(-problem_.causal_offset(), 0, problem_.query_tokens);
    pool_.ParallelFor(problem_.batch * problem_.query_heads, [&](int64_t task, int worker) {
      run_.ClearQueryGradients(task / problem_.query_heads, task % problem_.query_heads, 0, rows,
                               memory_.scratch[worker]);
    });
  }

  // Differentiates the held heads, each by one thread.
  void DifferentiateHeads() const {
    pool_.ParallelFor(heads_, [&](int64_t slot, int worker) { DifferentiateHead(slot, worker); });
  }

  void DifferentiateHead(int64_t slot, int worker) const {
    Chunk* chunks = memory_.chunks + worker * kKeptChunks;
    int64_t which = 0;
    Begin(slot, StateAfter(worker, which));
    Sums::Header header = run_.StateAt(StateAfter(worker, which)).header();
    for (int64_t block = KeptBlocks(problem_) - 1; block >= 0; --block) {
      const int64_t count = ChunksIn(block);
      SumKeysBefore(slot, block, count, chunks, memory_.scratch[worker]);
      for (int64_t n = count - 1; n >= 0; --n, which = 1 - which) {
        chunks[n].after = StateAfter(worker, which);
        DifferentiateChunk(slot, FirstKey(block, n), run_.StateAt(StateAfter(worker, 1 - which)),
                           header, chunks[n], memory_.scratch[worker]);
      }
    }
    if (run_.NeedsMaximumKey()) StoreMaximumKey(slot);
  }

  // Loads the keys of a block's chunks, and computes the sums before each.
  void SumKeysBefore(int64_t slot, int64_t block, int64_t count, Chunk* chunks,
                     BackwardScratch& scratch) const {
    chunks[0].before = KeptBefore(slot, block);
    Sums::Header header = run_.StateAt(chunks[0].before).header();
    for (int64_t n = 0; n < count; ++n) {
      run_.LoadChunkKeys(first_ + slot, FirstKey(block, n), chunks[n], scratch);
      run_.ExpectNothing(scratch);
      if (n + 1 < count) {
        run_.ExpectKeys(BatchOf(slot), HeadOf(slot), FirstKey(block, n + 1), scratch);
      } else {
        ExpectQueries(slot, FirstKey(block, n), scratch);
      }
      run_.AdvanceKeyHeader(first_ + slot, header, chunks[n]);
      if (n + 1 == count) return;
      chunks[n + 1].before = chunks[n + 1].own_before;
      const Sums next = run_.StateAt(chunks[n + 1].before);
      next.header() = header;
      run_.AddChunkKeys(chunks[n], next, 0, sizes_.features, scratch);
    }
  }

  // Differentiates a chunk whose keys are loaded. `header` is that of the sums over the queries
  // after it, which become `next`.
  void DifferentiateChunk(int64_t slot, int64_t first_key, const Sums& next, Sums::Header& header,
                          Chunk& chunk, BackwardScratch& scratch) const {
    for (int64_t g = 0; g < problem_.group(); ++g) {
      LoadChunkQueries(slot, g, first_key, chunk, scratch);
    }
    run_.ExpectNothing(scratch);
    run_.ExpectQueryGradients(BatchOf(slot), HeadOf(slot) * problem_.group(), FirstQuery(first_key),
                              scratch);
    run_.ExpectKeyGradients(BatchOf(slot), HeadOf(slot), first_key, scratch);
    if (first_key % (kKeptChunks * kChunk) != 0) {
      ExpectQueries(slot, first_key - kChunk, scratch);
    } else if (first_key > 0) {
      run_.ExpectKeys(BatchOf(slot), HeadOf(slot), first_key - kKeptChunks * kChunk, scratch);
    }
    run_.AdvanceChunkHeader(header, chunk);
    run_.AddChunkQueries(chunk, next, 0, sizes_.features, scratch);
    run_.Differentiate(BatchOf(slot), HeadOf(slot), chunk, scratch);
    AdvanceChain(slot, chunk, scratch);
    StoreKeyGradients(slot, chunk, scratch);
    if (run_.wants_w()) run_.AddChunkToW(chunk, 0, sizes_.projections, PartOfW(slot));
  }

  // Differentiates the held heads' blocks of chunks, from the last to the first, for few heads.
  void DifferentiateBlocks() {
    which_ = 0;
    for (int64_t slot = 0; slot < heads_; ++slot) Begin(slot, StateAfter(slot, which_));
    for (block_ = KeptBlocks(problem_) - 1; block_ >= 0; --block_, which_ = 1 - which_) {
      count_ = ChunksIn(block_);
      LocateSums();
      LoadChunks();
      ComputeSums();
      pool_.ParallelFor(heads_ * count_, [&](int64_t task, int worker) {
        const int64_t slot = task / count_;
        run_.Differentiate(BatchOf(slot), HeadOf(slot), ChunksOf(slot)[task % count_],
                           memory_.scratch[worker]);
      });
      pool_.ParallelFor(heads_, [&](int64_t slot, int worker) {
        for (int64_t n = count_ - 1; n >= 0; --n) {
          AdvanceChain(slot, ChunksOf(slot)[n], memory_.scratch[worker]);
        }
      });
      StoreKeysAndAddToW();
    }
    for (int64_t slot = 0; run_.NeedsMaximumKey() && slot < heads_; ++slot) StoreMaximumKey(slot);
  }

  // Clears what goes through the chunks of a head, and `after`, the sums over no queries.
  void Begin(int64_t slot, float* after) const {
    const Sums none = run_.StateAt(after);
    none.Reset();
    none.header().reference = kInfinity;
    run_.ResetChain(memory_.chains[slot]);
    std::fill_n(PartOfW(slot), plan_.matrix_floats, 0.0f);
  }
  int64_t ChunksIn(int64_t block) const {
    return std::min(kKeptChunks, CeilDivide(problem_.kv_tokens, kChunk) - block * kKeptChunks);
  }
  static int64_t FirstKey(int64_t block, int64_t n) { return (block * kKeptChunks + n) * kChunk; }
  // Returns the sums over the keys before a block, which the forward pass kept.
  float* KeptBefore(int64_t slot, int64_t block) const {
    return kept_.states + ((first_ + slot) * KeptBlocks(problem_) + block) * sizes_.state;
  }
  // Returns the first query at the places of a chunk's keys.
  int64_t FirstQuery(int64_t first_key) const {
    return std::max<int64_t>(first_key - problem_.causal_offset(), 0);
  }
  void ExpectQueries(int64_t slot, int64_t first_key, BackwardScratch& scratch) const {
    run_.ExpectQueries(BatchOf(slot), HeadOf(slot) * problem_.group(), FirstQuery(first_key),
                       scratch);
  }
  // Loads the queries of head g of the group that are at the places of a chunk's keys.
  void LoadChunkQueries(int64_t slot, int64_t g, int64_t first_key, Chunk& chunk,
                        BackwardScratch& scratch) const {
    const int64_t end = std::min(first_key + kChunk, problem_.kv_tokens);
    const int64_t first = FirstQuery(first_key);
    const int64_t rows = std::max<int64_t>(end - problem_.causal_offset() - first, 0);
    run_.LoadChunkQueries(BatchOf(slot), HeadOf(slot) * problem_.group() + g, first, rows,
                          chunk.queries[g], scratch);
  }
  void AdvanceChain(int64_t slot, Chunk& chunk, BackwardScratch& scratch) const {
    run_.AdvanceChain(first_ + slot, run_.StateAt(chunk.before).header(), chunk,
                      memory_.chains[slot], scratch);
  }
  void StoreKeyGradients(int64_t slot, Chunk& chunk, BackwardScratch& scratch) const {
    run_.StoreKeyGradients(BatchOf(slot), HeadOf(slot), chunk,
                           run_.NeedsMaximumKey() ? memory_.chains + slot : nullptr, scratch);
  }
  void StoreMaximumKey(int64_t slot) const {
    run_.StoreMaximumKey(BatchOf(slot), HeadOf(slot), memory_.chains[slot], PartOfW(slot));
  }

  int64_t BatchOf(int64_t slot) const { return (first_ + slot) / problem_.kv_heads; }
  int64_t HeadOf(int64_t slot) const { return (first_ + slot) % problem_.kv_heads; }
  Chunk* ChunksOf(int64_t slot) const { return memory_.chunks + slot * kKeptChunks; }
  // Returns one of the two sums over queries, of a slot, or of a thread where heads are whole: those
  // after a block or chunk, and after the one before it.
  float* StateAfter(int64_t slot, int64_t which) const {
    return memory_.states + (slot * 2 + which) * sizes_.state;
  }
  // Tells the chunks where the sums before and after them are.
  void LocateSums() const {
    for (int64_t slot = 0; slot < heads_; ++slot) {
      for (int64_t n = 0; n < count_; ++n) {
        Chunk& chunk = ChunksOf(slot)[n];
        chunk.before = chunk.own_before;
        chunk.after = chunk.own_after;
      }
      ChunksOf(slot)[0].before = KeptBefore(slot, block_);
      ChunksOf(slot)[count_ - 1].after = StateAfter(slot, which_);
    }
  }

  // Loads the keys of each chunk, and the queries of each head of the group.
  void LoadChunks() const {
    const int64_t items = problem_.group() + 1;
    pool_.ParallelFor(heads_ * count_ * items, [&](int64_t task, int worker) {
      const int64_t slot = task / items / count_, n = task / items % count_, g = task % items;
      Chunk& chunk = ChunksOf(slot)[n];
      const int64_t first_key = FirstKey(block_, n);
      if (g == problem_.group()) {
        return run_.LoadChunkKeys(first_ + slot, first_key, chunk, memory_.scratch[worker]);
      }
      LoadChunkQueries(slot, g, first_key, chunk, memory_.scratch[worker]);
    });
  }

  // Computes the sums before and after each chunk.
  void ComputeSums() const {
    pool_.ParallelFor(heads_, [&](int64_t slot, int) { AdvanceHeaders(slot); });
    pool_.ParallelFor(heads_ * 2 * kSumSlices, [&](int64_t task, int worker) {
      const int64_t slot = task / kSumSlices / 2, slice = task % kSumSlices;
      const int64_t first = run_.SliceBegin(slice), last = run_.SliceBegin(slice + 1);
      if (first == last) return;
      BackwardScratch& scratch = memory_.scratch[worker];
      const Chunk* chunks = ChunksOf(slot);
      if (task / kSumSlices % 2 == 0) {
        for (int64_t n = 0; n + 1 < count_; ++n) {
          run_.AddChunkKeys(chunks[n], run_.StateAt(chunks[n + 1].before), first, last, scratch);
        }
      } else {
        for (int64_t n = count_ - 1; n >= 0; --n) {
          run_.AddChunkQueries(chunks[n], SumsAfterPrevious(slot, n), first, last, scratch);
        }
      }
    });
  }
  // Returns the sums over the queries after the chunk before chunk n.
  Sums SumsAfterPrevious(int64_t slot, int64_t n) const {
    return run_.StateAt(n > 0 ? ChunksOf(slot)[n - 1].after : StateAfter(slot, 1 - which_));
  }
  void AdvanceHeaders(int64_t slot) const {
    Chunk* chunks = ChunksOf(slot);
    Sums::Header header = run_.StateAt(chunks[0].before).header();
    for (int64_t n = 0; n < count_; ++n) {
      if (n > 0) run_.StateAt(chunks[n].before).header() = header;
      run_.AdvanceKeyHeader(first_ + slot, header, chunks[n]);
    }
    header = run_.StateAt(StateAfter(slot, which_)).header();
    for (int64_t n = count_ - 1; n >= 0; --n) run_.AdvanceChunkHeader(header, chunks[n]);
    run_.StateAt(StateAfter(slot, 1 - which_)).header() = header;
  }

  void StoreKeysAndAddToW() const {
    const int64_t chunks = heads_ * count_, slices = run_.wants_w() ? heads_ * kSumSlices : 0;
    pool_.ParallelFor(chunks + slices, [&](int64_t task, int worker) {
      if (task >= chunks) {
        return AddSliceToW((task - chunks) / kSumSlices, (task - chunks) % kSumSlices);
      }
      StoreKeyGradients(task / count_, ChunksOf(task / count_)[task % count_],
                        memory_.scratch[worker]);
    });
  }

  void AddSliceToW(int64_t slot, int64_t slice) const {
    const int64_t begin = run_.RowSliceBegin(slice), end = run_.RowSliceBegin(slice + 1);
    for (int64_t n = count_ - 1; begin < end && n >= 0; --n) {
      run_.AddChunkToW(ChunksOf(slot)[n], begin, end, PartOfW(slot));
    }
  }

  const Problem& problem_;
  const LinearGradient& run_;
  const Sizes& sizes_;
  const BackwardPlan& plan_;
  const Kept& kept_;
  const BackwardMemory& memory_;
  ThreadPool& pool_;
  int64_t first_ = 0;  // the first of the heads that are held
  int64_t heads_ = 0;  // their number
  int64_t block_ = 0;  // the block of chunks, and how many it has
  int64_t count_ = 0;
  int64_t which_ = 0;  // which state has the sums after the block
};

}  // namespace
}  // namespace linear_cpu

size_t LinearBackwardWorkspaceBytes(const Problem& problem, const FeatureMap& map, int threads) {
  const linear_cpu::Sizes sizes(problem, map);
  const linear_cpu::BackwardPlan plan(problem, sizes, threads);
  return Workspace::Measure([&](Workspace& workspace) {
    linear_cpu::LayOutBackward(problem, sizes, plan, threads, workspace);
  });
}

absl::Status LinearBackwardCpu(const Problem& problem, const LinearBackwardCall& call,
                               const Execution& execution) {
  TFB_RETURN_IF_ERROR(CheckLinearMap(problem, call.map, call.w));
  const linear_cpu::Sizes sizes(problem, call.map);
  const int threads = execution.pool->threads();
  const linear_cpu::BackwardPlan plan(problem, sizes, threads);
  Workspace workspace(execution.workspace), kept_memory(execution.kept);
  const linear_cpu::BackwardMemory memory =
      linear_cpu::LayOutBackward(problem, sizes, plan, threads, workspace);
  const linear_cpu::Kept kept = linear_cpu::LayOutKept(problem, sizes, kept_memory);
  const linear_cpu::LinearGradient run(problem, call, sizes, kept, memory);
  linear_cpu::PadMatrix(call.w, sizes, memory.w);
  linear_cpu::Backward(problem, run, sizes, plan, kept, memory, *execution.pool).Run();
  return absl::OkStatus();
}

}  // namespace tfb
