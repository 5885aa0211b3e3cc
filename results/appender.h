// Appends to a result file, one record per call, so that a process killed at any instant leaves a
// file that parses up to its last whole record.
#ifndef TFB_RESULTS_APPENDER_H_
#define TFB_RESULTS_APPENDER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/message.h"
#include "results/results.pb.h"
#include "results/wire.h"

namespace tfb {

struct AppenderOptions {
  enum class Existing {
    kRefuse,  // return AlreadyExists where the file exists and is not empty
    kResume   // append after its last whole record; an incomplete record at the end is cut off
  };
  Existing existing = Existing::kRefuse;
  // Whether to call fdatasync after every record, so that a case survives a power failure, too.
  bool sync = true;
  // Whether to create the missing folders of the file's path.
  bool make_folders = true;
  // Appends beyond this size fail: other programs cannot parse longer files as one message.
  int64_t max_file_bytes = wire::kMaxFileBytes;
};

// Holds the file open and locked (flock) against other appenders. Not thread-safe.
class ResultAppender {
 public:
  // Opens `path`. Errors name it: AlreadyExists (see above), Unavailable where another process
  // holds the lock, and those of results/reader.h where the file to resume is damaged or not a
  // result file; such a file is left as it is.
  static absl::StatusOr<std::unique_ptr<ResultAppender>> Open(const std::string& path,
                                                              const AppenderOptions& options = {});
  ~ResultAppender();
  ResultAppender(const ResultAppender&) = delete;
  ResultAppender& operator=(const ResultAppender&) = delete;

  // Appends `environment`, to which the following cases belong. Where its id is empty, one is made
  // from start time, host and process. Call this once, before the first case.
  absl::Status Append(Environment environment);

  // Appends `result` with a single write. A case that names no environment gets the last one
  // appended here; returns FailedPrecondition where there is none. Returns InvalidArgument where
  // its status is unspecified, or not ok without a reason, or it is too long, or a text is not
  // UTF-8. After ResourceExhausted (disk or file full) the file ends where it did before.
  absl::Status Append(Case result);

  // Returns what the file held when it was opened, which is nothing for a new file.
  const ResultSet& existing() const { return existing_; }
  // Returns the bytes of an incomplete record that Open cut off. Tell the user where it is not 0.
  int64_t cut_bytes() const { return cut_bytes_; }
  const std::string& path() const { return path_; }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  ResultAppender(std::string path, int fd, const AppenderOptions& options);
  absl::Status Begin();
  absl::Status WriteMessage(int field, google::protobuf::Message& message);
  absl::Status WriteRecord(int field, absl::string_view payload);

  std::string path_;
  int fd_;
  AppenderOptions options_;
  ResultSet existing_;
  int64_t cut_bytes_ = 0;
  int64_t size_bytes_ = 0;
  std::string environment_id_;
};

// Returns the bytes of a result file that holds `results`: signature, environments, cases with
// their checksums, then unknown fields.
std::string SerializeResults(const ResultSet& results);

// Writes `results` to `path` atomically: to a temporary file beside it, which is then renamed.
absl::Status WriteResultFile(const std::string& path, const ResultSet& results);

}  // namespace tfb

#endif  // TFB_RESULTS_APPENDER_H_
