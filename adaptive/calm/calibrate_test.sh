#!/bin/bash
# usage: calibrate_test.sh CALIBRATE
# Runs the program small, and wrongly.
set -eu

output="$("$1" --sequences=8 --tokens=40 --splits=20 --decode_batch=3 --repetitions=1 --risk=0.9 2>/dev/null)"
for row in softmax saturation classifier; do
  grep -Eq "^$row .*% of .*% of" <<< "$output" || { echo "no row $row:"; echo "$output"; exit 1; }
done
grep -q "allowed are 5.0%" <<< "$output"
# Every measure and the whole model have a mark in the plot.
for mark in "o softmax" "x saturation" "v classifier" "W the whole model"; do
  grep -q "$mark" <<< "$output" || { echo "the plot has no \"$mark\":"; echo "$output"; exit 1; }
done

# Of two sequences that calibrate nothing can be promised.
output="$("$1" --sequences=4 --tokens=20 --splits=5 --measures=classifier --p_value=hoeffding 2>/dev/null)"
grep -q "no threshold is accepted" <<< "$output"

"$1" --help | grep -q -- "--risk"
for wrong in --risk=1 --loss=none --sequences=1 --tokens=0 --p_value=x --measures=pear --sequences=1000000; do
  status=0
  message="$("$1" "$wrong" 2>&1 >/dev/null)" || status=$?
  [[ "$status" == 2 ]] || { echo "$wrong: exit status $status"; exit 1; }
  echo "$message"
done
