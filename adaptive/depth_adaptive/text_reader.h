// The trained language model with exits, on held-out text: what programs measure of it.
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
#include "harness/language_model.h"

namespace tfb {

// Sequences of held-out text, far apart. With the same numbers of both, those that `skip` the tokens of
// others follow them and are other text.
struct TextSample {
  int64_t sequences = 1;
  int64_t tokens = 1;  // of each
  int64_t skip = 0;    // tokens before each
};

// Of each token of each sequence, [sequences][tokens]; `layers` and `flops_saved` are means.
struct TextReading {
  std::vector<float> bits;    // -log2 p(next byte)
  std::vector<uint8_t> best;  // the most likely next byte
  std::vector<float> sure;    // how likely that is
  std::vector<uint8_t> next;  // the next byte
  double layers = 0;
  double flops_saved = 0;

  double BitsPerByte() const;
  // The share of tokens whose most likely byte is also the other's.
  double Agreement(const TextReading& other) const;
};

class TextReader {
 public:
  // For timings: as the technique decides, or never, when nothing is asked either.
  enum class Leave : uint8_t { kAsDecided, kNever };

  // Whose next bytes are scored with a layer of an exit stack, `at_a_time` sequences as a batch. What
  // is not among the options are the model's.
  static absl::StatusOr<std::unique_ptr<TextReader>> Create(const Technique& technique,
                                                            const Options& options,
                                                            const TextSample& sample,
                                                            int64_t at_a_time, ThreadPool* pool);

  // All sequences. `exits`, i32 [sequences, tokens], unless empty, take the place of the technique's.
  absl::StatusOr<TextReading> Read(const ConstTensorView& exits = {});
  // Processor seconds of one thread, for the layers alone, in a reading of the first batch.
  absl::StatusOr<double> TimeReading(Leave leave);
  // The same where each sequence of the batch gets one token a step.
  absl::StatusOr<double> TimeDecoding(Leave leave);
  // Of the last call.
  double flops_saved() const { return layer_->statistics().at("flops_saved"); }

 private:
  TextReader() = default;
  // `exits`: of the batch.
  absl::Status ReadBatch(int64_t first, const ConstTensorView& exits, const Execution& execution);
  ConstTensorView ExitsOf(Leave leave) const {
    return leave == Leave::kNever ? never_.view() : ConstTensorView();
  }
  void Score(int64_t first, TextReading* reading) const;
  int64_t sequences_of_batch() const { return layer_->problem().batch; }

  std::shared_ptr<const LanguageModel> model_;
  ThreadPool* pool_ = nullptr;
  ThreadPool single_{1};
  Problem text_;  // all sequences, with what they skip
  TextSample sample_;
  std::unique_ptr<Layer> layer_;
  Tensor x_;      // of all sequences
  Tensor out_;    // of a batch
  Tensor never_;  // exits of a batch: beyond all layers
  Tensor workspace_;
  Execution execution_;
};

// Processor seconds of the calling thread so far.
double ThreadSeconds();
double Median(std::vector<double> samples);

}  // namespace tfb

#endif  // TFB_ADAPTIVE_DEPTH_ADAPTIVE_TEXT_READER_H_
