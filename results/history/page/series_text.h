// Writes the values of a series as a short text, which the script of a page reads again when it
// draws the series (series_text.js).
//
// The text is a sequence of digits of base 88: the printable ASCII characters without space and
// "&'<>\, which need no escape in JSON nor in HTML. Integers take one digit where they are small:
//
//   unsigned     n < 60 is the digit n. n - 60 < 20 * 88 is a digit of 60..79 and another. After that
//                n - 1820 < 6 * 88^2 is a digit of 80..85 and two others. Any other n is 86 and five.
//   signed       n >= 0 is the unsigned 2n, n < 0 is -2n - 1.
//
// and make up
//
//   text         presence, then exact or reduced values
//   presence     the number of ranges of successive runs; of each the runs before it that have no
//                value, and its own
//   exact        the digit 0; the number of distinct values; each as decimal text with a space after
//                it; where there are several, pairs of the value's place and how often it repeats,
//                until all runs have one
//   reduced      the digit 1; the number of blocks; of each the number of its values and that of the
//                groups that they are reduced to, 0 where every value is kept; then the values of
//                all blocks. Group i of g groups of n values has those from i n / g to (i+1) n / g.
//                A group is its median, its least and its greatest value.
//   value        q(v) = round(ln v / (2 ln 1.001)), which is within 0.1 % of v, as a signed
//                difference from the prediction p, which then moves a quarter of the way to q(v),
//                rounded down. The least and the greatest value of a group are differences from the
//                median instead, or from p where the median is not positive. The digit 87 announces
//                a value without q: another digit 0 is zero, 1 NaN, 2 infinity, 3 -infinity; 4 and
//                a difference is a negative value. Before a group's median 87, 5 and n say that n
//                of its values are not finite; nothing follows where they are all of them.
//
// The exact form is taken where it is shorter, as it is for what hardly ever changes.
#ifndef TFB_RESULTS_HISTORY_PAGE_SERIES_TEXT_H_
#define TFB_RESULTS_HISTORY_PAGE_SERIES_TEXT_H_

#include <string>
#include <vector>

namespace tfb {

// How much of a series is kept.
struct Detail {
  int latest = 150;  // values at the end, all of which are kept
  int around = 10;   // values on either side of each cut, all of which are kept
  int groups = 75;   // that the others are reduced to, where that leaves more than 3 in a group
  // Values that are not finite and are kept one by one; those before them are counted in groups.
  int odd = 64;
};

// Returns how many values a group has at most in a series of `count` values; 1 where all are kept.
int LargestGroup(int count, const Detail& detail);

// Returns the text of `values`, that belong to the ascending `runs`. No group has values from both
// sides of a cut: `cuts` are places in `values` in any order. With `exact`, the values are kept.
std::string SeriesText(const std::vector<int>& runs, const std::vector<double>& values,
                       const std::vector<int>& cuts, const Detail& detail, bool exact);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_PAGE_SERIES_TEXT_H_
