// The encoding of position and time that universal adds before each step, for every technique that
// repeats a block:
//
//   P^n[p] = PE[p + position_offset] + T[n - 1 + first_step]       n = 1 .. steps
//
// See universal.h for PE, T and the source.
#ifndef TFB_CORE_LAYERS_ATTENTION_POSITION_TIME_H_
#define TFB_CORE_LAYERS_ATTENTION_POSITION_TIME_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "core/definition.h"
#include "core/layers/attention/encoded_attention.h"
#include "core/layers/attention/projected_attention.h"
#include "core/layers/sinusoid.h"
#include "core/options.h"
#include "core/technique.h"

namespace tfb::layers {

struct PositionTime {
  static constexpr int64_t kMaxOffset = int64_t{1} << 30;  // see positional/sinusoidal
  enum class Time { kSinusoid, kLearned };

  Time time = Time::kSinusoid;
  int64_t first_step = 1;
  SinusoidForm form;
  int64_t position_offset = 0;

  void Describe(OptionBinder& bind) {
    bind.Choice("time", &time, {{"sinusoid", Time::kSinusoid}, {"learned", Time::kLearned}},
                "the encoding of the step");
    bind.Int("first_step", &first_step, 0, kMaxOffset, "number of the first step; of sinusoids");
    bind.Choice("layout", &form.layout,
                {{"interleaved", SinusoidLayout::kInterleaved},
                 {"concatenated", SinusoidLayout::kConcatenated}},
                "sines and cosines in turn, or all sines before all cosines");
    bind.Choice(
        "frequencies", &form.frequencies,
        {{"paper", SinusoidFrequencies::kPaper}, {"inclusive", SinusoidFrequencies::kInclusive}},
        "base^(-2 j / model_dim), or up to 1 / base inclusive, as tensor2tensor has it");
    bind.Real("base", &form.base, 1, 1e9, "of the frequencies");
    bind.Int("position_offset", &position_offset, 0, kMaxOffset, "position of token 0");
  }
};

// Returns, with time=learned, t [steps, model_dim], drawn N(0, 1); else none.
std::vector<ParameterSpec> TimeParameters(const PositionTime& encoding, int64_t steps,
                                          int64_t width);

// Returns PE [1, tokens, width], repeated before every step, and T [steps, width].
absl::StatusOr<Encodings> PositionsAndTimes(const PositionTime& encoding, int64_t tokens,
                                            int64_t steps, int64_t width,
                                            const NamedTensors& parameters);

// Computes channel c of the encoding in float64; n counts steps from 0.
class DefinedPositionTime {
 public:
  DefinedPositionTime(const PositionTime& encoding, int64_t width, const NamedTensors& parameters);
  double operator()(int64_t n, int64_t p, int64_t c) const;

 private:
  const PositionTime& encoding_;
  int64_t width_;
  DoubleTensor learned_;  // empty for sinusoids
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_ATTENTION_POSITION_TIME_H_
