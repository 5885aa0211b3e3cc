#include "attention/strided/strided.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/definition.h"
#include "core/flash/flash_parts.h"
#include "core/schedule/residue_order.h"

namespace tfb::strided {
namespace {

const bool registered = RegisterTechnique<Strided>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "strided";
  info.family = "attention";
  info.title = "Sparse Transformer, strided";
  info.citation = "Child, Gray, Radford, Sutskever 2019, arXiv:1904.10509v1, sections 4.2 and 4.3";
  info.exactness = Exactness::kExact;
  info.budget_option = "stride";
  info.growth = 1.5;
  info.supports_noncausal = false;
  info.devices = {Device::kCpu, Device::kCuda};
  return info;
}

using Combine = StridedOptions::Combine;

// Returns how many tokens before the query the row begins.
int64_t RowReach(const StridedOptions& options) {
  return options.stride - (options.bandwidth == StridedOptions::Bandwidth::kCode ? 1 : 0);
}

// A pattern over places of the residue order: a query sees those of its residue, at least `least`
// steps back.
class ColumnPattern : public Pattern {
 public:
  ColumnPattern(const ResidueOrder& order, int64_t least) : order_(order), least_(least) {}

  bool Allows(int64_t, int64_t i, int64_t j) const override {
    return i - j >= least_ && order_.Residue(i) == order_.Residue(j);
  }
  void KeyRanges(int64_t, int64_t query_begin, int64_t query_end,
                 std::vector<KeyRange>* ranges) const override {
    for (int64_t i = query_begin; i < query_end;) {
      const auto [begin, end] = order_.Residue(i);
      const int64_t last = std::min(end, query_end) - 1;
      ranges->push_back({begin, last - least_ + 1, false});
      if (i == query_begin && last == query_end - 1) {
        ranges->push_back({begin, query_begin - least_ + 1, true});
      }
      i = last + 1;
    }
  }

 private:
  ResidueOrder order_;
  int64_t least_;
};

// A pattern in which key-value heads take turns: the row in the order of the tokens, the column in
// that of residues.
class AlternatingPattern : public Pattern {
 public:
  AlternatingPattern(const Problem& problem, BandPattern row, ColumnPattern column)
      : heads_(problem.query_heads),
        group_(problem.group()),
        row_(row),
        column_(std::move(column)) {}

  static bool IsRow(int64_t kv_head) { return kv_head % 2 == 0; }
  int64_t heads() const override { return heads_; }
  bool Allows(int64_t head, int64_t i, int64_t j) const override {
    return Of(head).Allows(0, i, j);
  }
  void KeyRanges(int64_t head, int64_t query_begin, int64_t query_end,
                 std::vector<KeyRange>* ranges) const override {
    Of(head).KeyRanges(0, query_begin, query_end, ranges);
  }

 private:
  const Pattern& Of(int64_t head) const {
    return IsRow(head / group_) ? static_cast<const Pattern&>(row_) : column_;
  }

  int64_t heads_;
  int64_t group_;
  BandPattern row_;
  ColumnPattern column_;
};

class StridedLayer : public FlashPartsLayer {
 public:
  StridedLayer(const Problem& problem, const StridedOptions& options, Device device)
      : FlashPartsLayer(problem, device,
                        std::vector<Problem>(options.combine == Combine::kMerged ? 2 : 1, problem)),
        options_(options) {}

 protected:
  std::vector<FlashPartSpec> DescribeParts() override {
    const ResidueOrder order(problem().query_tokens, options_.stride);
    const BandPattern row(-RowReach(options_), 0);
    std::vector<FlashPartSpec> parts;
    const auto add_row = [&] { parts.push_back({std::make_unique<BandPattern>(row), {}, {}}); };
    const auto add_column = [&](int64_t least) {
      parts.push_back(
          {std::make_unique<ColumnPattern>(order, least), order.tokens(), order.tokens()});
    };
    switch (options_.combine) {
      case Combine::kMerged:
        add_row();
        add_column(RowReach(options_) / options_.stride + 1);  // adds the keys that the row lacks
        break;
      case Combine::kInterleaved:
        options_.layer % 2 == 0 ? add_row() : add_column(0);
        break;
      case Combine::kPerHead: {
        std::vector<int32_t> tokens;
        for (int64_t g = 0; g < problem().kv_heads; ++g) {
          tokens.insert(tokens.end(), order.tokens().begin(), order.tokens().end());
          if (AlternatingPattern::IsRow(g)) {
            std::iota(tokens.end() - problem().query_tokens, tokens.end(), 0);
          }
        }
        parts.push_back(
            {std::make_unique<AlternatingPattern>(problem(), row, ColumnPattern(order, 0)), tokens,
             tokens});
        break;
      }
    }
    return parts;
  }

 private:
  StridedOptions options_;
};

absl::Status Check(const Problem& problem) {
  if (problem.query_tokens == problem.kv_tokens) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat("strided is self-attention: query_tokens is ",
                                               problem.query_tokens, ", kv_tokens is ",
                                               problem.kv_tokens));
}

}  // namespace

Strided::Strided() : TechniqueOf(Info()) {}

absl::StatusOr<std::unique_ptr<Layer>> Strided::MakeLayer(const Problem& problem,
                                                          const StridedOptions& options,
                                                          Device device, uint64_t) const {
  TFB_RETURN_IF_ERROR(Check(problem));
  return std::make_unique<StridedLayer>(problem, options, device);
}

absl::Status Strided::Definition(const Problem& problem, const StridedOptions& options,
                                 const NamedTensors&, const Inputs& inputs,
                                 const DefinitionRequest& request, NamedTensors* outputs) const {
  TFB_RETURN_IF_ERROR(Check(problem));
  const int64_t l = options.stride;
  const bool is_paper = options.bandwidth == StridedOptions::Bandwidth::kPaper;
  const auto sees = [&](int64_t h, int64_t i, int64_t j) {  // j <= i: the problem is causal
    const bool in_row = is_paper ? j >= i - l : j > i - l;
    const bool in_column = (i - j) % l == 0;
    switch (options.combine) {
      case Combine::kInterleaved:
        return options.layer % 2 == 0 ? in_row : in_column;
      case Combine::kPerHead:
        return h / problem.group() % 2 == 0 ? in_row : in_column;
      default:
        return in_row || in_column;
    }
  };
  DefineMaskedAttention(
      problem, inputs, request, 0, sees, [](int64_t, int64_t, int64_t, int64_t) { return 0.0; },
      outputs);
  return absl::OkStatus();
}

}  // namespace tfb::strided
