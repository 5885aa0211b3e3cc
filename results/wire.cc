#include "results/wire.h"

#include <algorithm>
#include <array>

namespace tfb {
namespace wire {
namespace {

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

// Outcome of reading a varint: its length in bytes, 0 when cut, -1 when longer than ten bytes or
// beyond 64 bits.
int ParseVarint(absl::string_view bytes, uint64_t* value) {
  *value = 0;
  for (size_t i = 0; i < bytes.size() && i < 10; ++i) {
    const uint64_t byte = static_cast<unsigned char>(bytes[i]);
    if (i == 9 && byte > 1) return -1;
    *value |= (byte & 0x7f) << (7 * i);
    if ((byte & 0x80) == 0) return static_cast<int>(i) + 1;
  }
  return bytes.size() >= 10 ? -1 : 0;
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

void AppendVarint(uint64_t value, std::string* out) {
  for (; value >= 0x80; value >>= 7) out->push_back(static_cast<char>((value & 0x7f) | 0x80));
  out->push_back(static_cast<char>(value));
}

void AppendLengthDelimited(int field, absl::string_view payload, std::string* out) {
  AppendVarint(static_cast<uint64_t>(field) << 3 | 2, out);
  AppendVarint(payload.size(), out);
  out->append(payload.data(), payload.size());
}

void AppendChecksum(absl::string_view record, std::string* out) {
  const uint32_t crc = Crc32c(record);
  AppendVarint(kRecordChecksumsField << 3 | 5, out);
  for (int shift = 0; shift < 32; shift += 8) out->push_back(static_cast<char>(crc >> shift));
}

std::string Signature() {
  std::string signature;
  AppendLengthDelimited(kFormatField, kFormat, &signature);
  return signature;
}

Field ParseField(absl::string_view head, int64_t available) {
  Field field;
  uint64_t tag = 0;
  const int tag_bytes = ParseVarint(head, &tag);
  if (tag_bytes == 0) {
    field.state = Field::State::kCut;
    return field;
  }
  // Tags are 32-bit: 29 bits of number, 3 of type.
  if (tag_bytes < 0 || tag > 0xffffffffu || tag >> 3 == 0) return field;
  field.number = static_cast<int>(tag >> 3);
  field.wire_type = static_cast<int>(tag & 7);
  field.payload_begin = tag_bytes;

  uint64_t varint = 0;
  switch (field.wire_type) {
    case 1:
      field.end = tag_bytes + 8;
      break;
    case 5:
      field.end = tag_bytes + 4;
      break;
    case 0:
    case 2: {
      const int varint_bytes = ParseVarint(head.substr(tag_bytes), &varint);
      if (varint_bytes < 0) return field;
      if (varint_bytes == 0) {
        field.state = Field::State::kCut;
        return field;
      }
      field.end = tag_bytes + varint_bytes;
      if (field.wire_type == 0) break;
      field.payload_begin = field.end;
      if (varint > static_cast<uint64_t>(kMaxRecordBytes)) return field;
      field.end += static_cast<int64_t>(varint);
      break;
    }
    default:  // groups, which proto3 does not have, and two types that nobody defined
      return field;
  }
  field.state = field.end <= available ? Field::State::kWhole : Field::State::kCut;
  return field;
}

}  // namespace wire
}  // namespace tfb
