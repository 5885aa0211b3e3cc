// The keys that a query sees: a technique states its pattern once, for every engine and device.
#ifndef TFB_CORE_SCHEDULE_PATTERN_H_
#define TFB_CORE_SCHEDULE_PATTERN_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "absl/types/span.h"

namespace tfb {

// The keys begin, begin + 1, ..., end - 1.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

// A set of keys, as ranges.
class KeyList {
 public:
  // Adds keys, some of which may be in the set already or lie beyond the sequence.
  void Add(int64_t begin, int64_t end) {
    if (begin < end) ranges_.push_back({begin, end});
  }
  void AddAll() { Add(0, std::numeric_limits<int64_t>::max()); }
  void Clear() { ranges_.clear(); }

  // Makes the ranges ascending and disjoint, without gaps of nothing between neighbours, and leaves
  // out keys outside [0, kv_tokens).
  void Normalize(int64_t kv_tokens);
  absl::Span<const KeyRange> ranges() const { return ranges_; }

 private:
  std::vector<KeyRange> ranges_;
};

// Which keys each query of a head sees. It leaves out the causal mask of the problem: the schedule
// builder adds that.
class Pattern {
 public:
  virtual ~Pattern() = default;

  // Returns the number of heads with patterns of their own; head h of the problem has pattern h
  // where there are several, else pattern 0.
  virtual int64_t heads() const { return 1; }

  // Adds the keys that query i sees, and returns the first query behind i that may see others. Keys
  // and queries are indices in their sequences. The length of the lists decides the cost of building
  // the schedule.
  virtual int64_t AddKeys(int64_t head, int64_t i, KeyList* keys) const = 0;

  // Tells whether query i sees key j. It is slow.
  bool Sees(int64_t head, int64_t i, int64_t j) const;
};

// A pattern in which every query sees every key.
class FullPattern : public Pattern {
 public:
  int64_t AddKeys(int64_t, int64_t, KeyList* keys) const override {
    keys->AddAll();
    return std::numeric_limits<int64_t>::max();
  }
};

// A band: query i sees the keys j with low <= j - i <= high.
class BandPattern : public Pattern {
 public:
  BandPattern(int64_t low, int64_t high) : low_(low), high_(high) {}
  int64_t AddKeys(int64_t, int64_t i, KeyList* keys) const override {
    keys->Add(i + low_, i + high_ + 1);
    return i + 1;
  }

 private:
  int64_t low_;
  int64_t high_;
};

// A pattern that is a function: see Pattern::AddKeys.
class FunctionPattern : public Pattern {
 public:
  using Function = std::function<int64_t(int64_t head, int64_t i, KeyList* keys)>;
  explicit FunctionPattern(Function add_keys, int64_t heads = 1)
      : add_keys_(std::move(add_keys)), heads_(heads) {}
  int64_t heads() const override { return heads_; }
  int64_t AddKeys(int64_t head, int64_t i, KeyList* keys) const override {
    return add_keys_(head, i, keys);
  }

 private:
  Function add_keys_;
  int64_t heads_;
};

}  // namespace tfb

#endif  // TFB_CORE_SCHEDULE_PATTERN_H_
