#include "core/layers/list_rows.h"

#include "core/cuda/runtime.h"
#include "core/layers/list_rows_kernels.h"
#include "core/status.h"

namespace tfb {

absl::Status ListRows(Device device, const RowListMemory& memory, int64_t batch, int64_t tokens,
                      const Execution& execution) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  ListRowsArguments arguments = {};
  arguments.is_listed = memory.is_listed;
  arguments.rows = memory.rows;
  arguments.begins = memory.begins;
  arguments.row_count = batch * tokens;
  arguments.tokens = tokens;
  return ToStatus(
      KernelsOn<ListRowsKernels>(runtime->target()).list_rows(arguments, execution.stream));
}

}  // namespace tfb
