#include "results/reader.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "results/appender.h"
#include "results/synthetic.h"
#include "results/wire.h"

namespace tfb {
namespace {

using ::tfb::synthetic::CaseSpec;
using ::tfb::synthetic::MakeCase;
using ::tfb::synthetic::MakeEnvironment;
using ::tfb::synthetic::MakeSweep;

std::string Path(const std::string& name) {
  const std::string path = ::testing::TempDir() + "/" + name;
  unlink(path.c_str());
  return path;
}

void WriteBytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// A file of one environment and three cases, and the ends of each record, with and without its
// checksum.
struct SmallFile {
  std::string bytes;
  std::vector<size_t> record_ends;
};
SmallFile MakeSmallFile() {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  SmallFile file;
  file.record_ends.push_back(SerializeResults(results).size() - 5);
  for (const int64_t tokens : {256, 512, 1024}) {
    CaseSpec spec;
    spec.tokens = tokens;
    *results.add_cases() = MakeCase(spec);
    file.record_ends.push_back(SerializeResults(results).size() - 5);
  }
  file.bytes = SerializeResults(results);
  return file;
}

TEST(Wire, Crc32cMatchesThePublishedCheckValues) {
  EXPECT_EQ(wire::Crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(wire::Crc32c(std::string(32, '\0')), 0x8a9136aau);  // RFC 3720, B.4
  EXPECT_EQ(wire::Crc32c(""), 0u);
}

TEST(Wire, AVarintOfMoreThanTenBytesIsMalformed) {
  const std::string nine = "\x08" + std::string(9, '\xff');
  EXPECT_EQ(wire::ParseField(nine, nine.size()).state, wire::Field::State::kCut);
  const std::string ten = nine + '\x01';
  const wire::Field whole = wire::ParseField(ten, ten.size());
  EXPECT_EQ(whole.state, wire::Field::State::kWhole);
  EXPECT_EQ(whole.end, 11);
  const std::string eleven = nine + "\xff\x01";
  EXPECT_EQ(wire::ParseField(eleven, eleven.size()).state, wire::Field::State::kMalformed);
}

TEST(ResultReader, GivesBackWhatWasWritten) {
  const ResultSet sweep = MakeSweep();
  const absl::StatusOr<ResultFile> file = ReadResultBytes(SerializeResults(sweep), "bytes");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->torn_bytes, 0);
  EXPECT_EQ(file->results.format(), wire::kFormat);
  EXPECT_EQ(file->results.cases_size(), sweep.cases_size());
  EXPECT_EQ(SerializeResults(file->results), SerializeResults(sweep));
}

TEST(ResultReader, AFileIsOneValidMessageForOtherPrograms) {
  const ResultSet sweep = MakeSweep();
  ResultSet parsed;
  ASSERT_TRUE(parsed.ParseFromString(SerializeResults(sweep)));
  EXPECT_EQ(parsed.cases_size(), sweep.cases_size());
  EXPECT_EQ(parsed.record_checksums_size(), sweep.cases_size() + 1);
}

TEST(ResultReader, AnEmptyFileHasNoRecords) {
  const std::string path = Path("empty.pb");
  WriteBytes(path, "");
  const absl::StatusOr<ResultFile> file = ReadResultFile(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->results.cases_size(), 0);
  EXPECT_EQ(file->torn_bytes, 0);
}

TEST(ResultReader, StopsAtATornTailAndSaysSoWhereverTheFileIsCut) {
  const SmallFile file = MakeSmallFile();
  const size_t signature_bytes = wire::Signature().size();
  for (size_t cut = 0; cut <= file.bytes.size(); ++cut) {
    const absl::StatusOr<ResultFile> read =
        ReadResultBytes(absl::string_view(file.bytes).substr(0, cut), "cut");
    ASSERT_TRUE(read.ok()) << "cut at " << cut << ": " << read.status();
    int records = 0;
    size_t whole = cut >= signature_bytes ? signature_bytes : 0;
    for (const size_t end : file.record_ends) {
      if (cut < end) break;
      ++records;
      whole = cut >= end + 5 ? end + 5 : end;  // a cut checksum leaves its record unverified
    }
    EXPECT_EQ(read->results.environments_size() + read->results.cases_size(), records) << cut;
    EXPECT_EQ(read->whole_bytes, static_cast<int64_t>(whole)) << cut;
    EXPECT_EQ(read->torn_bytes, static_cast<int64_t>(cut - whole)) << cut;
  }
}

TEST(ResultReader, TakesZerosThatALossOfPowerLeftForATornTail) {
  const SmallFile file = MakeSmallFile();
  // The file's length reached the disk, the data from `from` on did not.
  for (size_t from = 0; from < file.bytes.size(); ++from) {
    std::string bytes = file.bytes.substr(0, from);
    bytes.resize(file.bytes.size(), '\0');
    const absl::StatusOr<ResultFile> read = ReadResultBytes(bytes, "zeros");
    if (from > 0 && from < wire::Signature().size()) {
      EXPECT_FALSE(read.ok()) << from;  // holds no record; better not taken for one of ours
      continue;
    }
    ASSERT_TRUE(read.ok()) << "zeros from " << from << ": " << read.status();
    size_t records = 0;
    // A record counts where its checksum is all there; trailing zeros of it are no loss.
    while (records < file.record_ends.size() &&
           bytes.substr(0, file.record_ends[records] + 5) ==
               file.bytes.substr(0, file.record_ends[records] + 5)) {
      ++records;
    }
    EXPECT_EQ(read->results.environments_size() + read->results.cases_size(),
              static_cast<int>(records))
        << from;
    EXPECT_EQ(read->whole_bytes + read->torn_bytes, static_cast<int64_t>(bytes.size())) << from;
  }
}

TEST(ResultReader, ADamagedLengthIsNotTakenForATornTail) {
  SmallFile file = MakeSmallFile();
  // The first record's length, two bytes behind the signature and the tag, now passes the end.
  const size_t length_at = wire::Signature().size() + 1;
  file.bytes[length_at + 1] = '\x7f';
  const absl::StatusOr<ResultFile> read = ReadResultBytes(file.bytes, "runs/a.pb");
  ASSERT_EQ(read.status().code(), absl::StatusCode::kDataLoss) << read.status();
  EXPECT_EQ(
      std::string(read.status().message()),
      "runs/a.pb: damaged at offset 17 of " + std::to_string(file.bytes.size()) +
          ": the length of field 2 passes the file's end, yet whole records follow; --salvage "
          "of //tools:render or //tools:merge reads what is whole");
}

TEST(ResultReader, EveryChangedByteIsAnErrorOrATornTailAndNeverAnotherResult) {
  const SmallFile file = MakeSmallFile();
  const absl::StatusOr<ResultFile> original = ReadResultBytes(file.bytes, "original");
  ASSERT_TRUE(original.ok());
  std::set<std::string> cases;
  for (const Case& result : original->results.cases()) cases.insert(result.SerializeAsString());
  for (size_t at = 0; at < file.bytes.size(); ++at) {
    for (const int flip : {0x01, 0x80, 0xff}) {
      std::string bytes = file.bytes;
      bytes[at] = static_cast<char>(bytes[at] ^ flip);
      const absl::StatusOr<ResultFile> read = ReadResultBytes(bytes, "flipped");
      if (!read.ok()) {
        EXPECT_EQ(read.status().message().find('\n'), absl::string_view::npos);
        continue;
      }
      // Only the tag of a checksum, or the last record, may change without being damage: then the
      // record counts as an unverified or unknown one.
      for (const Case& result : read->results.cases()) {
        if (at < file.record_ends[2]) {
          EXPECT_TRUE(cases.count(result.SerializeAsString())) << "byte " << at;
        }
      }
    }
  }
}

TEST(ResultReader, WhateverByteIsChangedAllOtherRecordsCanBeSalvaged) {
  const SmallFile small = MakeSmallFile();
  const ResultSet whole = ReadResultBytes(small.bytes, "whole")->results;
  for (size_t place = 0; place < small.bytes.size(); ++place) {
    std::string bytes = small.bytes;
    bytes[place] = static_cast<char>(bytes[place] ^ 0x41);
    const absl::StatusOr<ResultFile> file = ReadResultBytes(bytes, "flipped", Damage::kPassOver);
    if (place + 1 == wire::Signature().size()) {  // the format's version: it may be another layout
      EXPECT_EQ(file.status().code(), absl::StatusCode::kUnimplemented);
      continue;
    }
    ASSERT_TRUE(file.ok()) << place << ": " << file.status();
    // The signature is no record; any other place costs the record that it is in, but for the tag
    // of a checksum, without which a record is read unverified.
    const int lost = place < wire::Signature().size() ? 0 : 1;
    EXPECT_GE(file->results.cases_size() + file->results.environments_size(), 4 - lost) << place;
    EXPECT_GT(file->damaged_bytes + file->torn_bytes, 0) << place;
    EXPECT_NE(WhatWasLeftOut(*file), "");
    for (const Case& result : file->results.cases()) {
      const auto same = [&](const Case& one) {
        return one.SerializeAsString() == result.SerializeAsString();
      };
      EXPECT_TRUE(std::any_of(whole.cases().begin(), whole.cases().end(), same)) << place;
    }
  }
  EXPECT_EQ(WhatWasLeftOut(*ReadResultBytes(small.bytes, "whole", Damage::kPassOver)), "");
}

TEST(ResultReader, WhatHoldsNoRecordIsNotSalvaged) {
  const std::string text(5000, 'x');
  EXPECT_EQ(ReadResultBytes(text, "text", Damage::kPassOver).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ResultReader, RandomCorruptionNeverCrashesIt) {
  const std::string original = MakeSmallFile().bytes;
  std::mt19937_64 random(20240607);
  int errors = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = original;
    const int changes = 1 + random() % 8;
    for (int change = 0; change < changes && !bytes.empty(); ++change) {
      const size_t at = random() % bytes.size();
      switch (random() % 5) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes.erase(at, random() % 40);
          break;
        case 2:
          bytes.insert(at, std::string(random() % 12, static_cast<char>(random())));
          break;
        case 3:
          bytes.insert(at, bytes.substr(random() % bytes.size(), random() % 60));
          break;
        case 4:
          bytes.resize(at);
          break;
      }
    }
    const absl::StatusOr<ResultFile> read = ReadResultBytes(bytes, "random");
    if (!read.ok()) {
      ++errors;
      continue;
    }
    EXPECT_EQ(read->whole_bytes + read->torn_bytes, static_cast<int64_t>(bytes.size()));
    for (const Case& result : read->results.cases()) CaseKey(result);
  }
  EXPECT_GT(errors, 1000);
}

TEST(ResultReader, SomethingElseThanAResultFileIsAClearError) {
  const std::string path = Path("notes.txt");
  WriteBytes(path, "\nThese are notes about an experiment.\n");
  const absl::StatusOr<ResultFile> read = ReadResultFile(path);
  ASSERT_EQ(read.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(read.status().message()),
            path +
                ": is not a result file (it does not begin with the signature "
                "\"tfb.ResultSet/1\")");
}

TEST(ResultReader, AMissingFileAndAFolderAreClearErrors) {
  const std::string missing = Path("missing.pb");
  const absl::Status status = ReadResultFile(missing).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(std::string(status.message()), missing + ": cannot open: No such file or directory");
  EXPECT_EQ(ReadResultFile(::testing::TempDir()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ResultReader, ReadsConcatenatedFilesAndKeepsEachCaseWithItsEnvironment) {
  ResultSet first;
  *first.add_environments() = MakeEnvironment("monday");
  CaseSpec spec;
  spec.environment_id = "monday";
  *first.add_cases() = MakeCase(spec);
  ResultSet second;
  *second.add_environments() = MakeEnvironment("tuesday");
  spec.environment_id = "tuesday";
  *second.add_cases() = MakeCase(spec);
  const absl::StatusOr<ResultFile> read =
      ReadResultBytes(SerializeResults(first) + SerializeResults(second), "both");
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->results.cases_size(), 2);
  EXPECT_EQ(FindEnvironment(read->results, read->results.cases(1).environment_id()),
            &read->results.environments(1));
  EXPECT_EQ(FindEnvironment(read->results, "wednesday"), nullptr);
  EXPECT_EQ(CasesByKey(read->results, "tuesday").size(), 1u);
  EXPECT_EQ(CasesByKey(read->results).begin()->second, &read->results.cases(1));
}

TEST(ResultReader, UnknownFieldsSurviveARewrite) {
  // Field 1000 of a case, field 900 of an environment and field 77 of the set, from a later
  // version.
  ResultSet results = MakeSweep();
  results.mutable_cases(2)
      ->GetReflection()
      ->MutableUnknownFields(results.mutable_cases(2))
      ->AddLengthDelimited(1000, "later");
  Environment* environment = results.mutable_environments(0);
  environment->GetReflection()->MutableUnknownFields(environment)->AddVarint(900, 7);
  results.GetReflection()->MutableUnknownFields(&results)->AddLengthDelimited(77, "summary");
  const std::string path = Path("unknown.pb");
  ASSERT_TRUE(WriteResultFile(path, results).ok());
  const absl::StatusOr<ResultFile> read = ReadResultFile(path);
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_TRUE(WriteResultFile(path, read->results).ok());
  const absl::StatusOr<ResultFile> again = ReadResultFile(path);
  ASSERT_TRUE(again.ok()) << again.status();

  const auto unknown =
      [](const google::protobuf::Message& message) -> const google::protobuf::UnknownFieldSet& {
    return message.GetReflection()->GetUnknownFields(message);
  };
  ASSERT_EQ(unknown(again->results.cases(2)).field_count(), 1);
  EXPECT_EQ(unknown(again->results.cases(2)).field(0).length_delimited(), "later");
  ASSERT_EQ(unknown(again->results.environments(0)).field_count(), 1);
  EXPECT_EQ(unknown(again->results.environments(0)).field(0).varint(), 7u);
  ASSERT_EQ(unknown(again->results).field_count(), 1);
  EXPECT_EQ(unknown(again->results).field(0).length_delimited(), "summary");
}

TEST(ResultReader, AFileOfANewerFormatIsCalledThat) {
  std::string bytes;
  wire::AppendLengthDelimited(wire::kFormatField, "tfb.ResultSet/2", &bytes);
  const absl::Status status = ReadResultBytes(bytes + "more", "new.pb").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(status.message(),
            "new.pb: is a result file of format tfb.ResultSet/2; this build reads tfb.ResultSet/1: "
            "use a newer one");
}

TEST(ResultReader, AFileBeyondTwoGibibytesIsReadUpToItsTornTail) {
  const std::string path = Path("sparse.pb");
  const std::string bytes = MakeSmallFile().bytes;
  WriteBytes(path, bytes);
  const int64_t size = (int64_t{1} << 31) + 12345;  // zeros from there on, which take no disk
  ASSERT_EQ(truncate(path.c_str(), size), 0);
  const absl::StatusOr<ResultFile> read = ReadResultFile(path);
  unlink(path.c_str());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->results.cases_size(), 3);
  EXPECT_EQ(read->torn_bytes, size - static_cast<int64_t>(bytes.size()));
}

TEST(ResultReader, ALengthBeyondTheLargestRecordIsDamageAndAllocatesNothing) {
  // The tag of a record of cases, then 1 << 40 as its length.
  const char head[] = {wire::kCasesField << 3 | 2, '\x80', '\x80', '\x80', '\x80', '\x80', '\x20'};
  const std::string bytes = wire::Signature() + std::string(head, sizeof(head)) + "x";
  EXPECT_EQ(ReadResultBytes(bytes, "long").status().code(), absl::StatusCode::kDataLoss);
}

TEST(CaseKey, DiffersWhereAnyPartOfTheKeyDiffers) {
  const Case base = MakeCase(CaseSpec());
  std::set<std::string> keys = {CaseKey(base)};
  int variants = 1;
  const auto expect_new = [&](const Case& changed) {
    ++variants;
    EXPECT_TRUE(keys.insert(CaseKey(changed)).second) << CaseKey(changed);
  };
  const std::vector<void (*)(Case::Key*)> changes = {
      [](Case::Key* key) { key->set_technique("other"); },
      [](Case::Key* key) { (*key->mutable_options())["a"] = "1"; },
      [](Case::Key* key) { (*key->mutable_options())["a"] = "1,b=2"; },
      [](Case::Key* key) {
        (*key->mutable_options())["a"] = "1";
        (*key->mutable_options())["b"] = "2";
      },
      [](Case::Key* key) { key->set_device(DEVICE_TYPE_CUDA); },
      [](Case::Key* key) { key->set_dtype(ELEMENT_TYPE_BF16); },
      [](Case::Key* key) { key->set_dtype(static_cast<ElementType>(40)); },
      [](Case::Key* key) { key->set_dtype(static_cast<ElementType>(41)); },
      [](Case::Key* key) { key->mutable_problem()->set_batch(2); },
      [](Case::Key* key) { key->mutable_problem()->set_query_heads(2); },
      [](Case::Key* key) { key->mutable_problem()->set_kv_heads(2); },
      [](Case::Key* key) { key->mutable_problem()->set_query_tokens(2); },
      [](Case::Key* key) { key->mutable_problem()->set_kv_tokens(2); },
      [](Case::Key* key) { key->mutable_problem()->set_head_dim(2); },
      [](Case::Key* key) { key->mutable_problem()->set_value_dim(2); },
      [](Case::Key* key) { key->mutable_problem()->set_causal(false); },
      [](Case::Key* key) { key->mutable_input()->set_name("peaked"); },
      [](Case::Key* key) { key->mutable_input()->set_file("x"); },
      [](Case::Key* key) { key->mutable_input()->set_model("x"); },
      [](Case::Key* key) { key->mutable_input()->set_layer("x"); },
      [](Case::Key* key) { (*key->mutable_input()->mutable_details())["x"] = "y"; },
      [](Case::Key* key) { key->set_seed(2); },
      [](Case::Key* key) { key->set_threads(1); },
      [](Case::Key* key) { key->set_purpose(Case::PURPOSE_ACCURACY); },
      [](Case::Key* key) { key->set_pass(Case::PASS_BACKWARD); },
      [](Case::Key* key) { key->set_pass(Case::PASS_TRAINING); },
      [](Case::Key* key) { key->set_pass(static_cast<Case::Pass>(40)); },
      [](Case::Key* key) { key->set_pass(static_cast<Case::Pass>(41)); },
  };
  for (const auto& change : changes) {
    Case changed = base;
    change(changed.mutable_key());
    expect_new(changed);
  }
  EXPECT_EQ(keys.size(), static_cast<size_t>(variants));
}

TEST(CaseKey, DependsOnTheKeyAlone) {
  Case one = MakeCase(CaseSpec());
  Case other = one;
  other.set_environment_id("elsewhere");
  other.mutable_outcome()->set_status(Outcome::STATUS_FAILED);
  other.mutable_technique()->set_title("A new title");
  EXPECT_EQ(CaseKey(one), CaseKey(other));
}

TEST(CaseKey, ReadsAsOneLine) {
  CaseSpec spec;
  spec.technique = "near";
  spec.option_name = "window";
  spec.option_value = "256";
  EXPECT_EQ(CaseKey(MakeCase(spec)),
            "technique=near options=window%3D256 device=cpu dtype=f32 batch=1 query_heads=8 "
            "kv_heads=8 query_tokens=512 kv_tokens=512 head_dim=64 value_dim=64 causal=1 "
            "input=gaussian file= model= layer= details= seed=1 threads=2 purpose=scaling");
}

// So that a file of before there were other passes has the same cases.
TEST(CaseKey, OfTheForwardPassSaysNothingOfIt) {
  CaseSpec spec;
  const Case silent = MakeCase(spec);
  Case forward = silent;
  forward.mutable_key()->set_pass(Case::PASS_FORWARD);
  EXPECT_EQ(forward.SerializeAsString(), silent.SerializeAsString());
  EXPECT_EQ(CaseKey(forward).find("pass"), std::string::npos);
  spec.pass = Case::PASS_TRAINING;
  EXPECT_EQ(CaseKey(MakeCase(spec)), CaseKey(forward) + " pass=training");
}

TEST(Wire, AFieldIsWholeCutOrMalformed) {
  using State = wire::Field::State;
  const std::string largest("\x0a\x80\x80\x80\x20", 5);  // of 64 MiB
  const std::string too_large("\x0a\x81\x80\x80\x20", 5);
  const struct {
    std::string head;
    int64_t available;
    State state;
    int number, wire_type;
    int64_t payload_begin, end;
  } kRows[] = {
      {"", 0, State::kCut, 0, 0, 0, 0},
      {std::string(1, '\0'), 1, State::kMalformed, 0, 0, 0, 0},
      {"\x80", 1, State::kCut, 0, 0, 0, 0},
      {"\x08", 1, State::kCut, 1, 0, 1, 0},
      {"\x08\x05", 2, State::kWhole, 1, 0, 1, 2},
      {"\x10\x85\x01", 3, State::kWhole, 2, 0, 1, 3},
      {"\x10\x85\x01", 2, State::kCut, 2, 0, 1, 3},
      {"\x19"
       "12345678",
       9, State::kWhole, 3, 1, 1, 9},
      {"\x19"
       "1234567",
       8, State::kCut, 3, 1, 1, 9},
      {"\x25"
       "1234",
       5, State::kWhole, 4, 5, 1, 5},
      {"\x25"
       "123",
       4, State::kCut, 4, 5, 1, 5},
      {"\x0a\x03"
       "abc",
       5, State::kWhole, 1, 2, 2, 5},
      {"\x0a\x03"
       "ab",
       4, State::kCut, 1, 2, 2, 5},
      {"\x0a", 1, State::kCut, 1, 2, 1, 0},
      {"\x0b", 1, State::kMalformed, 1, 3, 1, 0},
      {"\x0e", 1, State::kMalformed, 1, 6, 1, 0},
      {"\x0f", 1, State::kMalformed, 1, 7, 1, 0},
      {"\xfd\xff\xff\xff\x0f"
       "1234",
       9, State::kWhole, (1 << 29) - 1, 5, 5, 9},
      {"\xfd\xff\xff\xff\x1f"
       "1234",
       9, State::kMalformed, 0, 0, 0, 0},
      {largest, 5, State::kCut, 1, 2, 5, 5 + wire::kMaxRecordBytes},
      {largest, 5 + wire::kMaxRecordBytes, State::kWhole, 1, 2, 5, 5 + wire::kMaxRecordBytes},
      {too_large, 6 + wire::kMaxRecordBytes, State::kMalformed, 1, 2, 1, 0},
  };
  for (const auto& row : kRows) {
    const wire::Field field = wire::ParseField(row.head, row.available);
    const std::string name = ::testing::PrintToString(row.head);
    EXPECT_EQ(field.state, row.state) << name;
    EXPECT_EQ(field.number, row.number) << name;
    EXPECT_EQ(field.wire_type, row.wire_type) << name;
    EXPECT_EQ(field.payload_begin, row.payload_begin) << name;
    EXPECT_EQ(field.end, row.end) << name;
  }
}

std::string Framed(const std::string& payload) {
  std::string frame;
  wire::AppendLengthDelimited(wire::kCasesField, payload, &frame);
  wire::AppendChecksum(std::string(frame), &frame);
  return frame;
}

TEST(ResultReader, DamageSaysWhereItIsAndOfWhatKind) {
  const SmallFile small = MakeSmallFile();
  const size_t size = small.bytes.size();
  const std::string checksum = small.bytes.substr(small.record_ends[0], 5);
  std::string flipped = small.bytes, other_signature;
  flipped[small.record_ends[1] - 1] = static_cast<char>(flipped[small.record_ends[1] - 1] ^ 1);
  wire::AppendLengthDelimited(wire::kFormatField, "tfb.ResultSet/2", &other_signature);
  const std::string zeros(3, '\0');
  const struct {
    std::string bytes;
    size_t offset;
    std::string what;
  } kRows[] = {
      {small.bytes + checksum, size, "a checksum that follows no record"},
      {flipped, small.record_ends[0] + 5,
       absl::StrCat("a record of ", small.record_ends[1] - small.record_ends[0] - 5,
                    " bytes does not match its checksum")},
      {small.bytes + Framed("\xff\xff"), size, "a record of field 3 with 4 bytes does not parse"},
      {small.bytes + other_signature, size, "a signature other than \"tfb.ResultSet/1\""},
      {small.bytes + "\x0b", size, "no record begins here"},
      {small.bytes + zeros + "x", size, "no record begins here"},
      {small.bytes.substr(0, small.record_ends[3]) + zeros + "x", small.record_ends[2] + 5,
       absl::StrCat("a record of ", small.record_ends[3] - small.record_ends[2] - 5,
                    " bytes is followed by something else than a record")},
  };
  for (const auto& row : kRows) {
    const absl::Status status = ReadResultBytes(row.bytes, "a.pb").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(std::string(status.message()),
              absl::StrCat("a.pb: damaged at offset ", row.offset, " of ", row.bytes.size(), ": ",
                           row.what,
                           "; --salvage of //tools:render or //tools:merge reads what is whole"));
  }
}

TEST(ResultReader, WhatWasLeftOutIsSaidInOneLine) {
  const auto text = [](int64_t damaged, int64_t places, int64_t torn) {
    ResultFile file;
    file.path = "a.pb";
    file.damaged_bytes = damaged;
    file.damaged_places = places;
    file.torn_bytes = torn;
    return WhatWasLeftOut(file);
  };
  EXPECT_EQ(text(0, 0, 0), "");
  EXPECT_EQ(text(0, 0, 1), "a.pb: left out: 1 bytes of a torn last record");
  EXPECT_EQ(text(1, 1, 0), "a.pb: left out: 1 bytes in 1 place are damaged");
  EXPECT_EQ(text(9, 2, 3),
            "a.pb: left out: 9 bytes in 2 places are damaged, 3 bytes of a torn last record");
}

// A file of many times what is read at once, with records of all sizes.
std::string MakeLongFile() {
  ResultSet results;
  *results.add_environments() = MakeEnvironment();
  for (int i = 1; i <= 60; ++i) {
    CaseSpec spec;
    spec.tokens = i;
    Case& result = *results.add_cases() = MakeCase(spec);
    for (int sample = 0; sample < i * i; ++sample) {
      result.mutable_outcome()->mutable_timing()->add_run_ns(sample);
    }
  }
  return SerializeResults(results);
}

TEST(ResultReader, AFileIsReadLikeItsBytesWhereverItIsDamaged) {
  const std::string whole = MakeLongFile();
  ASSERT_GT(whole.size(), size_t{500} << 10);
  const std::string path = Path("long.pb");
  for (size_t place = 100; place <= whole.size(); place += whole.size() / 12) {
    std::string bytes = whole;
    if (place + 1 < whole.size()) bytes[place] = static_cast<char>(bytes[place] ^ 0x55);
    WriteBytes(path, bytes);
    for (const Damage damage : {Damage::kRefuse, Damage::kPassOver}) {
      const absl::StatusOr<ResultFile> of_file = ReadResultFile(path, damage);
      const absl::StatusOr<ResultFile> of_bytes = ReadResultBytes(bytes, path, damage);
      ASSERT_EQ(of_file.status(), of_bytes.status()) << place;
      if (!of_file.ok()) continue;
      EXPECT_EQ(SerializeResults(of_file->results), SerializeResults(of_bytes->results)) << place;
      EXPECT_EQ(of_file->damaged_bytes, of_bytes->damaged_bytes) << place;
      EXPECT_EQ(of_file->damaged_places, of_bytes->damaged_places) << place;
      EXPECT_EQ(of_file->whole_bytes, of_bytes->whole_bytes) << place;
      EXPECT_EQ(of_file->torn_bytes, of_bytes->torn_bytes) << place;
    }
  }
}

TEST(ResultReader, AFileThatIsCutWhileItIsReadEndsWithATornTail) {
  const std::string whole = MakeLongFile();
  const std::string path = Path("shrinking.pb");
  WriteBytes(path, whole);
  const auto reader = ResultReader::Open(path);
  ASSERT_TRUE(reader.ok()) << reader.status();
  const int64_t left = static_cast<int64_t>(whole.size()) - 1000;
  ASSERT_EQ(truncate(path.c_str(), left), 0);
  ResultSet results;
  absl::StatusOr<bool> more = true;
  while (more.ok() && *more) more = (*reader)->Next(&results);
  ASSERT_TRUE(more.ok()) << more.status();
  EXPECT_EQ(results.cases_size(), 59);
  EXPECT_EQ((*reader)->whole_bytes() + (*reader)->torn_bytes(), left);
}

TEST(CaseKey, EscapesWhatWouldMakeItAmbiguous) {
  Case::Key key;
  key.set_technique("a b%c,d=e\x7f\x1f!~\xc3\xa9");
  key.set_options_text("as=it,is");
  EXPECT_EQ(CanonicalOptions(key), "as=it,is");
  const std::string text = CaseKey(key);
  EXPECT_EQ(text.substr(0, text.find(" device")),
            "technique=a%20b%25c%2Cd%3De%7F%1F!~\xc3\xa9 options=as%3Dit%2Cis");
  (*key.mutable_options())["b,"] = "2";
  (*key.mutable_options())["a"] = "=";
  EXPECT_EQ(CanonicalOptions(key), "a=%3D,b%2C=2");
}

TEST(Machine, IsSaidByEverythingThatTimesDependOn) {
  ResultSet results;
  *results.add_environments() = MakeEnvironment("one");
  Environment& two = *results.add_environments() = MakeEnvironment("two");
  EXPECT_EQ(MachineOf(results, "one"), MachineOf(results, "two"));
  EXPECT_EQ(MachineDifferences(results.environments(0), two), std::vector<std::string>());
  two.set_git_dirty(false);
  two.clear_compiler();
  two.set_program_checksum(0xbeef);
  Gpu* gpu = two.add_gpus();
  gpu->set_name("A GPU");
  gpu->set_driver("550");
  gpu->set_toolkit("12");
  EXPECT_EQ(MachineOf(results, "two"),
            "host=bench-1 system=Linux%206.1 processor=Imaginary%20CPU%209000 cores=2 SIMD=AVX-512 "
            "GPUs=A%20GPU%2C%20driver%20550%2C%20toolkit%2012 compiler= CUDA%20compiler= "
            "compiler%20flags=-O2 compilation%20mode=opt "
            "commit=0123456789abcdef0123456789abcdef01234567 program's%20checksum=0000beef");
  EXPECT_EQ(MachineOf(results, "three, at"), "unknown three%2C%20at");
  EXPECT_EQ(MachineDifferences(results.environments(0), two),
            (std::vector<std::string>{
                "GPUs: unknown / A GPU, driver 550, toolkit 12", "compiler: g++ 12.2.0 / unknown",
                "commit: 0123456789abcdef0123456789abcdef01234567 with changes / "
                "0123456789abcdef0123456789abcdef01234567",
                "program's checksum: unknown / 0000beef"}));
}

}  // namespace
}  // namespace tfb
