// Reads result files, and defines when two cases are the same case.
//
// A file is read record by record at wire level, so that it may be longer than memory allows a
// single message to be, and so that what was whole before a crash is read after it:
//
//   torn tail    The file ends within a record or in zeros, as after a killed process or a power
//                failure. The records before the tail are read, and the number of ignored bytes is
//                reported. A tail that contains a record with a valid checksum counts as damage.
//   damage       A checksum does not match, bytes are no record, or a payload does not parse. The
//                reader returns absl::DataLossError with path and offset or, with
//                Damage::kPassOver, continues at the next record with a valid checksum.
//   not a result file   absl::InvalidArgumentError with the path.
//   no such file        absl::NotFoundError; not readable: absl::PermissionDeniedError.
#ifndef TFB_RESULTS_READER_H_
#define TFB_RESULTS_READER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "results/results.pb.h"

namespace tfb {

class ByteSource;  // bytes at offsets, from a file or from memory

// Whether reading a damaged file is an error, or gives every undamaged record.
enum class Damage { kRefuse, kPassOver };

// One pass over a result file. Not thread-safe.
class ResultReader {
 public:
  // Opens `path` and reads its signature. An empty file has no records.
  static absl::StatusOr<std::unique_ptr<ResultReader>> Open(const std::string& path,
                                                            Damage damage = Damage::kRefuse);
  // Reads `bytes`, which must outlive the reader; `name` stands for the path in messages.
  static absl::StatusOr<std::unique_ptr<ResultReader>> FromBytes(absl::string_view bytes,
                                                                 const std::string& name,
                                                                 Damage damage = Damage::kRefuse);
  ~ResultReader();

  // Reads the next environment, case or unknown field and merges it into `results`, which keeps its
  // contents. Returns false at the end of the file and at a torn tail.
  absl::StatusOr<bool> Next(ResultSet* results);

  // Returns the offset one past the last whole record read so far, where an appender may go on.
  int64_t whole_bytes() const { return offset_; }
  // Returns the bytes of the torn tail, 0 where there is none; known once Next has returned false.
  int64_t torn_bytes() const { return torn_bytes_; }
  // Return the number of damaged bytes that were passed over, and in how many places.
  int64_t damaged_bytes() const { return damaged_bytes_; }
  int64_t damaged_places() const { return damaged_places_; }

 private:
  ResultReader(std::unique_ptr<ByteSource> source, std::string name, Damage damage);
  absl::Status CheckSignature();
  // Both end the reading with a torn tail at offset_, or return the error where it is damage.
  absl::StatusOr<bool> EndAtTornTail(int64_t field_number);
  absl::StatusOr<bool> EndAtZeros(int64_t begin, absl::string_view otherwise);
  absl::StatusOr<bool> NextUndamaged(ResultSet* results);
  absl::Status PassOverDamage();
  // Returns the offset of the first record with a valid checksum from `begin` on, or the size.
  absl::StatusOr<int64_t> FindVerifiedRecord(int64_t begin);
  absl::StatusOr<bool> ZerosFrom(int64_t begin);
  absl::Status Damaged(absl::string_view what) const;

  std::unique_ptr<ByteSource> source_;
  std::string name_;
  Damage damage_;
  int64_t offset_ = 0;
  int64_t torn_bytes_ = 0;
  int64_t damaged_bytes_ = 0;
  int64_t damaged_places_ = 0;
};

// A whole file in memory.
struct ResultFile {
  std::string path;
  ResultSet results;
  int64_t whole_bytes = 0;
  int64_t torn_bytes = 0;  // ignored at the end
  int64_t damaged_bytes = 0;
  int64_t damaged_places = 0;
};
absl::StatusOr<ResultFile> ReadResultFile(const std::string& path, Damage damage = Damage::kRefuse);
absl::StatusOr<ResultFile> ReadResultBytes(absl::string_view bytes, const std::string& name,
                                           Damage damage = Damage::kRefuse);
// Returns a sentence for people where part of the file could not be read, else an empty text.
std::string WhatWasLeftOut(const ResultFile& file);

// Returns "name=value,name=value" in the order of names, with the four characters `%,=` and space
// written as %XX, so that different options never give the same text.
std::string CanonicalOptions(const std::map<std::string, std::string>& options);
std::string CanonicalOptions(const Case::Key& key);

// Returns the whole key as one line, which is equal for two cases exactly when their keys are: e.g.
// "technique=near options=window%3D256 device=cpu dtype=f32 batch=1 ... purpose=scaling", with
// " pass=training" where the pass is not the forward one. Uses the map of options, or their text
// where the map is empty. The environment is not part of a key.
std::string CaseKey(const Case& result);
std::string CaseKey(const Case::Key& key);

// Return the names that the command line uses: "cpu", "cuda"; "f32", "bf16"; "accuracy"; "ok", "out
// of memory"; "exact". Unspecified values, and values of a newer version, are "unspecified".
absl::string_view Name(DeviceType device);
absl::string_view Name(ElementType dtype);
absl::string_view Name(Case::Purpose purpose);
absl::string_view Name(Case::Pass pass);  // "forward", "backward", "training"
absl::string_view Name(Outcome::Status status);
absl::string_view Name(TechniqueDescription::Exactness exactness);
absl::string_view Name(TechniqueDescription::InputKind kind);
absl::string_view Name(TechniqueDescription::Weights weights);
absl::string_view Name(ErrorMeasure::Metric metric);

// Returns the environment with this id, or null.
const Environment* FindEnvironment(const ResultSet& results, absl::string_view id);

// Returns a text with everything but the case that a time depends on: host, processor, memory,
// GPUs, compiler, flags, commit, the program's checksum. It is equal for the environments of a
// sweep and of its continuation with --resume, so that their times share a table. An unknown id is
// a machine of its own.
std::string MachineOf(const ResultSet& results, absl::string_view environment_id);
// Returns what two machines in this sense differ in, as in "commit: 1a2b / 3c4d".
std::vector<std::string> MachineDifferences(const Environment& a, const Environment& b);

// Returns the cases of an environment by key; of several with one key, the last. Returns those of
// all environments where `environment_id` is empty. The pointers point into `results`.
std::map<std::string, const Case*> CasesByKey(const ResultSet& results,
                                              absl::string_view environment_id = "");

}  // namespace tfb

#endif  // TFB_RESULTS_READER_H_
