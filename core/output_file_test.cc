#include "core/output_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/file_error.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

namespace fs = std::filesystem;

class OutputFileTest : public ::testing::Test {
 protected:
  OutputFileTest() {
    folder_ = absl::StrCat(::testing::TempDir(), "/",
                           ::testing::UnitTest::GetInstance()->current_test_info()->name(), "_",
                           getpid());
    fs::create_directories(folder_);
  }
  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  std::string Contents(const std::string& name) const {
    std::stringstream text;
    text << std::ifstream(Path(name)).rdbuf();
    return text.str();
  }
  int Files() const { return static_cast<int>(std::distance(fs::directory_iterator(folder_), {})); }

  std::string folder_;
};

TEST_F(OutputFileTest, TheOldContentStaysUntilTheNewIsWhole) {
  ASSERT_TRUE(WriteFile(Path("a"), "old").ok());
  {
    const auto file = OutputFile::Open(Path("a"));
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_TRUE((*file)->Write("ne").ok());
    EXPECT_EQ(Contents("a"), "old");
  }
  EXPECT_EQ(Contents("a"), "old");
  EXPECT_EQ(Files(), 1);  // what was written in vain is gone
  ASSERT_TRUE(WriteFile(Path("a"), "new").ok());
  EXPECT_EQ(Contents("a"), "new");
  EXPECT_EQ(Files(), 1);
}

TEST_F(OutputFileTest, BytesMayBeWrittenOverLater) {
  const auto file = OutputFile::Open(Path("a"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE((*file)->Write("....body").ok());
  EXPECT_TRUE((*file)->WriteAt(0, "head").ok());
  EXPECT_TRUE((*file)->Finish().ok());
  EXPECT_EQ(Contents("a"), "headbody");
}

TEST_F(OutputFileTest, LinksStayAndTheirTargetIsReplaced) {
  ASSERT_TRUE(WriteFile(Path("target"), "old").ok());
  fs::create_symlink("target", Path("near"));
  fs::create_symlink(Path("near"), Path("far"));
  fs::create_symlink("later", Path("dangling"));
  ASSERT_TRUE(WriteFile(Path("far"), "new").ok());
  EXPECT_TRUE(fs::is_symlink(Path("far")));
  EXPECT_TRUE(fs::is_symlink(Path("near")));
  EXPECT_EQ(Contents("target"), "new");
  ASSERT_TRUE(WriteFile(Path("dangling"), "made").ok());
  EXPECT_TRUE(fs::is_symlink(Path("dangling")));
  EXPECT_EQ(Contents("later"), "made");
  fs::create_symlink("loop", Path("loop"));
  EXPECT_EQ(WriteFile(Path("loop"), "x").code(), absl::StatusCode::kUnavailable);
}

TEST_F(OutputFileTest, PermissionsStay) {
  ASSERT_TRUE(WriteFile(Path("a"), "old").ok());
  ASSERT_EQ(chmod(Path("a").c_str(), 0640), 0);
  ASSERT_TRUE(WriteFile(Path("a"), "new").ok());
  struct stat info;
  ASSERT_EQ(stat(Path("a").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640u);
}

TEST_F(OutputFileTest, AFifoIsWrittenTo) {
  ASSERT_EQ(mkfifo(Path("fifo").c_str(), 0600), 0);
  std::string read;
  std::thread reader([&] { read = Contents("fifo"); });
  EXPECT_TRUE(WriteFile(Path("fifo"), "through").ok());
  reader.join();
  EXPECT_EQ(read, "through");
  EXPECT_TRUE(fs::is_fifo(Path("fifo")));
  EXPECT_EQ(Files(), 1);
}

TEST_F(OutputFileTest, APipeWithoutAPathIsWrittenToThroughItsDescriptor) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const std::string path = absl::StrCat("/dev/fd/", ends[1]);  // as /dev/stdout leads to one
  EXPECT_TRUE(CheckWritable(path).ok());
  const absl::Status status = WriteFile(path, "through");
  EXPECT_TRUE(status.ok()) << status;
  close(ends[1]);
  char buffer[16];
  ASSERT_EQ(read(ends[0], buffer, sizeof(buffer)), 7);
  EXPECT_EQ(std::string(buffer, 7), "through");
  close(ends[0]);
}

TEST_F(OutputFileTest, AFileThatIsOpenIsWrittenWhereItsOtherWritersHaveCome) {
  const int descriptor = open(Path("a").c_str(), O_WRONLY | O_CREAT, 0666);
  ASSERT_EQ(write(descriptor, "first ", 6), 6);
  for (const char* folder : {"/dev/fd", "/proc/self/fd"}) {
    const std::string path = absl::StrCat(folder, "/", descriptor);
    EXPECT_TRUE(CheckWritable(path).ok());
    EXPECT_TRUE(WriteFile(path, "second ").ok());
  }
  ASSERT_EQ(write(descriptor, "last", 4), 4);
  close(descriptor);
  EXPECT_EQ(Contents("a"), "first second second last");
  EXPECT_EQ(Files(), 1);
}

TEST_F(OutputFileTest, ADeviceStaysADeviceAndAFullOneIsAnError) {
  EXPECT_TRUE(WriteFile("/dev/null", "gone").ok());
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  const absl::Status full = WriteFile("/dev/full", "more");
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(absl::StrContains(full.message(), "/dev/full: cannot write: No space left")) << full;
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
  const auto null = OutputFile::Open("/dev/null");
  ASSERT_TRUE(null.ok()) << null.status();
  EXPECT_EQ((*null)->WriteAt(0, "x").code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(OutputFileTest, WhetherAPathCanBeWrittenIsKnownBefore) {
  ASSERT_TRUE(WriteFile(Path("a"), "old").ok());
  ASSERT_EQ(mkfifo(Path("fifo").c_str(), 0600), 0);
  for (const char* name : {"a", "new", "fifo"}) {
    EXPECT_TRUE(CheckWritable(Path(name)).ok()) << name;
  }
  EXPECT_EQ(Contents("a"), "old");
  EXPECT_EQ(Files(), 2);
  EXPECT_EQ(CheckWritable(Path("absent/a")).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(CheckWritable(folder_).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(OutputFileTest, OnePlainFileIsKnownByAnyOfItsPaths) {
  EXPECT_TRUE(IsSamePlainFile(Path("absent"), Path("./absent")));
  EXPECT_TRUE(IsSamePlainFile("absent", fs::current_path().string() + "/absent"));
  EXPECT_FALSE(IsSamePlainFile(Path("absent"), Path("other")));
  ASSERT_TRUE(WriteFile(Path("a"), "x").ok());
  fs::create_symlink("a", Path("link"));
  EXPECT_TRUE(IsSamePlainFile(Path("a"), Path("link")));
  EXPECT_TRUE(IsSamePlainFile(Path("link"), Path("a")));
  EXPECT_FALSE(IsSamePlainFile(Path("a"), Path("absent")));
  EXPECT_FALSE(IsSamePlainFile("/dev/null", "/dev/null"));
}

TEST_F(OutputFileTest, WhatCannotBeWrittenIsNamed) {
  EXPECT_EQ(WriteFile(folder_, "x").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(WriteFile(Path("absent/a"), "x").code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(WriteFile(Path("a"), "x").ok());
  EXPECT_EQ(WriteFile(Path("a/b"), "x").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Files(), 1);
}

TEST(FileError, HasTheCodeOfItsKindAndNamesPathActionAndReason) {
  const std::vector<std::pair<absl::StatusCode, std::vector<int>>> kinds = {
      {absl::StatusCode::kNotFound, {ENOENT, ENOTDIR}},
      {absl::StatusCode::kPermissionDenied, {EACCES, EPERM, EROFS}},
      {absl::StatusCode::kInvalidArgument, {EISDIR}},
      {absl::StatusCode::kResourceExhausted, {ENOSPC, EDQUOT, EFBIG}},
      {absl::StatusCode::kUnavailable, {EIO, EMFILE}}};
  for (const auto& [code, errors] : kinds) {
    for (const int error : errors) {
      EXPECT_EQ(FileError("some/file", "write", error),
                absl::Status(code, absl::StrCat("some/file: cannot write: ", strerror(error))));
    }
  }
}

TEST_F(OutputFileTest, NoDescriptorStaysOpen) {
  const auto lowest_free = [] {
    const int descriptor = open("/dev/null", O_RDONLY);
    close(descriptor);
    return descriptor;
  };
  const int before = lowest_free();
  { EXPECT_TRUE(OutputFile::Open(Path("a")).ok()); }
  EXPECT_EQ(lowest_free(), before);
  EXPECT_TRUE(WriteFile(Path("a"), "text").ok());
  EXPECT_EQ(lowest_free(), before);
  { EXPECT_TRUE(OutputFile::Open("/dev/null").ok()); }
  EXPECT_EQ(lowest_free(), before);
}

}  // namespace
}  // namespace tfb
