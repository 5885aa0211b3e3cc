#include "attention/rfa/rfa.h"
#include "gtest/gtest.h"
