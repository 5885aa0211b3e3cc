// Contestants of a shared library, which exports the functions of harness/c/tfb.h.
//
// A technique in its tfb_techniques names, as "definition", the technique of this suite whose float64
// definition it computes. It gets that technique's inputs and the parameters that it has of the same
// names. It is loaded in the process that calls its layers, a sweep's worker, so that a crash costs
// its own case.
#ifndef TFB_HARNESS_CONTESTANTS_SHARED_LIBRARY_H_
#define TFB_HARNESS_CONTESTANTS_SHARED_LIBRARY_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "harness/contestants/contestant.h"

namespace tfb {

class SharedLibrary : public ContestantFile {
 public:
  // `seconds`: how long it may take to be loaded.
  explicit SharedLibrary(std::string path, double seconds = 30)
      : ContestantFile(std::move(path)), seconds_(seconds) {}

  // Returns what the library's tfb_techniques says. A process of its own loads the library, so that
  // one that crashes or hangs when it is loaded is an error here: NotFound where there is no such
  // file, InvalidArgument where it cannot be loaded, lacks a function or has another version of the
  // interface, DeadlineExceeded where it says nothing for too long.
  absl::StatusOr<std::string> List() const override;
  absl::StatusOr<std::unique_ptr<ContestantLayer>> Create(
      const LayerRequest& request) const override;

 private:
  const double seconds_;
};

}  // namespace tfb

#endif  // TFB_HARNESS_CONTESTANTS_SHARED_LIBRARY_H_
