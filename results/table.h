// Tables and numbers as text, for terminals and Markdown.
#ifndef TFB_RESULTS_TABLE_H_
#define TFB_RESULTS_TABLE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace tfb {

enum class Emphasis { kNone, kStrong, kGood, kBad, kFaint };

struct TableCell {
  TableCell() = default;
  TableCell(std::string t, Emphasis e = Emphasis::kNone)  // NOLINT: a text is a cell
      : text(std::move(t)), emphasis(e) {}
  TableCell(const char* t) : text(t) {}  // NOLINT
  TableCell(std::string t, Emphasis e, std::string d, Emphasis detail_e)
      : text(std::move(t)), emphasis(e), detail(std::move(d)), detail_emphasis(detail_e) {}
  std::string text;
  Emphasis emphasis = Emphasis::kNone;
  // Stands behind the text where there is room for it: an interval, a ratio.
  std::string detail;
  Emphasis detail_emphasis = Emphasis::kFaint;
};

struct TableColumn {
  std::string header;  // lines separated by '\n', set against the bottom
  bool right = false;  // aligned right, as numbers are
  // Fewest characters to which the column may be narrowed where the table is too wide: its cells go
  // on in further lines, broken at spaces. 0: never.
  int least_width = 0;
  // On a terminal the details of a column of rank 1 are shown where the table fits with all of that
  // rank, those of rank 2 where it fits with both. Markdown and HTML always show details.
  int detail_rank = 0;
};

struct Table {
  std::string title;
  std::vector<TableColumn> columns;
  std::vector<std::vector<TableCell>> rows;  // each as long as `columns`
  // The group of each row, by which pages filter: as long as `rows`, or empty.
  std::vector<std::string> row_groups;
  std::vector<std::string> notes;  // below the table
  // Columns from the left that stand in every part where a wide table is shown in parts.
  int repeated_columns = 1;
  // Rows from the top that the others are compared with: a terminal shows them again at the head of
  // each group of rows where the table is long.
  int reference_rows = 0;

  void AddRow(std::vector<TableCell> cells, std::string group) {
    rows.push_back(std::move(cells));
    row_groups.push_back(std::move(group));
  }
};

struct TextStyle {
  bool colour = false;  // ANSI escape sequences
  bool unicode = true;  // otherwise the few characters beyond ASCII that we print are replaced
  int width = 120;      // of the terminal; 0: unlimited
};

// Columns aligned by display width. Where the table is wider than the style allows, columns with a
// least width are narrowed: their cells are broken into lines, and only a word that is too long is
// cut, ending in an ellipsis. If that is not enough the table is shown in parts, none of them wider
// unless a single column is.
std::string ToTerminal(const Table& table, const TextStyle& style);
// The table without the details that ToTerminal has no room for.
Table WithShownDetails(Table table, const TextStyle& style);
std::string ToMarkdown(const Table& table);
// Returns Markdown that shows `text` as it is: nothing within a line of it is markup, and a newline
// is a space.
std::string MarkdownText(absl::string_view text);

// Columns that `text`, in UTF-8, takes on a terminal: combining marks none, East Asian wide
// characters and emoji two. An invalid byte counts one.
int DisplayWidth(absl::string_view text);
// The longest beginning of `text` that takes at most `width` columns, with "…" at its end where
// something was cut.
std::string CutToWidth(absl::string_view text, int width);
// Breaks `text` at spaces into lines of at most `width` columns; the second and later ones begin
// with `indent`. A word that is too long stands alone.
std::string Wrap(absl::string_view text, int width, absl::string_view indent);
// `text` in the colours of `emphasis`, or as it is without colour.
std::string Emphasise(absl::string_view text, Emphasis emphasis, const TextStyle& style);
// Text from a file or a flag made harmless: control characters, escape sequences among them,
// become '?'.
std::string Printable(absl::string_view text);
// The characters beyond ASCII that this library prints, replaced by ASCII ones of equal width.
std::string ToAscii(absl::string_view text);

// Numbers for people. Not finite: "inf", "-inf", "nan"; absent: "-".
std::string FormatSignificant(std::optional<double> value, int digits = 3);  // 0.512 12.3 1230
std::string FormatError(std::optional<double> value);  // two digits: 0.18 2.1e-7 0
std::string FormatBound(std::optional<double> value);  // the same without zeros at the end
std::string FormatMilliseconds(std::optional<double> ns);
std::string FormatBytes(std::optional<double> bytes);    // 512 B, 1.5 KiB, 12 MiB
std::string FormatPercent(std::optional<double> share);  // 0.61: 61%
std::string FormatRatio(std::optional<double> ratio);    // 8.1x
// "[7.9, 8.3]" for two ratios: with two digits, or up to four where those do not tell the ends from
// each other or from 1.
std::string FormatInterval(double low, double high);
// Scaled by 1000s: FormatScaled(4.2e11, "FLOP/s") is "420 GFLOP/s".
std::string FormatScaled(std::optional<double> value, absl::string_view unit);

}  // namespace tfb

#endif  // TFB_RESULTS_TABLE_H_
