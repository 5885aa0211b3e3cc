// Makes the files that //tools:new_technique writes: a working technique for its author to change.
#ifndef TFB_TOOLS_TECHNIQUE_TEMPLATE_H_
#define TFB_TOOLS_TECHNIQUE_TEMPLATE_H_

#include <map>
#include <string>

#include "absl/strings/string_view.h"

namespace tfb {

// Returns the contents by file name ("BUILD", "NAME.h", ...) of the technique FAMILY/NAME. `name`
// is in lower_snake_case.
std::map<std::string, std::string> TechniqueFiles(absl::string_view family, absl::string_view name);

// Returns the name of the class: "LongformerTwo" for "longformer_two".
std::string ClassName(absl::string_view name);

}  // namespace tfb

#endif  // TFB_TOOLS_TECHNIQUE_TEMPLATE_H_
