// Appends to a result file, one record a call, so that a process killed at any instant leaves a
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
    kRefuse,  // absl::AlreadyExistsError where the file is there and not empty
    kResume   // go on behind its last whole record; a torn tail is cut off
  };
  Existing existing = Existing::kRefuse;
  // Waits for the disk after every record: a case survives a loss of power, not only the process.
  bool sync = true;
  // Folders on the way to the file are made where they are missing.
  bool make_folders = true;
  // Appends beyond it are refused: longer files are no longer one Protobuf message to others.
  int64_t max_file_bytes = wire::kMaxFileBytes;
};

// Holds the file open and locked (flock) against other appenders. Not thread-safe.
class ResultAppender {
 public:
  // Errors name the path: AlreadyExists (see above), Unavailable where another process holds the
  // lock, those of results/reader.h where the file to resume is damaged or not a result file; such
  // a file is left as it is.
  static absl::StatusOr<std::unique_ptr<ResultAppender>> Open(const std::string& path,
                                                              const AppenderOptions& options = {});
  ~ResultAppender();
  ResultAppender(const ResultAppender&) = delete;
  ResultAppender& operator=(const ResultAppender&) = delete;

  // Appends `environment`, and makes it the one of the following cases. Where its id is empty, one
  // is made up from start time, host and process. Call it once, before the first case.
  absl::Status Append(Environment environment);

  // Appends `result` with a single write. Where it names no environment it gets the last one
  // appended here; FailedPrecondition where there is none. InvalidArgument where its status is
  // unspecified, or not ok without a reason, or it is too long, or a text is not UTF-8. After
  // ResourceExhausted (disk or file full) the file ends where it did before.
  absl::Status Append(Case result);

  // Returns what the file held when it was opened, which is nothing for a new file.
  const ResultSet& existing() const { return existing_; }
  // Bytes of a torn tail that was cut off on opening. Say so to the user where it is not 0.
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

// The bytes of a result file that holds `results`: signature, environments, cases with their
// checksums, then unknown fields.
std::string SerializeResults(const ResultSet& results);

// Writes `results` to `path`, whole or not at all (a temporary file beside it, renamed).
absl::Status WriteResultFile(const std::string& path, const ResultSet& results);

}  // namespace tfb

#endif  // TFB_RESULTS_APPENDER_H_
