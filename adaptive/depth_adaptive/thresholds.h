// The search for the thresholds of depth_adaptive's classifier "confidence".
#ifndef TFB_ADAPTIVE_DEPTH_ADAPTIVE_THRESHOLDS_H_
#define TFB_ADAPTIVE_DEPTH_ADAPTIVE_THRESHOLDS_H_

#include <cstdint>
#include <vector>

#include "adaptive/depth_adaptive/oracle.h"

namespace tfb {

// Of what each exit n makes of each token t, A^n_t, and of how sure it is, c^n_t, both of the stack that
// nothing leaves, thresholds tau_n, n < N, in thousandths, multiples of 10 or kNeverReached, with a large
//
//   mean_t (A^{n(t)}_t - penalty n(t)),   n(t) the first n with c^n_t >= tau_n, else N.
//
// One layer's threshold after the other is set to its best, ties to the higher one, until none improves.
// That is a local maximum: the best of those from the best threshold that all layers share, and from all
// tokens leaving after one layer. (That tokens which have left change what later ones see is not known
// here; a reading with the thresholds tells.)
std::vector<int64_t> SearchThresholds(const ExitValues& values, const ExitValues& confidences,
                                      double penalty);

}  // namespace tfb

#endif  // TFB_ADAPTIVE_DEPTH_ADAPTIVE_THRESHOLDS_H_
