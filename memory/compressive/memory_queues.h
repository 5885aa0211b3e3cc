// The contents of a layer's two queues as numbers. They are the same for all layers and batch rows,
// and depend only on how many tokens the stream has.
#ifndef TFB_MEMORY_COMPRESSIVE_MEMORY_QUEUES_H_
#define TFB_MEMORY_COMPRESSIVE_MEMORY_QUEUES_H_

#include <algorithm>
#include <cstdint>

#include "memory/compressive/compressive.h"

namespace tfb::compressive {

// The names of the tensors of what the queues hold, beside kMemories: see compressive.h.
inline constexpr char kCompressed[] = "compressed";
inline constexpr char kWaitingUse[] = "waiting_use";

// Tokens are counted from the stream's first; that is the first given one, or with start_zero the
// first of `memory` zero vectors. Compressed rows are counted from the first one, or from the first
// that is given, or from the first zero vector.
class MemoryQueues {
 public:
  // `segment` is the number of tokens of the longest segment.
  MemoryQueues(const CompressiveOptions& options, int64_t segment)
      : memory_(options.memory),
        compressed_(options.compressed_memory),
        rate_(options.compression),
        segment_(segment),
        given_tokens_(options.given_memory),
        given_rows_(options.given_compressed),
        starts_full_(options.start_zero && !options.is_given()),
        evicts_blocks_(options.eviction == CompressiveOptions::Eviction::kWholeBlocks) {}

  // The number of tokens and of compressed rows with which a stream begins.
  int64_t first_token() const { return starts_full_ ? memory_ : given_tokens_; }
  int64_t first_row() const { return starts_full_ ? compressed_ : given_rows_; }

  // Return, after `tokens` tokens, how many have left the memory, how many of those are compressed,
  // and how many compressed rows there have been.
  int64_t Left(int64_t tokens) const {
    const int64_t overflow = std::max<int64_t>(tokens - memory_, 0);
    return evicts_blocks_ ? (overflow + rate_ - 1) / rate_ * rate_ : overflow;
  }
  int64_t Compressed(int64_t tokens) const {
    return compressed_ == 0 ? 0 : Left(tokens) / rate_ * rate_;
  }
  int64_t Rows(int64_t tokens) const { return first_row() + Compressed(tokens) / rate_; }
  // Return the number of rows that a queue holds.
  int64_t MemoryTokens(int64_t tokens) const { return tokens - Left(tokens); }
  int64_t MemoryRows(int64_t tokens) const { return std::min(Rows(tokens), compressed_); }
  // Returns the number of tokens that have left the memory and wait to be compressed.
  int64_t Waiting(int64_t tokens) const {
    return compresses() ? Left(tokens) - Compressed(tokens) : 0;
  }

  // Returns the places for the tokens that are not yet compressed, in whole blocks.
  int64_t places() const { return (memory_ + segment_ + 2 * rate_ - 2) / rate_ * rate_; }
  int64_t max_blocks() const { return (segment_ + rate_ - 1) / rate_; }
  int64_t max_distance() const { return compressed_ + memory_ + segment_ - 1; }
  int64_t rate() const { return rate_; }
  bool starts_full() const { return starts_full_; }
  bool compresses() const { return compressed_ > 0; }

 private:
  int64_t memory_;
  int64_t compressed_;
  int64_t rate_;
  int64_t segment_;
  int64_t given_tokens_;
  int64_t given_rows_;
  bool starts_full_;
  bool evicts_blocks_;
};

}  // namespace tfb::compressive

#endif  // TFB_MEMORY_COMPRESSIVE_MEMORY_QUEUES_H_
