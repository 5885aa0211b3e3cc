// Early returns for absl::Status and absl::StatusOr, which Abseil itself leaves to each project, and
// a status for want of memory.
#ifndef TFB_CORE_STATUS_H_
#define TFB_CORE_STATUS_H_

#include <new>
#include <stdexcept>

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

namespace tfb {

// Returns body(), a status, or ResourceExhausted where an allocation throws, as those of containers
// do, of a size that no container has as well.
template <class Body>
auto WithMemory(const Body& body) -> decltype(body()) {
  constexpr char kNone[] = "an allocation failed: there is not enough memory";
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(kNone);
  } catch (const std::length_error&) {
    return absl::ResourceExhaustedError(kNone);
  }
}

}  // namespace tfb

#endif  // TFB_CORE_STATUS_H_
