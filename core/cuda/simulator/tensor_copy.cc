// CUDA driver API, cuTensorMapEncodeTiled; PTX ISA, "Tensors" and cp.async.bulk.tensor.
#include "core/cuda/simulator/tensor_copy.h"

#include <algorithm>
#include <cstring>

#include "core/cuda/simulator/cuda_runtime.h"
#include "core/cuda/simulator/hooks.h"

namespace cuda_simulator {
namespace {

constexpr uint64_t kMark = 0x70616d726f736e74;
constexpr int kRank = 4;
constexpr int64_t kRowBytes = 128;  // of a box, which is what the swizzle takes

// The simulator's content of a CUtensorMap.
struct Content {
  uint64_t mark;
  const char* data;
  int64_t sizes[kRank];
  int64_t strides[kRank];  // in bytes
  uint32_t box[kRank];
};
static_assert(sizeof(Content) <= sizeof(CUtensorMap), "");

}  // namespace

// Refuses what the driver refuses, and all that CopyBox does not know.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* data, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0 || reinterpret_cast<uintptr_t>(data) % 16 != 0 ||
      data == nullptr || rank != kRank) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if ((type != CU_TENSOR_MAP_DATA_TYPE_FLOAT16 && type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) ||
      interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || swizzle != CU_TENSOR_MAP_SWIZZLE_128B ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Content content = {kMark, static_cast<const char*>(data), {}, {2}, {}};
  for (int n = 0; n < kRank; ++n) {
    if (sizes[n] < 1 || sizes[n] > uint64_t{1} << 32) return CUDA_ERROR_INVALID_VALUE;
    if (box[n] < 1 || box[n] > 256 || element_strides[n] != 1) return CUDA_ERROR_INVALID_VALUE;
    content.sizes[n] = static_cast<int64_t>(sizes[n]);
    content.box[n] = box[n];
    if (n == 0) continue;
    const uint64_t stride = strides[n - 1];
    if (stride % 16 != 0 || stride >= uint64_t{1} << 40) return CUDA_ERROR_INVALID_VALUE;
    content.strides[n] = static_cast<int64_t>(stride);
  }
  if (box[0] * 2 != kRowBytes || box[2] != 1 || box[3] != 1) return CUDA_ERROR_INVALID_VALUE;
  std::memset(map, 0, sizeof(*map));
  std::memcpy(map, &content, sizeof(content));
  return CUDA_SUCCESS;
}

void CopyBox(const char* name, void* to, const void* map, const unsigned at[4], void* barrier,
             const void* site) {
  Machine& machine = *running_machine;
  Note(AccessKind::kRead, map, sizeof(CUtensorMap), site);
  Content content;
  std::memcpy(&content, map, sizeof(content));
  if (content.mark != kMark) {
    machine.Report(FindingKind::kBadInstruction, site, [&] {
      return Format("%s of a tensor map that no cuTensorMapEncodeTiled wrote", name);
    });
    machine.block.Abandon();
  }
  // An H100 ends such a launch with "an illegal instruction was encountered".
  if (at[0] % 8 != 0) {
    machine.Report(FindingKind::kBadInstruction, site, [&] {
      return Format("%s from number %d of rows on, which is not at a multiple of 16 bytes", name,
                    static_cast<int>(at[0]));
    });
    machine.block.Abandon();
  }
  // The swizzle is of addresses: 8 rows of 128 bytes are its period.
  CheckAlignment(to, name, 1024, site);
  PhaseBarrier* completion = machine.phase_barriers.BeginCopy(barrier, site);
  const SharedShadow::Agent agent{kMaxThreads + completion->agent, completion->last_copy};
  const auto coordinate = [&](int n) { return int64_t{static_cast<int>(at[n])}; };
  bool is_inside = true;
  const char* row = content.data;
  for (int n = 2; n < kRank; ++n) {
    is_inside &= coordinate(n) >= 0 && coordinate(n) < content.sizes[n];
    row += coordinate(n) * content.strides[n];
  }
  const int64_t begin = std::max<int64_t>(0, -coordinate(0));
  const int64_t end = std::min<int64_t>(content.box[0], content.sizes[0] - coordinate(0));
  for (int64_t r = 0; r < content.box[1]; ++r) {
    const int64_t y = coordinate(1) + r;
    char numbers[kRowBytes] = {};
    if (is_inside && y >= 0 && y < content.sizes[1] && begin < end) {
      const char* from = row + y * content.strides[1] + (coordinate(0) + begin) * 2;
      const size_t bytes = static_cast<size_t>(end - begin) * 2;
      Note(AccessKind::kRead, from, bytes, site);
      std::memcpy(numbers + begin * 2, from, bytes);
    }
    char* line = static_cast<char*>(to) + r * kRowBytes;
    machine.checker.Check({reinterpret_cast<uintptr_t>(line), static_cast<size_t>(kRowBytes),
                           AccessKind::kBulkWrite, site, &agent});
    for (int64_t chunk = 0; chunk < 8; ++chunk) {
      std::memcpy(line + (chunk ^ r % 8) * 16, numbers + chunk * 16, 16);
    }
  }
  machine.phase_barriers.EndCopy(completion, content.box[1] * kRowBytes, site);
}

}  // namespace cuda_simulator
