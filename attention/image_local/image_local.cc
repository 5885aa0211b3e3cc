#include "attention/image_local/image_local.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/definition.h"
#include "core/flash/flash_layer.h"
#include "core/flash/flash_parts.h"

namespace tfb::image_local {
namespace {

const bool registered = RegisterTechnique<ImageLocal>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "image_local";
  info.family = "attention";
  info.title = "Image Transformer local attention, 1D and 2D";
  info.citation = "Parmar et al. 2018, arXiv:1802.05751v3, section 3.3";
  info.exactness = Exactness::kExact;
  info.budget_option = "memory";
  info.growth = 1;
  info.devices = {Device::kCpu, Device::kCuda};
  return info;
}

bool Is2d(const ImageLocalOptions& options) { return options.form == ImageLocalOptions::Form::k2d; }

// Returns the tokens in a row of the image: `width`, or the side of the smallest square that holds
// all tokens.
int64_t WidthOf(const ImageLocalOptions& options, int64_t tokens) {
  if (options.width > 0) return options.width;
  int64_t width = 1;
  while (width * width < tokens) ++width;
  return width;
}

// The window around each block; where causal, the schedule cuts it off at the query.
class Pattern1d : public Pattern {
 public:
  explicit Pattern1d(const ImageLocalOptions& options)
      : block_(options.query_block), memory_(options.memory) {}
  bool Allows(int64_t, int64_t i, int64_t j) const override {
    const int64_t begin = i / block_ * block_;
    return j >= begin - memory_ && j < begin + block_ + memory_;
  }
  void KeyRanges(int64_t, int64_t query_begin, int64_t query_end,
                 std::vector<KeyRange>* ranges) const override {
    for (int64_t i = query_begin; i < query_end;) {
      const int64_t begin = i / block_ * block_;
      const int64_t end = std::min(query_end, begin + block_);
      const bool is_only_block = i == query_begin && end == query_end;
      ranges->push_back({begin - memory_, begin + block_ + memory_, is_only_block});
      i = end;
    }
  }

 private:
  int64_t block_;
  int64_t memory_;
};

// An image cut into blocks, and the orders of its tokens in which a block's queries, and the parts
// of its memory, lie one behind the other.
//
// Queries are in block-raster order: raster inside a block, raster over blocks. Keys are too, but
// inside a block one strip of columns after the other: strips end where the flange of a neighbour
// does, so that every memory has all of a strip's columns or none, and its part of a strip is
// contiguous. With f_w = w there is one strip, and the orders are the same.
class Image {
 public:
  Image(const ImageLocalOptions& options, int64_t tokens)
      : tokens_(tokens), width_(std::clamp<int64_t>(tokens, 1, WidthOf(options, tokens))) {
    const int64_t height = std::max<int64_t>((tokens + width_ - 1) / width_, 1);
    block_height_ = std::min(options.block_height, height);
    block_width_ = std::min(options.block_width, width_);
    flange_height_ = std::min(options.flange_height, height);
    flange_width_ = std::min(options.flange_width, width_);
    const int64_t over = flange_width_ % block_width_;
    cuts_ = {std::min(over, block_width_ - over), std::max(over, block_width_ - over)};
    query_order_ = BlockRaster(/*in_strips=*/false);
    key_order_ = BlockRaster(/*in_strips=*/true);
    key_place_.resize(tokens);
    for (int64_t n = 0; n < tokens; ++n) key_place_[key_order_[n]] = n;
  }

  const std::vector<int32_t>& query_order() const { return query_order_; }
  const std::vector<int32_t>& key_order() const { return key_order_; }
  int64_t width() const { return width_; }
  int64_t block_height() const { return block_height_; }
  int64_t block_width() const { return block_width_; }
  int64_t flange_height() const { return flange_height_; }
  int64_t flange_width() const { return flange_width_; }
  int64_t KeyPlace(int64_t row, int64_t column) const { return key_place_[row * width_ + column]; }
  // Returns the end of the strip of a column.
  int64_t StripEnd(int64_t column) const {
    const int64_t begin = column / block_width_ * block_width_;
    for (const int64_t cut : cuts_) {
      if (column < begin + cut) return std::min(begin + cut, width_);
    }
    return std::min(begin + block_width_, width_);
  }

 private:
  std::vector<int32_t> BlockRaster(bool in_strips) const {
    std::vector<int32_t> order;
    for (int64_t r0 = 0; r0 * width_ < tokens_; r0 += block_height_) {
      for (int64_t begin = 0, end; begin < width_; begin = end) {
        end = in_strips ? StripEnd(begin) : std::min(begin + block_width_, width_);
        for (int64_t r = r0; r < r0 + block_height_; ++r) {
          for (int64_t token = r * width_ + begin; token < std::min(r * width_ + end, tokens_);
               ++token) {
            order.push_back(static_cast<int32_t>(token));
          }
        }
      }
    }
    return order;
  }

  int64_t tokens_;
  int64_t width_;
  int64_t block_height_;
  int64_t block_width_;
  int64_t flange_height_;
  int64_t flange_width_;
  std::vector<int64_t> cuts_;  // ends of a block's strips, beside the block's, ascending
  std::vector<int32_t> query_order_;
  std::vector<int32_t> key_order_;
  std::vector<int64_t> key_place_;  // the inverse of key_order
};

// A pattern over places of the image's two orders.
class Pattern2d : public Pattern {
 public:
  explicit Pattern2d(const Image& image) : image_(image) {}

  bool Allows(int64_t, int64_t i, int64_t j) const override {
    const Position query = PositionOf(image_.query_order()[i]);
    const Position key = PositionOf(image_.key_order()[j]);
    const Position block = BlockOf(query);
    if (key.row >= block.row + image_.block_height()) return false;
    const int64_t left = block.column - image_.flange_width();
    const int64_t right = block.column + image_.block_width();
    if (key.row < block.row) {
      return key.row >= block.row - image_.flange_height() && key.column >= left &&
             key.column < right + image_.flange_width();
    }
    if (key.column < block.column) return key.column >= left;
    return key.column < right &&
           (key.row < query.row || (key.row == query.row && key.column <= query.column));
  }

  void KeyRanges(int64_t, int64_t query_begin, int64_t query_end,
                 std::vector<KeyRange>* ranges) const override {
    for (int64_t i = query_begin, end; i < query_end; i = end) {
      const Position block = BlockOfPlace(i);
      for (end = i + 1; end < query_end && BlockOfPlace(end) == block;) ++end;
      AddMemory(block, /*all=*/i == query_begin && end == query_end, ranges);
    }
  }

 private:
  struct Position {
    int64_t row;
    int64_t column;
    bool operator==(const Position& other) const {
      return row == other.row && column == other.column;
    }
  };
  Position PositionOf(int64_t token) const {
    return {token / image_.width(), token % image_.width()};
  }
  // Returns the position of the block's first token.
  Position BlockOf(const Position& at) const {
    return {at.row / image_.block_height() * image_.block_height(),
            at.column / image_.block_width() * image_.block_width()};
  }
  Position BlockOfPlace(int64_t i) const { return BlockOf(PositionOf(image_.query_order()[i])); }

  void AddMemory(const Position& block, bool all, std::vector<KeyRange>* ranges) const {
    const int64_t left = std::max<int64_t>(block.column - image_.flange_width(), 0);
    const int64_t right =
        std::min(block.column + image_.block_width() + image_.flange_width(), image_.width());
    const int64_t top = std::max<int64_t>(block.row - image_.flange_height(), 0);
    for (int64_t row = top; row < block.row;) {  // one row of blocks after the other
      const int64_t first = row / image_.block_height() * image_.block_height();
      const int64_t last = first + image_.block_height() - 1;
      if (row == first) {
        ranges->push_back({image_.KeyPlace(row, left), image_.KeyPlace(last, right - 1) + 1, all});
      } else {
        for (int64_t begin = left, end; begin < right; begin = end) {
          end = image_.StripEnd(begin);
          ranges->push_back({image_.KeyPlace(row, begin), image_.KeyPlace(last, end - 1) + 1, all});
        }
      }
      row = last + 1;
    }
    const int64_t own = image_.KeyPlace(block.row, block.column);
    ranges->push_back({image_.KeyPlace(block.row, left), own, all});
    ranges->push_back({own, own + image_.block_height() * image_.block_width(), false});
  }

  const Image& image_;
};

class Layer2d : public FlashPartsLayer {
 public:
  Layer2d(const Problem& problem, const ImageLocalOptions& options, Device device)
      : FlashPartsLayer(problem, device, {problem}), image_(options, problem.kv_tokens) {}

 protected:
  std::vector<FlashPartSpec> DescribeParts() override {
    std::vector<FlashPartSpec> parts;
    parts.push_back(
        {std::make_unique<Pattern2d>(image_), image_.query_order(), image_.key_order()});
    return parts;
  }

 private:
  Image image_;
};

absl::Status Check(const Problem& problem, const ImageLocalOptions& options) {
  if (problem.query_tokens != problem.kv_tokens) {
    return absl::UnimplementedError(absl::StrCat("image_local is self-attention: query_tokens is ",
                                                 problem.query_tokens, ", kv_tokens is ",
                                                 problem.kv_tokens));
  }
  if (Is2d(options) && !problem.causal) {
    return absl::UnimplementedError(
        "image_local with form=2d is causal: its memory reaches up and to the sides of a block, "
        "not "
        "down; allowed are a causal problem, or form=1d");
  }
  return absl::OkStatus();
}

}  // namespace

ImageLocal::ImageLocal() : TechniqueOf(Info()) {}

absl::StatusOr<std::unique_ptr<Layer>> ImageLocal::MakeLayer(const Problem& problem,
                                                             const ImageLocalOptions& options,
                                                             Device device, uint64_t) const {
  TFB_RETURN_IF_ERROR(Check(problem, options));
  if (Is2d(options)) return std::make_unique<Layer2d>(problem, options, device);
  return std::make_unique<FlashLayer>(problem, QkvInputs(problem), AttentionOutputs(problem),
                                      device, std::make_unique<Pattern1d>(options));
}

absl::Status ImageLocal::Definition(const Problem& problem, const ImageLocalOptions& options,
                                    const NamedTensors&, const Inputs& inputs,
                                    const DefinitionRequest& request, NamedTensors* outputs) const {
  TFB_RETURN_IF_ERROR(Check(problem, options));
  const auto no_bias = [](int64_t, int64_t, int64_t, int64_t) { return 0.0; };
  if (!Is2d(options)) {
    const auto sees = [&](int64_t, int64_t i, int64_t j) {
      const int64_t b = options.query_block * (i / options.query_block);
      const int64_t last = problem.causal ? i : b + options.query_block - 1 + options.memory;
      return b - options.memory <= j && j <= last;
    };
    DefineMaskedAttention(problem, inputs, request, /*scale=*/0, sees, no_bias, outputs);
    return absl::OkStatus();
  }
  const int64_t width = WidthOf(options, problem.kv_tokens);
  const int64_t h = options.block_height, w = options.block_width;
  const int64_t f_h = options.flange_height, f_w = options.flange_width;
  const auto sees = [&](int64_t, int64_t i, int64_t j) {
    const int64_t r = i / width, c = i % width, key_r = j / width, key_c = j % width;
    const int64_t r0 = r / h * h, c0 = c / w * w;
    const bool above = r0 - f_h <= key_r && key_r < r0 && c0 - f_w <= key_c && key_c < c0 + w + f_w;
    const bool left = r0 <= key_r && key_r < r0 + h && c0 - f_w <= key_c && key_c < c0;
    const bool within =
        key_r / h == r / h && key_c / w == c / w && (key_r < r || (key_r == r && key_c <= c));
    return above || left || within;
  };
  Problem block_raster = problem;  // the order of rows is not the tokens'
  block_raster.causal = false;
  DefineMaskedAttention(block_raster, inputs, request, /*scale=*/0, sees, no_bias, outputs);
  return absl::OkStatus();
}

}  // namespace tfb::image_local
