#include "core/cuda/shared_opt_in.h"

#include <map>
#include <mutex>
#include <utility>

namespace tfb {

int OptInOnce(int gpu, const void* kernel, size_t bytes,
              int (*opt_in)(const void* kernel, size_t bytes)) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, size_t> opted_in;
  const std::lock_guard<std::mutex> lock(mutex);
  size_t& most = opted_in[{gpu, kernel}];
  if (bytes <= most) return 0;
  const int error = opt_in(kernel, bytes);
  if (error == 0) most = bytes;
  return error;
}

}  // namespace tfb
