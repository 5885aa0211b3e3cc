#include "results/merge.h"

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/unknown_field_set.h"
#include "gtest/gtest.h"
#include "results/appender.h"
#include "results/reader.h"
#include "results/synthetic.h"

namespace tfb {
namespace {

namespace fs = std::filesystem;
using ::absl::StrContains;
using ::tfb::synthetic::MakeSweep;

class Merge : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) /
              ::testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }

  std::string Write(const std::string& name, const ResultSet& results) {
    const std::string path = (folder_ / name).string();
    EXPECT_TRUE(WriteResultFile(path, results).ok());
    return path;
  }

  // Makes the sweep as another process on another machine would have written it.
  static ResultSet Elsewhere() {
    ResultSet results = MakeSweep();
    results.mutable_environments(0)->set_id("other");
    results.mutable_environments(0)->set_host("bench-2");
    for (Case& result : *results.mutable_cases()) result.set_environment_id("other");
    return results;
  }

  fs::path folder_;
};

TEST_F(Merge, OfShardsIsTheWholeSweep) {
  const ResultSet whole = MakeSweep();
  std::vector<std::string> paths;
  for (int shard = 0; shard < 4; ++shard) {
    ResultSet part;
    *part.mutable_environments() = whole.environments();
    for (int i = shard; i < whole.cases_size(); i += 4) *part.add_cases() = whole.cases(i);
    paths.push_back(Write(absl::StrCat("shard", shard, ".pb"), part));
  }
  absl::StatusOr<Merged> merged = MergeResultFiles(paths);
  ASSERT_TRUE(merged.ok()) << merged.status();
  EXPECT_EQ(merged->files, 4);
  EXPECT_EQ(merged->replaced_cases, 0);
  EXPECT_EQ(merged->repeated_environments, 3);
  EXPECT_EQ(merged->results.environments_size(), 1);
  ASSERT_EQ(merged->results.cases_size(), whole.cases_size());
  const auto expected = CasesByKey(whole);
  for (const Case& result : merged->results.cases()) {
    EXPECT_EQ(result.SerializeAsString(), expected.at(CaseKey(result))->SerializeAsString());
  }
}

TEST_F(Merge, KeepsMachinesApart) {
  absl::StatusOr<Merged> merged =
      MergeResultFiles({Write("a.pb", MakeSweep()), Write("b.pb", Elsewhere())});
  ASSERT_TRUE(merged.ok()) << merged.status();
  EXPECT_EQ(merged->results.environments_size(), 2);
  EXPECT_EQ(merged->results.cases_size(), 2 * MakeSweep().cases_size());
  EXPECT_EQ(merged->replaced_cases, 0);
}

TEST_F(Merge, LetsTheLaterOfEqualCasesWin) {
  ResultSet later = MakeSweep();
  later.mutable_cases(3)->mutable_outcome()->set_flops(7);
  absl::StatusOr<Merged> merged =
      MergeResultFiles({Write("a.pb", MakeSweep()), Write("b.pb", later)});
  ASSERT_TRUE(merged.ok()) << merged.status();
  EXPECT_EQ(merged->replaced_cases, MakeSweep().cases_size());
  ASSERT_EQ(merged->results.cases_size(), MakeSweep().cases_size());
  EXPECT_EQ(CasesByKey(merged->results).at(CaseKey(later.cases(3)))->outcome().flops(), 7);
}

TEST_F(Merge, KeepsUnknownFieldsOfFilesEnvironmentsAndCases) {
  ResultSet results = MakeSweep();
  const auto add = [](google::protobuf::Message* message) {
    message->GetReflection()->MutableUnknownFields(message)->AddVarint(1234, 56);
  };
  add(&results);
  add(results.mutable_environments(0));
  add(results.mutable_cases(0));
  absl::StatusOr<Merged> merged =
      MergeResultFiles({Write("a.pb", results), Write("b.pb", Elsewhere())});
  ASSERT_TRUE(merged.ok()) << merged.status();
  const auto count = [](const google::protobuf::Message& message) {
    return message.GetReflection()->GetUnknownFields(message).field_count();
  };
  EXPECT_EQ(count(merged->results), 1);
  EXPECT_EQ(count(merged->results.environments(0)), 1);
  EXPECT_EQ(count(merged->results.cases(0)), 1);
}

TEST_F(Merge, RefusesOneIdForTwoEnvironments) {
  ResultSet other = MakeSweep();
  other.mutable_environments(0)->set_cpu_model("Another");
  const std::string a = Write("a.pb", MakeSweep()), b = Write("b.pb", other);
  const absl::Status status = MergeResultFiles({a, b}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(StrContains(status.message(), a) && StrContains(status.message(), b)) << status;
  // Environments that differ only in unknown fields are different.
  ResultSet newer = MakeSweep();
  Environment* environment = newer.mutable_environments(0);
  environment->GetReflection()->MutableUnknownFields(environment)->AddVarint(1234, 56);
  EXPECT_FALSE(MergeResultFiles({a, Write("c.pb", newer)}).ok());
}

TEST_F(Merge, RefusesACaseWithoutItsEnvironment) {
  ResultSet results = MakeSweep();
  results.mutable_cases(2)->set_environment_id("gone");
  const std::string path = Write("a.pb", results);
  const absl::Status status = MergeResultFiles({path}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(StrContains(status.message(), path) && StrContains(status.message(), "gone"))
      << status;
}

TEST_F(Merge, NamesTheFileThatCannotBeRead) {
  const std::string good = Write("a.pb", MakeSweep());
  const std::string text = (folder_ / "text.pb").string();
  std::ofstream(text) << "not results";
  for (const std::string& bad : {text, (folder_ / "none.pb").string()}) {
    const absl::Status status = MergeResultFiles({good, bad}).status();
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(StrContains(status.message(), bad)) << status;
  }
  // A flipped bit in the middle.
  std::stringstream contents;
  contents << std::ifstream(good, std::ios::binary).rdbuf();
  std::string bytes = contents.str();
  bytes[bytes.size() / 2] ^= 1;
  const std::string damaged = (folder_ / "damaged.pb").string();
  std::ofstream(damaged, std::ios::binary) << bytes;
  const absl::Status status = MergeResultFiles({damaged, good}).status();
  EXPECT_TRUE(StrContains(status.message(), damaged)) << status;
}

TEST_F(Merge, TellsOfATornTailAndKeepsTheRest) {
  const std::string torn = Write("torn.pb", MakeSweep());
  fs::resize_file(torn, fs::file_size(torn) - 100);
  absl::StatusOr<Merged> merged = MergeResultFiles({torn, Write("b.pb", Elsewhere())});
  ASSERT_TRUE(merged.ok()) << merged.status();
  EXPECT_EQ(merged->results.cases_size(), 2 * MakeSweep().cases_size() - 1);
  ASSERT_EQ(merged->notes.size(), 1u);
  EXPECT_TRUE(StrContains(merged->notes[0], torn)) << merged->notes[0];
  EXPECT_TRUE(StrContains(merged->notes[0], "torn"));
}

TEST_F(Merge, LeavesOutTheCasesOfADamagedEnvironmentWhereThatIsAskedFor) {
  // Two environments, of which the first is damaged; three cases are its own.
  ResultSet both = MakeSweep();
  *both.add_environments() = Elsewhere().environments(0);
  for (int i = 3; i < both.cases_size(); ++i) both.mutable_cases(i)->set_environment_id("other");
  std::string bytes = SerializeResults(both);
  bytes[100] ^= 1;
  const std::string damaged = (folder_ / "damaged.pb").string();
  std::ofstream(damaged, std::ios::binary) << bytes;
  EXPECT_EQ(MergeResultFiles({damaged}).status().code(), absl::StatusCode::kDataLoss);
  absl::StatusOr<Merged> merged = MergeResultFiles({damaged}, Damage::kPassOver);
  ASSERT_TRUE(merged.ok()) << merged.status();
  EXPECT_EQ(merged->files, 1);
  EXPECT_EQ(merged->results.environments_size(), 1);
  EXPECT_EQ(merged->results.cases_size(), both.cases_size() - 3);
  EXPECT_EQ(merged->results.format(), "tfb.ResultSet/1");
  ASSERT_EQ(merged->notes.size(), 2u);
  EXPECT_TRUE(StrContains(merged->notes[0], " bytes in 1 place are damaged")) << merged->notes[0];
  EXPECT_EQ(merged->notes[1], damaged + ": left out: 3 cases whose environment is damaged");
}

TEST_F(Merge, RefusalsNameFilesAndEnvironments) {
  ResultSet other = MakeSweep();
  other.mutable_environments(0)->set_host("another");
  const std::string a = Write("a.pb", MakeSweep()), b = Write("b.pb", other);
  EXPECT_EQ(MergeResultFiles({a, b}).status().message(),
            b + ": environment \"env\" is another one than in " + a +
                "; are these results of one and the same process?");
  other = MakeSweep();
  other.mutable_cases(2)->set_environment_id("gone");
  const std::string c = Write("c.pb", other);
  EXPECT_EQ(MergeResultFiles({c}).status().message(),
            c + ": a case names environment \"gone\", which is not there");
}

}  // namespace
}  // namespace tfb
