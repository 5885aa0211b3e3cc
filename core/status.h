// Early returns for absl::Status and absl::StatusOr, which Abseil itself leaves to each project.
#ifndef TFB_CORE_STATUS_H_
#define TFB_CORE_STATUS_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define TFB_STATUS_CONCAT_INNER(a, b) a##b
#define TFB_STATUS_CONCAT(a, b) TFB_STATUS_CONCAT_INNER(a, b)

#define TFB_RETURN_IF_ERROR(expression)                                              \
  do {                                                                               \
    if (absl::Status tfb_status = (expression); !tfb_status.ok()) return tfb_status; \
  } while (false)

#define TFB_ASSIGN_OR_RETURN(left, expression) \
  TFB_ASSIGN_OR_RETURN_INNER(TFB_STATUS_CONCAT(tfb_value_, __LINE__), left, expression)
#define TFB_ASSIGN_OR_RETURN_INNER(value, left, expression) \
  auto value = (expression);                                \
  if (!value.ok()) return value.status();                   \
  left = *std::move(value)

#endif  // TFB_CORE_STATUS_H_
