#include "attention/linformer/linformer.h"

#include "gtest/gtest.h"
