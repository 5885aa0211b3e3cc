// Views of some heads and tokens of a tensor, for the layers of engine flash.
#ifndef TFB_CORE_FLASH_CROP_H_
#define TFB_CORE_FLASH_CROP_H_

#include "core/flash/plan.h"
#include "core/flash/score_terms.h"
#include "core/tensor.h"

namespace tfb {

// Returns the elements of a range of one axis; an empty view stays empty.
template <class View>
View Crop(const View& view, int axis, const TokenRange& range) {
  if (view.empty() || (range.begin == 0 && range.end == view.dim(axis))) return view;
  return Slice(view, axis, range.begin, range.size());
}

// Returns some heads and tokens of a view, which may have these heads alone.
template <class View>
View Crop(const View& view, const TokenRange& heads, const TokenRange& tokens) {
  if (view.empty()) return view;
  const bool has_others = view.dim(1) > heads.size();
  return Crop(has_others ? Slice(view, 1, heads.begin, heads.size()) : view, 2, tokens);
}

// Returns what a softmax writes of a tensor: the rows of its heads and queries, or all places.
template <class View>
View Crop(const View& view, const FlashRows& rows) {
  return rows.out_by_place ? view : Crop(view, rows.heads, rows.queries);
}

}  // namespace tfb

#endif  // TFB_CORE_FLASH_CROP_H_
