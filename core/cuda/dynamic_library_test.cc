#include "core/cuda/dynamic_library.h"

#include <gtest/gtest.h>

#include "gmock/gmock.h"

namespace tfb {
namespace {

using ::testing::HasSubstr;

TEST(DynamicLibrary, OpensTheFirstNameThatThereIsAndFindsItsFunctions) {
  const auto library = DynamicLibrary::Open({"libno_such.so.7", "libm.so.6", "libc.so.6"});
  ASSERT_TRUE(library.ok()) << library.status();
  EXPECT_EQ(library->name(), "libm.so.6");
  double (*cosine)(double) = nullptr;
  ASSERT_TRUE(library->Resolve("cos", &cosine).ok());
  EXPECT_EQ(cosine(0), 1);
}

TEST(DynamicLibrary, SaysOfEveryNameWhyItDoesNotOpen) {
  const absl::Status status =
      DynamicLibrary::Open({"libno_such.so.13", "libno_such.so.12"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("libno_such.so.13: cannot open"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("; libno_such.so.12: cannot open"));
}

TEST(DynamicLibrary, SaysWhichFunctionIsMissing) {
  const auto library = DynamicLibrary::Open({"libm.so.6"});
  ASSERT_TRUE(library.ok()) << library.status();
  void (*function)() = nullptr;
  const absl::Status status = library->Resolve("cublasCreate_v2", &function);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "libm.so.6 has no function cublasCreate_v2");
  EXPECT_EQ(function, nullptr);
}

}  // namespace
}  // namespace tfb
