#!/bin/bash
# The program on a window of twenty bytes: its table, and what it says of flags that are wrong.
set -eu

program="$1"
output="$("$program" --lengths=20 --bytes=3 --segment=8 --threads=1)"
line="$(grep -E '^ +20 ' <<< "$output")"
# Length, three times in ms with bits per byte, two ratios, no published one.
[[ $(wc -w <<< "$line") == 10 && "$line" == *" -" ]] || { echo "$output"; exit 1; }
# A byte is foretold better than by chance, alike with either way of appending.
read -r _ _ _ _ segments _ _ one_at_a_time _ <<< "$line"
awk -v a="$segments" -v b="$one_at_a_time" 'BEGIN { exit !(a > 0.1 && a < 8 && a - b < 0.002 && b - a < 0.002) }' ||
  { echo "$output"; exit 1; }

for wrong in --lengths=0 --lengths=long --segment=0 --bytes=-1 --threads=0 --no_such_flag; do
  code=0
  message="$("$program" "$wrong" 2>&1 > /dev/null)" || code=$?
  [[ $code == 2 && "$message" == *"${wrong%%=*}"* ]] || { echo "$wrong: exit $code, $message"; exit 1; }
done
