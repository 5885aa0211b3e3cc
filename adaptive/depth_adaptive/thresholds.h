// The search for the thresholds of depth_adaptive's classifier "confidence".
#ifndef TFB_ADAPTIVE_DEPTH_ADAPTIVE_THRESHOLDS_H_
#define TFB_ADAPTIVE_DEPTH_ADAPTIVE_THRESHOLDS_H_

#include <cstdint>
#include <vector>

#include "adaptive/depth_adaptive/oracle.h"

namespace tfb::depth_adaptive {

// From the value A^n_t of exit n for token t, and its confidence c^n_t, both in the stack that no
// token leaves, finds thresholds tau_n, n < N, in thousandths, multiples of 10 or kNeverReached,
// with a large
//
//   mean_t (A^{n(t)}_t - penalty n(t)),   n(t) the first n with c^n_t >= tau_n, else N.
//
// One layer's threshold after the other is set to its best, ties to the higher one, until none
// improves. That is a local maximum: the best of those from the best threshold that all layers
// share, and from all tokens leaving after one layer. (The search does not know that tokens which
// have left change the keys of later ones; a reading with the thresholds shows that.)
std::vector<int64_t> SearchThresholds(const ExitValues& values, const ExitValues& confidences,
                                      double penalty);

}  // namespace tfb::depth_adaptive

#endif  // TFB_ADAPTIVE_DEPTH_ADAPTIVE_THRESHOLDS_H_
