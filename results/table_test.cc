#include "results/table.h"

#include <limits>
#include <string>

#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Table SmallTable() {
  Table table;
  table.title = "Things";
  table.columns = {{"name", false, 6}, {"first\nnumber", true}, {"second", true}};
  table.rows = {{"a", "1", "22.5"}, {"a long name", "1000", "-"}};
  table.notes = {"a note"};
  return table;
}

TEST(Table, AlignsColumnsAndSetsHeadersAgainstTheBottom) {
  EXPECT_EQ(ToTerminal(SmallTable(), TextStyle()),
            "Things\n"
            "              first\n"
            "name         number  second\n"
            "a                 1    22.5\n"
            "a long name    1000       -\n"
            "a note\n");
}

TEST(Table, BreaksNamesWhereTheTerminalIsNarrowAndCutsLongWords) {
  TextStyle style;
  style.width = 24;
  Table table = SmallTable();
  table.rows.push_back({"interminable", "2", "3"});
  EXPECT_EQ(ToTerminal(table, style),
            "Things\n"
            "           first\n"
            "name      number  second\n"
            "a              1    22.5\n"
            "a long      1000       -\n"
            "  name\n"
            "intermi…       2       3\n"
            "a note\n");
}

TEST(Table, IsShownInPartsWhereCuttingIsNotEnough) {
  TextStyle style;
  style.width = 19;
  EXPECT_EQ(ToTerminal(SmallTable(), style),
            "Things\n"
            "              first\n"
            "name         number\n"
            "a                 1\n"
            "a long name    1000\n"
            "\n"
            "name         second\n"
            "a              22.5\n"
            "a long name       -\n"
            "a note\n");
}

TEST(Table, WithoutWidthNothingIsCut) {
  TextStyle style;
  style.width = 0;
  Table table = SmallTable();
  table.rows[0][0] = std::string(500, 'x');
  EXPECT_NE(ToTerminal(table, style).find(std::string(500, 'x')), std::string::npos);
}

TEST(Table, ColourSurroundsCellsWithoutChangingTheirPlaces) {
  TextStyle style;
  style.colour = true;
  Table table;
  table.columns = {{"v", true}, {"w"}};
  table.rows = {{{"bad", Emphasis::kBad}, "x"}};
  EXPECT_EQ(ToTerminal(table, style),
            "\x1b[2m  v  w\x1b[0m\n"
            "\x1b[1;31mbad\x1b[0m  x\n");
}

TEST(Table, ShowsDetailsByRankWhereTheyFit) {
  Table table;
  table.columns = {{"name"}, {"ms", true, 0, 1}, {"speed-up", true, 0, 2}};
  table.rows = {{"a", "10", "-"},
                {"b",
                 {"9.1", Emphasis::kNone, "1.1x", Emphasis::kFaint},
                 {"1.1x", Emphasis::kNone, "[1.0, 1.2]", Emphasis::kFaint}}};
  TextStyle style;
  EXPECT_EQ(ToTerminal(table, style),
            "name        ms         speed-up\n"
            "a      10          -\n"
            "b     9.1 1.1x  1.1x [1.0, 1.2]\n");
  style.width = 30;
  EXPECT_EQ(ToTerminal(table, style),
            "name        ms  speed-up\n"
            "a      10              -\n"
            "b     9.1 1.1x      1.1x\n");
  EXPECT_EQ(WithShownDetails(table, style).rows[1][2].detail, "");
  EXPECT_EQ(WithShownDetails(table, style).rows[1][1].detail, "1.1x");
  style.width = 20;
  EXPECT_EQ(ToTerminal(table, style),
            "name   ms  speed-up\n"
            "a      10         -\n"
            "b     9.1      1.1x\n");
  EXPECT_NE(ToMarkdown(table).find("| b | 9.1 1.1x | 1.1x [1.0, 1.2] |"), std::string::npos);
}

TEST(Table, MarkdownEscapesWhatWouldBreakIt) {
  Table table;
  table.columns = {{"a|b"}, {"n\nm", true}};
  table.rows = {{"<script>", "x_y (<= 2)"}, {{"no", Emphasis::kBad}, "`*`"}};
  EXPECT_EQ(ToMarkdown(table),
            "| a\\|b | n m |\n"
            "| --- | ---: |\n"
            "| &lt;script> | x\\_y (<= 2) |\n"
            "| **no** | \\`\\*\\` |\n");
}

TEST(DisplayWidth, CountsColumnsAndNotBytes) {
  EXPECT_EQ(DisplayWidth("abc"), 3);
  EXPECT_EQ(DisplayWidth("é…·"), 3);
  EXPECT_EQ(DisplayWidth("e\xcc\x81"), 1);  // a combining acute accent
  EXPECT_EQ(DisplayWidth("注意"), 4);
  EXPECT_EQ(DisplayWidth("\xff\xc3"), 2);  // invalid bytes
}

TEST(CutToWidth, NeverCutsWithinACharacter) {
  EXPECT_EQ(CutToWidth("注意力", 6), "注意力");
  EXPECT_EQ(CutToWidth("注意力", 5), "注意…");
  EXPECT_EQ(CutToWidth("注意力", 4), "注…");
  EXPECT_EQ(CutToWidth("abc", 1), "…");
  EXPECT_EQ(CutToWidth("abc", 0), "");
}

TEST(Wrap, BreaksAtSpacesAndLeavesLongWordsWhole) {
  EXPECT_EQ(Wrap("one two three", 7, "  "), "one two\n  three");
  EXPECT_EQ(Wrap("extraordinary x", 5, ""), "extraordinary\nx");
}

TEST(Printable, LeavesNoEscapeSequence) {
  EXPECT_EQ(Printable("a\x1b[2Jb\n\x7f"), "a?[2Jb??");
  EXPECT_EQ(Printable("\xc2\x9b"
                      "31m"),
            "?31m");  // a control sequence in one character
  EXPECT_EQ(Printable("a\xe2\x80\xae"
                      "b"),
            "a?b");  // right-to-left override
  EXPECT_EQ(Printable("注 é"), "注 é");
}

TEST(ToAscii, KeepsWidths) { EXPECT_EQ(ToAscii("a · b… é 注"), "a | b~ ? ??"); }

TEST(Format, SignificantDigits) {
  EXPECT_EQ(FormatSignificant(0.51234), "0.512");
  EXPECT_EQ(FormatSignificant(12.345), "12.3");
  EXPECT_EQ(FormatSignificant(9.996), "10.0");
  EXPECT_EQ(FormatSignificant(1234.5), "1234");
  EXPECT_EQ(FormatSignificant(0.000012345), "1.23e-5");
  EXPECT_EQ(FormatSignificant(-2.0), "-2.00");
  EXPECT_EQ(FormatSignificant(0.0), "0");
  EXPECT_EQ(FormatSignificant(1e12), "1.00e12");
}

TEST(Format, AbsentAndNotFiniteNumbersSaySo) {
  EXPECT_EQ(FormatSignificant(std::nullopt), "-");
  EXPECT_EQ(FormatError(std::nullopt), "-");
  EXPECT_EQ(FormatBytes(std::nullopt), "-");
  EXPECT_EQ(FormatPercent(std::nullopt), "-");
  EXPECT_EQ(FormatRatio(std::nullopt), "-");
  EXPECT_EQ(FormatMilliseconds(std::nullopt), "-");
  EXPECT_EQ(FormatScaled(std::nullopt, "B/s"), "-");
  EXPECT_EQ(FormatError(kInfinity), "inf");
  EXPECT_EQ(FormatSignificant(-kInfinity), "-inf");
  EXPECT_EQ(FormatMilliseconds(std::numeric_limits<double>::quiet_NaN()), "nan");
  EXPECT_EQ(FormatPercent(kInfinity), "inf");
}

TEST(Format, Errors) {
  EXPECT_EQ(FormatError(2e-7), "2e-7");
  EXPECT_EQ(FormatError(2.14e-7), "2.1e-7");
  EXPECT_EQ(FormatError(0.18), "0.18");
  EXPECT_EQ(FormatError(0.0012), "1.2e-3");
  EXPECT_EQ(FormatError(0.0), "0");
}

TEST(Format, BytesPercentRatioAndScale) {
  EXPECT_EQ(FormatBytes(512), "512 B");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBytes(4 << 20), "4 MiB");
  EXPECT_EQ(FormatPercent(0.614), "61%");
  EXPECT_EQ(FormatPercent(0.0341), "3.4%");
  EXPECT_EQ(FormatRatio(8.14), "8.1x");
  EXPECT_EQ(FormatInterval(7.91, 8.34), "[7.9, 8.3]");
  EXPECT_EQ(FormatInterval(8.11, 8.14), "[8.11, 8.14]");
  EXPECT_EQ(FormatInterval(0.93, 0.998), "[0.930, 0.998]");
  EXPECT_EQ(FormatRatio(123.4), "123x");
  EXPECT_EQ(FormatScaled(4.2e11, "FLOP/s"), "420 GFLOP/s");
  EXPECT_EQ(FormatScaled(20e9, "B/s"), "20 GB/s");
}

}  // namespace
}  // namespace tfb
