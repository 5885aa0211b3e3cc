// Registers the toys where it is linked in.
#include "harness/toys.h"

namespace tfb {
namespace {

const bool registered = [] {
  AddToys(Registry::Global());
  return true;
}();

}  // namespace
}  // namespace tfb
