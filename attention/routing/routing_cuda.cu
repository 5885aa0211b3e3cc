#include "attention/routing/routing_functors.h"
#include "core/cuda/for_each.cuh"

namespace tfb::routing {

TFB_FOR_EACH_IN_ROWS(ScoresFromMarks);
TFB_FOR_EACH_IN_ROWS(MarksOfMembers);

}  // namespace tfb::routing
