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

# The mean layers, FLOPs saved in percent, bits per byte and agreement of the row that begins so.
numbers() { sed -nE "s/^$1 +([0-9.]+) +(-?[0-9.]+)% +([0-9.]+) +([0-9.]+)$/\1 \2 \3 \4/p" <<< "$output"; }
# Without a penalty the oracle of a sequence takes its best layer: no layer for all is better. A larger penalty leaves
# earlier and saves more; it costs bits where the whole sequence leaves at once.
best="$(numbers "oracle of sequences, penalty 0" | cut -d' ' -f3)"
for layer in 1 2 3 4 5 6; do
  of_layer="$(numbers "always after layer $layer" | cut -d' ' -f3)"
  awk -v best="$best" -v other="$of_layer" 'BEGIN { exit !(best <= other + 1e-4) }' || {
    echo "the oracle's $best bits are more than the $of_layer of layer $layer"
    exit 1
  }
done
for oracle in "oracle of sequences" "oracle of tokens"; do
  last="99 -99 0"
  bits_count=$([[ "$oracle" == *sequences ]] && echo 1 || echo 0)
  for penalty in 0 0.02 0.05 0.1 0.2 0.4; do
    row="$(numbers "$oracle, penalty $penalty")"
    awk -v last="$last" -v row="$row" -v bits="$bits_count" 'BEGIN {
      split(last, a)
      exit !(split(row, b) == 4 && b[1] <= a[1] && b[2] >= a[2] && (!bits || b[3] >= a[3]))
    }' || {
      echo "$oracle, penalty $penalty: $row after $last"
      exit 1
    }
    last="$row"
  done
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
