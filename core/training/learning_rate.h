// Learning rates by the step t, from 1.
#ifndef TFB_CORE_TRAINING_LEARNING_RATE_H_
#define TFB_CORE_TRAINING_LEARNING_RATE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace tfb {

// Returns factor width^-0.5 min(t^-0.5, t warmup^-1.5): up in a line for `warmup` steps, which are 1 at
// least, then down by the inverse square root, from factor (width warmup)^-0.5. Source: Vaswani et al.,
// arXiv:1706.03762v7, section 5.3, equation 3, with factor 1 and 4,000 steps; often called Noam.
inline double NoamRate(int64_t t, int64_t width, int64_t warmup, double factor = 1) {
  const double step = static_cast<double>(t), up = static_cast<double>(warmup);
  return factor / std::sqrt(static_cast<double>(width)) *
         std::min(1 / std::sqrt(step), step / (up * std::sqrt(up)));
}

// Returns rate min(1, t / warmup): up in a line for `warmup` steps, 0 for none, then constant. Source:
// Goyal et al. 2017, arXiv:1706.02677v2, section 2.2.
inline double WarmUpRate(int64_t t, int64_t warmup, double rate) {
  return t < warmup ? rate * static_cast<double>(t) / static_cast<double>(warmup) : rate;
}

// Returns WarmUpRate up to step `warmup`, then half a cosine down to `least` in step `steps`, and
// `least` from there on. Source: Loshchilov, Hutter 2017, "SGDR", arXiv:1608.03983v5, section 3,
// equation 5, without restarts.
inline double CosineRate(int64_t t, int64_t warmup, int64_t steps, double rate, double least = 0) {
  if (t < warmup) return WarmUpRate(t, warmup, rate);
  if (t >= steps) return least;
  constexpr double kPi = 3.14159265358979323846;
  const double part = static_cast<double>(t - warmup) / static_cast<double>(steps - warmup);
  return least + (rate - least) * (1 + std::cos(kPi * part)) / 2;
}

}  // namespace tfb

#endif  // TFB_CORE_TRAINING_LEARNING_RATE_H_
