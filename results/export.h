// Renders results for programs; results/render.h describes the formats.
#ifndef TFB_RESULTS_EXPORT_H_
#define TFB_RESULTS_EXPORT_H_

#include <string>

#include "results/analysis.h"

namespace tfb {

std::string RenderCsv(const Analysis& analysis);
std::string RenderJson(const Analysis& analysis);

}  // namespace tfb

#endif  // TFB_RESULTS_EXPORT_H_
