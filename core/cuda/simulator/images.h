// Finds the segments and variables of the program and its libraries in memory.
#ifndef TFB_CORE_CUDA_SIMULATOR_IMAGES_H_
#define TFB_CORE_CUDA_SIMULATOR_IMAGES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cuda_simulator {

// Code, constants or variables of the program or a library.
struct Segment {
  uintptr_t begin;
  uintptr_t end;
  bool is_writable;  // while the program runs, as variables are
};
std::vector<Segment> LoadedSegments();

// The program or library that contains an address: its file and load address. The path is empty
// where there is none.
struct Image {
  std::string path;
  uintptr_t base = 0;
};
Image ImageOf(uintptr_t address);

// A static variable, with its name in the source without namespaces and functions. The name is
// empty where the program has no symbols.
struct Variable {
  std::string name;
  uintptr_t begin = 0;
  size_t bytes = 0;
};
Variable StaticVariableAt(uintptr_t address);

// Returns the bytes of the static variables of the function at an address, in which a kernel's
// __shared__ variables are; not of those of functions that it calls. It is 0 where the program has
// no symbols.
size_t BytesOfStaticVariablesIn(uintptr_t function);

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_IMAGES_H_
