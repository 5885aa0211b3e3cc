// Where in the source a place in the program's code is.
#ifndef TFB_CORE_CUDA_SIMULATOR_SOURCE_LINE_H_
#define TFB_CORE_CUDA_SIMULATOR_SOURCE_LINE_H_

#include <string>
#include <vector>

namespace cuda_simulator {

// For each return address the line of its call, such as "flash.cu:88"; of a call in an inlined
// function of another file "kernel.cuh:112 from flash.cu:88". Asks binutils' addr2line, once for
// each address; empty where that is not installed or knows nothing.
std::vector<std::string> SourceLines(const std::vector<const void*>& return_addresses);

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_SOURCE_LINE_H_
