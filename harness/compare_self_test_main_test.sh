#!/bin/bash
# What the program prints, and how it answers bad usage. How many alarms there are is for
# compare_self_test_test, whose clock is simulated.
# usage: compare_self_test_main_test.sh COMPARE_SELF_TEST
set -u

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

out="$("$1" --runs=1 --techniques=dense,toy_mean --lengths=16 --repetitions=3 --rounds=1 --min_time=1ms \
  --keep="$TEST_TMPDIR/kept" 2> "$TEST_TMPDIR/err")"
status=$?
(( status <= 1 )) || fail "exit status $status: $out $(cat "$TEST_TMPDIR/err")"
grep -q '^3 sweeps, 1 techniques at 16 tokens, 3 samples each; threshold 1.05$' <<< "$out" || fail "no first line: $out"
grep -q '^false alarms  [0-9]* of [0-9]*, .* of times that are the same are called SLOWER$' <<< "$out" || fail "false alarms: $out"
grep -q '^power         [01] of 1, .* of techniques slowed by 10% are found$' <<< "$out" || fail "power: $out"
[[ -s "$TEST_TMPDIR/kept/3.pb" ]] || fail "no result files are kept"

"$1" --runs=1 --techniques=dense 2> "$TEST_TMPDIR/err"
(( $? == 2 )) || fail "nothing can be slowed, and no error"
grep -q '^compare_self_test: --techniques: none of them is held against another one' "$TEST_TMPDIR/err" ||
  fail "message: $(cat "$TEST_TMPDIR/err")"
"$1" --slow_down=1 2> "$TEST_TMPDIR/err"
(( $? == 2 )) || fail "a factor of 1 is taken"
echo PASSED
