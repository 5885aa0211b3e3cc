// Finds the runs at which the level of a noisy series changed, for many series of the same runs at
// once.
//
// Nothing is assumed of the noise but that the runs between two changes are exchangeable: heavy
// tails, and noise that all series of a run share, are allowed.
//
//   levels   Of a series y_1..y_n those of at least three runs that leave the least sum of squares
//            about their means, plus c^2 s^2 for each change: the criterion of PELT (Killick,
//            Fearnhead & Eckley, JASA 107 (2012) 1590-1598), solved exactly by optimal partitioning
//            (Jackson et al., IEEE Signal Processing Letters 12 (2005) 105-108).
//   noise    s is the scale of the successive differences of the whole series, which steps hardly
//            change: their root mean square over sqrt 2, with those beyond 2.5 of their scale drawn
//            in (Huber's proposal), pooled with the typical scale of all series as if that were
//            known from eight more values. Before, values farther than 3 s from the median of the
//            five values around them are drawn in to it (Hampel's identifier), so that one odd run,
//            or two, decide nothing.
//   penalty  One change is better than none where t = |mean behind - mean before| / (s sqrt(1/k +
//            1/(n-k))) exceeds c for a split with k values behind it. The runs are permuted, those
//            of all series alike, and the largest t over all splits and series is noted: c is what
//            all but a `false_alarm_rate` of the permutations stay below (Westfall & Young,
//            Resampling-Based Multiple Testing, 1993, section 2; for change points Antoch &
//            Huskova, Statistics & Probability Letters 53 (2001) 37-46). So where nothing changed,
//            one change, at least, is found in any of the series with about that probability, whatever
//            their number and distribution, if the order of the runs says nothing: noise that follows
//            that of the run before finds more. Two changes that make a bump are not among the noted,
//            and are found somewhat more often (1 % of 100 runs of which 5 % are odd, for 0.1 %). Levels that are 6 standard errors apart are taken out
//            beforehand.
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
  // The indices of the values that begin a new level, ascending, for each series.
  std::vector<std::vector<int>> at;
  std::vector<double> scale;  // s of each series; 0 where it has too few values
  double critical = 0;        // c; 0 where no series is long enough
};

// The fewest values with which a series is searched: two levels of three, and two to tell the noise.
inline constexpr int kFewestForChangePoints = 8;

// Finds the changes of all series. Equal arguments give equal results.
ChangePoints FindChangePoints(const std::vector<NoisySeries>& series,
                              const ChangePointOptions& options);

// Returns the smallest step that a series of `runs` runs shows within `after` runs, on average:
// critical * scale * sqrt(1/after + 1/runs), in the unit of the values.
double SmallestStep(double critical, double scale, int runs, int after);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_CHANGE_POINTS_H_
