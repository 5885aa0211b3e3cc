// The keys that a query sees: a technique states its pattern once, for every engine and device.
#ifndef TFB_CORE_SCHEDULE_PATTERN_H_
#define TFB_CORE_SCHEDULE_PATTERN_H_

#include <cstdint>
#include <vector>

namespace tfb {

// The keys begin, begin + 1, ..., end - 1.
struct KeyRange {
  int64_t begin;
  int64_t end;
  bool all;  // every query asked about sees every key of the range
};

// A predicate over (head, query, key). It leaves out the causal mask of the problem: the schedule
// builder adds that.
class Pattern {
 public:
  virtual ~Pattern() = default;

  // Returns the number of heads with patterns of their own; head h of the problem has pattern h
  // where there are several, else pattern 0.
  virtual int64_t heads() const { return 1; }

  // Tells whether query i sees key j, as the paper states it. Positions are token indices of the
  // query and the key sequence.
  virtual bool Allows(int64_t head, int64_t i, int64_t j) const = 0;

  // Appends ranges that together hold every key seen by any query in [query_begin, query_end), in
  // any order, overlapping or beyond the ends of the sequence as is convenient. Their total length
  // decides the cost of building the schedule, so a linear pattern gives ranges of bounded length.
  virtual void KeyRanges(int64_t head, int64_t query_begin, int64_t query_end,
                         std::vector<KeyRange>* ranges) const = 0;
};

// A pattern in which every query sees every key.
class FullPattern : public Pattern {
 public:
  explicit FullPattern(int64_t kv_tokens) : kv_tokens_(kv_tokens) {}
  bool Allows(int64_t, int64_t, int64_t) const override { return true; }
  void KeyRanges(int64_t, int64_t, int64_t, std::vector<KeyRange>* ranges) const override {
    ranges->push_back({0, kv_tokens_, true});
  }

 private:
  int64_t kv_tokens_;
};

// A band: query i sees the keys j with low <= j - i <= high.
class BandPattern : public Pattern {
 public:
  BandPattern(int64_t low, int64_t high) : low_(low), high_(high) {}
  bool Allows(int64_t, int64_t i, int64_t j) const override {
    return j - i >= low_ && j - i <= high_;
  }
  void KeyRanges(int64_t, int64_t query_begin, int64_t query_end,
                 std::vector<KeyRange>* ranges) const override {
    ranges->push_back({query_begin + low_, query_end + high_, false});
    // The range may be empty.
    ranges->push_back({query_end - 1 + low_, query_begin + high_ + 1, true});
  }

 private:
  int64_t low_;
  int64_t high_;
};

}  // namespace tfb

#endif  // TFB_CORE_SCHEDULE_PATTERN_H_
