// Checks for tests that markup is well-formed: tags nest and close, attributes are quoted and occur
// once, and there is no stray < or &.
#ifndef TFB_RESULTS_WELL_FORMED_H_
#define TFB_RESULTS_WELL_FORMED_H_

#include <string>

#include "absl/strings/string_view.h"

namespace tfb {

// Returns what is wrong and where, or "". With `html` a doctype, void elements (meta, input, br)
// and attributes without a value are allowed, and the contents of style and script are not checked.
std::string MarkupProblem(absl::string_view markup, bool html);

}  // namespace tfb

#endif  // TFB_RESULTS_WELL_FORMED_H_
