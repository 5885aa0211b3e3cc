// Foretells how long the check of a case against float64 will take, from those before.
#ifndef TFB_HARNESS_MEASURE_CHECK_FORECAST_H_
#define TFB_HARNESS_MEASURE_CHECK_FORECAST_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "harness/inputs/job.h"
#include "harness/measure/worker_messages.pb.h"

namespace tfb {

class CheckForecast {
 public:
  // The check of the case took so long.
  void Note(const Job& job, double seconds);

  // Returns why the errors of a case are not measured, or nothing where they are. A check may take
  // half of the case's timeout (0: none), and what the visit allows; where it does not say, the one
  // of a scaling case, which is there for its times, may take 5 s.
  std::string WhyNotChecked(const Job& job, const Visit::Item& wishes, double case_timeout) const;

 private:
  double ExpectedSeconds(const Job& job) const;

  // Tokens and seconds of the last check, by technique, options and purpose; without the options for
  // added counterparts.
  std::map<std::string, std::pair<int64_t, double>> last_;
};

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_CHECK_FORECAST_H_
