// Functions that the figures share. This header is private to them.
#ifndef TFB_RESULTS_FIGURE_PARTS_H_
#define TFB_RESULTS_FIGURE_PARTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "results/analysis.h"
#include "results/figures.h"
#include "results/plot.h"

namespace tfb {
namespace figure {

// Techniques that share a panel.
struct Panel {
  std::string title;
  std::vector<const Series*> members;
  // The name of each member without the words that all of them share; those are the subtitle.
  std::vector<std::string> labels;
  std::string subtitle;
};

// Splits `members` into panels of at most plot::kStyles techniques.
std::vector<Panel> SplitPanels(const std::vector<const Series*>& members);

// Returns the group's series that are not counterparts and that pass the filter.
std::vector<const Series*> Members(const SeriesGroup& group, const SeriesFilter& filter);

plot::Axis LengthAxis(const SeriesGroup& group);
plot::Axis TimeAxis(std::string title);  // in nanoseconds
plot::Axis BytesAxis(std::string title);
std::string TimeText(double ns);                   // "12.3 ms"
std::string LengthWord(const SeriesGroup& group);  // "tokens", "keys" or "queries"

// Returns the printable name "near window=256", with " (failed)" where a case failed.
std::string CurveName(const Series& series);
// Returns a key that is the same for a series in every figure.
std::string CurveKey(const Series& series);
std::string FamilyOf(const Series& series);

// Returns the measured limit for a case: the highest peak of its device, type and threads.
std::optional<double> ComputePeak(const Environment& environment, const Case& result);
struct Bandwidth {
  double bytes_per_second;
  const char* what;  // "read", or "copy" where reading was not measured
};
std::optional<Bandwidth> BandwidthPeak(const Environment& environment, const Case& result);

}  // namespace figure
}  // namespace tfb

#endif  // TFB_RESULTS_FIGURE_PARTS_H_
