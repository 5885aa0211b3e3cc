#include "core/layers/copy_rows.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/cuda/device_array.h"
#include "core/cuda/mirror.h"
#include "core/cuda/runtime.h"
#include "core/random.h"
#include "core/tensor.h"
#include "core/tested_devices.h"
#include "core/thread_pool.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

class CopyRowsOn : public ::testing::TestWithParam<Device> {};

// Rows are copied from a ring that wraps to one that wraps elsewhere; s(n) is the row that n is a
// copy of, or -1.
TEST_P(CopyRowsOn, EveryRowIsTheOneThatTheCallSaysAndTheOthersStay) {
  constexpr int64_t kBatch = 2, kRows = 7, kFromPlaces = 9, kToPlaces = 8, kFromFirst = 5,
                    kToFirst = 3;
  const std::vector<int32_t> selected = {4, 0, -1, 8, 2, 2, -7, 6, 5, -1, 3, 1, 0, 8};
  struct Case {
    const char* name;
    bool selects;
    int64_t dilated_block;
  };
  for (const Case& c : {Case{"in order", false, 0}, Case{"selected", true, 0},
                        Case{"selected, whatever the block", true, 2}, Case{"dilated", false, 2},
                        Case{"dilated by three", false, 3}}) {
    // More channels than a thread copies at a time, and no multiple of four.
    for (const int64_t channels : {1, 6, 70}) {
      Tensor from(DType::kF32, {kBatch, kFromPlaces, channels});
      FillNormal(&from, 1, "from");
      Tensor to(DType::kBF16, {kBatch, kToPlaces, channels});
      Fill(to.view(), 1000);
      const DeviceArray<int32_t> list = DeviceArray<int32_t>::Create(GetParam(), selected).value();
      ThreadPool pool(2);
      Execution execution;
      execution.pool = &pool;
      CopyRowsCall call;
      std::optional<DeviceMirror> mirror;
      call.from = from.view();
      call.to = to.view();
      if (GetParam() != Device::kCpu) {
        mirror.emplace(CudaRuntime::For(GetParam()).value());
        call.from = mirror->Copy(from.view()).value();
        call.to = mirror->CopyForWriting(to.view()).value();
      }
      call.from_first = kFromFirst;
      call.to_first = kToFirst;
      call.rows = kRows;
      if (c.selects) call.selected = list.data();
      call.dilated_block = c.dilated_block;
      ASSERT_EQ(CopyRows(GetParam(), call, execution), absl::OkStatus());
      if (mirror.has_value()) {
        ASSERT_EQ(mirror->CopyBack(), absl::OkStatus());
      }

      for (int64_t b = 0; b < kBatch; ++b) {
        for (int64_t place = 0; place < kToPlaces; ++place) {
          const int64_t n = (place - kToFirst + kToPlaces) % kToPlaces;
          int64_t source = n;
          if (c.selects) {
            source = n < kRows ? selected[b * kRows + n] : 0;
          } else if (c.dilated_block > 0) {
            const int64_t block = n / c.dilated_block, i = n % c.dilated_block;
            source = c.dilated_block * block + c.dilated_block - 1 - 2 * i;
          }
          for (int64_t channel = 0; channel < channels; ++channel) {
            Tensor expected(DType::kBF16, {1});
            double value = 0;
            if (source >= 0) {
              value = *from.view().At<float>(b, (kFromFirst + source) % kFromPlaces, channel);
            }
            expected.view().Set(0, n < kRows ? value : 1000);
            ASSERT_EQ(to.view().Get(to.view().Offset(b, place, channel)), expected.view().Get(0))
                << c.name << ", row " << n << " of " << b << ", channel " << channel;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, CopyRowsOn, ::testing::ValuesIn(TestedDevices()),
                         [](const auto& device) { return std::string(Name(device.param)); });

}  // namespace
}  // namespace tfb
