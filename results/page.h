// Renders a result set as one HTML page that needs no network and no other file.
#ifndef TFB_RESULTS_PAGE_H_
#define TFB_RESULTS_PAGE_H_

#include <string>
#include <vector>

#include "results/analysis.h"
#include "results/table.h"

namespace tfb {

struct PageOptions {
  std::vector<std::string> paths;  // of the files, named at the end
  std::vector<std::string> notes;  // e.g. that a file ends in an incomplete record
};

// Returns a page with figures (results/figures.h) and their data, tables that can be sorted and
// filtered, the cases that did not run, and the machines. All text from files is escaped.
std::string RenderPage(const Analysis& analysis, const PageOptions& options);

// Returns one table as HTML; `id` is unique in the page.
std::string ToHtml(const Table& table, const std::string& id);

}  // namespace tfb

#endif  // TFB_RESULTS_PAGE_H_
