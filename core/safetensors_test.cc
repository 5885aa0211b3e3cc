#include "core/safetensors.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
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
  tensors["c"] = Tensor(DType::kI32, {1});
  tensors["c"].span<int32_t>()[0] = 0x05060708;
  const absl::StatusOr<std::string> bytes = SerializeSafetensors(tensors, {{"k", "v"}});
  ASSERT_TRUE(bytes.ok());
  std::string header =
      R"({"__metadata__":{"k":"v"},"a":{"data_offsets":[0,4],"dtype":"I32","shape":[1]},)"
      R"("b":{"data_offsets":[8,11],"dtype":"U8","shape":[3]},)"
      R"("c":{"data_offsets":[4,8],"dtype":"I32","shape":[1]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  EXPECT_EQ(*bytes, WithLength(header, std::string("\x04\x03\x02\x01\x08\x07\x06\x05") + "xyz"));
}

TEST(Safetensors, TensorsBeginAtTheNextMultipleOfEight) {
  for (size_t size = 0; size < 8; ++size) {
    const std::string bytes = *SerializeSafetensors({}, {{"k", std::string(size, 'v')}});
    const size_t header = bytes.find_last_not_of(' ') + 1;
    EXPECT_EQ(bytes.size() % 8, 0u);
    EXPECT_LT(bytes.size() - header, 8u);
  }
}

TEST(Safetensors, ALayoutIsTheHeaderWithPlacesInTheFile) {
  NamedTensors tensors = OneOfEach();
  const std::string bytes = *SerializeSafetensors(tensors, {{"model", "m"}});
  const absl::StatusOr<SafetensorsLayout> layout = ParseSafetensorsLayout(bytes, "f");
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->metadata, (std::map<std::string, std::string>{{"model", "m"}}));
  ASSERT_EQ(layout->tensors.size(), tensors.size());
  int64_t data_begin = static_cast<int64_t>(bytes.size());
  for (const auto& [name, entry] : layout->tensors) {
    EXPECT_EQ(entry.dtype, tensors[name].dtype());
    EXPECT_EQ(entry.shape, tensors[name].shape());
    ASSERT_EQ(entry.end - entry.begin, static_cast<int64_t>(tensors[name].bytes())) << name;
    EXPECT_EQ(std::memcmp(bytes.data() + entry.begin, tensors[name].raw(), tensors[name].bytes()),
              0)
        << name;
    data_begin = std::min(data_begin, entry.begin);
  }
  EXPECT_EQ(*SerializeSafetensorsLayout(*layout), bytes.substr(0, data_begin));
  EXPECT_FALSE(ParseSafetensorsLayout(bytes.substr(0, 9), "f").ok());
}

TEST(Safetensors, TheHeaderOfALayoutHasTheRoomBeforeItsFirstTensor) {
  SafetensorsLayout layout;
  layout.tensors["q"] = {DType::kU8, {2}, 0, 0};
  const std::string header = R"({"q":{"data_offsets":[0,2],"dtype":"U8","shape":[2]}})";
  const auto with_room = [&](size_t room) {
    layout.tensors["q"].begin = static_cast<int64_t>(8 + room);
    layout.tensors["q"].end = layout.tensors["q"].begin + 2;
    return SerializeSafetensorsLayout(layout);
  };
  EXPECT_EQ(*with_room(header.size()), WithLength(header));
  EXPECT_EQ(*with_room(header.size() + 3), WithLength(header + "   "));
  EXPECT_EQ(with_room(header.size() - 1).status(),
            absl::InvalidArgumentError("a header of 53 bytes for 1 tensors has room for 52"));
  EXPECT_EQ(SerializeSafetensorsLayout({}).status(),
            absl::InvalidArgumentError("a layout without tensors does not say where they begin"));
  layout.metadata["k"] = "\xe9";
  EXPECT_EQ(with_room(1000).status(), absl::InvalidArgumentError("metadata \"k\" is not UTF-8"));
}

TEST(Safetensors, AFileOfOneByteIsRead) {
  const std::string path = Path("byte.safetensors");
  NamedTensors tensors;
  tensors["b"] = Tensor(DType::kU8, {1});
  tensors["b"].span<uint8_t>()[0] = 7;
  ASSERT_TRUE(WriteSafetensors(path, tensors).ok());
  ExpectSameBits(ReadSafetensors(path)->tensors, tensors);
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

// A header with its bytes of tensors, and the whole error.
TEST(Safetensors, WhatIsWrongIsRefusedWithAWholeMessage) {
  struct Case {
    std::string header;
    int data_bytes;
    std::string message;
  };
  const auto q = [](const std::string& dtype, const std::string& shape,
                    const std::string& offsets) {
    return "{" + Entry("q", dtype, shape, offsets) + "}";
  };
  const std::string a = Entry("a", "U8", "[4]", "[0,4]");
  const std::string long_name(81, 'n');
  const std::vector<Case> cases = {
      {"", 0, "header does not begin with \"{\""},
      {" {}", 0, "header does not begin with \"{\""},
      {"[]", 0, "header does not begin with \"{\""},
      {"{\"a\":", 0, "header is not valid JSON"},
      {"{\"a\":\xff}", 0, "header is not valid JSON"},
      {"{} x", 0, "header is not valid JSON"},
      {"{\"__metadata__\":[]}", 0, "__metadata__ is not an object"},
      {"{\"__metadata__\":{\"n\":1}}", 0, "__metadata__ of \"n\" is not a text"},
      {"{" + a + "," + a + "}", 4, "header has the name \"a\" twice"},
      {R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1,
       "header has the name \"dtype\" twice"},
      {R"({"__metadata__":{"k":"1","k":"2"}})", 0, "header has the name \"k\" twice"},
      {R"({"b":1,"b":2,"a":3,"a":4})", 0, "header has the name \"b\" twice"},
      {"{\"q\":3}", 0, "tensor \"q\" is not described by an object"},
      {"{\"q\":-3}", 0, "tensor \"q\" is not described by an object"},
      {"{\"q\":0.5}", 0, "tensor \"q\" is not described by an object"},
      {"{\"q\":true}", 0, "tensor \"q\" is not described by an object"},
      {"{\"q\":null}", 0, "tensor \"q\" is not described by an object"},
      {"{\"q\":\"U8\"}", 0, "tensor \"q\" is not described by an object"},
      {"{\"q\":[{}]}", 0, "tensor \"q\" is not described by an object"},
      {"{\"" + long_name.substr(1) + "\":3}", 0,
       "tensor \"" + long_name.substr(1) + "\" is not described by an object"},
      {"{\"" + long_name + "\":3}", 0,
       "tensor \"" + long_name.substr(1) + "...\" is not described by an object"},
      {R"({"q":{"shape":[1],"data_offsets":[0,4]}})", 4, "tensor \"q\" has no dtype"},
      {R"({"q":{"dtype":7,"shape":[1],"data_offsets":[0,4]}})", 4, "tensor \"q\" has no dtype"},
      {q("F8_E4M3", "[1]", "[0,1]"), 1,
       "tensor \"q\" has dtype \"F8_E4M3\"; read are F64, F32, F16, BF16, I64, I32, U8, BOOL"},
      {R"({"q":{"dtype":"F32","data_offsets":[0,4]}})", 4, "tensor \"q\" has no shape"},
      {q("F32", "4", "[0,4]"), 4, "tensor \"q\" has no shape"},
      {q("U8", "[1,1,1,1,1,1]", "[0,1]"), 1, "tensor \"q\" has 6 dimensions; read are up to 5"},
      {q("U8", "[1,1,1,1,1]", "[0,1]"), 1, "ok"},
      {R"({"q":{"dtype":"F32","shape":[1]}})", 4, "tensor \"q\" has no data_offsets [begin, end]"},
      {q("F32", "[1]", "4"), 4, "tensor \"q\" has no data_offsets [begin, end]"},
      {q("F32", "[1]", "[0]"), 4, "tensor \"q\" has no data_offsets [begin, end]"},
      {q("F32", "[1]", "[0,4,8]"), 8, "tensor \"q\" has no data_offsets [begin, end]"},
      {q("U8", "[3]", "[-1,2]"), 2,
       "tensor \"q\" has data_offsets \"[-1,2]\", which are not two offsets"},
      {q("U8", "[3]", "[0,18446744073709551615]"), 2,
       "tensor \"q\" has data_offsets \"[0,18446744073709551615]\", which are not two offsets"},
      {q("U8", "[3]", "[0,9223372036854775807]"), 2,
       "tensor \"q\" has data_offsets \"[0,9223372036854775807]\"; the file has only 2 bytes of "
       "tensors"},
      {q("U8", "[3]", "[0,3]"), 2,
       "tensor \"q\" has data_offsets \"[0,3]\"; the file has only 2 bytes of tensors"},
      {q("U8", "[1]", "[2,1]"), 2,
       "tensor \"q\" has data_offsets \"[2,1]\", whose end is before their beginning"},
      {q("F32", "[3]", "[1,9]"), 9,
       "tensor \"q\" has data_offsets \"[1,9]\", which are 8 bytes; its f32 [3] has 12"},
      // 2^32 * 2^32 elements wrap to 0, and 2^61 elements of 8 bytes do too.
      {q("F64", "[4294967296,4294967296]", "[0,0]"), 0,
       "tensor \"q\" has shape [4294967296, 4294967296], whose bytes overflow 64 bits"},
      {q("F64", "[2305843009213693952]", "[0,0]"), 0,
       "tensor \"q\" has shape [2305843009213693952], whose bytes overflow 64 bits"},
      {q("F64", "[4294967296,4294967296,0]", "[0,0]"), 0,
       "tensor \"q\" has shape [4294967296, 4294967296, 0], whose bytes overflow 64 bits"},
      {q("F64", "[0,4294967296,4294967296]", "[0,0]"), 0,
       "tensor \"q\" has shape [0, 4294967296, 4294967296], whose bytes overflow 64 bits"},
      {q("F64", "[1152921504606846975,1]", "[0,0]"), 0,
       "tensor \"q\" has data_offsets \"[0,0]\", which are 0 bytes; its f64 "
       "[1152921504606846975, 1] has 9223372036854775800"},
      {"{" + a + "," + Entry("b", "U8", "[4]", "[3,7]") + "}", 7,
       "tensor \"b\" begins at byte 3 and overlaps tensor \"a\", which ends at 4"},
      {"{" + a + "," + Entry("b", "U8", "[4]", "[0,4]") + "}", 4,
       "tensor \"b\" begins at byte 0 and overlaps tensor \"a\", which ends at 4"},
      {"{" + a + "," + Entry("b", "U8", "[1]", "[6,7]") + "}", 7,
       "tensor \"b\" begins at byte 6, but bytes 4 to 6 belong to no tensor"},
      {"{" + a + "}", 6, "has 2 bytes behind its last tensor"}};
  for (const Case& c : cases) {
    EXPECT_EQ(ErrorOf(c.header, c.data_bytes), c.message == "ok" ? "ok" : "some/file: " + c.message)
        << c.header;
  }
  for (const char* size :
       {"-1", "1.0", "1.5", "null", "9223372036854775808", "99999999999999999999", "[1]"}) {
    const std::string quoted = size[0] == '9' && size[1] == '9' ? "1e+20" : size;
    EXPECT_EQ(ErrorOf(q("U8", absl::StrCat("[1,", size, "]"), "[0,1]"), 1),
              "some/file: tensor \"q\" has size \"" + quoted +
                  "\" in its shape; allowed are 0 to 2^63 - 1");
  }
  EXPECT_EQ(ErrorOf(q("U8", "[\"\xc3\xa9\"]", "[0,1]"), 1),
            "some/file: tensor \"q\" has size \"\\\"\\\\u00e9\\\"\" in its shape; allowed are 0 "
            "to 2^63 - 1");
  EXPECT_EQ(ParseSafetensors(WithLength(q("F8_E4M3", "[1]", "[0,1]"), "x"), "f").status().code(),
            absl::StatusCode::kUnimplemented);
}

TEST(Safetensors, ADeeplyNestedHeaderIsAnErrorAndNotAnOverflowOfTheStack) {
  const std::string deep(200'000, '[');
  EXPECT_THAT(ErrorOf("{\"a\":" + deep), HasSubstr("not valid JSON"));
  EXPECT_THAT(ErrorOf("{\"a\":" + deep + std::string(deep.size(), ']') + "}"),
              HasSubstr("tensor \"a\" is not described by an object"));
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
  const std::vector<std::pair<uint64_t, std::string>> cases = {
      {200'000'000, "header has 200000000 bytes; allowed are up to 100000000"},
      {100'000'001, "header has 100000001 bytes; allowed are up to 100000000"},
      {100'000'000, "header does not begin with \"{\""}};
  for (const auto& [length, message] : cases) {
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(&length), sizeof(length));
    ASSERT_EQ(truncate(path.c_str(), 300'000'000), 0);
    EXPECT_EQ(std::string(ReadSafetensors(path).status().message()), path + ": " + message);
  }
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
