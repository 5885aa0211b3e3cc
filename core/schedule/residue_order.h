// Tokens by their residue of a stride.
#ifndef TFB_CORE_SCHEDULE_RESIDUE_ORDER_H_
#define TFB_CORE_SCHEDULE_RESIDUE_ORDER_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace tfb {

// An order of tokens 0, s, 2 s, ..., 1, s + 1, ...: the tokens that are a multiple of the stride
// apart are neighbours in it, so that a dilated window is a plain band inside each residue, and a
// strided column is a dense block whose tiles are full instead of having one key in s.
class ResidueOrder {
 public:
  ResidueOrder(int64_t tokens, int64_t stride)
      : stride_(std::min(stride, std::max<int64_t>(tokens, 1))) {
    for (int64_t r = 0; r < stride_; ++r) {
      begin_.push_back(static_cast<int64_t>(tokens_.size()));
      for (int64_t j = r; j < tokens; j += stride_) tokens_.push_back(static_cast<int32_t>(j));
    }
    begin_.push_back(tokens);
  }
  int64_t Token(int64_t place) const { return tokens_[place]; }
  int64_t Place(int64_t token) const { return begin_[token % stride_] + token / stride_; }
  // Returns the first place and one past the last of the residue that `place` is in.
  std::pair<int64_t, int64_t> Residue(int64_t place) const {
    const int64_t r = tokens_[place] % stride_;
    return {begin_[r], begin_[r + 1]};
  }
  const std::vector<int32_t>& tokens() const { return tokens_; }

 private:
  int64_t stride_;
  std::vector<int64_t> begin_;
  std::vector<int32_t> tokens_;
};

}  // namespace tfb

#endif  // TFB_CORE_SCHEDULE_RESIDUE_ORDER_H_
