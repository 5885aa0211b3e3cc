// Lists of rows for tests of listed work: see core/cuda/row_list.h.
#ifndef TFB_CORE_LAYERS_LISTED_TESTING_H_
#define TFB_CORE_LAYERS_LISTED_TESTING_H_

#include <cstdint>
#include <vector>

#include "core/cuda/device_array.h"
#include "core/cuda/row_list.h"
#include "core/layers/list_rows.h"
#include "core/problem.h"
#include "gtest/gtest.h"

namespace tfb {

using Flags = std::vector<uint8_t>;  // of all rows, 1 where one is listed

// A list on a device, made from flags in host memory.
struct Listed {
  Listed(Device device, const Flags& flags, int64_t batch)
      : is_listed(DeviceArray<uint8_t>::Create(device, flags).value()),
        rows(DeviceArray<int32_t>::Allocate(device, static_cast<int64_t>(flags.size())).value()),
        begins(DeviceArray<int32_t>::Allocate(device, batch + 1).value()) {
    memory = {is_listed.mutable_data(), rows.mutable_data(), begins.mutable_data()};
    EXPECT_EQ(ListRows(device, memory, batch, static_cast<int64_t>(flags.size()) / batch, {}),
              absl::OkStatus());
    list = memory.list(batch);
  }

  DeviceArray<uint8_t> is_listed;
  DeviceArray<int32_t> rows;
  DeviceArray<int32_t> begins;
  RowListMemory memory;
  RowList list;
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_LISTED_TESTING_H_
