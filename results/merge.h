// Joins result files: of the shards of one sweep, or of several machines.
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
  int64_t repeated_environments = 0;  // equal ones with the same id, kept once
  std::vector<std::string> notes;     // for people: what was left out
};

// Reads `paths` and joins them in their order. Environments are kept, each id once; cases are kept
// in their order, of several with the same key and environment the last; fields that this version
// does not know are kept.
//
// Errors name the file: those of results/reader.h where one cannot be read or is damaged;
// FailedPrecondition where an id stands for different environments in two files, or where a case
// names an environment that its file lacks. A torn tail is no error, but a note.
//
// Where damage is to be passed over, what it took is a note, and cases whose environment it took
// are left out.
absl::StatusOr<Merged> MergeResultFiles(const std::vector<std::string>& paths,
                                        Damage damage = Damage::kRefuse);

}  // namespace tfb

#endif  // TFB_RESULTS_MERGE_H_
