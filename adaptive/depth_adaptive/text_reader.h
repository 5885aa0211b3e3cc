// The trained language model with exits, on held-out text, for programs that measure it.
#ifndef TFB_ADAPTIVE_DEPTH_ADAPTIVE_TEXT_READER_H_
#define TFB_ADAPTIVE_DEPTH_ADAPTIVE_TEXT_READER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/options.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/thread_pool.h"
#include "harness/inputs/language_model.h"

namespace tfb::depth_adaptive {

// Sequences of held-out text, far apart. Of two samples with equal `sequences` and `tokens`, one that
// skips the other's tokens reads the text behind them.
struct TextSample {
  int64_t sequences = 1;
  int64_t tokens = 1;  // of each
  int64_t skip = 0;    // tokens before each
};

// Results for each token of each sequence, [sequences][tokens]; `layers` and `flops_saved` are
// means.
struct TextReading {
  std::vector<float> bits;    // -log2 p(next byte)
  std::vector<uint8_t> best;  // the most likely next byte
  std::vector<float> sure;    // the probability of that byte
  std::vector<uint8_t> next;  // the next byte
  double layers = 0;
  double flops_saved = 0;

  double BitsPerByte() const;
  // Returns the share of tokens whose most likely byte is also the other's.
  double Agreement(const TextReading& other) const;
};

class TextReader {
 public:
  // When tokens leave during timings: as the technique decides, or never, when no rule is evaluated
  // either.
  enum class Leave : uint8_t { kAsDecided, kNever };

  // Creates a reader that scores next bytes with a layer of an exit stack, `at_a_time` sequences as
  // a batch. Options that are not given are the model's.
  static absl::StatusOr<std::unique_ptr<TextReader>> Create(const Technique& technique,
                                                            const Options& options,
                                                            const TextSample& sample,
                                                            int64_t at_a_time, ThreadPool* pool);

  // Reads all sequences. `exits`, i32 [sequences, tokens], unless empty, replace the technique's.
  absl::StatusOr<TextReading> Read(const ConstTensorView& exits = {});
  // Returns the processor seconds of one thread, for the layers alone, in a reading of the first
  // batch.
  absl::StatusOr<double> TimeReading(Leave leave);
  // Does the same where each sequence of the batch gets one token a step.
  absl::StatusOr<double> TimeDecoding(Leave leave);
  // Returns the share of the last call.
  double flops_saved() const { return layer_->statistics().at("flops_saved"); }

 private:
  TextReader() = default;
  // `exits` are those of the batch.
  absl::Status ReadBatch(int64_t first, const ConstTensorView& exits, const Execution& execution);
  ConstTensorView ExitsOf(Leave leave) const {
    return leave == Leave::kNever ? never_.view() : ConstTensorView();
  }
  void Score(int64_t first, TextReading* reading) const;
  int64_t sequences_of_batch() const { return layer_->problem().batch; }

  std::shared_ptr<const LanguageModel> model_;
  ThreadPool* pool_ = nullptr;
  ThreadPool single_{1};
  Problem text_;  // all sequences, with the tokens that they skip
  TextSample sample_;
  std::unique_ptr<Layer> layer_;
  Tensor x_;      // inputs of all sequences
  Tensor out_;    // of a batch
  Tensor never_;  // exits of a batch: beyond all layers
  Tensor workspace_;
  Execution execution_;
};

// Returns the processor seconds of the calling thread so far.
double ThreadSeconds();
// Returns the share of the time that decisions save: 1 less the ratio of the medians of the seconds
// with and without them.
double TimeSaved(const std::vector<double>& decided, const std::vector<double>& never);

}  // namespace tfb::depth_adaptive

#endif  // TFB_ADAPTIVE_DEPTH_ADAPTIVE_TEXT_READER_H_
