// A datastore: a language model's hidden states, and which token followed each. It is built once,
// saved, and mapped from disk: Khandelwal et al. 2020, arXiv:1911.00172v2, section 2.
//
// The file is a safetensors file:
//
//   "keys"    [entries, dim], f32 or f16; begins at a multiple of 4,096 bytes
//   "values"  [entries], u8 or i32; before them "padding", u8, where they would not be aligned else
//   metadata  "format": "datastore 1", "model" and "text": 16 hexadecimal digits each
//
// "model" is a fingerprint of the model whose states the keys are, since keys of another model are
// useless for its queries; "text" is one of the text that the model read.
#ifndef TFB_CORE_SEARCH_DATASTORE_H_
#define TFB_CORE_SEARCH_DATASTORE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/output_file.h"
#include "core/tensor.h"

namespace tfb {

// Returns 64 bits (FNV-1a) over names, dtypes, shapes and contents, or over a text.
uint64_t Fingerprint(const NamedTensors& tensors);
uint64_t Fingerprint(absl::string_view text);

struct DatastoreFormat {
  int64_t dim = 0;
  DType key_dtype = DType::kF32;
  DType value_dtype = DType::kU8;
  uint64_t model = 0;
  std::optional<uint64_t> text;  // a reader that names no text takes any
};

// Writes a datastore entry by entry. The file appears under its path when it is whole, and not
// before.
class DatastoreWriter {
 public:
  // Returns InvalidArgument for a format that does not exist or a path that leads to no plain file,
  // and the errors of OutputFile.
  static absl::StatusOr<std::unique_ptr<DatastoreWriter>> Create(const std::string& path,
                                                                 const DatastoreFormat& format);
  ~DatastoreWriter();  // Leaves no file behind where Finish was not called.

  // Appends keys [n, dim] of any floating dtype, rounded to the format's, and values [n] of the
  // format's dtype. Returns InvalidArgument for a key that is not finite, or not so as f16. After
  // an error nothing is appended.
  absl::Status Append(const ConstTensorView& keys, const ConstTensorView& values);
  // Finishes the file; call it once, after the last entry. There must be at least one.
  absl::Status Finish();

  int64_t entries() const { return entries_; }

 private:
  DatastoreWriter(std::string path, const DatastoreFormat& format,
                  std::unique_ptr<OutputFile> file);
  absl::Status WriteHeaderAndValues();

  std::string path_;
  DatastoreFormat format_;
  std::unique_ptr<OutputFile> file_;  // null after Finish
  int64_t entries_ = 0;
  std::string values_;  // written behind the last key
};

// A mapped datastore. Its pages are read when they are used, and are shared between processes as
// long as nobody writes to them. If another program truncates the file meanwhile, this program ends
// (SIGBUS). Datastores are movable.
class Datastore {
 public:
  // Opens a file. Returns InvalidArgument, with the file and the field, for a file that is no
  // datastore, a truncated one, one of another model, text, dtype or number of channels, or one
  // without entries; NotFound and the like where it cannot be opened.
  static absl::StatusOr<Datastore> Open(const std::string& path, const DatastoreFormat& expected);
  // Does the same for bytes in memory, aligned to 4 bytes, which the caller keeps; `name` stands
  // for the path in messages.
  static absl::StatusOr<Datastore> Parse(absl::string_view bytes, const std::string& name,
                                         const DatastoreFormat& expected);

  int64_t entries() const { return keys_.dim(0); }
  const ConstTensorView& keys() const { return keys_; }
  const ConstTensorView& values() const { return values_; }
  uint64_t text() const { return text_; }

  // Returns "keys" and "values", which keep the file mapped: nothing is copied, except from bytes
  // that were parsed. Writes to these tensors stay in this process, and change no file.
  NamedTensors Tensors() const;

 private:
  std::shared_ptr<void> mapped_;
  ConstTensorView keys_;
  ConstTensorView values_;
  uint64_t text_ = 0;
};

}  // namespace tfb

#endif  // TFB_CORE_SEARCH_DATASTORE_H_
