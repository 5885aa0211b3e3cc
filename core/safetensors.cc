#include "core/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/output_file.h"
#include "core/status.h"

namespace tfb {
namespace {

using Json = nlohmann::json;

constexpr char kMetadata[] = "__metadata__";
constexpr int64_t kLengthBytes = 8;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little-endian");

// The range of a tensor's bytes in the file, from its header entry.
struct Entry {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  int64_t begin = 0;
  int64_t end = 0;
};

// Copies `size` bytes at `offset` of the file to `to`.
using ReadAt = absl::FunctionRef<absl::Status(int64_t offset, int64_t size, char* to)>;

// Returns a name or text of a file in a form that fits a message of one line.
std::string Quoted(absl::string_view text) {
  constexpr size_t kLongest = 80;
  if (text.size() <= kLongest) return absl::StrCat("\"", absl::CHexEscape(text), "\"");
  return absl::StrCat("\"", absl::CHexEscape(text.substr(0, kLongest)), "...\"");
}

absl::Status Bad(absl::string_view file, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(file, ": ", what));
}

absl::Status BadTensor(absl::string_view file, absl::string_view tensor, absl::string_view what) {
  return Bad(file, absl::StrCat("tensor ", Quoted(tensor), " ", what));
}

absl::Status SystemError(absl::string_view file, absl::string_view what) {
  const int error = errno;
  return absl::ErrnoToStatus(error, absl::StrCat(file, ": ", what));
}

struct ElementType {
  const char* name;
  DType dtype;
};
// Element types of the format. A dtype is written by the first name that it has here.
constexpr ElementType kElementTypes[] = {
    {"F64", DType::kF64}, {"F32", DType::kF32}, {"F16", DType::kF16}, {"BF16", DType::kBF16},
    {"I64", DType::kI64}, {"I32", DType::kI32}, {"U8", DType::kU8},   {"BOOL", DType::kU8},
};

absl::StatusOr<DType> ParseElementType(absl::string_view file, const std::string& tensor,
                                       const Json& entry) {
  const auto field = entry.find("dtype");
  if (field == entry.end() || !field->is_string()) {
    return BadTensor(file, tensor, "has no dtype");
  }
  const std::string& name = field->get_ref<const std::string&>();
  for (const ElementType& type : kElementTypes) {
    if (name == type.name) return type.dtype;
  }
  return absl::UnimplementedError(
      absl::StrCat(file, ": tensor ", Quoted(tensor), " has dtype ", Quoted(name),
                   "; read are F64, F32, F16, BF16, I64, I32, U8, BOOL"));
}

// Returns a whole number of the header, or -1 where the value is not a whole number that fits 63
// bits.
int64_t WholeNumber(const Json& value) {
  if (!value.is_number_unsigned()) return -1;
  const uint64_t number = value.get<uint64_t>();
  return number <= static_cast<uint64_t>(INT64_MAX) ? static_cast<int64_t>(number) : -1;
}

// Returns the text of a small piece of the header, for a message.
std::string TextOf(const Json& value) {
  return Quoted(value.dump(-1, ' ', true, Json::error_handler_t::replace));
}

absl::StatusOr<Shape> ParseShape(absl::string_view file, const std::string& tensor,
                                 const Json& entry) {
  const auto field = entry.find("shape");
  if (field == entry.end() || !field->is_array()) return BadTensor(file, tensor, "has no shape");
  if (field->empty()) return Shape{1};
  if (field->size() > kMaxRank) {
    return absl::UnimplementedError(absl::StrCat(file, ": tensor ", Quoted(tensor), " has ",
                                                 field->size(), " dimensions; read are up to ",
                                                 kMaxRank));
  }
  Shape shape;
  for (const Json& size : *field) {
    shape.push_back(WholeNumber(size));
    if (shape.back() < 0) {
      return BadTensor(
          file, tensor,
          absl::StrCat("has size ", TextOf(size), " in its shape; allowed are 0 to 2^63 - 1"));
    }
  }
  return shape;
}

absl::StatusOr<Entry> ParseEntry(absl::string_view file, const std::string& name, const Json& json,
                                 int64_t data_bytes) {
  if (!json.is_object()) return BadTensor(file, name, "is not described by an object");
  Entry entry;
  entry.name = name;
  TFB_ASSIGN_OR_RETURN(entry.dtype, ParseElementType(file, name, json));
  TFB_ASSIGN_OR_RETURN(entry.shape, ParseShape(file, name, json));
  const auto offsets = json.find("data_offsets");
  if (offsets == json.end() || !offsets->is_array() || offsets->size() != 2) {
    return BadTensor(file, name, "has no data_offsets [begin, end]");
  }
  entry.begin = WholeNumber((*offsets)[0]);
  entry.end = WholeNumber((*offsets)[1]);
  const std::string text = absl::StrCat("has data_offsets ", TextOf(*offsets));
  if (entry.begin < 0 || entry.end < 0) {
    return BadTensor(file, name, absl::StrCat(text, ", which are not two offsets"));
  }
  if (entry.end < entry.begin) {
    return BadTensor(file, name, absl::StrCat(text, ", whose end is before their beginning"));
  }
  if (entry.end > data_bytes) {
    return BadTensor(file, name,
                     absl::StrCat(text, "; the file has only ", data_bytes, " bytes of tensors"));
  }
  int64_t bytes = SizeOf(entry.dtype);
  for (const int64_t size : entry.shape) {
    // A size of 0 makes the product 0, which would hide an overflow by later sizes; it is checked
    // as a 1.
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) {
      return BadTensor(
          file, name,
          absl::StrCat("has shape ", ShapeString(entry.shape), ", whose bytes overflow 64 bits"));
    }
  }
  bytes = SizeOf(entry.dtype) * NumElements(entry.shape);
  if (bytes != entry.end - entry.begin) {
    return BadTensor(
        file, name,
        absl::StrCat(text, ", which are ", entry.end - entry.begin, " bytes; its ",
                     Name(entry.dtype), " ", ShapeString(entry.shape), " has ", bytes));
  }
  return entry;
}

// Checks that the ranges, sorted by their beginnings, follow one another from the first byte to the
// last.
absl::Status CheckCoverage(absl::string_view file, std::vector<Entry> entries, int64_t data_bytes) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::make_pair(a.begin, a.end) < std::make_pair(b.begin, b.end);
  });
  int64_t end = 0;
  const Entry* last = nullptr;
  for (const Entry& entry : entries) {
    if (entry.begin < end) {
      return BadTensor(file, entry.name,
                       absl::StrCat("begins at byte ", entry.begin, " and overlaps tensor ",
                                    Quoted(last->name), ", which ends at ", end));
    }
    if (entry.begin > end) {
      return BadTensor(file, entry.name,
                       absl::StrCat("begins at byte ", entry.begin, ", but bytes ", end, " to ",
                                    entry.begin, " belong to no tensor"));
    }
    end = entry.end;
    last = &entry;
  }
  if (end != data_bytes) {
    return Bad(file, absl::StrCat("has ", data_bytes - end, " bytes behind its last tensor"));
  }
  return absl::OkStatus();
}

// Finds a name that an object of a JSON text has twice, which the JSON library would silently
// merge. (Its parser with a callback would tell as well, in time that grows with the square of the
// names.)
class DuplicateFinder : public Json::json_sax_t {
 public:
  const std::string& duplicate() const { return duplicate_; }  // quoted; empty where there is none

  bool start_object(size_t) override {
    open_.emplace_back();
    return true;
  }
  bool key(std::string& name) override {
    if (!open_.back().insert(name).second && duplicate_.empty()) duplicate_ = Quoted(name);
    return true;
  }
  bool end_object() override {
    open_.pop_back();
    return true;
  }
  bool start_array(size_t) override { return true; }
  bool end_array() override { return true; }
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(int64_t) override { return true; }
  bool number_unsigned(uint64_t) override { return true; }
  bool number_float(double, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool binary(Json::binary_t&) override { return true; }
  bool parse_error(size_t, const std::string&, const Json::exception&) override { return false; }

 private:
  std::vector<std::set<std::string>> open_;  // the names of the objects around
  std::string duplicate_;
};

absl::StatusOr<Json> ParseHeader(absl::string_view file, const std::string& text) {
  if (text.empty() || text[0] != '{') return Bad(file, "header does not begin with \"{\"");
  DuplicateFinder finder;
  if (!Json::sax_parse(text, &finder)) return Bad(file, "header is not valid JSON");
  if (!finder.duplicate().empty()) {
    return Bad(file, absl::StrCat("header has the name ", finder.duplicate(), " twice"));
  }
  return Json::parse(text);
}

absl::StatusOr<std::map<std::string, std::string>> ParseMetadata(absl::string_view file,
                                                                 const Json& json) {
  if (!json.is_object()) return Bad(file, "__metadata__ is not an object");
  std::map<std::string, std::string> metadata;
  for (const auto& [key, value] : json.items()) {
    if (!value.is_string()) {
      return Bad(file, absl::StrCat("__metadata__ of ", Quoted(key), " is not a text"));
    }
    metadata[key] = value.get<std::string>();
  }
  return metadata;
}

// The header's tensors, with offsets that count from its end, which is `data_begin`.
struct Header {
  int64_t data_begin = 0;
  std::vector<Entry> entries;
  std::map<std::string, std::string> metadata;
};

absl::StatusOr<Header> ReadHeader(absl::string_view file, int64_t file_bytes, ReadAt read) {
  if (file_bytes < kLengthBytes) {
    return Bad(file, absl::StrCat("is ", file_bytes, " bytes long, too short for safetensors"));
  }
  uint64_t length = 0;
  TFB_RETURN_IF_ERROR(read(0, kLengthBytes, reinterpret_cast<char*>(&length)));
  if (length > static_cast<uint64_t>(file_bytes - kLengthBytes)) {
    return Bad(file, absl::StrCat("header of ", length, " bytes reaches beyond the file's ",
                                  file_bytes, " bytes: truncated, or not safetensors"));
  }
  if (length > static_cast<uint64_t>(kMaxSafetensorsHeaderBytes)) {
    return Bad(file, absl::StrCat("header has ", length, " bytes; allowed are up to ",
                                  kMaxSafetensorsHeaderBytes));
  }
  Header header;
  header.data_begin = kLengthBytes + static_cast<int64_t>(length);
  std::string text(length, '\0');
  TFB_RETURN_IF_ERROR(read(kLengthBytes, static_cast<int64_t>(length), text.data()));
  TFB_ASSIGN_OR_RETURN(const Json json, ParseHeader(file, text));
  const int64_t data_bytes = file_bytes - header.data_begin;
  for (const auto& [name, value] : json.items()) {
    if (name == kMetadata) {
      TFB_ASSIGN_OR_RETURN(header.metadata, ParseMetadata(file, value));
      continue;
    }
    TFB_ASSIGN_OR_RETURN(header.entries.emplace_back(), ParseEntry(file, name, value, data_bytes));
  }
  TFB_RETURN_IF_ERROR(CheckCoverage(file, header.entries, data_bytes));
  return header;
}

absl::StatusOr<SafetensorsFile> Parse(absl::string_view file, int64_t file_bytes, ReadAt read) {
  TFB_ASSIGN_OR_RETURN(Header header, ReadHeader(file, file_bytes, read));
  SafetensorsFile contents;
  contents.metadata = std::move(header.metadata);
  for (const Entry& entry : header.entries) {
    absl::StatusOr<Tensor> tensor = Tensor::Allocate(entry.dtype, entry.shape);
    if (!tensor.ok()) {
      return absl::Status(
          tensor.status().code(),
          absl::StrCat(file, ": tensor ", Quoted(entry.name), ": ", tensor.status().message()));
    }
    TFB_RETURN_IF_ERROR(read(header.data_begin + entry.begin, entry.end - entry.begin,
                             static_cast<char*>(tensor->raw())));
    contents.tensors[entry.name] = *std::move(tensor);
  }
  return contents;
}

// Tells whether JSON can hold the text, which the library does not write where it is not UTF-8.
bool IsUtf8(const std::string& text) {
  try {
    Json(text).dump();
  } catch (const Json::type_error&) {
    return false;
  }
  return true;
}

const char* ElementTypeName(DType dtype) {
  const auto* type =
      std::find_if(std::begin(kElementTypes), std::end(kElementTypes),
                   [dtype](const ElementType& candidate) { return candidate.dtype == dtype; });
  return type->name;
}

// Orders tensors by falling size of their elements, so that each tensor is aligned to its elements.
std::vector<NamedTensors::const_iterator> FileOrder(const NamedTensors& tensors) {
  std::vector<NamedTensors::const_iterator> order;
  for (auto it = tensors.begin(); it != tensors.end(); ++it) order.push_back(it);
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return SizeOf(a->second.dtype()) > SizeOf(b->second.dtype());
  });
  return order;
}

// Returns the header of tensors in this order, with offsets that count from the header's end.
absl::StatusOr<std::string> HeaderText(const std::vector<Entry>& entries,
                                       const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  for (const auto& [key, value] : metadata) {
    if (!IsUtf8(key) || !IsUtf8(value)) {
      return absl::InvalidArgumentError(absl::StrCat("metadata ", Quoted(key), " is not UTF-8"));
    }
    header[kMetadata][key] = value;
  }
  for (const Entry& entry : entries) {
    if (!IsUtf8(entry.name) || entry.name == kMetadata) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", Quoted(entry.name), " has a name that safetensors cannot hold"));
    }
    header[entry.name] = {{"dtype", ElementTypeName(entry.dtype)},
                          {"shape", std::vector<int64_t>(entry.shape.begin(), entry.shape.end())},
                          {"data_offsets", {entry.begin, entry.end}}};
  }
  return header.dump();
}

std::string WithLength(const std::string& header) {
  const uint64_t length = header.size();
  return absl::StrCat(absl::string_view(reinterpret_cast<const char*>(&length), sizeof(length)),
                      header);
}

// Returns the length and the header of the file, padded so that the tensors begin at a multiple of
// 8.
absl::StatusOr<std::string> SerializeHeader(const NamedTensors& tensors,
                                            const std::map<std::string, std::string>& metadata) {
  std::vector<Entry> entries;
  int64_t offset = 0;
  for (const auto& it : FileOrder(tensors)) {
    const auto& [name, tensor] = *it;
    if (tensor.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", Quoted(name), " is empty"));
    }
    const int64_t end = offset + static_cast<int64_t>(tensor.bytes());
    entries.push_back({name, tensor.dtype(), tensor.shape(), offset, end});
    offset = end;
  }
  TFB_ASSIGN_OR_RETURN(std::string text, HeaderText(entries, metadata));
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return WithLength(text);
}

absl::string_view BytesOf(const Tensor& tensor) {
  return absl::string_view(static_cast<const char*>(tensor.raw()), tensor.bytes());
}

}  // namespace

absl::StatusOr<SafetensorsFile> ReadSafetensors(const std::string& path) {
  // Opening a FIFO without O_NONBLOCK waits for a writer; it makes no difference to a plain file.
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  FILE* const stream = descriptor < 0 ? nullptr : fdopen(descriptor, "rb");
  if (stream == nullptr) return SystemError(path, "cannot open");
  const auto closer = absl::MakeCleanup([stream] { fclose(stream); });
  setvbuf(stream, nullptr, _IONBF, 0);  // the bytes go straight to the tensors
  struct stat info;
  if (fstat(descriptor, &info) != 0) return SystemError(path, "cannot read");
  if (!S_ISREG(info.st_mode)) return Bad(path, "is not a regular file");
  return Parse(path, info.st_size, [&](int64_t offset, int64_t size, char* to) -> absl::Status {
    const size_t bytes = static_cast<size_t>(size);
    if (fseeko(stream, offset, SEEK_SET) == 0 && fread(to, 1, bytes, stream) == bytes) {
      return absl::OkStatus();
    }
    return feof(stream) ? Bad(path, "was cut short while it was read")
                        : SystemError(path, "cannot read");
  });
}

absl::StatusOr<SafetensorsFile> ParseSafetensors(absl::string_view bytes, const std::string& name) {
  return Parse(name, static_cast<int64_t>(bytes.size()),
               [bytes](int64_t offset, int64_t size, char* to) {
                 bytes.copy(to, static_cast<size_t>(size), static_cast<size_t>(offset));
                 return absl::OkStatus();
               });
}

absl::StatusOr<SafetensorsLayout> ParseSafetensorsLayout(absl::string_view bytes,
                                                         const std::string& name) {
  TFB_ASSIGN_OR_RETURN(Header header, ReadHeader(name, static_cast<int64_t>(bytes.size()),
                                                 [bytes](int64_t offset, int64_t size, char* to) {
                                                   bytes.copy(to, static_cast<size_t>(size),
                                                              static_cast<size_t>(offset));
                                                   return absl::OkStatus();
                                                 }));
  SafetensorsLayout layout;
  layout.metadata = std::move(header.metadata);
  for (Entry& entry : header.entries) {
    layout.tensors[entry.name] = {entry.dtype, std::move(entry.shape),
                                  header.data_begin + entry.begin, header.data_begin + entry.end};
  }
  return layout;
}

absl::StatusOr<std::string> SerializeSafetensorsLayout(const SafetensorsLayout& layout) {
  if (layout.tensors.empty()) {
    return absl::InvalidArgumentError("a layout without tensors does not say where they begin");
  }
  int64_t begin = std::numeric_limits<int64_t>::max();
  for (const auto& [name, entry] : layout.tensors) begin = std::min(begin, entry.begin);
  std::vector<Entry> entries;
  for (const auto& [name, entry] : layout.tensors) {
    entries.push_back({name, entry.dtype, entry.shape, entry.begin - begin, entry.end - begin});
  }
  TFB_ASSIGN_OR_RETURN(std::string text, HeaderText(entries, layout.metadata));
  const int64_t room = begin - kLengthBytes;
  if (static_cast<int64_t>(text.size()) > room) {
    return absl::InvalidArgumentError(absl::StrCat("a header of ", text.size(), " bytes for ",
                                                   entries.size(), " tensors has room for ", room));
  }
  text.resize(static_cast<size_t>(room), ' ');
  return WithLength(text);
}

absl::StatusOr<std::string> SerializeSafetensors(
    const NamedTensors& tensors, const std::map<std::string, std::string>& metadata) {
  TFB_ASSIGN_OR_RETURN(std::string bytes, SerializeHeader(tensors, metadata));
  for (const auto& it : FileOrder(tensors)) absl::StrAppend(&bytes, BytesOf(it->second));
  return bytes;
}

absl::Status WriteSafetensors(const std::string& path, const NamedTensors& tensors,
                              const std::map<std::string, std::string>& metadata) {
  const absl::StatusOr<std::string> header = SerializeHeader(tensors, metadata);
  if (!header.ok()) return Bad(path, header.status().message());
  TFB_ASSIGN_OR_RETURN(const std::unique_ptr<OutputFile> file, OutputFile::Open(path));
  TFB_RETURN_IF_ERROR(file->Write(*header));
  for (const auto& it : FileOrder(tensors)) {
    TFB_RETURN_IF_ERROR(file->Write(BytesOf(it->second)));
  }
  return file->Finish();
}

}  // namespace tfb
