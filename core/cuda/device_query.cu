#include <string.h>

#include "core/cuda/device_query.h"
#include "core/cuda/kernel.cuh"

namespace tfb {
namespace {

const char* ErrorOf(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears the error, so that the next launch does not return it again
  return cudaGetErrorString(error);
}

// Returns 0 where the driver does not report the attribute: some virtual GPUs hide their clocks.
int AttributeOrZero(cudaDeviceAttr attribute, int ordinal) {
  int value = 0;
  return ErrorOf(cudaDeviceGetAttribute(&value, attribute, ordinal)) == nullptr ? value : 0;
}

const char* QueryVersions(int* driver_version, int* runtime_version) {
  if (const char* error = ErrorOf(cudaDriverGetVersion(driver_version))) return error;
  return ErrorOf(cudaRuntimeGetVersion(runtime_version));
}

const char* QueryDeviceCount(int* count) { return ErrorOf(cudaGetDeviceCount(count)); }

const char* QueryDevice(int ordinal, CudaDeviceQuery* query) {
  cudaDeviceProp properties;
  if (const char* error = ErrorOf(cudaGetDeviceProperties(&properties, ordinal))) return error;
  static_assert(sizeof(query->name) == sizeof(properties.name), "both hold 256 characters");
  memcpy(query->name, properties.name, sizeof(query->name));
  query->pci_domain = properties.pciDomainID;
  query->pci_bus = properties.pciBusID;
  query->pci_device = properties.pciDeviceID;
  query->compute_capability_major = properties.major;
  query->compute_capability_minor = properties.minor;
  query->memory_bytes = properties.totalGlobalMem;
  query->l2_cache_bytes = properties.l2CacheSize;
  query->shared_memory_bytes_per_block = properties.sharedMemPerBlockOptin;
  query->multiprocessors = properties.multiProcessorCount;
  // CUDA 13 took the clocks out of cudaDeviceProp.
  query->clock_khz = AttributeOrZero(cudaDevAttrClockRate, ordinal);
  query->memory_clock_khz = AttributeOrZero(cudaDevAttrMemoryClockRate, ordinal);
  return nullptr;
}

#define TFB_TEXT(number) TFB_TEXT_OF(number)
#define TFB_TEXT_OF(number) #number
constexpr char kCompiler[] = "nvcc " TFB_TEXT(__CUDACC_VER_MAJOR__) "." TFB_TEXT(
    __CUDACC_VER_MINOR__) "." TFB_TEXT(__CUDACC_VER_BUILD__);

}  // namespace

TFB_KERNEL_TABLE(CudaDeviceQueries, {kCompiler, &QueryVersions, &QueryDeviceCount, &QueryDevice});

}  // namespace tfb
