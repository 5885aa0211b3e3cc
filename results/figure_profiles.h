// Collects the error, or quality, and the cost of each technique on one input profile. This header
// is private to the figures.
#ifndef TFB_RESULTS_FIGURE_PROFILES_H_
#define TFB_RESULTS_FIGURE_PROFILES_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "results/analysis.h"
#include "results/figures.h"

namespace tfb {
namespace figure {

// harness/inputs/language_model.h defines the first; networks with early exits report the others.
inline constexpr char kBitsPerByte[] = "bits_per_byte";
inline constexpr char kMeanLayers[] = "mean_layers";
inline constexpr char kFlopsSaved[] = "flops_saved";

// One technique with its options on one input profile, over layers, masks and seeds.
struct Entry {
  const Series* series = nullptr;
  const Series* dense = nullptr;  // its counterpart; itself where it has none
  // Against dense, of the forward pass; of a call; over dense's time.
  std::vector<double> errors, times_ns, ratios;
  std::map<std::string, std::vector<double>> statistics;
  bool failed = false;
  bool borrowed_ratio = false;  // from another input, at the longest length with a time
};

// Returns the median; NaN where a value is NaN, and nothing where there are no values.
std::optional<double> Middle(const std::vector<double>& values);
std::optional<double> Middle(const Entry& entry, const char* statistic);

// The cases of one input profile, element type and device, by length.
struct Profile {
  std::string title;
  std::map<int64_t, std::vector<Entry>> by_tokens;
};

// Returns the profiles in the order of the file. A dense counterpart is kept where a technique that
// is compared with it passes the filter.
std::vector<Profile> ProfilesOf(const Analysis& analysis, const SeriesFilter& filter);

// Returns the entries of the longest length at which enough is known to choose, or null. Where a
// profile has errors and no times, as in a file of accuracy cases without repetitions, techniques
// get their time relative to dense at the longest length at which they were timed.
const std::vector<Entry>* FindLongest(const Analysis& analysis, Profile* profile, int64_t* tokens);

}  // namespace figure
}  // namespace tfb

#endif  // TFB_RESULTS_FIGURE_PROFILES_H_
