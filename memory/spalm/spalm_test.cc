#include "memory/spalm/spalm.h"
