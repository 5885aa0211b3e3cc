// Makes synthetic results for tests: plausible machines, techniques and numbers.
#ifndef TFB_RESULTS_SYNTHETIC_H_
#define TFB_RESULTS_SYNTHETIC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "results/results.pb.h"

namespace tfb {
namespace synthetic {

// Makes a machine of this id with two cores, an f32 peak of 400 GFLOP/s and 20 GB/s, and no GPU.
Environment MakeEnvironment(absl::string_view id = "env");

// Returns `count` samples that lie symmetrically within +-1 % of `median_ns`.
std::vector<double> Samples(double median_ns, int count = 11);

// A case to make. "plain" is the baseline of all cases, itself included.
struct CaseSpec {
  std::string technique = "plain";
  std::string option_name;  // with option_value: the one option; none where empty
  std::string option_value;
  DeviceType device = DEVICE_TYPE_CPU;
  ElementType dtype = ELEMENT_TYPE_F32;
  int64_t tokens = 512;
  Case::Purpose purpose = Case::PURPOSE_SCALING;
  Case::Pass pass = Case::PASS_FORWARD;
  TechniqueDescription::Exactness exactness = TechniqueDescription::EXACTNESS_EXACT;
  double expected_growth = 2;
  double median_ns = 1e6;  // of a run; 0 for a case without times
  uint64_t seed = 1;
  std::string environment_id = "env";
};

// Makes a case of 1 x 8 heads x `tokens` x 64 with status ok, samples, flops and memory, of passes
// other than the forward one also what a run keeps. Accuracy cases have both errors and a bound of
// 2e-6.
Case MakeCase(const CaseSpec& spec);

// Makes a case with the same key, a status and a reason, and nothing measured.
Case MakeUnmeasured(const CaseSpec& spec, Outcome::Status status, absl::string_view reason);

// Adds the samples of a warm run, and says in the record that a visit took them.
void AddVisit(int64_t start_unix_ns, const std::vector<double>& run_ns, Case* result);

// Makes a sweep of "plain" (quadratic), "near" (linear, faster than "plain" from 707 tokens on, by
// the arithmetic there) and "sketch" (approximate) at 256 to 4096 tokens, with an accuracy case
// each.
ResultSet MakeSweep();

}  // namespace synthetic
}  // namespace tfb

#endif  // TFB_RESULTS_SYNTHETIC_H_
