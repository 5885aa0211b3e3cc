#include "attention/image_local/image_local.h"

#include <algorithm>
#include <vector>

#include "core/flash/flash_technique.h"

namespace tfb::image_local {
namespace {

bool Is2d(const ImageLocalOptions& options) { return options.form == ImageLocalOptions::Form::k2d; }

// Returns the tokens in a row of the image: `width`, or the side of the smallest square that holds
// all tokens.
int64_t WidthOf(const ImageLocalOptions& options, int64_t tokens) {
  if (options.width > 0) return options.width;
  int64_t width = 1;
  while (width * width < tokens) ++width;
  return width;
}

// Returns the window around each block; where causal, the schedule cuts it off at the query.
FunctionPattern Pattern1d(const ImageLocalOptions& options) {
  return FunctionPattern(
      [block = options.query_block, memory = options.memory](int64_t, int64_t i, KeyList* keys) {
        const int64_t begin = i / block * block;
        keys->Add(begin - memory, begin + block + memory);
        return begin + block;
      });
}

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
  explicit Pattern2d(const ImageLocalOptions& options, int64_t tokens) : image_(options, tokens) {}

  const Image& image() const { return image_; }

  int64_t AddKeys(int64_t, int64_t i, KeyList* keys) const override {
    const int64_t token = image_.query_order()[i];
    const int64_t row = token / image_.width(), column = token % image_.width();
    const int64_t top = row / image_.block_height() * image_.block_height();
    const int64_t left = column / image_.block_width() * image_.block_width();
    AddMemory(top, left, keys);
    // Of its own block a query sees the rows above and its own row up to itself.
    const int64_t right = std::min(left + image_.block_width(), image_.width());
    for (int64_t r = top; r <= row; ++r) {
      const int64_t last = r < row ? right : column + 1;
      for (int64_t begin = left, end; begin < last; begin = end) {
        end = std::min(image_.StripEnd(begin), last);
        const int64_t place = image_.KeyPlace(r, begin);
        keys->Add(place, place + end - begin);
      }
    }
    return i + 1;
  }

 private:
  // Adds the memory of the block whose first token is at (block_row, block_column), without the
  // block.
  void AddMemory(int64_t block_row, int64_t block_column, KeyList* keys) const {
    const int64_t left = std::max<int64_t>(block_column - image_.flange_width(), 0);
    const int64_t right =
        std::min(block_column + image_.block_width() + image_.flange_width(), image_.width());
    const int64_t top = std::max<int64_t>(block_row - image_.flange_height(), 0);
    for (int64_t row = top; row < block_row;) {  // one row of blocks after the other
      const int64_t first = row / image_.block_height() * image_.block_height();
      const int64_t last = first + image_.block_height() - 1;
      if (row == first) {
        keys->Add(image_.KeyPlace(row, left), image_.KeyPlace(last, right - 1) + 1);
      } else {
        for (int64_t begin = left, end; begin < right; begin = end) {
          end = image_.StripEnd(begin);
          keys->Add(image_.KeyPlace(row, begin), image_.KeyPlace(last, end - 1) + 1);
        }
      }
      row = last + 1;
    }
    keys->Add(image_.KeyPlace(block_row, left), image_.KeyPlace(block_row, block_column));
  }

  Image image_;
};

class ImageLocal : public FlashTechnique<ImageLocalOptions> {
 public:
  ImageLocal()
      : FlashTechnique(SparseSelfAttention(
            {"image_local", "attention", "Image Transformer local attention, 1D and 2D",
             "Parmar et al. 2018, arXiv:1802.05751v3, section 3.3"},
            /*budget_option=*/"memory", /*growth=*/1)) {}

 private:
  absl::Status Check(const Problem& problem, const ImageLocalOptions& options) const override {
    if (!Is2d(options) || problem.causal) return absl::OkStatus();
    return absl::UnimplementedError(
        "image_local with form=2d is causal: its memory reaches up and to the sides of a block, "
        "not down; allowed are a causal problem, or form=1d");
  }

  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    FlashPlan plan(job.problem);
    if (!Is2d(job.options)) return plan.Sees(Pattern1d(job.options));
    const Pattern2d pattern(job.options, job.problem.kv_tokens);
    return plan.Sees(pattern)
        .QueryOrder(pattern.image().query_order())
        .KeyOrder(pattern.image().key_order());
  }

  absl::Status Definition(const Problem& problem, const ImageLocalOptions& options,
                          const NamedTensors&, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override {
    Problem block_raster = problem;  // the order of rows is not the tokens'
    block_raster.causal = problem.causal && !Is2d(options);
    const PairScore score = Is2d(options) ? Define2d(problem, options) : Define1d(problem, options);
    DefineMaskedAttention(block_raster, inputs, request, score, outputs);
    return absl::OkStatus();
  }

  static PairScore Define1d(const Problem& problem, const ImageLocalOptions& options) {
    return PairScore::Sees([options, causal = problem.causal](int64_t, int64_t i, int64_t j) {
      const int64_t b = options.query_block * (i / options.query_block);
      const int64_t last = causal ? i : b + options.query_block - 1 + options.memory;
      return b - options.memory <= j && j <= last;
    });
  }

  static PairScore Define2d(const Problem& problem, const ImageLocalOptions& options) {
    const int64_t width = WidthOf(options, problem.kv_tokens);
    const int64_t h = options.block_height, w = options.block_width;
    const int64_t f_h = options.flange_height, f_w = options.flange_width;
    return PairScore::Sees([=](int64_t, int64_t i, int64_t j) {
      const int64_t r = i / width, c = i % width, key_r = j / width, key_c = j % width;
      const int64_t r0 = r / h * h, c0 = c / w * w;
      const bool above =
          r0 - f_h <= key_r && key_r < r0 && c0 - f_w <= key_c && key_c < c0 + w + f_w;
      const bool left = r0 <= key_r && key_r < r0 + h && c0 - f_w <= key_c && key_c < c0;
      const bool within =
          key_r / h == r / h && key_c / w == c / w && (key_r < r || (key_r == r && key_c <= c));
      return above || left || within;
    });
  }
};

const bool registered = RegisterTechnique<ImageLocal>();

}  // namespace
}  // namespace tfb::image_local
