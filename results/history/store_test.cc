#include "results/history/store.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "results/history/testing.h"

namespace tfb {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kMarker[] = "tfb-history";

std::string ReadBytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

void WriteBytes(const fs::path& path, absl::string_view bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// The files of a folder with their bytes.
std::map<std::string, std::string> FilesOf(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file())
      files[fs::relative(entry.path(), folder)] = ReadBytes(entry.path());
  }
  return files;
}

HistoryRun RunWithCase(int number) {
  HistoryRun run = MakeHistoryRun(number);
  AddHistoryValue(AddHistoryCase(&run, "near"), HISTORY_METRIC_TIME_OVER_DENSE, 0.25 + number);
  return run;
}

// Runs `work` in a process of its own and returns how it ended, as waitpid does.
int InChild(const std::function<int()>& work) {
  const pid_t child = fork();
  if (child == 0) _exit(work());
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
}

class StoreTest : public testing::Test {
 protected:
  StoreTest() {
    std::string path = testing::TempDir() + "/store-XXXXXX";
    EXPECT_NE(mkdtemp(path.data()), nullptr);
    base_ = path;
    folder_ = (base_ / "store").string();
  }
  ~StoreTest() override { fs::remove_all(base_); }

  HistoryStore Store() { return *HistoryStore::OpenOrCreate(folder_); }
  std::vector<std::string> NamesIn(const HistoryStore& store) {
    std::vector<std::string> names;
    const absl::StatusOr<StoredRuns> stored = store.Read();
    EXPECT_TRUE(stored.ok()) << stored.status();
    if (!stored.ok()) return names;
    for (const StoredRun& run : stored->runs) names.push_back(run.name);
    return names;
  }
  fs::path PathOf(const HistoryRun& run) {
    return fs::path(folder_) / "runs" / absl::StrCat(RunName(run), ".pb.gz");
  }

  fs::path base_;
  std::string folder_;
};

TEST_F(StoreTest, GivesBackWhatWasAddedInTheOrderOfTime) {
  const HistoryStore store = Store();
  ASSERT_TRUE(store.Add({RunWithCase(2), RunWithCase(1)}).ok());
  ASSERT_TRUE(store.Add({RunWithCase(3)}).ok());
  const absl::StatusOr<StoredRuns> stored = HistoryStore::Open(folder_)->Read();
  ASSERT_TRUE(stored.ok());
  ASSERT_EQ(stored->runs.size(), 3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(stored->runs[i].run.SerializeAsString(), RunWithCase(i + 1).SerializeAsString());
    EXPECT_EQ(stored->runs[i].name, RunName(RunWithCase(i + 1)));
  }
}

TEST_F(StoreTest, NamesSayWhenAndWhatWasMeasured) {
  HistoryRun run = MakeHistoryRun(0);
  EXPECT_THAT(RunName(run), testing::StartsWith("20231114T221320Z-000000000000-"));
  run.mutable_environments(0)->set_git_commit("../../etc");
  EXPECT_THAT(RunName(run), testing::StartsWith("20231114T221320Z-unknown-"));
  HistoryRun other = run;
  other.mutable_environments(0)->set_id("another process");
  EXPECT_NE(RunName(run), RunName(other));
}

TEST_F(StoreTest, TheSameRunAgainChangesNothing) {
  const HistoryStore store = Store();
  ASSERT_TRUE(store.Add({RunWithCase(1)}).ok());
  const auto before = FilesOf(folder_);
  const absl::StatusOr<Additions> again = store.Add({RunWithCase(1), RunWithCase(1)});
  ASSERT_TRUE(again.ok());
  EXPECT_THAT(again->added, IsEmpty());
  EXPECT_EQ(again->known.size(), 2);
  EXPECT_EQ(FilesOf(folder_), before);
}

TEST_F(StoreTest, ARunWithOtherContentsIsRefusedAndNothingOfTheCallAdded) {
  const HistoryStore store = Store();
  ASSERT_TRUE(store.Add({RunWithCase(1)}).ok());
  const auto before = FilesOf(folder_);
  HistoryRun resumed = RunWithCase(1);
  AddHistoryCase(&resumed, "far");
  const absl::StatusOr<Additions> refused = store.Add({RunWithCase(2), resumed});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr(PathOf(resumed).string()));
  EXPECT_EQ(FilesOf(folder_), before);
  // The same within one call.
  EXPECT_EQ(store
                .Add({RunWithCase(3),
                      [] {
                        HistoryRun other = RunWithCase(3);
                        AddHistoryCase(&other, "far");
                        return other;
                      }()})
                .status()
                .code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(FilesOf(folder_), before);
}

TEST_F(StoreTest, AFileCutAnywhereIsAnErrorThatNamesItOrANote) {
  const HistoryStore store = Store();
  ASSERT_TRUE(store.Add({RunWithCase(1), RunWithCase(2)}).ok());
  const fs::path path = PathOf(RunWithCase(1));
  const std::string whole = ReadBytes(path);
  for (size_t size = 0; size < whole.size(); ++size) {
    WriteBytes(path, absl::string_view(whole).substr(0, size));
    const absl::StatusOr<StoredRuns> stored = store.Read();
    ASSERT_EQ(stored.status().code(), absl::StatusCode::kDataLoss) << size;
    ASSERT_THAT(std::string(stored.status().message()), HasSubstr(path.string()));
    const absl::StatusOr<StoredRuns> salvaged = store.Read(Damage::kPassOver);
    ASSERT_TRUE(salvaged.ok());
    ASSERT_EQ(salvaged->runs.size(), 1);
    ASSERT_EQ(salvaged->notes.size(), 1);
    ASSERT_THAT(salvaged->notes[0], HasSubstr(path.string()));
  }
  // No addition repairs or replaces it in silence.
  EXPECT_EQ(store.Add({RunWithCase(1)}).status().code(), absl::StatusCode::kDataLoss);
  WriteBytes(path, whole + "x");
  EXPECT_EQ(store.Read().status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(StoreTest, EveryChangedByteOfAFileIsFound) {
  const HistoryStore store = Store();
  ASSERT_TRUE(store.Add({RunWithCase(1)}).ok());
  const fs::path path = PathOf(RunWithCase(1));
  const std::string whole = ReadBytes(path);
  int without_meaning = 0;
  // The bytes before 10 are gzip's head, which has the time and the system of the writer.
  for (size_t place = 10; place < whole.size(); ++place) {
    std::string damaged = whole;
    damaged[place] ^= 0x10;
    WriteBytes(path, damaged);
    const absl::StatusOr<StoredRuns> stored = store.Read();
    if (stored.ok()) {  // a bit that fills up the last byte of the compressed data
      ASSERT_EQ(stored->runs[0].run.SerializeAsString(), RunWithCase(1).SerializeAsString());
      ++without_meaning;
    } else {
      ASSERT_EQ(stored.status().code(), absl::StatusCode::kDataLoss) << place;
    }
  }
  EXPECT_LE(without_meaning, 1);
}

TEST_F(StoreTest, RefusesAStoreAndARunOfANewerVersion) {
  const HistoryStore store = Store();
  HistoryRun newer = RunWithCase(1);
  newer.set_format("tfb.HistoryRun/2");
  WriteBytes(PathOf(newer), PackRun(newer));
  for (const Damage damage : {Damage::kRefuse, Damage::kPassOver}) {
    const absl::Status status = store.Read(damage).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("a newer version of this program"));
  }
  WriteBytes(fs::path(folder_) / kMarker, "tfb.History/2\n");
  for (const absl::Status& status :
       {HistoryStore::Open(folder_).status(), HistoryStore::OpenOrCreate(folder_).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("a newer version of this program"));
  }
  EXPECT_EQ(ReadBytes(fs::path(folder_) / kMarker), "tfb.History/2\n");
}

TEST_F(StoreTest, AFolderThatIsNoStoreIsLeftAlone) {
  EXPECT_EQ(HistoryStore::Open(folder_).status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(fs::exists(folder_));
  fs::create_directories(folder_);
  EXPECT_EQ(HistoryStore::Open(folder_).status().code(), absl::StatusCode::kNotFound);
  WriteBytes(fs::path(folder_) / "thesis.tex", "x");
  EXPECT_EQ(HistoryStore::OpenOrCreate(folder_).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(FilesOf(folder_), ElementsAre(testing::Pair("thesis.tex", "x")));
  EXPECT_EQ(HistoryStore::OpenOrCreate((fs::path(folder_) / "thesis.tex").string()).status().code(),
            absl::StatusCode::kInvalidArgument);
  WriteBytes(fs::path(folder_) / kMarker, "something else\n");
  EXPECT_EQ(HistoryStore::Open(folder_).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(StoreTest, WhatAKilledWriterLeftIsRemovedByTheNextOne) {
  const HistoryStore store = Store();
  ASSERT_TRUE(store.Add({RunWithCase(1)}).ok());
  const auto before = FilesOf(folder_);
  // Killed while it made the store, and while it wrote a run.
  WriteBytes(fs::path(folder_) / kMarker, "tfb.Hist");
  WriteBytes(absl::StrCat(PathOf(RunWithCase(2)).string(), ".123.tmp"), "half a r");
  EXPECT_EQ(NamesIn(*HistoryStore::Open(folder_)).size(), 1);
  ASSERT_TRUE(Store().Add({}).ok());
  EXPECT_EQ(FilesOf(folder_), before);
}

TEST_F(StoreTest, AWriterKilledAtAnyMomentLeavesAStoreThatReads) {
  constexpr int kKills = 20;
  int number = 0;
  for (int kill_number = 0; kill_number < kKills; ++kill_number) {
    const pid_t child = fork();
    if (child == 0) {
      for (int i = number;; ++i) {
        if (!HistoryStore::OpenOrCreate(folder_)->Add({RunWithCase(i)}).ok()) _exit(1);
      }
    }
    usleep(1000 * (1 + 3 * kill_number % 17));
    ASSERT_EQ(kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    const absl::StatusOr<StoredRuns> stored = Store().Read();
    ASSERT_TRUE(stored.ok()) << stored.status();
    for (size_t i = 0; i < stored->runs.size(); ++i) {
      ASSERT_EQ(stored->runs[i].run.SerializeAsString(),
                RunWithCase(static_cast<int>(i)).SerializeAsString());
    }
    number = static_cast<int>(stored->runs.size());
  }
}

TEST_F(StoreTest, WritersAtOnceLoseNothing) {
  constexpr int kWriters = 4, kRuns = 12;
  std::vector<pid_t> children;
  for (int writer = 0; writer < kWriters; ++writer) {
    const pid_t child = fork();
    if (child == 0) {
      for (int i = 0; i < kRuns; ++i) {
        // Each has runs of its own, and one that all add.
        const absl::StatusOr<HistoryStore> store = HistoryStore::OpenOrCreate(folder_);
        if (!store.ok()) _exit(1);
        if (!store->Add({RunWithCase(1000 + i), RunWithCase(100 * writer + i)}).ok()) _exit(2);
      }
      _exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(NamesIn(Store()).size(), (kWriters + 1) * kRuns);
  EXPECT_EQ(FilesOf(folder_).size(), 1 + (kWriters + 1) * kRuns);
}

TEST_F(StoreTest, AFullDiskLeavesTheStoreAsItWas) {
  ASSERT_TRUE(Store().Add({RunWithCase(1)}).ok());
  const auto before = FilesOf(folder_);
  const int status = InChild([this] {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {64, 64};  // bytes that a file may have
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 3;
    HistoryRun large = RunWithCase(3);
    for (int i = 0; i < 100; ++i) AddHistoryCase(&large, absl::StrCat("technique", i * i));
    const absl::Status full = HistoryStore::Open(folder_)->Add({RunWithCase(2), large}).status();
    return absl::IsResourceExhausted(full) && absl::StrContains(full.message(), folder_) ? 0 : 4;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(FilesOf(folder_), before);
}

TEST_F(StoreTest, StoresThatAreMergedInAnyOrderAreEqual) {
  const auto merged = [this](const std::string& name, const std::vector<std::vector<int>>& parts) {
    const std::string folder = (base_ / name).string();
    for (const std::vector<int>& part : parts) {
      std::vector<HistoryRun> runs;
      for (const int number : part) runs.push_back(RunWithCase(number));
      EXPECT_TRUE(HistoryStore::OpenOrCreate(folder)->Add(runs).ok());
    }
    return FilesOf(folder);
  };
  EXPECT_EQ(merged("a", {{1, 2, 3}, {3, 4}}), merged("b", {{4, 3}, {2}, {1, 3}}));
}

TEST_F(StoreTest, ARunThatWasResumedCountsOnceWithWhateverWasAddedFirst) {
  const HistoryRun other = RunWithCase(7), interrupted = RunWithCase(1);
  HistoryRun resumed = RunWithCase(1);
  *resumed.add_environments() = MakeHistoryRun(2).environments(0);
  AddHistoryValue(AddHistoryCase(&resumed, "far"), HISTORY_METRIC_TIME_OVER_DENSE, 0.5);
  const std::vector<std::vector<HistoryRun>> orders = {{interrupted, other, resumed},
                                                       {resumed, other, interrupted}};
  for (size_t i = 0; i < orders.size(); ++i) {
    const auto store = HistoryStore::OpenOrCreate((base_ / absl::StrCat(i)).string());
    ASSERT_TRUE(store.ok()) << store.status();
    for (const HistoryRun& run : orders[i]) ASSERT_TRUE(store->Add({run}).ok());
    const auto stored = store->Read();
    ASSERT_TRUE(stored.ok()) << stored.status();
    std::vector<std::string> names;
    for (const StoredRun& run : stored->runs) names.push_back(run.name);
    EXPECT_THAT(names, ElementsAre(RunName(resumed), RunName(other)));
  }
}

TEST_F(StoreTest, ACloneWithoutTheEmptyFolderOfRunsIsAStore) {
  Store();
  fs::remove(fs::path(folder_) / "runs");  // git keeps no empty folder
  EXPECT_THAT(NamesIn(*HistoryStore::Open(folder_)), IsEmpty());
  EXPECT_TRUE(HistoryStore::Open(folder_)->Add({RunWithCase(1)}).ok());
  EXPECT_EQ(NamesIn(Store()).size(), 1);
}

}  // namespace
}  // namespace tfb
