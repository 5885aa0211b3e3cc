// Encodes and decodes the records of a result file, for the reader and the appender.
#ifndef TFB_RESULTS_WIRE_H_
#define TFB_RESULTS_WIRE_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace tfb {
namespace wire {

// Value of ResultSet.format in every file of this layout.
inline constexpr absl::string_view kFormat = "tfb.ResultSet/1";

// Field numbers of ResultSet.
inline constexpr int kFormatField = 1;
inline constexpr int kEnvironmentsField = 2;
inline constexpr int kCasesField = 3;
inline constexpr int kRecordChecksumsField = 4;

// The longest record that is written or accepted. A case with 100,000 samples takes 0.8 MiB; 64 MiB
// leaves two orders of magnitude and keeps a damaged length from allocating more.
inline constexpr int64_t kMaxRecordBytes = int64_t{64} << 20;

// The longest file that is still one Protobuf message for other programs (sizes are int32 there).
inline constexpr int64_t kMaxFileBytes = (int64_t{1} << 31) - 1;

// Returns the CRC-32C (Castagnoli polynomial, reflected 0x82f63b78), as iSCSI and ext4 compute it:
// Crc32c("123456789") == 0xe3069283.
uint32_t Crc32c(absl::string_view bytes);

// Appends a length-delimited field: tag, length, payload.
void AppendLengthDelimited(int field, absl::string_view payload, std::string* out);

// Appends the checksum field for `record`, which is the whole field that precedes it.
void AppendChecksum(absl::string_view record, std::string* out);

// Returns the first bytes of every file: the format field.
std::string Signature();

// The field at the beginning of some bytes.
struct Field {
  enum class State {
    kWhole,     // the field lies wholly within the bytes
    kCut,       // the bytes end before the field does
    kMalformed  // no field begins like this
  };
  State state = State::kMalformed;
  int number = 0;
  int wire_type = 0;          // 0 varint, 1 eight bytes, 2 length-delimited, 5 four bytes
  int64_t payload_begin = 0;  // bytes from the beginning of the field
  int64_t end = 0;            // one past the field's last byte; for kCut 0 where it is unknown
};

// Reads the tag and the length of a field from `head`, the beginning of the `available` bytes that
// are left of a file. kMaxFieldHeadBytes of `head` are always enough.
Field ParseField(absl::string_view head, int64_t available);
inline constexpr int64_t kMaxFieldHeadBytes = 20;

}  // namespace wire
}  // namespace tfb

#endif  // TFB_RESULTS_WIRE_H_
