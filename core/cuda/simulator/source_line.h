// Finds the source lines of addresses in the program's code.
#ifndef TFB_CORE_CUDA_SIMULATOR_SOURCE_LINE_H_
#define TFB_CORE_CUDA_SIMULATOR_SOURCE_LINE_H_

#include <string>
#include <vector>

namespace cuda_simulator {

// Returns for each return address the line of its call, such as "flash.cu:88", or "kernel.cuh:112
// from flash.cu:88" for a call in an inlined function of another file. Calls binutils' addr2line
// once for each address; a line is empty where that is not installed or does not know the address.
std::vector<std::string> SourceLines(const std::vector<const void*>& return_addresses);

// Returns the line of a call and those of all inlined calls around it: "warp.cuh:12 from
// flash.cuh:70 from flash.cu:88". It is empty where that is not known.
std::string CallChain(const void* return_address);

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_SOURCE_LINE_H_
