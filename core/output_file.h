// Files that are written whole or not at all.
#ifndef TFB_CORE_OUTPUT_FILE_H_
#define TFB_CORE_OUTPUT_FILE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tfb {

// Bytes go to a temporary file in the same folder, which Finish puts in the place of what is at the
// path. Until then that is untouched: it outlives a full disk, a failure and a kill, which leaves
// the temporary file PATH.<process>.tmp behind. A symbolic link stays, and what it leads to is
// replaced; the permissions of what was there stay too.
//
// A path that leads to no plain file (a device, a FIFO), or to one that this process has open
// (/dev/stdout, /dev/fd/N), is written to directly, where its other writers have come to.
//
// Errors name the path and the system's reason: NotFound (no such folder), PermissionDenied,
// InvalidArgument (the path is a folder), ResourceExhausted (no space), Unavailable (all else).
class OutputFile {
 public:
  static absl::StatusOr<std::unique_ptr<OutputFile>> Open(const std::string& path);
  // Removes the temporary file where Finish has not been called, or has failed.
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  absl::Status Write(absl::string_view bytes);
  // Writes over bytes that were written before. Returns InvalidArgument where the path leads to no
  // plain file.
  absl::Status WriteAt(int64_t offset, absl::string_view bytes);
  // Waits until the bytes are on the disk, and puts them in their place. Nothing is written after
  // it.
  absl::Status Finish();

 private:
  OutputFile(std::string path, std::string target, std::string temporary, int descriptor);

  const std::string path_;       // as the caller gave it
  const std::string target_;     // where its links lead
  const std::string temporary_;  // empty where the target is written to directly
  int descriptor_;               // -1 after Finish
};

// Returns the error that Open would, for a program that computes long before it writes. Nothing is
// changed, and what is no plain file is not opened.
absl::Status CheckWritable(const std::string& path);

// Tells whether two paths lead, or would lead, to one plain file, so that writing the one loses
// what the other has.
bool IsSamePlainFile(const std::string& a, const std::string& b);

// Writes the bytes as such a file.
absl::Status WriteFile(const std::string& path, absl::string_view bytes);

}  // namespace tfb

#endif  // TFB_CORE_OUTPUT_FILE_H_
