// Collects the findings of a launch.
#ifndef TFB_CORE_CUDA_SIMULATOR_FINDINGS_H_
#define TFB_CORE_CUDA_SIMULATOR_FINDINGS_H_

#include <string>
#include <vector>

#include "core/cuda/simulator/simulator.h"

namespace cuda_simulator {

// Formats like printf.
std::string Format(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string Text(const Index3& index);  // returns "(1, 0, 0)"

class FindingLog {
 public:
  void StartLaunch(const char* kernel, int max_findings);
  // Tells whether to Add a finding of this kind at this place of the kernel's code. Returns false
  // if there already is one, which is then counted, or if there are too many.
  bool Wants(FindingKind kind, const void* site);
  void Add(FindingKind kind, const Index3& block, const Index3& thread, const void* site,
           std::string what);
  // Looks up the source lines and writes the messages.
  void FinishLaunch();

  bool is_full() const { return static_cast<int>(findings_.size()) >= max_findings_; }
  const std::vector<Finding>& findings() const { return findings_; }
  // Returns the first finding's message, and how many more there are.
  std::string Summary() const;

 private:
  const char* kernel_ = "";
  int max_findings_ = 0;
  std::vector<Finding> findings_;   // a message lacks its beginning until FinishLaunch
  std::vector<const void*> sites_;  // of each
};

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_FINDINGS_H_
