// What //tools:new_technique writes: the files of a technique that works as it stands, for its author to change.
#ifndef TFB_TOOLS_TECHNIQUE_TEMPLATE_H_
#define TFB_TOOLS_TECHNIQUE_TEMPLATE_H_

#include <map>
#include <string>

#include "absl/strings/string_view.h"

namespace tfb {

// Contents by file name ("BUILD", "NAME.h", ...) of the technique FAMILY/NAME. `name` is in lower_snake_case.
std::map<std::string, std::string> TechniqueFiles(absl::string_view family, absl::string_view name);

// "longformer_two" as a class: "LongformerTwo".
std::string ClassName(absl::string_view name);

}  // namespace tfb

#endif  // TFB_TOOLS_TECHNIQUE_TEMPLATE_H_
