#ifndef TFB_CORE_CUDA_DEVICE_QUERY_H_
#define TFB_CORE_CUDA_DEVICE_QUERY_H_

// The queries that device_probe.cc makes to the CUDA runtime, in plain C types: nvcc sees no
// Abseil, and C++ sees no CUDA header.

#include <stddef.h>

namespace tfb {

struct CudaDeviceQuery {
  char name[256];
  int pci_domain;
  int pci_bus;
  int pci_device;
  int compute_capability_major;
  int compute_capability_minor;
  size_t memory_bytes;
  size_t l2_cache_bytes;
  size_t shared_memory_bytes_per_block;
  int multiprocessors;
  int clock_khz;
  int memory_clock_khz;
};

// Each call returns null, or the runtime's text (a static string) that says why it failed.
struct CudaDeviceQueries {
  const char* compiler;  // "nvcc 13.0.88"
  const char* (*versions)(int* driver_version, int* runtime_version);
  const char* (*device_count)(int* count);
  const char* (*device)(int ordinal, CudaDeviceQuery* query);
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_DEVICE_QUERY_H_
