#include "attention/fixed/fixed.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/definition.h"
#include "core/flash/flash_parts.h"

namespace tfb::fixed {
namespace {

const bool registered = RegisterTechnique<Fixed>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "fixed";
  info.family = "attention";
  info.title = "Sparse Transformer, fixed";
  info.citation = "Child, Gray, Radford, Sutskever 2019, arXiv:1904.10509v1, sections 4.2 and 4.3";
  info.exactness = Exactness::kExact;
  info.budget_option = "stride";
  info.growth = 1.5;
  info.supports_noncausal = false;
  info.devices = {Device::kCpu, Device::kCuda};
  return info;
}

using Combine = FixedOptions::Combine;

// The places of keys: first all tokens in their order, for rows; from a whole tile on the summary
// tokens, block by block, for columns, so that the summary tokens of many blocks fill a tile.
class Places {
 public:
  Places(const FixedOptions& options, int64_t tokens)
      : tokens_(tokens),
        stride_(options.stride),
        width_(std::min(options.summary, stride_)),
        summaries_(options.summaries),
        first_(RoundUpToTile(tokens)) {}

  int64_t size() const { return first_ + SummariesBefore(tokens_ + stride_ - 1); }
  int64_t first_summary() const { return first_; }
  bool IsSummary(int64_t place) const { return place >= first_; }
  // Returns the number of summary tokens of the blocks that end at or before `token`.
  int64_t SummariesBefore(int64_t token) const { return token / stride_ * width_; }
  // Returns the token of a summary place for a key-value head. The last block's may lie beyond the
  // sequence.
  int64_t Token(int64_t kv_head, int64_t place) const {
    const int64_t n = place - first_, in_block = stride_ - (kv_head % summaries_ + 1) * width_;
    return n / width_ * stride_ + in_block + n % width_;
  }
  // Returns the token of each place, for each key-value head. Places of no token, which nothing
  // sees, read token 0.
  std::vector<int32_t> Order(int64_t kv_heads) const {
    std::vector<int32_t> order;
    order.reserve(kv_heads * size());
    for (int64_t g = 0; g < kv_heads; ++g) {
      for (int64_t place = 0; place < size(); ++place) {
        const int64_t token = IsSummary(place) ? Token(g, place) : place;
        order.push_back(token < tokens_ ? static_cast<int32_t>(token) : 0);
      }
    }
    return order;
  }

 private:
  static int64_t RoundUpToTile(int64_t tokens) {
    return (tokens + kFlashTile - 1) / kFlashTile * kFlashTile;
  }

  int64_t tokens_;
  int64_t stride_;
  int64_t width_;  // summary tokens of a block
  int64_t summaries_;
  int64_t first_;
};

// A query sees its own block in the row's places, and other blocks' summaries in the column's.
class FixedPattern : public Pattern {
 public:
  FixedPattern(const Problem& problem, const FixedOptions& options, const Places& places)
      : heads_(options.combine == Combine::kPerHead || options.summaries > 1 ? problem.query_heads
                                                                             : 1),
        group_(problem.group()),
        options_(options),
        places_(places) {}

  int64_t heads() const override { return heads_; }

  bool Allows(int64_t head, int64_t i, int64_t place) const override {
    if (!places_.IsSummary(place)) {
      return SeesRow(head) && place <= i && Block(place) == Block(i);
    }
    const int64_t token = places_.Token(head / group_, place);
    // Summary tokens of the own block are in the row, if there is one.
    return SeesColumn(head) && token <= i && !(SeesRow(head) && Block(token) == Block(i));
  }

  void KeyRanges(int64_t head, int64_t query_begin, int64_t query_end,
                 std::vector<KeyRange>* ranges) const override {
    const int64_t last = query_end - 1;
    if (SeesRow(head)) {
      ranges->push_back({Block(query_begin) * options_.stride, query_end, false});
      if (Block(query_begin) == Block(last)) {
        ranges->push_back({Block(query_begin) * options_.stride, query_begin + 1, true});
      }
    }
    if (SeesColumn(head)) {
      const int64_t first = places_.first_summary();
      ranges->push_back({first, first + places_.SummariesBefore(last + options_.stride), false});
      ranges->push_back({first, first + places_.SummariesBefore(query_begin), true});
    }
  }

 private:
  int64_t Block(int64_t token) const { return token / options_.stride; }
  bool SeesRow(int64_t head) const {
    switch (options_.combine) {
      case Combine::kInterleaved:
        return options_.layer % 2 == 0;
      case Combine::kPerHead:
        return head / group_ % 2 == 0;
      default:
        return true;
    }
  }
  bool SeesColumn(int64_t head) const {
    return options_.combine == Combine::kMerged || !SeesRow(head);
  }

  int64_t heads_;
  int64_t group_;
  FixedOptions options_;
  Places places_;
};

Problem WithPlaces(Problem problem, const FixedOptions& options) {
  problem.kv_tokens = Places(options, problem.query_tokens).size();
  return problem;
}

class FixedLayer : public FlashPartsLayer {
 public:
  FixedLayer(const Problem& problem, const FixedOptions& options, Device device)
      : FlashPartsLayer(problem, device, {WithPlaces(problem, options)}), options_(options) {}

 protected:
  std::vector<FlashPartSpec> DescribeParts() override {
    const Places places(options_, problem().query_tokens);
    std::vector<FlashPartSpec> parts;
    parts.push_back({std::make_unique<FixedPattern>(problem(), options_, places),
                     {},
                     places.Order(options_.summaries > 1 ? problem().kv_heads : 1)});
    return parts;
  }

 private:
  FixedOptions options_;
};

absl::Status Check(const Problem& problem, const FixedOptions& options) {
  if (problem.query_tokens != problem.kv_tokens) {
    return absl::UnimplementedError(absl::StrCat("fixed is self-attention: query_tokens is ",
                                                 problem.query_tokens, ", kv_tokens is ",
                                                 problem.kv_tokens));
  }
  const int64_t fit = std::max<int64_t>(options.stride / options.summary, 1);
  if (options.summaries > fit) {
    return absl::InvalidArgumentError(absl::StrCat(
        "option summaries is ", options.summaries, "; allowed with stride=", options.stride,
        " and summary=", options.summary, " are 1 to ", fit));
  }
  return absl::OkStatus();
}

}  // namespace

Fixed::Fixed() : TechniqueOf(Info()) {}

absl::StatusOr<std::unique_ptr<Layer>> Fixed::MakeLayer(const Problem& problem,
                                                        const FixedOptions& options, Device device,
                                                        uint64_t) const {
  TFB_RETURN_IF_ERROR(Check(problem, options));
  return std::make_unique<FixedLayer>(problem, options, device);
}

absl::Status Fixed::Definition(const Problem& problem, const FixedOptions& options,
                               const NamedTensors&, const Inputs& inputs,
                               const DefinitionRequest& request, NamedTensors* outputs) const {
  TFB_RETURN_IF_ERROR(Check(problem, options));
  const int64_t l = options.stride, c = options.summary;
  const auto sees = [&](int64_t h, int64_t i, int64_t j) {  // j <= i: the problem is causal
    const int64_t g = h / problem.group(), s = g % options.summaries;
    const bool in_row = j / l == i / l;
    const bool in_column = j % l >= l - (s + 1) * c && j % l < l - s * c;
    switch (options.combine) {
      case Combine::kInterleaved:
        return options.layer % 2 == 0 ? in_row : in_column;
      case Combine::kPerHead:
        return g % 2 == 0 ? in_row : in_column;
      default:
        return in_row || in_column;
    }
  };
  DefineMaskedAttention(
      problem, inputs, request, 0, sees, [](int64_t, int64_t, int64_t, int64_t) { return 0.0; },
      outputs);
  return absl::OkStatus();
}

}  // namespace tfb::fixed
