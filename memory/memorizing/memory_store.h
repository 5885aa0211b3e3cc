// The store of a memorizing layer: normalised keys and values of past tokens, first in, first out,
// and the reading of queries from it.
//
// Each batch row and head of keys has a ring of slots: token j lies in slot j mod (capacity + lag),
// so that a token is written once and never moved, and the newest replaces the oldest. The newest
// `lag` tokens are kept but not searched. The CPU keeps fp32, CUDA the problem's dtype.
//
// Where queries read the whole store, engine flash does it, without a search.
#ifndef TFB_MEMORY_MEMORIZING_MEMORY_STORE_H_
#define TFB_MEMORY_MEMORIZING_MEMORY_STORE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/device_array.h"
#include "core/flash/flash_engine.h"
#include "core/problem.h"
#include "core/schedule/band_schedule.h"
#include "core/search/search.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"
#include "memory/memorizing/memorizing_cuda.h"

namespace tfb::memorizing {

struct StoreShape {
  int64_t capacity = 1;     // entries that a search sees
  int64_t lag = 0;          // newer tokens that a search does not see
  int64_t k = 1;            // entries that a query reads, at most `capacity`
  int64_t max_segment = 1;  // queries of a Read
  SearchSelection selection = SearchSelection::kExact;
  bool has_null = false;  // queries read a learned key and value, too
  bool joins = false;     // one softmax over what is read and the layer's own keys; else a gate

  // Whether the size of the scores matters beside their differences.
  bool weighs() const { return has_null || joins; }
  int64_t slots() const { return capacity + lag; }
};

// Copies rows of `from` [batch, heads, tokens, channels] of any floating dtype, without the first
// `skip` tokens, to places first_place, first_place + 1, ... of the ring `to` [batch * heads, places,
// channels], which is contiguous, and f32 on the CPU. It allocates nothing.
struct CopyToRingCall {
  ConstTensorView from;
  int64_t skip = 0;
  RowLength length = RowLength::kKept;
  const float* scales = nullptr;  // [heads], of the device, with kScale
  TensorView to;
  int64_t first_place = 0;
};
absl::Status CopyToRing(Device device, const CopyToRingCall& call, const Execution& execution);

class MemoryStore {
 public:
  MemoryStore() = default;
  // Allocates the memory. Returns ResourceExhausted where there is not enough.
  static absl::StatusOr<MemoryStore> Create(Device device, const Problem& problem,
                                            const StoreShape& shape);

  // f32 in host memory: gate, which `joins` does without, and scale [heads]; with a null slot its
  // key and value [kv_heads, head_dim].
  struct Parameters {
    ConstTensorView gate, scale, null_key = {}, null_value = {};
  };
  // Copies the parameters to the device.
  absl::Status Setup(const Parameters& parameters);

  void Clear() { tokens_ = 0; }
  int64_t entries() const;  // number of entries that a Read searches
  size_t bytes() const { return keys_.bytes() + values_.bytes(); }
  size_t workspace_bytes(int threads) const;

  // heads = g o + (1 - g) heads, where o is the result of the queries' reading and g =
  // sigmoid(gate), or with `joins` sigmoid(l - m), of the log-sum-exps l of the scores of what is
  // read and m, `log_sum_exp` f32 [batch, heads, tokens], of the layer's own. Heads are unchanged
  // where nothing is read. q of any floating dtype and heads, f32, are [batch, heads, tokens,
  // head_dim]. `retrieved`, i64 [batch, heads, tokens, k] unless empty, becomes the tokens that
  // were read, ascending, counted from the first Append; -1 behind the last.
  absl::Status Read(const ConstTensorView& q, const TensorView& heads,
                    const ConstTensorView& log_sum_exp, const TensorView& retrieved,
                    const Execution& execution);
  // Appends the next tokens: k and v, [batch, kv_heads, tokens, head_dim] of any floating dtype.
  absl::Status Append(const ConstTensorView& k, const ConstTensorView& v,
                      const Execution& execution);

  // Sets the store to the state after so many tokens, of which k and v are the last.
  absl::Status Recall(int64_t tokens, const ConstTensorView& k, const ConstTensorView& v,
                      const Execution& execution);
  // Copies what the store keeps, the oldest token first, to [batch, kv_heads, tokens, head_dim] of
  // any floating dtype. Either may be empty.
  absl::Status CopyTo(const TensorView& keys, const TensorView& values,
                      const Execution& execution) const;

 private:
  MemoryStore(Device device, const Problem& problem, const StoreShape& shape)
      : device_(device), problem_(problem), shape_(shape), schedule_(shape.max_segment) {}

  int64_t rows() const { return problem_.batch * problem_.query_heads; }
  int64_t key_rows() const { return problem_.batch * problem_.kv_heads; }
  int64_t kept() const { return std::min(tokens_, shape_.slots()); }
  int64_t oldest() const { return tokens_ <= shape_.slots() ? 0 : tokens_ % shape_.slots(); }
  TensorView Ring(const DeviceArray<std::byte>& memory) const;  // [key_rows, slots, head_dim]
  SearchSizes LargestSearch() const;
  // Returns the problem of queries that read so many tokens.
  Problem DenseProblem(int64_t queries, int64_t entries) const;
  bool reads_all() const { return shape_.lag == 0 && entries() <= shape_.k; }

  // Returns memory for queries of unit length, f32 [rows, tokens, head_dim].
  TensorView LayOutQueries(int64_t tokens, Workspace& workspace) const;
  // The result of a search: the best k slots, or the values' mean.
  struct Found {
    int32_t* slots = nullptr;  // [rows][tokens][k]
    float* scores = nullptr;   // [rows][tokens][k]
    // [rows][tokens][head_dim]: the mean over the whole store, instead of slots; and the
    // log-sum-exp of its scores, [rows][tokens].
    float* mean = nullptr;
    float* log_sum_exp = nullptr;  // null where it is not used
  };
  // A Read on its way to Mix.
  struct Reading {
    TensorView queries;           // [rows, tokens, head_dim], of unit length, or of their scales
    ConstTensorView log_sum_exp;  // of the layer's own scores; empty unless it `joins`
    Found found;
  };
  Found LayOutSlots(int64_t tokens, Workspace& workspace) const;
  Found LayOutMean(int64_t tokens, Workspace& workspace) const;

  absl::StatusOr<Found> FindBest(const TensorView& queries, const Execution& execution) const;
  absl::StatusOr<Found> ReadAll(const TensorView& queries, const Execution& execution);

  // Copies rows of queries or keys, [batch, heads, tokens, head_dim], as CopyToRing.
  absl::Status CopyRows(const ConstTensorView& from, int64_t skip, RowLength length,
                        const TensorView& to, int64_t first_place,
                        const Execution& execution) const;
  // Writes the tokens in k slots, which it sorts.
  void StoreTokens(int32_t* slots, const TensorView& retrieved, int64_t offset) const;
  // What one query reads: the softmax of its scores over values, and their log-sum-exp, -inf where
  // it reads nothing.
  struct OneRead {
    float* sum;  // [head_dim]
    float log_sum_exp;
  };
  void AddNull(const Reading& reading, int64_t query, int64_t h, OneRead* read) const;
  void MixOnCpu(const Reading& reading, const TensorView& heads, const TensorView& retrieved,
                const Execution& execution) const;
  absl::Status MixOnCuda(const Reading& reading, const TensorView& heads,
                         const TensorView& retrieved, const Execution& execution) const;

  Device device_ = Device::kCpu;
  Problem problem_;
  StoreShape shape_;
  DType dtype_ = DType::kF32;  // dtype of keys and values
  DeviceArray<std::byte> keys_;
  DeviceArray<std::byte> values_;
  DeviceArray<float> gates_;  // [heads]
  DeviceArray<float> scales_;
  DeviceArray<float> null_keys_;  // [kv_heads, head_dim], of unit length
  DeviceArray<float> null_values_;
  FlashEngine dense_;
  BandSchedule schedule_;  // the schedule of a call on the CPU
  int64_t tokens_ = 0;     // tokens since the last Clear
};

}  // namespace tfb::memorizing

#endif  // TFB_MEMORY_MEMORIZING_MEMORY_STORE_H_
