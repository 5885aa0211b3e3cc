#!/bin/bash
# A sweep with somebody else's library, of which some techniques crash, fail, are wrong or refuse: each has a row of its own.
# contestants_sweep_test.sh SWEEP LIBRARY
set -u
out="$TEST_TMPDIR/out"
"$PWD/$1" --contestants="$PWD/$2,$TEST_TMPDIR/libmissing.so" --techniques=dense --lengths=64 --heads=1 --head_dims=8 --causal=true \
  --accuracy=false --counterparts=false --repetitions=3 --threads=1 --case_timeout=20s --output="$TEST_TMPDIR/c.pb" > "$out" 2> "$TEST_TMPDIR/err"
status=$?
failed=0
expect() {  # each case is a line of standard error when it is done
  grep -qE -- "^\[[0-9]+/[0-9]+\] $1, cpu, .*: $2\$" "$TEST_TMPDIR/err" || { echo "missing: $1: $2"; failed=1; }
}
[[ $status == 1 ]] || { echo "exit status $status"; failed=1; }
expect 'dense' '[0-9.]+ ms'
expect 'dense@toy' '[0-9.]+ ms'
expect 'wrong@toy' '[0-9.]+ ms, failed: max error over max value is [0-9.]+, its bound 2e-05'
expect 'crashes@toy' 'failed: "first run" ended the process: signal 6 \(Aborted\)'
expect 'hangs@toy' 'timeout: .* took longer than --case_timeout=20s; .*'
expect 'writes_inputs@toy' 'failed: the layer wrote into its inputs'
expect 'keeps_its_result@toy' '[0-9.]+ ms, failed: max error over max value is .*'
expect 'writes_nothing@toy' '.*failed: .*'
expect 'fails@toy' 'failed: the kernel fell over'
expect 'refuses@toy' 'unsupported: not today'
expect 'reads_more@toy' 'unsupported: it reads bias, which its definition does not have'
expect 'unknown@missing' 'skipped: .*/libmissing.so: there is no such file'
if (( failed )); then
  cat "$out" "$TEST_TMPDIR/err"
  exit 1
fi
