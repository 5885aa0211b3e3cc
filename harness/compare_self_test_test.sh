#!/bin/bash
# A technique that takes sixteen times as long is found, and the same sweep twice is no regression.
# usage: compare_self_test_test.sh COMPARE_SELF_TEST
set -u

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

out="$("$1" --runs=1 --slow_down=16 --threshold=2 --techniques=dense,toy_mean --lengths=128 --repetitions=15 --rounds=1 --min_time=30ms \
  --keep="$TEST_TMPDIR/kept" 2> "$TEST_TMPDIR/err")"
status=$?
(( status == 0 )) || fail "exit status $status: $out $(cat "$TEST_TMPDIR/err")"
grep -q '^3 sweeps, 1 techniques at 128 tokens, 15 samples each; threshold 2$' <<< "$out" || fail "no first line: $out"
grep -q '^false alarms  0 of ' <<< "$out" || fail "false alarms: $out"
grep -q '^power         1 of 1, 100.00% ' <<< "$out" || fail "power: $out"
grep -q 'of techniques slowed by 1500% are found$' <<< "$out" || fail "power: $out"
[[ -s "$TEST_TMPDIR/kept/3.pb" ]] || fail "no result files are kept"

"$1" --runs=1 --techniques=dense 2> "$TEST_TMPDIR/err" && fail "nothing can be slowed, and no error"
grep -q '^compare_self_test: --techniques: none of them is held against another one' "$TEST_TMPDIR/err" ||
  fail "message: $(cat "$TEST_TMPDIR/err")"
"$1" --slow_down=1 2> "$TEST_TMPDIR/err"
(( $? == 2 )) || fail "a factor of 1 is taken"
echo PASSED
