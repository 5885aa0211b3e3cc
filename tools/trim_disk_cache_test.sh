#!/bin/bash
# Tests that what was written longest ago goes first, and no more than has to.
set -eu

trim="$1"
fail() { echo "$1" >&2; exit 1; }
cache="$TEST_TMPDIR/cache with a space"
mkdir -p "$cache/ac" "$cache/cas"
add() {  # NAME KIB DAYS
  truncate --size="$2K" "$cache/$1"
  touch --date="$3 days ago" "$cache/$1"
}
add 'cas/old' 300 9
add 'ac/older' 1 20
add 'cas/new' 400 1
add 'cas/middle one' 300 5
names() { (cd "$cache" && find . -type f | sort | tr '\n' ','); }

"$trim" "$cache" 0.001
[[ "$(names)" == './ac/older,./cas/middle one,./cas/new,./cas/old,' ]] || fail "1001 KiB fit into 0.001 GiB, left are $(names)"
"$trim" "$cache" 0.0008
[[ "$(names)" == './cas/middle one,./cas/new,' ]] || fail "0.0008 GiB hold the newest two, left are $(names)"
"$trim" "$cache" 0
[[ -z "$(names)" ]] || fail "nothing fits into 0, left are $(names)"
"$trim" "$cache" 1
"$trim" "$cache/none" 1
