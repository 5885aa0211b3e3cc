// Renders a comparison as a comment of a pull request, in GitHub's Markdown: the verdict first, then
// what changed, and everything else folded.
//
// A comment has at most kMostCommentBytes bytes, and so no more characters, however many findings
// there are and however long their texts. Rows that do not fit are left out as a whole and counted,
// beside the command that lists them; those of regressions are the last to be left out.
//
// Text from a file stands in code spans, where neither Markdown nor HTML is interpreted and where
// no mention, reference or link is made. In it '`' becomes ''', '|' becomes '¦' (a table's row would
// end its cell there), and a control character, an invisible one or one that changes the direction
// of text becomes '?'. A text that is too long lacks its middle.
#ifndef TFB_RESULTS_COMPARISON_COMMENT_H_
#define TFB_RESULTS_COMPARISON_COMMENT_H_

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"
#include "results/comparison.h"

namespace tfb {

// The first line of every comment, invisible on the page, by which tools/ci/post_comment finds the
// comment that it wrote before.
inline constexpr char kCommentMarker[] = "<!-- transformer-family-bench -->";
// GitHub refuses a comment of more than 65,536 characters.
inline constexpr size_t kMostCommentBytes = 60000;

// Returns the comment that shows `comparison`. Its heading says one of
//   Regressed          something got slower or worse, whatever else improved
//   Improved           something got faster or better, and nothing regressed
//   Unchanged          some time is the same within the threshold (or, where there are no times,
//                      some other number), and nothing changed
//   Cannot be judged   none of these: every time is ambiguous or not judged
// and counts the numbers of each verdict.
std::string RenderComment(const Comparison& comparison);

// Returns the comment for two results that cannot be compared, with the reason.
std::string RenderIncomparable(absl::string_view reason);

}  // namespace tfb

#endif  // TFB_RESULTS_COMPARISON_COMMENT_H_
