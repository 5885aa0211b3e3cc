#include "harness/measure/device_presence.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "core/cuda/device_probe.h"

namespace tfb {

bool CudaDeviceIsPresent() {
  return CudaDeviceIsPresent([] { return ProbeCudaMachine().ok(); });
}

bool CudaDeviceIsPresent(const std::function<bool()>& is_present) {
  const pid_t child = fork();
  if (child < 0) return false;
  if (child == 0) _exit(is_present() ? 0 : 1);
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return false;
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace tfb
