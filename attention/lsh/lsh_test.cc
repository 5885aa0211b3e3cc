#include "attention/lsh/lsh.h"

#include "gtest/gtest.h"

namespace tfb {
namespace {

TEST(Lsh, Exists) { EXPECT_EQ(Lsh().info().name, "lsh"); }

}  // namespace
}  // namespace tfb
