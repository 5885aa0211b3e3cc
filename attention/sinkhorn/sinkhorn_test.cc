#include "attention/sinkhorn/sinkhorn.h"

#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {
TEST(Sinkhorn, X) {}
}  // namespace
}  // namespace tfb
