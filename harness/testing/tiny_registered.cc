// Registers the tiny technique and every faulty form of it.
#include "harness/testing/tiny_technique.h"

namespace tfb {
namespace {

bool RegisterAll() {
  for (const TinyFault fault : AllTinyFaults()) Registry::Global().Add(MakeTiny(fault));
  return true;
}

const bool registered = RegisterAll();

}  // namespace
}  // namespace tfb
