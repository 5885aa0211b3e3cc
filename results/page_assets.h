// The page's style sheet and script as text, which the build makes from page.css and page.js.
#ifndef TFB_RESULTS_PAGE_ASSETS_H_
#define TFB_RESULTS_PAGE_ASSETS_H_

namespace tfb {

extern const char kPageStyle[];
extern const char kPageScript[];

}  // namespace tfb

#endif  // TFB_RESULTS_PAGE_ASSETS_H_
