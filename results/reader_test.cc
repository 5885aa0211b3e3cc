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

}  // namespace
}  // namespace tfb
