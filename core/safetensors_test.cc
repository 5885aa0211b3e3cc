#include "core/safetensors.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string Path(const std::string& name) { return ::testing::TempDir() + "/" + name; }

std::string WithLength(const std::string& header, const std::string& data = "") {
  const uint64_t length = header.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes + header + data;
}

// Returns the error of a file with this header and `data_bytes` bytes of tensors, or "ok" where
// there is none.
std::string ErrorOf(const std::string& header, int data_bytes = 0) {
  const absl::StatusOr<SafetensorsFile> file =
      ParseSafetensors(WithLength(header, std::string(data_bytes, 'x')), "some/file");
  if (file.ok()) return "ok";
  const std::string message(file.status().message());
  EXPECT_TRUE(absl::StartsWith(message, "some/file: ")) << message;
  EXPECT_THAT(message, Not(HasSubstr("\n")));
  return message;
}

std::string Entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return absl::StrCat("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":", shape,
                      ",\"data_offsets\":", offsets, "}");
}

NamedTensors OneOfEach() {
  NamedTensors tensors;
  for (DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kI64, DType::kI32,
                      DType::kU8}) {
    Tensor tensor(dtype, {2, 3});
    for (int i = 0; i < 6; ++i) tensor.view().Set(i, 10 * i + 1);
    tensors[std::string(Name(dtype))] = std::move(tensor);
  }
  tensors["none"] = Tensor(DType::kF32, {4, 0, 2});
  return tensors;
}

void ExpectSameBits(const NamedTensors& a, const NamedTensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) {
    const auto other = b.find(name);
    ASSERT_NE(other, b.end()) << name;
    EXPECT_EQ(tensor.dtype(), other->second.dtype()) << name;
    ASSERT_EQ(tensor.shape(), other->second.shape()) << name;
    EXPECT_EQ(std::memcmp(tensor.raw(), other->second.raw(), tensor.bytes()), 0) << name;
  }
}

TEST(Safetensors, WhatIsWrittenIsReadBackWithItsMetadata) {
  const std::string path = Path("round_trip.safetensors");
  const std::map<std::string, std::string> metadata = {{"model", "caf\xc3\xa9 \"6\"\n"}, {"n", ""}};
  ASSERT_TRUE(WriteSafetensors(path, OneOfEach(), metadata).ok());
  const absl::StatusOr<SafetensorsFile> file = ReadSafetensors(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->metadata, metadata);
  ExpectSameBits(file->tensors, OneOfEach());
}

TEST(Safetensors, NoTensorsAtAllIsAFile) {
  const absl::StatusOr<std::string> bytes = SerializeSafetensors({});
  ASSERT_TRUE(bytes.ok());
  const absl::StatusOr<SafetensorsFile> file = ParseSafetensors(*bytes, "none");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE(file->tensors.empty());
}

TEST(Safetensors, BytesAreThoseOfTheFormat) {
  NamedTensors tensors;
  tensors["b"] = Tensor(DType::kU8, {3});
  std::memcpy(tensors["b"].raw(), "xyz", 3);
  tensors["a"] = Tensor(DType::kI32, {1});
  tensors["a"].span<int32_t>()[0] = 0x01020304;
  const absl::StatusOr<std::string> bytes = SerializeSafetensors(tensors, {{"k", "v"}});
  ASSERT_TRUE(bytes.ok());
  std::string header =
      R"({"__metadata__":{"k":"v"},"a":{"data_offsets":[0,4],"dtype":"I32","shape":[1]},)"
      R"("b":{"data_offsets":[4,7],"dtype":"U8","shape":[3]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  EXPECT_EQ(*bytes, WithLength(header, std::string("\x04\x03\x02\x01") + "xyz"));
}

TEST(Safetensors, EqualContentsGiveEqualBytes) {
  EXPECT_EQ(*SerializeSafetensors(OneOfEach()), *SerializeSafetensors(OneOfEach()));
}

TEST(Safetensors, NanPayloadsSurviveBitForBit) {
  const std::vector<uint32_t> f32 = {0x7FC00001, 0xFFFFFFFF, 0x7F800001, 0x80000000, 0x00000001};
  const std::vector<uint16_t> f16 = {0x7E01, 0xFFFF, 0x7C01, 0x8000, 0x0001};
  NamedTensors tensors;
  tensors["f32"] = Tensor(DType::kF32, {5});
  std::memcpy(tensors["f32"].raw(), f32.data(), 20);
  tensors["f16"] = Tensor(DType::kF16, {5});
  std::memcpy(tensors["f16"].raw(), f16.data(), 10);
  tensors["bf16"] = Tensor(DType::kBF16, {5});
  std::memcpy(tensors["bf16"].raw(), f16.data(), 10);
  const std::string path = Path("nan.safetensors");
  ASSERT_TRUE(WriteSafetensors(path, tensors).ok());
  const absl::StatusOr<SafetensorsFile> file = ReadSafetensors(path);
  ASSERT_TRUE(file.ok()) << file.status();
  ExpectSameBits(file->tensors, tensors);
}

TEST(Safetensors, BoolsAreReadAsBytes) {
  const std::string header = "{" + Entry("mask", "BOOL", "[2]", "[0,2]") + "}";
  const auto file = ParseSafetensors(WithLength(header, std::string("\x01\x00", 2)), "f");
  ASSERT_TRUE(file.ok()) << file.status();
  const Tensor& mask = file->tensors.at("mask");
  EXPECT_EQ(mask.dtype(), DType::kU8);
  EXPECT_EQ(mask.span<uint8_t>()[0], 1);
  EXPECT_EQ(mask.span<uint8_t>()[1], 0);
}

TEST(Safetensors, AScalarIsReadAsOneElement) {
  const std::string header = "{" + Entry("s", "U8", "[]", "[0,1]") + "}";
  const auto file = ParseSafetensors(WithLength(header, "A"), "f");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->tensors.at("s").shape(), Shape({1}));
}

TEST(Safetensors, TensorsMayStandInAnyOrder) {
  EXPECT_EQ(ErrorOf("{" + Entry("a", "U8", "[1]", "[2,3]") + "," +
                        Entry("b", "U8", "[2]", "[0,2]") + "}   ",
                    3),
            "ok");
}

TEST(Safetensors, BrokenHeadersAreNamed) {
  EXPECT_THAT(ErrorOf("{\"a\":"), HasSubstr("header is not valid JSON"));
  EXPECT_THAT(ErrorOf("{\"a\":\xff}"), HasSubstr("header is not valid JSON"));
  EXPECT_THAT(ErrorOf("{} x"), HasSubstr("header is not valid JSON"));
  EXPECT_THAT(ErrorOf(" {}"), HasSubstr("does not begin with"));
  EXPECT_THAT(ErrorOf("[]"), HasSubstr("does not begin with"));
  EXPECT_THAT(ErrorOf(""), HasSubstr("does not begin with"));
  EXPECT_THAT(ErrorOf("{\"__metadata__\":[]}"), HasSubstr("__metadata__ is not an object"));
  EXPECT_THAT(ErrorOf("{\"__metadata__\":{\"n\":1}}"),
              HasSubstr("__metadata__ of \"n\" is not a text"));
}

TEST(Safetensors, ADeeplyNestedHeaderIsAnErrorAndNotAnOverflowOfTheStack) {
  const std::string deep(200'000, '[');
  EXPECT_THAT(ErrorOf("{\"a\":" + deep), HasSubstr("not valid JSON"));
  EXPECT_THAT(ErrorOf("{\"a\":" + deep + std::string(deep.size(), ']') + "}"),
              HasSubstr("tensor \"a\" is not described by an object"));
}

TEST(Safetensors, DuplicateNamesAreNamed) {
  const std::string a = Entry("a", "U8", "[1]", "[0,1]");
  EXPECT_THAT(ErrorOf("{" + a + "," + a + "}", 1), HasSubstr("the name \"a\" twice"));
  EXPECT_THAT(ErrorOf(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1),
              HasSubstr("the name \"dtype\" twice"));
  EXPECT_THAT(ErrorOf(R"({"__metadata__":{"k":"1","k":"2"}})"), HasSubstr("the name \"k\" twice"));
}

// In time that grows with their number alone: with its square this takes a minute.
TEST(Safetensors, FortyThousandTensorsAreRead) {
  NamedTensors tensors;
  for (int n = 0; n < 40'000; ++n) {
    Tensor& tensor = tensors[absl::StrCat("layer", n, ".q")] = Tensor(DType::kU8, {1});
    Fill(tensor.view(), n % 256);
  }
  const auto bytes = SerializeSafetensors(tensors);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const auto file = ParseSafetensors(*bytes, "many");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->tensors.size(), 40'000u);
  EXPECT_EQ(file->tensors.at("layer39999.q").span<uint8_t>()[0], 39'999 % 256);
}

TEST(Safetensors, MissingFieldsAreNamedWithTheirTensor) {
  EXPECT_THAT(ErrorOf("{\"q\":3}"), HasSubstr("tensor \"q\" is not described"));
  EXPECT_THAT(ErrorOf(R"({"q":{"shape":[1],"data_offsets":[0,4]}})", 4),
              HasSubstr("tensor \"q\" has no dtype"));
  EXPECT_THAT(ErrorOf(R"({"q":{"dtype":7,"shape":[1],"data_offsets":[0,4]}})", 4),
              HasSubstr("tensor \"q\" has no dtype"));
  EXPECT_THAT(ErrorOf(R"({"q":{"dtype":"F32","data_offsets":[0,4]}})", 4),
              HasSubstr("tensor \"q\" has no shape"));
  EXPECT_THAT(ErrorOf(R"({"q":{"dtype":"F32","shape":[1]}})", 4),
              HasSubstr("tensor \"q\" has no data_offsets"));
  EXPECT_THAT(ErrorOf("{" + Entry("q", "F32", "[1]", "[0]") + "}", 4),
              HasSubstr("tensor \"q\" has no data_offsets"));
}

TEST(Safetensors, OtherElementTypesAreUnimplementedWithTheListOfThoseThatAreRead) {
  const auto file =
      ParseSafetensors(WithLength("{" + Entry("w", "F8_E4M3", "[1]", "[0,1]") + "}", "x"), "f");
  EXPECT_EQ(file.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(file.status().message()),
              AllOf(HasSubstr("tensor \"w\" has dtype \"F8_E4M3\""), HasSubstr("BF16")));
}

TEST(Safetensors, BadShapesAreNamedWithTheirTensor) {
  for (const char* size : {"-1", "1.0", "1.5", "\"1\"", "null", "9223372036854775808",
                           "99999999999999999999", "[1]"}) {
    EXPECT_THAT(ErrorOf("{" + Entry("q", "U8", absl::StrCat("[", size, "]"), "[0,1]") + "}", 1),
                HasSubstr("tensor \"q\" has size "))
        << size;
  }
  EXPECT_THAT(ErrorOf("{" + Entry("q", "U8", "[1,1,1,1,1,1]", "[0,1]") + "}", 1),
              HasSubstr("tensor \"q\" has 6 dimensions"));
}

TEST(Safetensors, AShapeWhoseProductOverflowsIsNamed) {
  // 2^32 * 2^32 elements wrap to 0, and 2^61 elements of 8 bytes do too.
  for (const char* shape : {"[4294967296,4294967296]", "[2305843009213693952]",
                            "[4294967296,4294967296,0]", "[0,4294967296,4294967296]"}) {
    EXPECT_THAT(ErrorOf("{" + Entry("q", "F64", shape, "[0,0]") + "}"),
                AllOf(HasSubstr("tensor \"q\""), HasSubstr("overflow 64 bits")))
        << shape;
  }
}

TEST(Safetensors, OffsetsThatDoNotFitTheirShapeAreNamed) {
  EXPECT_THAT(ErrorOf("{" + Entry("q", "F32", "[3]", "[0,8]") + "}", 8),
              AllOf(HasSubstr("tensor \"q\""), HasSubstr("are 8 bytes"), HasSubstr("has 12")));
}

TEST(Safetensors, ReversedOffsetsAreNamed) {
  EXPECT_THAT(ErrorOf("{" + Entry("q", "U8", "[1]", "[2,1]") + "}", 2),
              AllOf(HasSubstr("tensor \"q\""), HasSubstr("end is before")));
}

TEST(Safetensors, OffsetsBeyondTheFileAreNamed) {
  EXPECT_THAT(ErrorOf("{" + Entry("q", "U8", "[3]", "[0,3]") + "}", 2),
              AllOf(HasSubstr("tensor \"q\""), HasSubstr("only 2 bytes")));
  EXPECT_THAT(ErrorOf("{" + Entry("q", "U8", "[3]", "[-1,2]") + "}", 2),
              AllOf(HasSubstr("tensor \"q\""), HasSubstr("not two offsets")));
  EXPECT_THAT(ErrorOf("{" + Entry("q", "U8", "[3]", "[18446744073709551615,2]") + "}", 2),
              AllOf(HasSubstr("tensor \"q\""), HasSubstr("not two offsets")));
}

TEST(Safetensors, OverlapsAndGapsAndTrailingBytesAreNamed) {
  const std::string a = Entry("a", "U8", "[4]", "[0,4]");
  EXPECT_THAT(ErrorOf("{" + a + "," + Entry("b", "U8", "[4]", "[3,7]") + "}", 7),
              AllOf(HasSubstr("tensor \"b\""), HasSubstr("overlaps tensor \"a\"")));
  EXPECT_THAT(ErrorOf("{" + a + "," + Entry("b", "U8", "[4]", "[0,4]") + "}", 4),
              HasSubstr("overlaps"));
  EXPECT_THAT(ErrorOf("{" + a + "," + Entry("b", "U8", "[1]", "[6,7]") + "}", 7),
              AllOf(HasSubstr("tensor \"b\""), HasSubstr("bytes 4 to 6 belong to no tensor")));
  EXPECT_THAT(ErrorOf("{" + a + "}", 6), HasSubstr("2 bytes behind its last tensor"));
}

TEST(Safetensors, AHeaderLongerThanTheFileIsNamed) {
  for (const uint64_t length : {uint64_t{11}, uint64_t{1} << 40, UINT64_MAX, uint64_t{1} << 63}) {
    std::string bytes = WithLength("{}", "12345678");
    std::memcpy(bytes.data(), &length, sizeof(length));
    const auto file = ParseSafetensors(bytes, "f");
    EXPECT_THAT(std::string(file.status().message()), HasSubstr("reaches beyond the file's 18"));
  }
}

TEST(Safetensors, ALongHeaderOfALongFileIsRefusedBeforeItIsRead) {
  const std::string path = Path("sparse.safetensors");
  const uint64_t length = 200'000'000;
  {
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof(length));
  }
  ASSERT_EQ(truncate(path.c_str(), 300'000'000), 0);
  EXPECT_THAT(std::string(ReadSafetensors(path).status().message()),
              HasSubstr("allowed are up to 100000000"));
  unlink(path.c_str());
}

TEST(Safetensors, EveryTruncationOfAFileIsAnError) {
  const std::string bytes = *SerializeSafetensors(OneOfEach(), {{"model", "m"}});
  const std::string path = Path("cut.safetensors");
  for (size_t size = 0; size < bytes.size(); ++size) {
    const auto file = ParseSafetensors(absl::string_view(bytes).substr(0, size), "cut");
    EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument) << size;
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(size));
    EXPECT_EQ(ReadSafetensors(path).status().code(), absl::StatusCode::kInvalidArgument) << size;
  }
}

TEST(Safetensors, MutatedFilesAreReadOrRefusedAndNeverMore) {
  const std::string bytes = *SerializeSafetensors(OneOfEach(), {{"model", "m"}});
  const RandomStream random(7, "mutations");
  const std::string alphabet = "{}[]\",:0123456789-eEFUIB\\u\xff\x80 ";
  uint64_t draw = 0;
  int read = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string mutated = bytes;
    const uint64_t edits = 1 + random.Bits(draw++) % 3;
    for (uint64_t edit = 0; edit < edits; ++edit) {
      const size_t at = random.Bits(draw++) % mutated.size();
      switch (random.Bits(draw++) % 4) {
        case 0:
          mutated[at] = static_cast<char>(random.Bits(draw++));
          break;
        case 1:
          mutated[at] = alphabet[random.Bits(draw++) % alphabet.size()];
          break;
        case 2:
          mutated.erase(at, 1 + random.Bits(draw++) % 4);
          break;
        default:
          mutated.insert(at, 1, alphabet[random.Bits(draw++) % alphabet.size()]);
          break;
      }
    }
    const auto file = ParseSafetensors(mutated, "mutated");
    if (file.ok()) {
      ++read;
      EXPECT_TRUE(SerializeSafetensors(file->tensors, file->metadata).ok());
    } else {
      EXPECT_THAT(std::string(file.status().message()), Not(HasSubstr("\n")));
    }
  }
  EXPECT_GT(read, 0);  // a changed number in a tensor is still a file
}

TEST(Safetensors, AbsentFilesAndFoldersAreNamed) {
  const auto absent = ReadSafetensors(Path("absent"));
  EXPECT_EQ(absent.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(absent.status().message()), HasSubstr(Path("absent")));
  const auto folder = ReadSafetensors(::testing::TempDir());
  EXPECT_THAT(std::string(folder.status().message()), HasSubstr("is not a regular file"));
}

TEST(Safetensors, NamesThatCannotBeWrittenAreNamed) {
  NamedTensors reserved;
  reserved["__metadata__"] = Tensor(DType::kU8, {1});
  EXPECT_THAT(std::string(SerializeSafetensors(reserved).status().message()),
              HasSubstr("__metadata__"));
  NamedTensors latin;
  latin["caf\xe9"] = Tensor(DType::kU8, {1});
  EXPECT_THAT(std::string(SerializeSafetensors(latin).status().message()), HasSubstr("caf\\xe9"));
  NamedTensors empty;
  empty["e"] = Tensor();
  EXPECT_THAT(std::string(SerializeSafetensors(empty).status().message()),
              HasSubstr("tensor \"e\" is empty"));
  EXPECT_FALSE(SerializeSafetensors({}, {{"k", "\xe9"}}).ok());
}

TEST(Safetensors, AFailedWriteLeavesTheOldFileAndNothingElse) {
  const std::string folder = Path("old");
  mkdir(folder.c_str(), 0777);
  const std::string path = folder + "/f.safetensors";
  ASSERT_TRUE(WriteSafetensors(path, OneOfEach()).ok());
  NamedTensors bad;
  bad["e"] = Tensor();
  EXPECT_FALSE(WriteSafetensors(path, bad).ok());
  EXPECT_TRUE(ReadSafetensors(path).ok());
  // `path` names a folder: the temporary file is written, cannot be renamed, and is removed.
  const std::string taken = folder + "/taken";
  mkdir(taken.c_str(), 0777);
  EXPECT_FALSE(WriteSafetensors(taken, OneOfEach()).ok());
  struct stat info;
  EXPECT_NE(stat(absl::StrCat(taken, ".", getpid(), ".tmp").c_str(), &info), 0);
  const absl::Status nowhere = WriteSafetensors(folder + "/absent/f", OneOfEach());
  EXPECT_EQ(nowhere.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(nowhere.message()), HasSubstr(folder + "/absent/f"));
}

}  // namespace
}  // namespace tfb
