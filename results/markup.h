// Text put into XML and HTML so that it stays text, whatever a result file holds.
#ifndef TFB_RESULTS_MARKUP_H_
#define TFB_RESULTS_MARKUP_H_

#include <string>

#include "absl/strings/string_view.h"

namespace tfb {

// `text` for the content of an element or a quoted attribute: the five characters of markup are
// written as references, and what XML 1.0 does not allow (control characters, broken UTF-8, the
// non-characters U+FFFE and U+FFFF) becomes U+FFFD.
std::string EscapeMarkup(absl::string_view text);

// A coordinate in pixels of 1/96 inch: at most one decimal, finer than print; no exponent. What is not finite is 0.
std::string Coordinate(double value);

// ` name="value"` with the value escaped.
std::string Attribute(absl::string_view name, absl::string_view value);

}  // namespace tfb

#endif  // TFB_RESULTS_MARKUP_H_
