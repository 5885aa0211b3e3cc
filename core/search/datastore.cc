#include "core/search/datastore.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/flash/rows.h"
#include "core/safetensors.h"
#include "core/status.h"

namespace tfb {
namespace {

constexpr char kFormat[] = "datastore 1";
constexpr int64_t kKeysBegin = 4096;  // a page; the header takes a tenth of it

// FNV-1a: http://www.isthe.com/chongo/tech/comp/fnv
class Fnv {
 public:
  Fnv& Add(absl::string_view bytes) {
    for (const char byte : bytes) hash_ = (hash_ ^ static_cast<uint8_t>(byte)) * 0x100000001B3u;
    return *this;
  }
  // Adds the text's length too, so that one text's end cannot be another's beginning.
  Fnv& AddText(absl::string_view text) { return Add(absl::StrCat(text.size(), ":", text)); }
  uint64_t hash() const { return hash_; }

 private:
  uint64_t hash_ = 0xCBF29CE484222325u;
};

std::string Hex(uint64_t number) { return absl::StrCat(absl::Hex(number, absl::kZeroPad16)); }

absl::Status Bad(absl::string_view file, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(file, ": ", what));
}
absl::Status SystemError(absl::string_view file, absl::string_view what) {
  const int error = errno;
  return absl::ErrnoToStatus(error, absl::StrCat(file, ": ", what));
}

absl::Status CheckFormat(const std::string& path, const DatastoreFormat& format) {
  if (format.dim < 1) {
    return Bad(path, absl::StrCat("keys of ", format.dim, " channels; allowed are 1 or more"));
  }
  if (format.key_dtype != DType::kF32 && format.key_dtype != DType::kF16) {
    return Bad(path, absl::StrCat("keys in ", Name(format.key_dtype), "; allowed are f32 and f16"));
  }
  if (format.value_dtype != DType::kU8 && format.value_dtype != DType::kI32) {
    return Bad(path,
               absl::StrCat("values in ", Name(format.value_dtype), "; allowed are u8 and i32"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> MetadataOf(const SafetensorsLayout& layout, const std::string& file,
                                       const std::string& field) {
  const auto found = layout.metadata.find(field);
  if (found != layout.metadata.end()) return found->second;
  return Bad(file, absl::StrCat("has no metadata \"", field, "\": it is no datastore"));
}

absl::StatusOr<uint64_t> FingerprintIn(const SafetensorsLayout& layout, const std::string& file,
                                       const std::string& field) {
  TFB_ASSIGN_OR_RETURN(const std::string digits, MetadataOf(layout, file, field));
  uint64_t number = 0;
  if (digits.size() == 16 && absl::SimpleHexAtoi(digits, &number) && digits == Hex(number)) {
    return number;
  }
  return Bad(file, absl::StrCat("metadata \"", field, "\" is not 16 hexadecimal digits"));
}

absl::Status CheckFingerprint(const std::string& file, absl::string_view field, uint64_t number,
                              uint64_t expected) {
  if (number == expected) return absl::OkStatus();
  return Bad(file, absl::StrCat("was made of another ", field, ": its fingerprint is ", Hex(number),
                                ", not ", Hex(expected)));
}

// Returns the tensor of this name as a view of the file's bytes.
absl::StatusOr<ConstTensorView> TensorIn(const SafetensorsLayout& layout, absl::string_view bytes,
                                         const std::string& file, const std::string& name,
                                         DType dtype, int rank) {
  const auto found = layout.tensors.find(name);
  if (found == layout.tensors.end()) {
    return Bad(file, absl::StrCat("has no tensor \"", name, "\": it is no datastore"));
  }
  const SafetensorsEntry& entry = found->second;
  const std::string what =
      absl::StrCat("tensor \"", name, "\" is ", Name(entry.dtype), " ", ShapeString(entry.shape));
  if (entry.dtype != dtype) return Bad(file, absl::StrCat(what, "; expected is ", Name(dtype)));
  if (static_cast<int>(entry.shape.size()) != rank) {
    return Bad(file, absl::StrCat(what, "; expected are ", rank, " dimensions"));
  }
  if (entry.begin % SizeOf(dtype) != 0) {
    return Bad(file, absl::StrCat(what, " at byte ", entry.begin, ", which is no multiple of ",
                                  SizeOf(dtype)));
  }
  return ConstTensorView(bytes.data() + entry.begin, dtype, entry.shape);
}

absl::Status CheckShapes(const std::string& file, const Datastore& store, int64_t dim) {
  const int64_t entries = store.keys().dim(0), channels = store.keys().dim(1);
  if (entries == 0) return Bad(file, "has no entries");
  if (channels != dim) {
    return Bad(file, absl::StrCat("has keys of ", channels, " channels; expected are ", dim));
  }
  if (store.values().dim(0) == entries) return absl::OkStatus();
  return Bad(file, absl::StrCat("has ", entries, " keys and ", store.values().dim(0), " values"));
}

}  // namespace

uint64_t Fingerprint(const NamedTensors& tensors) {
  Fnv fnv;
  for (const auto& [name, tensor] : tensors) {
    fnv.AddText(name).AddText(Name(tensor.dtype())).AddText(ShapeString(tensor.shape()));
    fnv.Add(absl::string_view(static_cast<const char*>(tensor.raw()), tensor.bytes()));
  }
  return fnv.hash();
}

uint64_t Fingerprint(absl::string_view text) { return Fnv().Add(text).hash(); }

// ---- Writing ----

DatastoreWriter::DatastoreWriter(std::string path, const DatastoreFormat& format,
                                 std::unique_ptr<OutputFile> file)
    : path_(std::move(path)), format_(format), file_(std::move(file)) {}

absl::StatusOr<std::unique_ptr<DatastoreWriter>> DatastoreWriter::Create(
    const std::string& path, const DatastoreFormat& format) {
  TFB_RETURN_IF_ERROR(CheckFormat(path, format));
  TFB_ASSIGN_OR_RETURN(std::unique_ptr<OutputFile> file, OutputFile::Open(path));
  // The header, which is known at the end, takes the place of these.
  TFB_RETURN_IF_ERROR(file->Write(std::string(kKeysBegin, '\0')));
  TFB_RETURN_IF_ERROR(file->WriteAt(0, ""));
  return std::unique_ptr<DatastoreWriter>(new DatastoreWriter(path, format, std::move(file)));
}

DatastoreWriter::~DatastoreWriter() = default;

absl::Status DatastoreWriter::Append(const ConstTensorView& keys, const ConstTensorView& values) {
  if (keys.rank != 2 || keys.dim(1) != format_.dim || !IsFloating(keys.dtype) || values.rank != 1 ||
      values.dim(0) != keys.dim(0) || values.dtype != format_.value_dtype) {
    return Bad(path_,
               absl::StrCat("keys are ", Name(keys.dtype), " ", ShapeString(keys.shape()),
                            " and values ", Name(values.dtype), " ", ShapeString(values.shape()),
                            "; expected are keys [n, ", format_.dim, "] and values ",
                            Name(format_.value_dtype), " [n]"));
  }
  Tensor rounded(format_.key_dtype, keys.shape()), copied(format_.value_dtype, values.shape());
  CopyElements(keys, rounded.view());
  CopyElements(values, copied.view());
  std::vector<float> row(static_cast<size_t>(format_.dim));
  for (int64_t n = 0; n < keys.dim(0); ++n) {
    LoadRow(rounded.view(), n * format_.dim, 1, format_.dim, row.data());
    if (!AllFinite(row.data(), format_.dim)) {
      return Bad(path_,
                 absl::StrCat("key ", entries_ + n, " is not finite in ", Name(format_.key_dtype)));
    }
  }
  TFB_RETURN_IF_ERROR(file_->Write({static_cast<const char*>(rounded.raw()), rounded.bytes()}));
  values_.append(static_cast<const char*>(copied.raw()), copied.bytes());
  entries_ += keys.dim(0);
  return absl::OkStatus();
}

absl::Status DatastoreWriter::WriteHeaderAndValues() {
  SafetensorsLayout layout;
  layout.metadata = {
      {"format", kFormat}, {"model", Hex(format_.model)}, {"text", Hex(format_.text.value_or(0))}};
  const int64_t keys_end = kKeysBegin + entries_ * format_.dim * SizeOf(format_.key_dtype);
  const int64_t values_begin = RoundUp(keys_end, SizeOf(format_.value_dtype));
  const int64_t values_end = values_begin + static_cast<int64_t>(values_.size());
  const std::string padding(static_cast<size_t>(values_begin - keys_end), '\0');
  layout.tensors["keys"] = {format_.key_dtype, {entries_, format_.dim}, kKeysBegin, keys_end};
  layout.tensors["values"] = {format_.value_dtype, {entries_}, values_begin, values_end};
  if (!padding.empty()) {
    layout.tensors["padding"] = {DType::kU8, {values_begin - keys_end}, keys_end, values_begin};
  }
  TFB_ASSIGN_OR_RETURN(const std::string header, SerializeSafetensorsLayout(layout));
  TFB_RETURN_IF_ERROR(file_->Write(padding));
  TFB_RETURN_IF_ERROR(file_->Write(values_));
  return file_->WriteAt(0, header);
}

absl::Status DatastoreWriter::Finish() {
  if (file_ == nullptr) return absl::FailedPreconditionError(absl::StrCat(path_, ": is finished"));
  if (entries_ == 0) return Bad(path_, "has no entries");
  TFB_RETURN_IF_ERROR(WriteHeaderAndValues());
  const absl::Status status = file_->Finish();
  file_ = nullptr;
  return status;
}

// ---- Reading ----

absl::StatusOr<Datastore> Datastore::Parse(absl::string_view bytes, const std::string& name,
                                           const DatastoreFormat& expected) {
  TFB_RETURN_IF_ERROR(CheckFormat(name, expected));
  TFB_ASSIGN_OR_RETURN(const SafetensorsLayout layout, ParseSafetensorsLayout(bytes, name));
  TFB_ASSIGN_OR_RETURN(const std::string format, MetadataOf(layout, name, "format"));
  if (format != kFormat) {
    return Bad(name, absl::StrCat("metadata \"format\" is not \"", kFormat, "\""));
  }
  Datastore store;
  TFB_ASSIGN_OR_RETURN(const uint64_t model, FingerprintIn(layout, name, "model"));
  TFB_ASSIGN_OR_RETURN(store.text_, FingerprintIn(layout, name, "text"));
  TFB_RETURN_IF_ERROR(CheckFingerprint(name, "model", model, expected.model));
  TFB_RETURN_IF_ERROR(
      CheckFingerprint(name, "text", store.text_, expected.text.value_or(store.text_)));
  TFB_ASSIGN_OR_RETURN(store.keys_, TensorIn(layout, bytes, name, "keys", expected.key_dtype, 2));
  TFB_ASSIGN_OR_RETURN(store.values_,
                       TensorIn(layout, bytes, name, "values", expected.value_dtype, 1));
  TFB_RETURN_IF_ERROR(CheckShapes(name, store, expected.dim));
  return store;
}

absl::StatusOr<Datastore> Datastore::Open(const std::string& path,
                                          const DatastoreFormat& expected) {
  // Opening a FIFO without O_NONBLOCK waits for a writer; it makes no difference to a plain file.
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return SystemError(path, "cannot open");
  const auto closer = absl::MakeCleanup([file] { close(file); });
  struct stat info;
  if (fstat(file, &info) != 0) return SystemError(path, "cannot read");
  if (!S_ISREG(info.st_mode)) return Bad(path, "is not a regular file");
  if (info.st_size == 0) return Bad(path, "is empty");
  const auto size = static_cast<size_t>(info.st_size);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file, 0);
  if (memory == MAP_FAILED) return SystemError(path, "cannot map");
  std::shared_ptr<void> mapped(memory, [size](void* begin) { munmap(begin, size); });
  TFB_ASSIGN_OR_RETURN(
      Datastore store,
      Parse(absl::string_view(static_cast<const char*>(memory), size), path, expected));
  store.mapped_ = std::move(mapped);
  return store;
}

NamedTensors Datastore::Tensors() const {
  NamedTensors tensors;
  for (const auto& [name, view] : {std::pair("keys", keys_), std::pair("values", values_)}) {
    const TensorView all(const_cast<void*>(view.data), view.dtype, view.shape());
    Tensor tensor = Tensor::Sharing(mapped_, all);
    tensors[name] = mapped_ == nullptr ? tensor.Clone() : std::move(tensor);
  }
  return tensors;
}

}  // namespace tfb
