#include "memory/knn_lm/knn_lm.h"
