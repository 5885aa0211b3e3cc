#include "adaptive/universal_transformer/universal_transformer.h"

#include "gtest/gtest.h"

namespace tfb {
namespace {

TEST(UniversalTransformer, Compiles) {}

}  // namespace
}  // namespace tfb
