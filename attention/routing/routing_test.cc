#include "attention/routing/routing.h"

#include "gtest/gtest.h"

namespace tfb {
namespace {

TEST(Routing, Exists) { EXPECT_EQ(Routing().info().name, "routing"); }

}  // namespace
}  // namespace tfb
