// Formats tables and numbers as text, for terminals and Markdown.
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
  // An interval or ratio, which follows the text where there is room.
  std::string detail;
  Emphasis detail_emphasis = Emphasis::kFaint;
};

struct TableColumn {
  std::string header;  // lines separated by '\n', aligned at the bottom
  bool right = false;  // whether cells are aligned right, as numbers are
  // The width in characters to which the column may be narrowed where the table is too wide, by
  // breaking its cells at spaces into several lines; 0 where it may not.
  int least_width = 0;
  // A terminal shows the details of columns of rank 1 where the table fits with all of that rank,
  // and those of rank 2 where it fits with both. Markdown and HTML always show details.
  int detail_rank = 0;
};

struct Table {
  std::string title;
  std::vector<TableColumn> columns;
  std::vector<std::vector<TableCell>> rows;  // each as long as `columns`
  // The group of each row, by which pages filter. It is as long as `rows`, or empty.
  std::vector<std::string> row_groups;
  std::vector<std::string> notes;  // below the table
  // The number of columns on the left that are repeated in every part of a wide table.
  int repeated_columns = 1;
  // The number of rows at the top that the others are compared with. A terminal repeats them at the
  // head of each group of rows of a long table.
  int reference_rows = 0;

  void AddRow(std::vector<TableCell> cells, std::string group) {
    rows.push_back(std::move(cells));
    row_groups.push_back(std::move(group));
  }
};

struct TextStyle {
  bool colour = false;  // ANSI escape sequences
  bool unicode = true;  // false: non-ASCII characters of this library are replaced
  int width = 120;      // of the terminal; 0: unlimited
};

// Returns the table with columns aligned by display width. Where it is wider than the style allows,
// columns with a least width are narrowed: their cells are broken into lines, and only a word that
// is too long is cut, ending in an ellipsis. If that is not enough, the table is shown in parts,
// each of which fits unless a single column does not.
std::string ToTerminal(const Table& table, const TextStyle& style);
// Returns the table without the details that ToTerminal has no room for.
Table WithShownDetails(Table table, const TextStyle& style);
std::string ToMarkdown(const Table& table);
// Escapes `text` for use within a line of Markdown. A newline becomes a space.
std::string MarkdownText(absl::string_view text);

// Returns the columns that `text`, in UTF-8, takes on a terminal: combining marks take none, East
// Asian wide characters and emoji two, an invalid byte one.
int DisplayWidth(absl::string_view text);
// Returns the longest prefix of `text` that takes at most `width` columns, with "…" at its end
// where something was cut.
std::string CutToWidth(absl::string_view text, int width);
// Breaks `text` at spaces into lines of at most `width` columns, and begins the second and later
// ones with `indent`. A word that is too long has a line of its own.
std::string Wrap(absl::string_view text, int width, absl::string_view indent);
// Returns `text` in the colours of `emphasis`, or as it is where the style has no colour.
std::string Emphasise(absl::string_view text, Emphasis emphasis, const TextStyle& style);
// Replaces control characters, and so escape sequences, in text from a file or a flag by '?'.
std::string Printable(absl::string_view text);
// Replaces the non-ASCII characters that this library prints by ASCII ones of equal width.
std::string ToAscii(absl::string_view text);

// Format numbers for people: "inf", "-inf", "nan" where they are not finite, "-" where absent.
std::string FormatSignificant(std::optional<double> value, int digits = 3);  // 0.512 12.3 1230
std::string FormatError(std::optional<double> value);  // two digits: 0.18 2.1e-7 0
std::string FormatBound(std::optional<double> value);  // the same without zeros at the end
std::string FormatMilliseconds(std::optional<double> ns);
std::string FormatBytes(std::optional<double> bytes);    // 512 B, 1.5 KiB, 12 MiB
std::string FormatPercent(std::optional<double> share);  // 0.61: 61%
std::string FormatRatio(std::optional<double> ratio);    // 8.1x
// Returns "[7.9, 8.3]" for two ratios: with two digits, or up to four where with fewer an end would
// equal the other one or 1.
std::string FormatInterval(double low, double high);
// Returns the value with an SI prefix: FormatScaled(4.2e11, "FLOP/s") is "420 GFLOP/s".
std::string FormatScaled(std::optional<double> value, absl::string_view unit);

}  // namespace tfb

#endif  // TFB_RESULTS_TABLE_H_
