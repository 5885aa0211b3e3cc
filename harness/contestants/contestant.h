// Contestants as techniques: the part that does not depend on how somebody else's code is called.
#ifndef TFB_HARNESS_CONTESTANTS_CONTESTANT_H_
#define TFB_HARNESS_CONTESTANTS_CONTESTANT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/technique.h"
#include "harness/contestants/interface.h"

namespace tfb {

// A file with somebody else's code.
class ContestantFile {
 public:
  virtual ~ContestantFile() = default;

  const std::string& path() const { return path_; }
  // Returns FILE of NAME@FILE: the file's name without "lib" and its ending, with '_' for what a
  // technique's name cannot have.
  std::string name() const;

  // Returns a list of the contestants, a JSON array of objects with the members of tfb_techniques
  // (harness/c/tfb.h) "name", "definition", "title", "citation", "options", "devices", "causal",
  // and "outputs", names of the definition's outputs beside out that it writes, too. An option that is a text is the definition's option of that name, with the definition's value as
  // its default. The errors are those of the file as a whole.
  virtual absl::StatusOr<std::string> List() const = 0;

  // A layer is made of these. `spec` names the contestant as List does, with all of its options.
  struct LayerRequest {
    TechniqueSpec spec;
    Options definition_options;  // all of the definition's
    Problem problem;
    Device device = Device::kCpu;
    uint64_t seed = 1;
    std::vector<TensorSpec> inputs, outputs;  // outputs: "out" alone
    const Layer* ours = nullptr;  // of the definition's technique: its parameters and cost
  };
  virtual absl::StatusOr<std::unique_ptr<ContestantLayer>> Create(
      const LayerRequest& request) const = 0;

 protected:
  explicit ContestantFile(std::string path) : path_(std::move(path)) {}

 private:
  const std::string path_;
};

// Adds the contestants that `list`, an answer of List, has to the registry. Returns InvalidArgument,
// naming the file and the contestant, where the text is not as List says, a definition does not
// exist, or a name is taken; then nothing has been added.
absl::Status AddContestants(const std::shared_ptr<const ContestantFile>& file,
                            const std::string& list, Registry* registry);

// Adds "unknown@FILE", a technique whose layers have the status, so that a sweep has a row with the
// reason; "unknown2@FILE" where there is one of that name already.
absl::Status AddUnusable(const std::shared_ptr<const ContestantFile>& file,
                         const absl::Status& status, Registry* registry);

}  // namespace tfb

#endif  // TFB_HARNESS_CONTESTANTS_CONTESTANT_H_
