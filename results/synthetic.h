// Made-up results for tests: plausible machines, techniques and numbers, none of them measured.
#ifndef TFB_RESULTS_SYNTHETIC_H_
#define TFB_RESULTS_SYNTHETIC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "results/results.pb.h"

namespace tfb {
namespace synthetic {

// A machine with two cores, a measured f32 peak of 400 GFLOP/s and 20 GB/s, and no GPU. Its id is
// `id`.
Environment MakeEnvironment(absl::string_view id = "env");

// `count` samples around `median_ns`, symmetric, within +-1 %.
std::vector<double> Samples(double median_ns, int count = 11);

// "plain" is the baseline of everything here, and of itself.
struct CaseSpec {
  std::string technique = "plain";
  std::string option_name;  // with option_value: the one option; none where empty
  std::string option_value;
  DeviceType device = DEVICE_TYPE_CPU;
  ElementType dtype = ELEMENT_TYPE_F32;
  int64_t tokens = 512;
  Case::Purpose purpose = Case::PURPOSE_SCALING;
  TechniqueDescription::Exactness exactness = TechniqueDescription::EXACTNESS_EXACT;
  double expected_growth = 2;
  double median_ns = 1e6;  // of a run; none is recorded where it is 0
  uint64_t seed = 1;
  std::string environment_id = "env";
};

// A case of 1 x 8 heads x `tokens` x 64 with status ok, samples, flops and memory. Accuracy cases
// carry both errors and a bound of 2e-6.
Case MakeCase(const CaseSpec& spec);

// Makes a case with the same key, a status and a reason, and nothing measured.
Case MakeUnmeasured(const CaseSpec& spec, Outcome::Status status, absl::string_view reason);

// One sweep: "plain" (quadratic), "near" (linear, faster than "plain" from 707 tokens on, see the
// arithmetic there) and "sketch" (approximate), at 256 to 4096 tokens, each with one accuracy case.
ResultSet MakeSweep();

}  // namespace synthetic
}  // namespace tfb

#endif  // TFB_RESULTS_SYNTHETIC_H_
