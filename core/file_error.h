// The status of a system call on a file that failed.
#ifndef TFB_CORE_FILE_ERROR_H_
#define TFB_CORE_FILE_ERROR_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tfb {

// Returns the status for the errno `error`, with the message "PATH: cannot ACTION: what the system
// says": NotFound where there is no such file, PermissionDenied, InvalidArgument where it is a
// folder, ResourceExhausted where a disk, a quota or a limit is full, else Unavailable.
absl::Status FileError(const std::string& path, absl::string_view action, int error);

}  // namespace tfb

#endif  // TFB_CORE_FILE_ERROR_H_
