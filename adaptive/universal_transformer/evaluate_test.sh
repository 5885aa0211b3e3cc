#!/bin/bash
# usage: evaluate_test.sh EVALUATE
# What evaluate prints of a few short additions, and how it answers bad usage.
set -u
evaluate="$1"
failed=0

fail() {
  echo "FAILED: $1" >&2
  failed=1
}

small="--digits=6 --problems=20 --thresholds=0,0.99"
output="$("$evaluate" $small --rounds=1 2> /dev/null)" || fail "exit status $?"
for expected in "universal_transformer:" "6 digits, 20 additions" "8 steps        100.00 %   100.00 %" \
    "act 0 " "act 0.99 " "the gate takes" "steps taken by tokens, as trained" "places away"; do
  [[ "$output" == *"$expected"* ]] || fail "\"$expected\" is not in: $output"
done
longest="$(grep -o '#*$' <<< "$output" | awk 'length > most { most = length } END { print most }')"
[[ "$longest" == 40 ]] || fail "the longest bar has $longest signs instead of 40: $output"
# Untimed it is the same each time, with any number of threads.
once="$("$evaluate" $small --rounds=0 2> /dev/null | tail -n +4)"
again="$("$evaluate" $small --rounds=0 --threads=3 2> /dev/null | tail -n +4)"
[[ "$once" == "$again" && -n "$once" ]] || fail "$once is not $again"
other="$("$evaluate" $small --rounds=0 --seed=2 2> /dev/null | tail -n +4)"
[[ "$once" != "$other" ]] || fail "another seed gives the same: $other"

for usage in --digits=0 --digits=many --problems=0 --nines=2 --thresholds=1.5 --rounds=-1 --threads=0 --model=nowhere \
    --digit=3 word; do
  message="$("$evaluate" "$usage" 2>&1 > /dev/null)"
  status=$?
  (( status == 2 )) || fail "$usage: exit status $status"
  [[ "$message" == evaluate:* && "$(wc -l <<< "$message")" == 1 ]] || fail "$usage: $message"
done
"$evaluate" --help | grep -q -- --thresholds || fail "--help"
exit "$failed"
