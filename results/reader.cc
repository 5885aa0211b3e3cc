#include "results/reader.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "core/file_error.h"
#include "google/protobuf/stubs/common.h"
#include "results/wire.h"

namespace tfb {

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual int64_t size() const = 0;
  // Replaces `out` by the bytes [offset, offset + count), fewer where the source ends before.
  virtual absl::Status Read(int64_t offset, int64_t count, std::string* out) = 0;
};

namespace {

class FileSource : public ByteSource {
 public:
  static absl::StatusOr<std::unique_ptr<ByteSource>> Open(const std::string& path) {
    // Opening a FIFO without O_NONBLOCK waits for a writer; it makes no difference to a plain file.
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return FileError(path, "open", errno);
    struct stat info;
    if (fstat(fd, &info) != 0) {
      const int error = errno;
      close(fd);
      return FileError(path, "inspect", error);
    }
    if (!S_ISREG(info.st_mode)) {
      close(fd);
      return absl::InvalidArgumentError(
          absl::StrCat(path, S_ISDIR(info.st_mode) ? ": is a folder" : ": is not a regular file",
                       ", a result file was expected"));
    }
    return std::unique_ptr<ByteSource>(new FileSource(path, fd, info.st_size));
  }
  ~FileSource() override { close(fd_); }

  int64_t size() const override { return size_; }

  absl::Status Read(int64_t offset, int64_t count, std::string* out) override {
    count = std::max<int64_t>(0, std::min(count, size_ - offset));
    // Records are small and read in order, so one system call reads many of them.
    if (offset < buffer_begin_ ||
        offset + count > buffer_begin_ + static_cast<int64_t>(buffer_.size())) {
      if (absl::Status status = Fill(offset, std::max(count, kBufferBytes)); !status.ok()) {
        return status;
      }
    }
    const int64_t begin = std::min<int64_t>(offset - buffer_begin_, buffer_.size());
    out->assign(buffer_, begin, count);
    return absl::OkStatus();
  }

 private:
  static constexpr int64_t kBufferBytes = int64_t{1} << 18;

  FileSource(std::string path, int fd, int64_t size)
      : path_(std::move(path)), fd_(fd), size_(size) {}

  absl::Status Fill(int64_t offset, int64_t count) {
    count = std::min(count, size_ - offset);
    buffer_.resize(count);
    buffer_begin_ = offset;
    int64_t done = 0;
    while (done < count) {
      const ssize_t got = pread(fd_, &buffer_[done], count - done, offset + done);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return FileError(path_, "read", errno);
      if (got == 0) break;  // the file was truncated meanwhile
      done += got;
    }
    buffer_.resize(done);
    if (done < count) size_ = offset + done;
    return absl::OkStatus();
  }

  std::string path_;
  int fd_;
  int64_t size_;
  std::string buffer_;
  int64_t buffer_begin_ = 0;
};

class MemorySource : public ByteSource {
 public:
  explicit MemorySource(absl::string_view bytes) : bytes_(bytes) {}
  int64_t size() const override { return bytes_.size(); }
  absl::Status Read(int64_t offset, int64_t count, std::string* out) override {
    const absl::string_view part =
        offset < size() ? bytes_.substr(offset, count) : absl::string_view();
    out->assign(part.data(), part.size());
    return absl::OkStatus();
  }

 private:
  absl::string_view bytes_;
};

// Parses without the library's message on stderr, since the returned status has it.
bool ParseQuietly(const std::string& bytes, ResultSet* results) {
#if GOOGLE_PROTOBUF_VERSION < 4022000  // later ones log through Abseil, and less
  const google::protobuf::LogSilencer silencer;
#endif
  return results->ParseFromString(bytes);
}

// Compares each byte with the one before it, at the speed of memory.
bool AllZero(absl::string_view bytes) {
  return bytes.empty() || (bytes[0] == 0 && bytes.substr(1) == bytes.substr(0, bytes.size() - 1));
}

uint32_t LittleEndian32(absl::string_view bytes) {
  uint32_t value = 0;
  for (int i = 3; i >= 0; --i) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

// Tells whether a record with a valid checksum begins at `begin` in `bytes`.
bool VerifiedRecordAt(absl::string_view bytes, size_t begin) {
  const absl::string_view rest = bytes.substr(begin);
  const wire::Field record = wire::ParseField(rest, rest.size());
  if (record.state != wire::Field::State::kWhole || record.wire_type != 2 ||
      (record.number != wire::kEnvironmentsField && record.number != wire::kCasesField)) {
    return false;
  }
  const absl::string_view after = rest.substr(record.end);
  const wire::Field checksum = wire::ParseField(after, after.size());
  return checksum.state == wire::Field::State::kWhole && checksum.wire_type == 5 &&
         checksum.number == wire::kRecordChecksumsField &&
         LittleEndian32(after.substr(checksum.payload_begin)) ==
             wire::Crc32c(rest.substr(0, record.end));
}

// Percent-encodes control characters, and those that would make "name=value,..." ambiguous.
std::string Escape(absl::string_view text) {
  std::string out;
  for (const char c : text) {
    const unsigned char byte = static_cast<unsigned char>(c);
    if (byte <= ' ' || byte == 0x7f || c == '%' || c == ',' || c == '=') {
      absl::StrAppendFormat(&out, "%%%02X", byte);
    } else {
      out.push_back(c);
    }
  }
  return out;
}

}  // namespace

ResultReader::ResultReader(std::unique_ptr<ByteSource> source, std::string name, Damage damage)
    : source_(std::move(source)), name_(std::move(name)), damage_(damage) {}

ResultReader::~ResultReader() = default;

absl::StatusOr<std::unique_ptr<ResultReader>> ResultReader::Open(const std::string& path,
                                                                 Damage damage) {
  absl::StatusOr<std::unique_ptr<ByteSource>> source = FileSource::Open(path);
  if (!source.ok()) return source.status();
  std::unique_ptr<ResultReader> reader(new ResultReader(*std::move(source), path, damage));
  if (absl::Status status = reader->CheckSignature(); !status.ok()) return status;
  return reader;
}

absl::StatusOr<std::unique_ptr<ResultReader>> ResultReader::FromBytes(absl::string_view bytes,
                                                                      const std::string& name,
                                                                      Damage damage) {
  std::unique_ptr<ResultReader> reader(
      new ResultReader(std::make_unique<MemorySource>(bytes), name, damage));
  if (absl::Status status = reader->CheckSignature(); !status.ok()) return status;
  return reader;
}

absl::Status ResultReader::CheckSignature() {
  const std::string expected = wire::Signature();
  std::string found;
  if (absl::Status status = source_->Read(0, expected.size(), &found); !status.ok()) return status;
  // A file that ends within its signature has no records yet.
  if (absl::string_view(expected).substr(0, found.size()) == found) return absl::OkStatus();
  // After a crash a file may have its length, but zeros as data.
  absl::StatusOr<bool> zeros = ZerosFrom(0);
  if (!zeros.ok()) return zeros.status();
  if (*zeros) return absl::OkStatus();
  // An unknown layout has the same name and another number.
  std::string head;
  if (absl::Status status = source_->Read(0, 64, &head); !status.ok()) return status;
  const wire::Field field = wire::ParseField(head, static_cast<int64_t>(head.size()));
  const absl::string_view name = wire::kFormat.substr(0, wire::kFormat.find('/') + 1);
  if (field.state == wire::Field::State::kWhole && field.number == wire::kFormatField) {
    const absl::string_view format =
        absl::string_view(head).substr(field.payload_begin, field.end - field.payload_begin);
    if (format.substr(0, name.size()) == name) {
      return absl::UnimplementedError(absl::StrCat(name_, ": is a result file of format ",
                                                   Escape(format), "; this build reads ",
                                                   wire::kFormat, ": use a newer one"));
    }
  }
  if (damage_ == Damage::kPassOver) {
    absl::StatusOr<int64_t> first = FindVerifiedRecord(0);
    if (!first.ok()) return first.status();
    if (*first < source_->size()) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(name_, ": is not a result file (it does not begin with the signature \"",
                   wire::kFormat, "\")"));
}

absl::Status ResultReader::Damaged(absl::string_view what) const {
  return absl::DataLossError(absl::StrCat(name_, ": damaged at offset ", offset_, " of ",
                                          source_->size(), ": ", what,
                                          "; --salvage of //tools:render or //tools:merge reads "
                                          "what is whole"));
}

absl::StatusOr<int64_t> ResultReader::FindVerifiedRecord(int64_t begin) {
  std::string window;
  while (begin < source_->size()) {
    // A record that begins in the first half of the window ends within it.
    if (absl::Status status = source_->Read(begin, 2 * wire::kMaxRecordBytes, &window);
        !status.ok()) {
      return status;
    }
    const size_t places = std::min<size_t>(window.size(), wire::kMaxRecordBytes);
    for (size_t place = 0; place < places; ++place) {
      if (VerifiedRecordAt(window, place)) return begin + static_cast<int64_t>(place);
    }
    begin += static_cast<int64_t>(places);
  }
  return source_->size();
}

absl::StatusOr<bool> ResultReader::EndAtTornTail(int64_t field_number) {
  absl::StatusOr<int64_t> next = FindVerifiedRecord(offset_ + 1);
  if (!next.ok()) return next.status();
  if (*next < source_->size()) {
    return Damaged(absl::StrCat("the length of field ", field_number,
                                " passes the file's end, yet whole records follow"));
  }
  torn_bytes_ = source_->size() - offset_;
  return false;
}

absl::StatusOr<bool> ResultReader::ZerosFrom(int64_t begin) {
  std::string bytes;
  constexpr int64_t kStepBytes = int64_t{1} << 18;
  for (; begin < source_->size(); begin += kStepBytes) {
    if (absl::Status status = source_->Read(begin, kStepBytes, &bytes); !status.ok()) {
      return status;
    }
    if (!AllZero(bytes)) return false;
  }
  return true;
}

absl::StatusOr<bool> ResultReader::EndAtZeros(int64_t begin, absl::string_view otherwise) {
  absl::StatusOr<bool> zeros = ZerosFrom(begin);
  if (!zeros.ok()) return zeros.status();
  if (!*zeros) return Damaged(otherwise);
  torn_bytes_ = source_->size() - offset_;
  return false;
}

absl::StatusOr<bool> ResultReader::Next(ResultSet* results) {
  while (true) {
    absl::StatusOr<bool> next = NextUndamaged(results);
    if (!absl::IsDataLoss(next.status()) || damage_ == Damage::kRefuse) return next;
    if (absl::Status status = PassOverDamage(); !status.ok()) return status;
  }
}

absl::Status ResultReader::PassOverDamage() {
  absl::StatusOr<int64_t> next = FindVerifiedRecord(offset_ + 1);
  if (!next.ok()) return next.status();
  damaged_bytes_ += *next - offset_;
  ++damaged_places_;
  offset_ = *next;
  return absl::OkStatus();
}

absl::StatusOr<bool> ResultReader::NextUndamaged(ResultSet* results) {
  std::string head;
  std::string record;
  while (offset_ < source_->size()) {
    if (absl::Status status = source_->Read(offset_, wire::kMaxFieldHeadBytes, &head);
        !status.ok()) {
      return status;
    }
    const wire::Field field = wire::ParseField(head, source_->size() - offset_);
    if (field.state == wire::Field::State::kCut) return EndAtTornTail(field.number);
    if (field.state == wire::Field::State::kMalformed) {
      return EndAtZeros(offset_, "no record begins here");
    }
    if (field.number == wire::kRecordChecksumsField) {
      return Damaged("a checksum that follows no record");
    }
    const int64_t end = offset_ + field.end;
    if (absl::Status status = source_->Read(offset_, field.end, &record); !status.ok()) {
      return status;
    }
    if (offset_ + static_cast<int64_t>(record.size()) < end) return EndAtTornTail(field.number);

    // The checksum behind it, if there is one.
    if (absl::Status status = source_->Read(end, wire::kMaxFieldHeadBytes, &head); !status.ok()) {
      return status;
    }
    int64_t next = end;
    const wire::Field after = wire::ParseField(head, source_->size() - end);
    if (after.state == wire::Field::State::kWhole && after.wire_type == 5 &&
        after.number == wire::kRecordChecksumsField) {
      next = end + after.end;
      if (wire::Crc32c(record) !=
          LittleEndian32(absl::string_view(head).substr(after.payload_begin))) {
        return EndAtZeros(next - 1, absl::StrCat("a record of ", record.size(),
                                                 " bytes does not match its checksum"));
      }
    } else if (!head.empty() && head[0] == 0) {
      return EndAtZeros(end, absl::StrCat("a record of ", record.size(),
                                          " bytes is followed by something else than a record"));
    }

    if (field.number == wire::kFormatField) {
      if (record != wire::Signature()) {
        return Damaged(absl::StrCat("a signature other than \"", wire::kFormat, "\""));
      }
      results->set_format(std::string(wire::kFormat));
      offset_ = next;
      continue;
    }
    ResultSet one;
    if (!ParseQuietly(record, &one)) {
      return Damaged(absl::StrCat("a record of field ", field.number, " with ", record.size(),
                                  " bytes does not parse"));
    }
    results->MergeFrom(one);
    offset_ = next;
    return true;
  }
  return false;
}

namespace {

absl::StatusOr<ResultFile> ReadAll(ResultReader& reader, const std::string& name) {
  ResultFile file;
  file.path = name;
  while (true) {
    absl::StatusOr<bool> more = reader.Next(&file.results);
    if (!more.ok()) return more.status();
    if (!*more) break;
  }
  file.whole_bytes = reader.whole_bytes();
  file.torn_bytes = reader.torn_bytes();
  file.damaged_bytes = reader.damaged_bytes();
  file.damaged_places = reader.damaged_places();
  return file;
}

}  // namespace

absl::StatusOr<ResultFile> ReadResultFile(const std::string& path, Damage damage) {
  absl::StatusOr<std::unique_ptr<ResultReader>> reader = ResultReader::Open(path, damage);
  if (!reader.ok()) return reader.status();
  return ReadAll(**reader, path);
}

absl::StatusOr<ResultFile> ReadResultBytes(absl::string_view bytes, const std::string& name,
                                           Damage damage) {
  absl::StatusOr<std::unique_ptr<ResultReader>> reader =
      ResultReader::FromBytes(bytes, name, damage);
  if (!reader.ok()) return reader.status();
  return ReadAll(**reader, name);
}

std::string WhatWasLeftOut(const ResultFile& file) {
  std::vector<std::string> parts;
  if (file.damaged_bytes > 0) {
    parts.push_back(absl::StrCat(file.damaged_bytes, " bytes in ", file.damaged_places,
                                 file.damaged_places == 1 ? " place" : " places", " are damaged"));
  }
  if (file.torn_bytes > 0) {
    parts.push_back(absl::StrCat(file.torn_bytes, " bytes of a torn last record"));
  }
  if (parts.empty()) return "";
  return absl::StrCat(file.path, ": left out: ", absl::StrJoin(parts, ", "));
}

std::string CanonicalOptions(const std::map<std::string, std::string>& options) {
  std::string text;
  for (const auto& [name, value] : options) {
    absl::StrAppend(&text, text.empty() ? "" : ",", Escape(name), "=", Escape(value));
  }
  return text;
}

std::string CanonicalOptions(const Case::Key& key) {
  if (key.options().empty()) return key.options_text();
  return CanonicalOptions({key.options().begin(), key.options().end()});
}

namespace {

// Returns the number where this version has no name for a value, so that two such values differ.
template <typename Enum>
std::string NameOrNumber(Enum value) {
  const absl::string_view name = Name(value);
  return name == "unspecified" ? absl::StrCat(static_cast<int>(value)) : std::string(name);
}

}  // namespace

std::string CaseKey(const Case::Key& key) {
  const ProblemSize& problem = key.problem();
  const InputProfile& input = key.input();
  const std::string details = CanonicalOptions({input.details().begin(), input.details().end()});
  const bool is_forward = key.pass() == Case::PASS_FORWARD;
  return absl::StrCat("technique=", Escape(key.technique()),
                      " options=", Escape(CanonicalOptions(key)),
                      " device=", NameOrNumber(key.device()), " dtype=", NameOrNumber(key.dtype()),
                      " batch=", problem.batch(), " query_heads=", problem.query_heads(),
                      " kv_heads=", problem.kv_heads(), " query_tokens=", problem.query_tokens(),
                      " kv_tokens=", problem.kv_tokens(), " head_dim=", problem.head_dim(),
                      " value_dim=", problem.value_dim(), " causal=", problem.causal() ? 1 : 0,
                      " input=", Escape(input.name()), " file=", Escape(input.file()),
                      " model=", Escape(input.model()), " layer=", Escape(input.layer()),
                      " details=", Escape(details), " seed=", key.seed(),
                      " threads=", key.threads(), " purpose=", NameOrNumber(key.purpose()),
                      is_forward ? "" : " pass=", is_forward ? "" : NameOrNumber(key.pass()));
}

std::string CaseKey(const Case& result) { return CaseKey(result.key()); }

absl::string_view Name(DeviceType device) {
  switch (device) {
    case DEVICE_TYPE_CPU:
      return "cpu";
    case DEVICE_TYPE_CUDA:
      return "cuda";
    case DEVICE_TYPE_SIMULATOR:
      return "simulator";
    default:
      return "unspecified";
  }
}

absl::string_view Name(ElementType dtype) {
  switch (dtype) {
    case ELEMENT_TYPE_F32:
      return "f32";
    case ELEMENT_TYPE_BF16:
      return "bf16";
    case ELEMENT_TYPE_F16:
      return "f16";
    case ELEMENT_TYPE_F64:
      return "f64";
    default:
      return "unspecified";
  }
}

absl::string_view Name(Case::Purpose purpose) {
  switch (purpose) {
    case Case::PURPOSE_ACCURACY:
      return "accuracy";
    case Case::PURPOSE_SCALING:
      return "scaling";
    default:
      return "unspecified";
  }
}

absl::string_view Name(Case::Pass pass) {
  switch (pass) {
    case Case::PASS_FORWARD:
      return "forward";
    case Case::PASS_BACKWARD:
      return "backward";
    case Case::PASS_TRAINING:
      return "training";
    default:
      return "unspecified";
  }
}

absl::string_view Name(Outcome::Status status) {
  switch (status) {
    case Outcome::STATUS_OK:
      return "ok";
    case Outcome::STATUS_FAILED:
      return "failed";
    case Outcome::STATUS_SKIPPED:
      return "skipped";
    case Outcome::STATUS_UNSUPPORTED:
      return "unsupported";
    case Outcome::STATUS_TIMEOUT:
      return "timeout";
    case Outcome::STATUS_OUT_OF_MEMORY:
      return "out of memory";
    default:
      return "unspecified";
  }
}

absl::string_view Name(TechniqueDescription::Exactness exactness) {
  switch (exactness) {
    case TechniqueDescription::EXACTNESS_EXACT:
      return "exact";
    case TechniqueDescription::EXACTNESS_APPROXIMATE:
      return "approximate";
    case TechniqueDescription::EXACTNESS_OWN:
      return "own";
    default:
      return "unspecified";
  }
}

absl::string_view Name(TechniqueDescription::InputKind kind) {
  switch (kind) {
    case TechniqueDescription::INPUT_KIND_QKV:
      return "qkv";
    case TechniqueDescription::INPUT_KIND_HIDDEN:
      return "hidden";
    case TechniqueDescription::INPUT_KIND_TOKENS:
      return "tokens";
    default:
      return "unspecified";
  }
}

absl::string_view Name(TechniqueDescription::Weights weights) {
  switch (weights) {
    case TechniqueDescription::WEIGHTS_NONE:
      return "none";
    case TechniqueDescription::WEIGHTS_SEEDED:
      return "seeded";
    case TechniqueDescription::WEIGHTS_FILE:
      return "file";
    case TechniqueDescription::WEIGHTS_TRAINED:
      return "trained";
    default:
      return "unspecified";
  }
}

absl::string_view Name(ErrorMeasure::Metric metric) {
  switch (metric) {
    case ErrorMeasure::METRIC_RELATIVE_FROBENIUS:
      return "relative_frobenius";
    case ErrorMeasure::METRIC_MAX_ABS:
      return "max_abs";
    case ErrorMeasure::METRIC_MAX_ABS_OVER_MAX_VALUE:
      return "max_abs_over_max_value";
    case ErrorMeasure::METRIC_COSINE_DISTANCE:
      return "cosine_distance";
    default:
      return "unspecified";
  }
}

const Environment* FindEnvironment(const ResultSet& results, absl::string_view id) {
  for (const Environment& environment : results.environments()) {
    if (environment.id() == id) return &environment;
  }
  return nullptr;
}

namespace {

struct MachineField {
  absl::string_view name;
  std::string value;
};

std::vector<MachineField> MachineFields(const Environment& environment) {
  std::vector<std::string> gpus;
  for (const Gpu& gpu : environment.gpus()) {
    gpus.push_back(
        absl::StrCat(gpu.name(), ", driver ", gpu.driver(), ", toolkit ", gpu.toolkit()));
  }
  return {{"host", environment.host()},
          {"system", environment.os()},
          {"processor", environment.cpu_model()},
          {"cores", absl::StrCat(environment.logical_cores())},
          {"SIMD", absl::StrJoin(environment.simd(), " ")},
          {"GPUs", absl::StrJoin(gpus, "; ")},
          {"compiler", environment.compiler()},
          {"CUDA compiler", environment.cuda_compiler()},
          {"compiler flags", environment.compile_flags()},
          {"compilation mode", environment.compilation_mode()},
          {"commit",
           absl::StrCat(environment.git_commit(), environment.git_dirty() ? " with changes" : "")},
          {"program's checksum", environment.has_program_checksum()
                                     ? absl::StrFormat("%08x", environment.program_checksum())
                                     : ""}};
}

}  // namespace

std::string MachineOf(const ResultSet& results, absl::string_view environment_id) {
  const Environment* environment = FindEnvironment(results, environment_id);
  if (environment == nullptr) return absl::StrCat("unknown ", Escape(environment_id));
  return absl::StrJoin(MachineFields(*environment), " ",
                       [](std::string* out, const MachineField& field) {
                         absl::StrAppend(out, Escape(field.name), "=", Escape(field.value));
                       });
}

std::vector<std::string> MachineDifferences(const Environment& a, const Environment& b) {
  const std::vector<MachineField> of_a = MachineFields(a), of_b = MachineFields(b);
  const auto shown = [](const std::string& value) { return value.empty() ? "unknown" : value; };
  std::vector<std::string> differences;
  for (size_t i = 0; i < of_a.size(); ++i) {
    if (of_a[i].value == of_b[i].value) continue;
    differences.push_back(
        absl::StrCat(of_a[i].name, ": ", shown(of_a[i].value), " / ", shown(of_b[i].value)));
  }
  return differences;
}

std::map<std::string, const Case*> CasesByKey(const ResultSet& results,
                                              absl::string_view environment_id) {
  std::map<std::string, const Case*> cases;
  for (const Case& result : results.cases()) {
    if (!environment_id.empty() && result.environment_id() != environment_id) continue;
    cases[CaseKey(result)] = &result;
  }
  return cases;
}

}  // namespace tfb
