// Computes how many samples of each kind a case gets in its share of the time.
#ifndef TFB_HARNESS_PLAN_SAMPLE_PLAN_H_
#define TFB_HARNESS_PLAN_SAMPLE_PLAN_H_

namespace tfb {

// The range of six samples is a 95 % interval of the median, so fewer are taken only where six do
// not fit the time. Four are the fewest that can tell two cases apart: of three and three samples the
// rank sum test gives p = 0.1 at best, of four and four 0.029.
inline constexpr int kIntervalSamples = 6;
inline constexpr int kFewestSamples = 4;
// A call longer than this needs no warm-up call, since the effect of warm caches is negligible.
inline constexpr double kWarmedSeconds = 0.05;

// The samples that a case would have if time did not matter.
struct SampleWishes {
  int repetitions = 11;        // samples of warm runs
  double min_time = 0.01;      // seconds that a sample of warm runs lasts at least
  bool setup = true;           // also kIntervalSamples of Setup, each followed by one run
  bool cold = true;            // also kIntervalSamples of cold runs
  bool stream = false;         // also kIntervalSamples of whole streams
  bool graph = false;          // also kIntervalSamples of warm runs as CUDA graphs
  double setup_seconds = 0.0;  // of one Setup, where it is known to take long
  double flush_seconds = 0.0;  // of overwriting the caches before a cold run
  double trial_seconds = 0.0;  // of judging a contestant with each sample of warm runs
};

struct SamplePlan {
  int runs = 0, setups = 0, colds = 0, streams = 0, graphs = 0;
  double seconds = 0;  // expected for all of them
};

// Returns the samples that fit `share_seconds` where a call takes `call_seconds`. Warm runs get at
// least kFewestSamples, or `repetitions` where that is less, however long they take; the other
// kinds get as many as fit their part of the share. A share of 0 means no limit.
SamplePlan PlanSamples(const SampleWishes& wishes, double call_seconds, double share_seconds);

}  // namespace tfb

#endif  // TFB_HARNESS_PLAN_SAMPLE_PLAN_H_
