// Implements NVML's functions for the test of the code that calls them. The GPU is at 0000:01:00.0.
#include <cstring>

namespace {

int shutdowns = 0;
unsigned long long reasons = 0;
bool power_is_known = true;
constexpr int kSuccess = 0, kNotSupported = 3, kNotFound = 6;

}  // namespace

extern "C" {

// The test calls these to set and read the state.
void FakeNvmlSet(unsigned long long throttle_reasons, bool power) {
  reasons = throttle_reasons;
  power_is_known = power;
}
int FakeNvmlShutdowns() { return shutdowns; }

int nvmlInit_v2() { return kSuccess; }
int nvmlShutdown() {
  ++shutdowns;
  return kSuccess;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* pci_bus_id, void** device) {
  *device = &shutdowns;
  return std::strcmp(pci_bus_id, "00000000:01:00.0") == 0 ? kSuccess : kNotFound;
}
int nvmlDeviceGetClockInfo(void*, unsigned type, unsigned* mhz) {
  *mhz = type == 1 ? 1755 : 2619;
  return type == 1 || type == 2 ? kSuccess : kNotSupported;
}
int nvmlDeviceGetTemperature(void*, unsigned sensor, unsigned* celsius) {
  *celsius = 41;
  return sensor == 0 ? kSuccess : kNotSupported;
}
int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) {
  *milliwatts = 312500;
  return power_is_known ? kSuccess : kNotSupported;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* now) {
  *now = reasons;
  return kSuccess;
}

}  // extern "C"
