// Merges result files: those of the shards of one sweep, or of several machines.
#ifndef TFB_RESULTS_MERGE_H_
#define TFB_RESULTS_MERGE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "results/reader.h"
#include "results/results.pb.h"

namespace tfb {

struct Merged {
  ResultSet results;
  int64_t files = 0;
  int64_t replaced_cases = 0;         // left out for a later one with the same key and environment
  int64_t repeated_environments = 0;  // duplicates with the same id, which were left out
  std::vector<std::string> notes;     // sentences for people on what was left out
};

// Reads `paths` and merges them in their order. Keeps each environment id once; cases in their
// order, of several with the same key and environment the last; and unknown fields.
//
// Errors name the file: those of results/reader.h where one cannot be read or is damaged, and
// FailedPrecondition where an id stands for different environments in two files, or where a case
// names an environment that its file lacks. An incomplete record at the end gives a note, not an
// error. With Damage::kPassOver a note says what was lost; cases without environment are left out.
absl::StatusOr<Merged> MergeResultFiles(const std::vector<std::string>& paths,
                                        Damage damage = Damage::kRefuse);

}  // namespace tfb

#endif  // TFB_RESULTS_MERGE_H_
