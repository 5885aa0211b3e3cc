#include "core/layers/attention/position_time.h"

#include "core/layers/layer_definitions.h"
#include "core/status.h"

namespace tfb::layers {

std::vector<ParameterSpec> TimeParameters(const PositionTime& encoding, int64_t steps,
                                          int64_t width) {
  if (encoding.time == PositionTime::Time::kSinusoid) return {};
  return {{"t", {steps, width}, 0, 1}};
}

absl::StatusOr<Encodings> PositionsAndTimes(const PositionTime& encoding, int64_t tokens,
                                            int64_t steps, int64_t width,
                                            const NamedTensors& parameters) {
  Encodings encodings;
  encodings.repeat = true;
  TFB_ASSIGN_OR_RETURN(encodings.positions,
                       Sinusoids(encoding.position_offset, tokens, width, encoding.form));
  if (encoding.time == PositionTime::Time::kLearned) {
    encodings.times = parameters.at("t").Clone();
    return encodings;
  }
  TFB_ASSIGN_OR_RETURN(encodings.times,
                       Sinusoids(encoding.first_step, steps, width, encoding.form));
  return encodings;
}

DefinedPositionTime::DefinedPositionTime(const PositionTime& encoding, int64_t width,
                                         const NamedTensors& parameters)
    : encoding_(encoding), width_(width) {
  if (encoding.time == PositionTime::Time::kLearned) {
    learned_ = DoubleTensor(parameters.at("t").view());
  }
}

double DefinedPositionTime::operator()(int64_t n, int64_t p, int64_t c) const {
  const auto sinusoid = [&](int64_t position) {
    return DefineSinusoid(encoding_.form, width_, position, c);
  };
  const double time = learned_.size() > 0 ? learned_.Row(n)[c] : sinusoid(encoding_.first_step + n);
  return sinusoid(encoding_.position_offset + p) + time;
}

}  // namespace tfb::layers
