// The comments of a technique's header, for programs that show them.
//
// technique() in tools/technique.bzl takes them from NAME.h when the technique is built, so that
// the header is the one place where the formula stands.
#ifndef TFB_CORE_HEADER_TEXT_H_
#define TFB_CORE_HEADER_TEXT_H_

namespace tfb {

// Without the slashes; each line ends in '\n'.
struct HeaderText {
  const char* head = "";      // the comment at the head: the formula, its source, its cost
  const char* of_class = "";  // the comment on the technique's class: tensors; may be empty
};

// Registers the text of a technique at program start. The pointers must stay valid.
bool RegisterHeaderText(const char* technique, const HeaderText& text);
// Returns empty texts where none is registered.
HeaderText FindHeaderText(const char* technique);

}  // namespace tfb

#endif  // TFB_CORE_HEADER_TEXT_H_
