#include "core/search/datastore.h"

#include <dirent.h>

#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "core/random.h"
#include "core/safetensors.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

std::string Path(const std::string& name) { return ::testing::TempDir() + "/" + name; }

DatastoreFormat Format() {
  DatastoreFormat format;
  format.dim = 5;
  format.model = 0x0123456789ABCDEF;
  format.text = Fingerprint("once upon a time");
  return format;
}

struct Entries {
  Tensor keys;
  Tensor values;
};
Entries Random(int64_t count, const DatastoreFormat& format) {
  Entries entries = {Tensor(DType::kF32, {count, format.dim}), Tensor(format.value_dtype, {count})};
  FillNormal(&entries.keys, static_cast<uint64_t>(count), "keys");
  for (int64_t n = 0; n < count; ++n)
    entries.values.view().Set(n, static_cast<double>(n * 7 % 256));
  return entries;
}

absl::Status WriteStore(const std::string& path, const DatastoreFormat& format, int64_t count) {
  const Entries entries = Random(count, format);
  TFB_ASSIGN_OR_RETURN(const auto writer, DatastoreWriter::Create(path, format));
  TFB_RETURN_IF_ERROR(writer->Append(entries.keys.view(), entries.values.view()));
  return writer->Finish();
}

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}
void SetContents(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// Returns the error of opening the file; "ok" where there is none.
std::string ErrorOf(const std::string& path, const DatastoreFormat& expected = Format()) {
  const absl::StatusOr<Datastore> store = Datastore::Open(path, expected);
  if (store.ok()) return "ok";
  const std::string message(store.status().message());
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  EXPECT_EQ(message.rfind(path + ": ", 0), 0u) << message;
  return message.substr(path.size() + 2);
}

TEST(Datastore, WhatIsAppendedIsMapped) {
  const std::string path = Path("round_trip.safetensors");
  for (const DType key_dtype : {DType::kF32, DType::kF16}) {
    for (const DType value_dtype : {DType::kU8, DType::kI32}) {
      DatastoreFormat format = Format();
      format.key_dtype = key_dtype;
      format.value_dtype = value_dtype;
      auto writer = DatastoreWriter::Create(path, format).value();
      const Entries all = Random(11, format);
      for (const auto& [begin, size] : {std::pair(0, 3), std::pair(3, 0), std::pair(3, 8)}) {
        ASSERT_TRUE(writer
                        ->Append(Slice(all.keys.view(), 0, begin, size),
                                 Slice(all.values.view(), 0, begin, size))
                        .ok());
      }
      EXPECT_EQ(writer->entries(), 11);
      ASSERT_TRUE(writer->Finish().ok());
      const Datastore store = Datastore::Open(path, format).value();
      EXPECT_EQ(store.entries(), 11);
      EXPECT_EQ(store.text(), Fingerprint("once upon a time"));
      EXPECT_EQ(MaxDifference(store.keys(), all.keys.CloneAs(key_dtype).view()), 0);
      EXPECT_EQ(MaxDifference(store.values(), all.values.view()), 0);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(store.keys().data) % 4096, 0u);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(store.values().data) % SizeOf(value_dtype), 0u);
      // Any reader of the safetensors format can read it.
      EXPECT_EQ(ReadSafetensors(path)->tensors.at("values").dim(0), 11);
    }
  }
}

TEST(Datastore, TensorsAreTheMappedFileAndOutliveTheDatastore) {
  const std::string path = Path("tensors.safetensors");
  ASSERT_TRUE(WriteStore(path, Format(), 6).ok());
  const std::string bytes = Contents(path);
  auto store = std::make_unique<Datastore>(Datastore::Open(path, Format()).value());
  NamedTensors tensors = store->Tensors();
  EXPECT_EQ(tensors.at("keys").raw(), store->keys().data);
  EXPECT_EQ(tensors.at("values").raw(), store->values().data);
  store.reset();
  const Datastore again = Datastore::Open(path, Format()).value();
  EXPECT_EQ(MaxDifference(tensors.at("keys").view(), again.keys()), 0);
  Fill(tensors.at("keys").view(), 7);
  EXPECT_EQ(tensors.at("keys").view().Get(3), 7);
  EXPECT_NE(again.keys().Get(3), 7);
  EXPECT_EQ(Contents(path), bytes);
}

TEST(Datastore, EveryTruncationIsAnError) {
  const std::string path = Path("whole.safetensors"), cut = Path("cut.safetensors");
  ASSERT_TRUE(WriteStore(path, Format(), 6).ok());
  const std::string bytes = Contents(path);
  for (size_t size = 0; size < bytes.size(); ++size) {
    const std::string part = bytes.substr(0, size);
    EXPECT_FALSE(Datastore::Parse(part, "cut", Format()).ok()) << size;
    if (size % 1000 != 0) continue;
    SetContents(cut, part);
    EXPECT_NE(ErrorOf(cut), "ok") << size;
  }
  SetContents(cut, bytes + "x");
  EXPECT_EQ(ErrorOf(cut), "has 1 bytes behind its last tensor");
  EXPECT_EQ(ErrorOf(path), "ok");
}

TEST(Datastore, NamesWhatIsNotAsExpected) {
  const std::string path = Path("other.safetensors");
  ASSERT_TRUE(WriteStore(path, Format(), 6).ok());
  DatastoreFormat expected = Format();
  expected.model = 1;
  EXPECT_EQ(ErrorOf(path, expected),
            "was made of another model: its fingerprint is 0123456789abcdef, not 0000000000000001");
  expected = Format();
  expected.text = 2;
  EXPECT_THAT(ErrorOf(path, expected), HasSubstr("was made of another text"));
  expected.text.reset();
  EXPECT_EQ(ErrorOf(path, expected), "ok");
  expected.key_dtype = DType::kF16;
  EXPECT_EQ(ErrorOf(path, expected), "tensor \"keys\" is f32 [6, 5]; expected is f16");
  expected = Format();
  expected.value_dtype = DType::kI32;
  EXPECT_EQ(ErrorOf(path, expected), "tensor \"values\" is u8 [6]; expected is i32");
  expected = Format();
  expected.dim = 4;
  EXPECT_EQ(ErrorOf(path, expected), "has keys of 5 channels; expected are 4");
  EXPECT_THAT(ErrorOf(Path("absent")), HasSubstr("cannot open"));
}

TEST(Datastore, NamesWhatMakesAFileNoDatastore) {
  const std::string path = Path("no.safetensors");
  const std::map<std::string, std::string> metadata = {
      {"format", "datastore 1"}, {"model", "0123456789abcdef"}, {"text", "0000000000000000"}};
  DatastoreFormat expected = Format();
  expected.text.reset();
  const auto error = [&](const NamedTensors& tensors, std::map<std::string, std::string> fields) {
    EXPECT_TRUE(WriteSafetensors(path, tensors, fields).ok());
    return ErrorOf(path, expected);
  };
  const auto tensors = [](std::initializer_list<int64_t> keys,
                          std::initializer_list<int64_t> values) {
    NamedTensors named;
    named["keys"] = Tensor(DType::kF32, keys);
    named["values"] = Tensor(DType::kU8, values);
    return named;
  };
  EXPECT_EQ(error(tensors({2, 5}, {2}), metadata), "ok");
  EXPECT_EQ(error(tensors({0, 5}, {0}), metadata), "has no entries");
  EXPECT_EQ(error(tensors({2, 5}, {3}), metadata), "has 2 keys and 3 values");
  EXPECT_EQ(error(tensors({10}, {2}), metadata),
            "tensor \"keys\" is f32 [10]; expected are 2 dimensions");
  EXPECT_EQ(error({}, metadata), "has no tensor \"keys\": it is no datastore");
  EXPECT_EQ(error(tensors({2, 5}, {2}), {}), "has no metadata \"format\": it is no datastore");
  auto fields = metadata;
  fields["format"] = "datastore 2";
  EXPECT_EQ(error(tensors({2, 5}, {2}), fields), "metadata \"format\" is not \"datastore 1\"");
  for (const char* digits : {"123", "0123456789abcdeg", "0x23456789abcdef", "0123456789ABCDEF"}) {
    fields = metadata;
    fields["model"] = digits;
    EXPECT_EQ(error(tensors({2, 5}, {2}), fields),
              "metadata \"model\" is not 16 hexadecimal digits");
  }
  ASSERT_TRUE(WriteStore(path, Format(), 2).ok());
  SetContents(path, absl::StrReplaceAll(Contents(path), {{"\"shape\"", "\"shape"}}));
  EXPECT_THAT(ErrorOf(path), HasSubstr("header"));
}

TEST(DatastoreWriter, LeavesNothingBehindUntilItIsFinished) {
  const std::string folder = Path("folder");
  ASSERT_EQ(system(absl::StrCat("mkdir -p '", folder, "'").c_str()), 0);
  const auto files = [&folder] {
    int count = 0;
    DIR* directory = opendir(folder.c_str());
    while (const dirent* entry = readdir(directory)) count += entry->d_name[0] != '.';
    closedir(directory);
    return count;
  };
  const std::string path = folder + "/store";
  {
    const Entries entries = Random(3, Format());
    const auto writer = DatastoreWriter::Create(path, Format()).value();
    ASSERT_TRUE(writer->Append(entries.keys.view(), entries.values.view()).ok());
    EXPECT_THAT(ErrorOf(path), HasSubstr("cannot open"));
  }
  EXPECT_EQ(files(), 0);
  EXPECT_THAT(std::string(WriteStore(path, Format(), 0).message()), EndsWith("has no entries"));
  EXPECT_EQ(files(), 0);
  ASSERT_TRUE(WriteStore(path, Format(), 3).ok());
  EXPECT_EQ(files(), 1);
  EXPECT_EQ(ErrorOf(path), "ok");
}

TEST(DatastoreWriter, IsFinishedOnce) {
  const std::string path = Path("finished");
  const Entries entries = Random(3, Format());
  const auto writer = DatastoreWriter::Create(path, Format()).value();
  ASSERT_TRUE(writer->Append(entries.keys.view(), entries.values.view()).ok());
  ASSERT_TRUE(writer->Finish().ok());
  const std::string contents = Contents(path);
  const absl::Status again = writer->Finish();
  EXPECT_EQ(again.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(again.message(), absl::StrCat(path, ": is finished"));
  EXPECT_EQ(Contents(path), contents);
}

TEST(DatastoreWriter, RefusesWhatItCannotHold) {
  const std::string path = Path("refused");
  DatastoreFormat format = Format();
  format.dim = 0;
  EXPECT_THAT(std::string(DatastoreWriter::Create(path, format).status().message()),
              EndsWith("keys of 0 channels; allowed are 1 or more"));
  format = Format();
  format.key_dtype = DType::kBF16;
  EXPECT_THAT(std::string(DatastoreWriter::Create(path, format).status().message()),
              EndsWith("keys in bf16; allowed are f32 and f16"));
  format.key_dtype = DType::kF16;
  format.value_dtype = DType::kI64;
  EXPECT_THAT(std::string(DatastoreWriter::Create(path, format).status().message()),
              EndsWith("values in i64; allowed are u8 and i32"));
  format.value_dtype = DType::kU8;
  const auto writer = DatastoreWriter::Create(path, format).value();
  Entries entries = Random(3, format);
  entries.keys.span<float>()[7] = 65520;  // rounds to infinity
  EXPECT_THAT(std::string(writer->Append(entries.keys.view(), entries.values.view()).message()),
              EndsWith("key 1 is not finite in f16"));
  EXPECT_THAT(std::string(writer->Append(entries.keys.view(), entries.keys.view()).message()),
              EndsWith("keys are f32 [3, 5] and values f32 [3, 5]; expected are keys [n, 5] and "
                       "values u8 [n]"));
  EXPECT_EQ(writer->entries(), 0);
}

TEST(Fingerprint, TellsNamesShapesAndContentsApart) {
  NamedTensors a;
  a["w"] = Tensor(DType::kF32, {2, 3});
  Fill(a["w"].view(), 1);
  const uint64_t before = Fingerprint(a);
  EXPECT_EQ(Fingerprint(a), before);
  a["w"].span<float>()[5] = 1.0000001f;
  EXPECT_NE(Fingerprint(a), before);
  NamedTensors b;
  b["w"] = Tensor(DType::kF32, {3, 2});
  Fill(b["w"].view(), 1);
  EXPECT_NE(Fingerprint(b), before);
  // The expected values are published ones of FNV-1a.
  EXPECT_EQ(Fingerprint(absl::string_view("")), 0xCBF29CE484222325u);
  EXPECT_EQ(Fingerprint(absl::string_view("a")), 0xAF63DC4C8601EC8Cu);
}

}  // namespace
}  // namespace tfb
