// The style sheet and the script of the history's page as text, which the build makes from files.
#ifndef TFB_RESULTS_HISTORY_PAGE_HISTORY_PAGE_ASSETS_H_
#define TFB_RESULTS_HISTORY_PAGE_HISTORY_PAGE_ASSETS_H_

namespace tfb {

extern const char kHistoryPageStyle[];
extern const char kHistoryPageScript[];

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_PAGE_HISTORY_PAGE_ASSETS_H_
