#include "memory/reversible/reversible.h"

#include "gtest/gtest.h"
