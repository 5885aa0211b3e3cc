#include "core/flash/flash.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "core/flash/rows.h"

namespace tfb {

double ProductScale(const Problem& problem, double scale) {
  return scale != 0 ? scale : 1 / std::sqrt(static_cast<double>(problem.head_dim));
}

DistanceTable::DistanceTable(int64_t heads, int64_t query_tokens, int64_t kv_tokens,
                             const std::function<float(int64_t, int64_t)>& value)
    : heads_(heads), zero_(std::max<int64_t>(query_tokens - 1, 0)) {
  row_ = Row(query_tokens, kv_tokens);
  const int64_t offsets = row_ - kFlashTile;
  values_.assign(heads * row_, 0.0f);
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t n = 0; n < offsets; ++n) values_[h * row_ + n] = value(h, n - zero_);
  }
}

RelativeKeys::RelativeKeys(const ConstTensorView& table, int64_t low, int64_t high,
                           const std::function<int64_t(int64_t)>& row)
    : heads_(table.dim(0)),
      low_(low),
      high_(high),
      head_dim_(table.dim(2)),
      table_(table.data),
      element_size_(SizeOf(table.dtype)),
      head_stride_(table.stride(0)),
      row_stride_(table.stride(1)),
      channel_stride_(table.stride(2)) {
  if (high < low) return;
  for (int64_t offset = low; offset <= high; ++offset) rows_.push_back(row(offset));
  const auto floor_panel = [](int64_t offset) {
    return (offset >= 0 ? offset : offset - kFlashTile + 1) / kFlashTile;
  };
  first_panel_ = floor_panel(low);
  panel_count_ = floor_panel(high) - first_panel_ + 1;
  panels_.assign(heads_ * panel_count_ * head_dim_ * kFlashTile, 0.0f);
  std::vector<float> values(head_dim_);
  for (int64_t h = 0; h < heads_; ++h) {
    for (int64_t offset = low; offset <= high; ++offset) {
      LoadRow(table, table.Offset(h, rows_[offset - low]), table.stride(2), head_dim_,
              values.data());
      const int64_t index = offset - first_panel_ * kFlashTile;
      float* panel = panels_.data() +
                     (h * panel_count_ + index / kFlashTile) * head_dim_ * kFlashTile +
                     index % kFlashTile;
      for (int64_t c = 0; c < head_dim_; ++c) panel[c * kFlashTile] = values[c];
    }
  }
  for (int64_t h = 0; h < heads_; ++h) {
    for (int64_t n = 0; n < panel_count_ * kFlashTile; n += kBlock) {
      repeats_.push_back(n > 0 && BlockRepeats(h, n));
    }
  }
}

// Tells whether the offsets that begin `index` behind the first panel's all have the preceding
// vector.
bool RelativeKeys::BlockRepeats(int64_t head, int64_t index) const {
  const auto channel = [&](int64_t n, int64_t c) {
    return Panel(head, first_panel_ + n / kFlashTile)[c * kFlashTile + n % kFlashTile];
  };
  for (int64_t c = 0; c < head_dim_; ++c) {
    for (int64_t n = index; n < index + kBlock; ++n) {
      if (channel(n, c) != channel(index - 1, c)) return false;
    }
  }
  return true;
}

absl::Status CheckIds(const FlashCall& call) {
  if (!call.query_ids.empty() && !call.key_ids.empty()) return absl::OkStatus();
  return absl::InternalError("a call whose rule has label keys has no ids of queries or keys");
}

absl::Status CheckTokenRule(const TokenRule& rule) {
  if (rule.own < 0 && !rule.counts) return absl::OkStatus();
  if (rule.slots <= kMaxTokenSlots && rule.own < rule.slots && rule.query_codes != nullptr &&
      rule.key_codes != nullptr) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat("a token rule of ", rule.slots, " slots, of which slot ",
                                          rule.own, " is the call's own; allowed are 1 to ",
                                          kMaxTokenSlots, " slots with codes"));
}

}  // namespace tfb
