// Whether markup is well-formed, for tests: tags nest and close, attributes are quoted and there once,
// and no stray < or & is left.
#ifndef TFB_RESULTS_WELL_FORMED_H_
#define TFB_RESULTS_WELL_FORMED_H_

#include <string>

#include "absl/strings/string_view.h"

namespace tfb {

// Says what is wrong and where, or returns "". With `html` a doctype, elements without an end (meta, input, br) and
// attributes without a value are right, and what stands in style and script is not looked at.
std::string MarkupProblem(absl::string_view markup, bool html);

}  // namespace tfb

#endif  // TFB_RESULTS_WELL_FORMED_H_
