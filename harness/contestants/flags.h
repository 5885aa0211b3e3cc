// The flags --contestants and --python, of every program that links this.
#ifndef TFB_HARNESS_CONTESTANTS_FLAGS_H_
#define TFB_HARNESS_CONTESTANTS_FLAGS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "core/technique.h"

namespace tfb {

// Adds the contestants of the flags (see AddContestantFiles), of which a process in Python may
// allocate `memory_limit` bytes; 0: any number. Messages begin with the flag.
absl::Status AddContestantsFromFlags(int64_t memory_limit, Registry* registry,
                                     std::string* techniques);

}  // namespace tfb

#endif  // TFB_HARNESS_CONTESTANTS_FLAGS_H_
