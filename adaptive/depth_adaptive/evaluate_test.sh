#!/bin/bash
# usage: evaluate_test.sh EVALUATE
# Runs the program small, and wrongly.
set -eu

output="$("$1" --sequences=3 --tokens=140 --levels=1)"
for row in "always after layer 6 +6.00 +0.0% +[0-9.]+ +1.0000" "oracle of tokens, penalty 0" \
  "oracle of sequences, penalty 0" "sequence of likelihood, level 0" \
  "multinomial of correctness, level 0" "geometric of likelihood, level 0" \
  "confidence [0-9]+(/[0-9]+){4} "; do
  grep -Eq "^$row" <<< "$output" || { echo "no row $row:"; echo "$output"; exit 1; }
done

# The plot below the table, in which no row is missing.
grep -q "^bits per byte$" <<< "$output"
for mark in o ^ s m g c; do
  [[ "$(tail -22 <<< "$output" | grep -E '^ +[0-9.]* [+|]')" == *"$mark"* ]] || { echo "no $mark:"; echo "$output"; exit 1; }
done

"$1" --help | grep -q -- "--sigma"
for wrong in --sequences=0 --tokens=0 --levels=6 --sigma=-1 --threads=0 --sequences=1000000 --pear; do
  status=0
  message="$("$1" "$wrong" 2>&1 >/dev/null)" || status=$?
  [[ "$status" == 2 ]] || { echo "$wrong: exit status $status"; exit 1; }
  echo "$message"
done
