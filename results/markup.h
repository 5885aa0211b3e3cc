// Escapes text for XML and HTML, so that nothing in a result file becomes markup.
#ifndef TFB_RESULTS_MARKUP_H_
#define TFB_RESULTS_MARKUP_H_

#include <string>

#include "absl/strings/string_view.h"

namespace tfb {

// Returns `text` for the content of an element or a quoted attribute: the five characters of markup
// become references, and what XML 1.0 does not allow (control characters, invalid UTF-8, the
// non-characters U+FFFE and U+FFFF) becomes U+FFFD.
std::string EscapeMarkup(absl::string_view text);

// Writes a coordinate in pixels of 1/96 inch with at most one decimal, which is finer than print,
// and no exponent; a value that is not finite as 0.
std::string Coordinate(double value);

// Returns ` name="value"` with the value escaped.
std::string Attribute(absl::string_view name, absl::string_view value);

// Returns `<name attributes>text</name>` and a newline, with the text escaped.
std::string Element(absl::string_view name, absl::string_view text,
                    absl::string_view attributes = "");

// Returns a page up to the beginning of its body. The page loads nothing, and its title and styles
// are given: `styles` is CSS.
std::string BeginPage(absl::string_view title, absl::string_view styles);

}  // namespace tfb

#endif  // TFB_RESULTS_MARKUP_H_
