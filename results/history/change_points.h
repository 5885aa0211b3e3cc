// Finds the runs at which the level of a noisy series changed, for many series of the same runs at once.
//
// Nothing is assumed of the noise but that the runs between two changes are exchangeable: heavy tails, and noise that all
// series of a run share, are allowed.
//
//   statistic   Of a split of y_1..y_n that leaves k values behind it, t = |mean(last k) -
//               mean(first n-k)| / (s sqrt(1/k + 1/(n-k))), 3 <= k <= n-3. The scale s is that of the
//               successive differences of the whole series, which steps hardly change: their root mean
//               square over sqrt 2, with those beyond 2.5 of their scale drawn in (Huber's proposal),
//               pooled with the typical scale of all series as if that were known from eight more
//               values. Before, values farther than 3 s from the median of the five values around them
//               are drawn in to it (Hampel's identifier), so that one odd run, or two, decide nothing.
//   threshold   The runs are permuted, those of all series alike, and the largest statistic over all
//               series is noted. A split counts where its statistic exceeds all but a
//               `false_alarm_rate` of those of the permutations (Westfall & Young, Resampling-Based
//               Multiple Testing, 1993, section 2; for change points Antoch & Huskova, Statistics &
//               Probability Letters 53 (2001) 37-46). So where nothing changed, any change at all is
//               found in any of the series with at most that probability, whatever their number and
//               distribution. Levels that are 6 standard errors apart are taken out beforehand.
//   segments    Both sides of a split are searched again, as in E-divisive (Matteson & James, JASA 109
//               (2014) 334-345, section 3), in whose energy distance's place this statistic stands,
//               since it is linear in the runs; then each split is placed and tested once more between
//               its neighbours.
#ifndef TFB_RESULTS_HISTORY_CHANGE_POINTS_H_
#define TFB_RESULTS_HISTORY_CHANGE_POINTS_H_

#include <cstdint>
#include <vector>

namespace tfb {

// The values of one series, and the runs that they are of, ascending and different.
struct NoisySeries {
  std::vector<int> runs;
  std::vector<double> values;  // finite
};

struct ChangePointOptions {
  double false_alarm_rate = 0.001;  // between 0.0005 and 0.5; 1 / rate permutations are made
  uint64_t seed = 1;
};

struct ChangePoints {
  // Of each series, the indices of the values that begin a new level, ascending.
  std::vector<std::vector<int>> at;
  std::vector<double> scale;  // s of each series; 0 where it has too few values
  double critical = 0;  // the statistic that a split must exceed; 0 where no series is long enough
};

// The fewest values with which a series is searched: 8! / (2 x 2!) permutations tell it apart at any rate that is allowed.
inline constexpr int kFewestForChangePoints = 8;

// Finds the changes of all series. Equal arguments give equal results.
ChangePoints FindChangePoints(const std::vector<NoisySeries>& series,
                              const ChangePointOptions& options);

// Returns the smallest step that a series of `runs` runs shows within `after` runs, on average:
// critical * scale * sqrt(1/after + 1/runs), in the unit of the values.
double SmallestStep(double critical, double scale, int runs, int after);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_CHANGE_POINTS_H_
