#include "core/file_error.h"

#include <errno.h>
#include <string.h>

#include "absl/strings/str_cat.h"

namespace tfb {

absl::Status FileError(const std::string& path, absl::string_view action, int error) {
  const std::string message = absl::StrCat(path, ": cannot ", action, ": ", strerror(error));
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(message);
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(message);
    case EISDIR:
      return absl::InvalidArgumentError(message);
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return absl::ResourceExhaustedError(message);
    default:
      return absl::UnavailableError(message);
  }
}

}  // namespace tfb
