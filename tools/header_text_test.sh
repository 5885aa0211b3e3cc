#!/bin/bash
# header_text.awk takes the comment at the head of a header and the one on its class, as they are laid out.
set -eu
awk_program=$1
folder=$TEST_TMPDIR

cat >"$folder/mine.h" <<'END'
// Mine: one line.
//
//   y_i = sum_j "a_ij" v_j \ n
//
// Source: nobody.
#ifndef MINE_H_
#define MINE_H_

// Of the options.
struct MineOptions {};

// Mine reads q
// and v.
class Mine : public TechniqueOf<MineOptions> {
  // Not this.
};

// Nor this.
void Free();

#endif
END
cat >"$folder/base.h" <<'END'
// The base.
#ifndef BASE_H_
// Not this either.
class Base : public TechniqueOf<None> {};
#endif
END
printf '#ifndef BARE_H_\n' >"$folder/bare.h"

cat >"$folder/expected" <<END
// From $folder/mine.h, by tools/header_text.awk.
#include "core/header_text.h"

namespace {

const bool registered = tfb::RegisterHeaderText("mine", {R"TEXT(Mine: one line.

  y_i = sum_j "a_ij" v_j \\ n

Source: nobody.

$folder/base.h:

The base.
)TEXT", R"TEXT(Mine reads q
and v.
)TEXT"});

}  // namespace
END
awk -f "$awk_program" -v technique=mine "$folder/mine.h" "$folder/base.h" >"$folder/written"
diff "$folder/expected" "$folder/written"

if awk -f "$awk_program" -v technique=bare "$folder/bare.h" >"$folder/written" 2>"$folder/error"; then
    echo "a header without a comment is taken"
    exit 1
fi
grep -q "bare.h: begins with no comment" "$folder/error"
if awk -f "$awk_program" -v technique=bare "$folder/bare.h" "$folder/base.h" >"$folder/written" 2>"$folder/error"; then
    echo "the comment of a second header is taken for the first one's"
    exit 1
fi
grep -q "bare.h: begins with no comment" "$folder/error"
