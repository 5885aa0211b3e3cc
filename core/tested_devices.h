// The devices that tests run on: the CPU and the simulator, or a GPU alone.
//
// TFB_KERNEL_DEVICE in the environment names the one device that tests run kernels on, "cuda" or
// "simulator"; they then leave the CPU and other devices to runs without it. --config=gpu sets it
// to "cuda" for the tests tagged "gpu", so that a GPU repeats nothing that any machine tests.
#ifndef TFB_CORE_TESTED_DEVICES_H_
#define TFB_CORE_TESTED_DEVICES_H_

#include <vector>

#include "core/problem.h"

namespace tfb {

// Returns the device that tests run kernels on: the simulator, or the one that the environment
// names. Aborts where that is no device with kernels.
Device KernelDevice();

// Tells whether tests run on the device: on any, or where the environment names one on that alone.
bool IsTested(Device device);

// Returns the devices of a test that is true of the CPU and of kernels: the CPU and KernelDevice(),
// or the latter alone where the environment names it.
std::vector<Device> TestedDevices();

}  // namespace tfb

#endif  // TFB_CORE_TESTED_DEVICES_H_
