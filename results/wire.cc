#include "results/wire.h"

#include <algorithm>
#include <array>

#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/wire_format_lite.h"

namespace tfb {
namespace wire {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;
using google::protobuf::io::StringOutputStream;

constexpr int kMaxVarintBytes = 10;

std::array<uint32_t, 256> MakeCrcTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t remainder = byte;
    for (int bit = 0; bit < 8; ++bit) {
      remainder = (remainder >> 1) ^ ((remainder & 1) ? 0x82f63b78u : 0u);
    }
    table[byte] = remainder;
  }
  return table;
}

}  // namespace

uint32_t Crc32c(absl::string_view bytes) {
  static const std::array<uint32_t, 256> table = MakeCrcTable();
  uint32_t crc = 0xffffffffu;
  for (const char c : bytes) {
    crc = (crc >> 8) ^ table[(crc ^ static_cast<unsigned char>(c)) & 0xff];
  }
  return crc ^ 0xffffffffu;
}

void AppendLengthDelimited(int field, absl::string_view payload, std::string* out) {
  StringOutputStream stream(out);
  CodedOutputStream coded(&stream);
  coded.WriteTag(WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED));
  coded.WriteVarint64(payload.size());
  coded.WriteRaw(payload.data(), static_cast<int>(payload.size()));
}

void AppendChecksum(absl::string_view record, std::string* out) {
  const uint32_t crc = Crc32c(record);
  StringOutputStream stream(out);
  CodedOutputStream coded(&stream);
  coded.WriteTag(WireFormatLite::MakeTag(kRecordChecksumsField, WireFormatLite::WIRETYPE_FIXED32));
  coded.WriteLittleEndian32(crc);
}

std::string Signature() {
  std::string signature;
  AppendLengthDelimited(kFormatField, kFormat, &signature);
  return signature;
}

Field ParseField(absl::string_view head, int64_t available) {
  Field field;
  const int head_bytes = static_cast<int>(std::min<size_t>(head.size(), kMaxFieldHeadBytes));
  CodedInputStream coded(reinterpret_cast<const uint8_t*>(head.data()), head_bytes);
  // Reads a varint; where there is none, says whether the bytes end within it.
  const auto read = [&](uint64_t* value) {
    const int begin = coded.CurrentPosition();
    if (coded.ReadVarint64(value)) return true;
    if (head_bytes - begin < kMaxVarintBytes) field.state = Field::State::kCut;
    return false;
  };
  uint64_t tag = 0;
  // Tags are 32-bit: 29 bits of number, 3 of type.
  if (!read(&tag) || tag > 0xffffffffu || tag >> 3 == 0) return field;
  field.number = static_cast<int>(tag >> 3);
  field.wire_type = static_cast<int>(tag & 7);
  field.payload_begin = coded.CurrentPosition();

  uint64_t value = 0;
  switch (field.wire_type) {
    case WireFormatLite::WIRETYPE_FIXED64:
      field.end = field.payload_begin + 8;
      break;
    case WireFormatLite::WIRETYPE_FIXED32:
      field.end = field.payload_begin + 4;
      break;
    case WireFormatLite::WIRETYPE_VARINT:
      if (!read(&value)) return field;
      field.end = coded.CurrentPosition();
      break;
    case WireFormatLite::WIRETYPE_LENGTH_DELIMITED:
      if (!read(&value) || value > static_cast<uint64_t>(kMaxRecordBytes)) return field;
      field.payload_begin = coded.CurrentPosition();
      field.end = field.payload_begin + static_cast<int64_t>(value);
      break;
    default:  // groups, which proto3 does not have, and two types that nobody defined
      return field;
  }
  field.state = field.end <= available ? Field::State::kWhole : Field::State::kCut;
  return field;
}

}  // namespace wire
}  // namespace tfb
