#!/bin/bash
# A sweep with somebody else's library and Python file, of which some techniques crash, fail, are wrong or refuse: each has a row
# of its own.
# contestants_sweep_test.sh SWEEP LIBRARY PYTHON_FILE
set -u
out="$TEST_TMPDIR/out"
"$PWD/$1" --contestants="$PWD/$2,$TEST_TMPDIR/libmissing.so,$PWD/$3,missing.py" --python=/usr/bin/python3 --techniques=dense --lengths=64 --heads=1 --head_dims=8 --causal=true \
  --accuracy=false --counterparts=false --repetitions=3 --threads=1 --case_timeout=20s --memory_limit=1GiB --output="$TEST_TMPDIR/c.pb" > "$out" 2> "$TEST_TMPDIR/err"
status=$?
failed=0
expect() {  # each case is a line of standard error when it is done
  grep -qE -- "^\[[0-9]+/[0-9]+\] $1, cpu, .*: $2\$" "$TEST_TMPDIR/err" || { echo "missing: $1: $2"; failed=1; }
}
[[ $status == 1 ]] || { echo "exit status $status"; failed=1; }
# A library is named by its file alone, as from a shell in its folder.
cp "$PWD/$2" "$TEST_TMPDIR/libalone.so"
program="$PWD/$1"
alone="$(cd "$TEST_TMPDIR" && env -u BUILD_WORKING_DIRECTORY "$program" --contestants=libalone.so --techniques=dense@alone --list 2>&1)" ||
  { echo "libalone.so: $alone"; failed=1; }
[[ "$alone" == *dense@alone* ]] || { echo "libalone.so lists: $alone"; failed=1; }
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
expect 'unknown2@missing' 'skipped: (.*/)?missing.py: there is no such file'
expect 'dense@toy_contestants' '[0-9.]+ ms'
expect 'Window@toy_contestants' '[0-9.]+ ms'
expect 'network@toy_contestants' '[0-9.]+ ms'
expect 'uniform@toy_contestants' 'unsupported: .*'
expect 'wrong@toy_contestants' '[0-9.]+ ms, failed: max error over max value is [0-9.]+, its bound 2e-05'
expect 'keeps_its_result@toy_contestants' '.*failed: a call on new inputs, while it was timed: max error over max value is .*'
expect 'GivesOneBuffer@toy_contestants' 'failed: its result out of an earlier call changed with a later one'
expect 'returns_early@toy_contestants' '.*failed: max error over max value is .*'
expect 'writes_inputs@toy_contestants' 'failed: it wrote into its input v'
expect 'another_shape@toy_contestants' 'failed: its result out has shape \[1, 1, 63, 8\]; that of the definition is \[1, 1, 64, 8\]'
expect 'another_type@toy_contestants' 'failed: its result out is of float64; that of the definition is float32'
expect 'no_array@toy_contestants' 'failed: its result out is no array but a str'
expect 'raises@toy_contestants' 'failed: ValueError: .*\(toy_contestants.py:[0-9]+\)'
expect 'refuses@toy_contestants' 'unsupported: not today'
expect 'crashes@toy_contestants' 'failed: its process ended with signal 6 \(Aborted\)'
expect 'hangs@toy_contestants' 'timeout: .* took longer than --case_timeout=20s; .*'
expect 'takes_all_memory@toy_contestants' 'out of memory: .*'
if (( failed )); then
  cat "$out" "$TEST_TMPDIR/err"
  exit 1
fi
