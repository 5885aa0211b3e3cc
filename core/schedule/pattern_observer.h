// A view on the patterns that schedules are built from, for tests: a technique makes its patterns
// inside Setup, and a test holds them against their contract without knowing the technique.
#ifndef TFB_CORE_SCHEDULE_PATTERN_OBSERVER_H_
#define TFB_CORE_SCHEDULE_PATTERN_OBSERVER_H_

#include <functional>

#include "core/problem.h"
#include "core/schedule/pattern.h"

namespace tfb {

// While an observer lives, each BuildSchedule of its thread calls `observe` with its arguments
// before it builds. A thread has one observer at a time.
class PatternObserver {
 public:
  using Observe = std::function<void(const Problem&, const Pattern&)>;

  explicit PatternObserver(Observe observe);
  ~PatternObserver();
  PatternObserver(const PatternObserver&) = delete;
  PatternObserver& operator=(const PatternObserver&) = delete;

 private:
  Observe observe_;
};

}  // namespace tfb

#endif  // TFB_CORE_SCHEDULE_PATTERN_OBSERVER_H_
