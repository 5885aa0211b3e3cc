// Contestants in Python: functions and classes that tools/python/tfb/contestant.py serves.
//
// Each file has one process for each number of threads, which lives as long as the process that
// makes the layers, gets its tensors in shared memory, and times its own calls. A process that has
// ended is started again for the next layer that needs it, so that a crash costs its own case.
#ifndef TFB_HARNESS_CONTESTANTS_PYTHON_FILE_H_
#define TFB_HARNESS_CONTESTANTS_PYTHON_FILE_H_

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "harness/contestants/contestant.h"
#include "harness/contestants/python_process.h"

namespace tfb {

class PythonFile : public ContestantFile, public std::enable_shared_from_this<PythonFile> {
 public:
  // `contestants`: FILE.py:NAME,NAME, FILE.py for all that it defines, MODULE:NAME for a module that the
  // interpreter finds, or socket:PATH where a process serves its own. `seconds`: how long it may take
  // to load the file.
  PythonFile(const std::string& contestants, PythonSettings settings, double seconds = 120);

  // Asks a process that ends afterwards. The errors are those of PythonProcess::Start.
  absl::StatusOr<std::string> List() const override;
  absl::StatusOr<std::unique_ptr<ContestantLayer>> Create(
      const LayerRequest& request) const override;

  // Returns the process for so many threads, which is started where there is none.
  absl::StatusOr<std::shared_ptr<PythonProcess>> Process(int threads) const;

 private:
  absl::StatusOr<std::unique_ptr<PythonProcess>> Start(int threads, double seconds) const;

  const std::string contestants_;
  const PythonSettings settings_;
  const double seconds_;
  mutable std::map<int, std::shared_ptr<PythonProcess>> processes_;
};

}  // namespace tfb

#endif  // TFB_HARNESS_CONTESTANTS_PYTHON_FILE_H_
