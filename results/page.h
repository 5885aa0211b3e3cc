// A result set as one HTML page that needs nothing else: no network, no other file.
#ifndef TFB_RESULTS_PAGE_H_
#define TFB_RESULTS_PAGE_H_

#include <string>
#include <vector>

#include "results/analysis.h"
#include "results/table.h"

namespace tfb {

struct PageOptions {
  std::vector<std::string> paths;  // of the files, named at the end
  std::vector<std::string> notes;  // e.g. that a file has a torn tail
};

// Figures (results/figures.h) with their data, tables that sort and filter, what did not run, and
// the machines. Everything that comes from files is text: markup in it is shown, not obeyed.
std::string RenderPage(const Analysis& analysis, const PageOptions& options);

// One table as HTML; `id` is unique in the page.
std::string ToHtml(const Table& table, const std::string& id);

}  // namespace tfb

#endif  // TFB_RESULTS_PAGE_H_
