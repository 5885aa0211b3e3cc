#!/bin/bash
# usage: case_table_test.sh ALL_CONFORMANCE CASES.md
# The committed table of conformance cases names just the cases that there are, and no technique that
# is gone. One that is new may be missing: it passes its tests before the table is written again.
set -eu -o pipefail

readonly AGAIN='bazel run //harness:all_conformance -- --table=$PWD/harness/conformance/CASES.md'

# "technique." at the beginning of a line, then "  Case/device/options/problem" for each of its tests.
listed="$("$1" --gtest_list_tests)"
techniques="$(sed -nE 's/^([a-z0-9_]+)\.$/\1/p' <<< "$listed" | sort -u)"
cases="$(sed -nE 's/^  ([A-Za-z0-9]+)\/.*/\1/p' <<< "$listed" | sort -u)"

# The first cells of the rows below a heading of the file, one name in a line.
first_cells() {
  awk -F ' [|] ' -v heading="## $1" '
    /^## / { inside = $0 == heading; header = 1 }
    inside && /^[|] / && !header { sub(/^[|] /, "", $1); gsub(/, /, "\n", $1); print $1 }
    /^[|]---/ { header = 0 }' "$2" | sort -u
}
table_techniques="$(first_cells 'By technique' "$2")"
table_cases="$(first_cells 'By case' "$2")"

failed=0
if ! difference="$(diff <(echo "$table_cases") <(echo "$cases"))"; then
  printf 'CASES.md (<) does not list the cases that there are (>):\n%s\n' "$difference" >&2
  failed=1
fi
if gone="$(comm -23 <(echo "$table_techniques") <(echo "$techniques"))" && [[ -n "$gone" ]]; then
  printf 'CASES.md lists techniques that do not exist:\n%s\n' "$gone" >&2
  failed=1
fi
if (( failed )); then
  echo "Write it again: $AGAIN" >&2
  exit 1
fi
new="$(comm -13 <(echo "$table_techniques") <(echo "$techniques"))"
[[ -z "$new" ]] || printf 'not in CASES.md yet: %s\nWrite it again: %s\n' "${new//$'\n'/, }" "$AGAIN"
echo "$(wc -l <<< "$table_cases") cases, $(wc -l <<< "$table_techniques") techniques"
