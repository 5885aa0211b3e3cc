// A contestant is somebody else's code, which is measured and judged beside ours. A harness sees it
// as a technique, and what is here beyond that.
#ifndef TFB_HARNESS_CONTESTANTS_INTERFACE_H_
#define TFB_HARNESS_CONTESTANTS_INTERFACE_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/technique.h"

namespace tfb {

struct ContestantInfo {
  std::string file;        // where the code lies, as the flag names it
  std::string definition;  // whose definition it computes, "longformer:window=256"
  bool exact = true;       // false: it only approximates that, and its errors have no bound
};

class ContestantTechnique : public Technique {
 public:
  const ContestantInfo& contestant() const { return contestant_; }
  // Returns the definition's technique with all of its options, for these of the contestant.
  virtual absl::StatusOr<TechniqueSpec> DefinitionOf(const Options& options) const = 0;

 protected:
  ContestantTechnique(TechniqueInfo info, ContestantInfo contestant)
      : Technique(std::move(info)), contestant_(std::move(contestant)) {}

 private:
  const ContestantInfo contestant_;
};

// Returns null for a technique of this suite.
inline const ContestantTechnique* AsContestant(const Technique& technique) {
  return dynamic_cast<const ContestantTechnique*>(&technique);
}

class ContestantLayer : public Layer {
 public:
  // Returns what computes, by name: the versions of libraries, their threads and settings.
  virtual std::map<std::string, std::string> about() const { return {}; }

  absl::Status CheckBackward() const override {
    return absl::UnimplementedError("a contestant is measured in the forward pass alone");
  }

  // Tells whether the code runs in another process. Such a layer times its own calls, so that
  // nothing that is said between the processes is in a time.
  virtual bool times_itself() const { return false; }
  // Return the seconds of `calls` runs, one after the other, right behind `warm_calls` that are not
  // timed; of one run after `flush_bytes` of other memory were written; and of Setup. Runs are on
  // the inputs of the last Run, and the result of the last of them is written to its outputs.
  virtual absl::StatusOr<double> RunSeconds(int64_t /*calls*/, int64_t /*warm_calls*/) {
    return NoClock();
  }
  virtual absl::StatusOr<double> ColdRunSeconds(int64_t /*flush_bytes*/) { return NoClock(); }
  virtual absl::StatusOr<double> SetupSeconds() { return NoClock(); }
  // Returns the seconds of the last Setup: a compiler may take many, too many to repeat it.
  virtual double last_setup_seconds() const { return 0; }

 protected:
  using Layer::Layer;

 private:
  static absl::Status NoClock() { return absl::InternalError("the layer does not time itself"); }
};

}  // namespace tfb

#endif  // TFB_HARNESS_CONTESTANTS_INTERFACE_H_
