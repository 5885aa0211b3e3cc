#!/bin/bash
# usage: redraw_test.sh REDRAW RENDER PROTOC README DESCRIPTORS
# Tests tools/redraw_readme on a result file of made-up numbers, and the markers of the repository's README.
set -euo pipefail
redraw="$PWD/$1" render="$PWD/$2" protoc="$PWD/$3" readme="$PWD/$4" descriptors="$PWD/$5"
export RENDER="$render"
fail() { echo "redraw_test: $*" >&2; exit 1; }
rows_of() { sed -n '/^<!-- redraw_readme begin/,/^<!-- redraw_readme end/p' "$1" | sed -n 's/^| `\([^`]*\)` .*/\1/p'; }

# The repository's README has the markers once each, and shows the picture.
[[ "$(grep -c '^<!-- redraw_readme begin.* -->$' "$readme")" == 1 ]] || fail "README.md does not have one begin marker"
[[ "$(grep -c '^<!-- redraw_readme end -->$' "$readme")" == 1 ]] || fail "README.md does not have one end marker"
grep -q '](docs/sweep.svg)' "$readme" || fail "README.md does not show docs/sweep.svg"
[[ "$(wc -l < "$readme")" -lt 150 ]] || fail "README.md has 150 lines or more"
[[ "$(grep -c '^<!-- redraw_readme contestants begin -->$' "$readme")" == 1 ]] || fail "README.md does not have one begin marker of contestants"
[[ "$(grep -c '^<!-- redraw_readme contestants end -->$' "$readme")" == 1 ]] || fail "README.md does not have one end marker of contestants"

# Dense attention takes 40 ms, and technique n of 13 takes 40 / n ms; three families take turns. A quarter of that at half the length.
encode() { "$protoc" --descriptor_set_in="$descriptors" --encode=tfb.ResultSet results/results.proto; }
one_case() {  # name family purpose tokens error nanoseconds pass: eight samples are alike, or what commas separate
  printf 'cases { environment_id: "e" key { technique: "%s" device: DEVICE_TYPE_CPU dtype: ELEMENT_TYPE_F32 seed: 1 threads: 2\n' "$1"
  printf 'problem { batch: 1 query_heads: 8 kv_heads: 8 query_tokens: %d kv_tokens: %d head_dim: 64 value_dim: 64 causal: true }\n' "$4" "$4"
  printf 'input { name: "gaussian" } purpose: %s pass: %s }\n' "$3" "${7:-PASS_FORWARD}"
  printf 'technique { display_name: "%s" title: "Attention, \\"%s\\"" family: "%s" exactness: EXACTNESS_EXACT\n' "$1" "$1" "$2"
  printf 'input_kind: INPUT_KIND_QKV weights: WEIGHTS_NONE dense_counterpart: "dense" options_are_default: true expected_growth: 2 }\n'
  printf 'outcome { status: STATUS_OK peak_workspace_bytes: 2097152 parameter_bytes: 0 against_dense { relative_frobenius: %s }\n' "$5"
  if [[ -n "$6" ]]; then
    local samples="$6"
    if [[ "$samples" != *,* ]]; then samples="$(printf "$samples,%.0s" 1 2 3 4 5 6 7 8)"; fi
    printf 'timing { clock: CLOCK_WALL run_ns: [%s] }' "${samples%,}"
  fi
  printf '} }\n'
}
{
  printf 'format: "tfb.ResultSet/1"\nenvironments { id: "e" cpu_model: "Processor, made up" threads: 2 logical_cores: 2 }\n'
  for n in 0 1 2 3 4 5 6 7 8 9 10 11 12 13; do
    name="$(printf 'near%02d' "$n")" family="$(cut -d ' ' -f $((n % 3 + 1)) <<< "attention memory positional")" time=$((40000000 / (n == 0 ? 1 : n)))
    if [[ "$n" == 0 ]]; then name=dense; fi
    one_case "$name" "$family" PURPOSE_ACCURACY 512 "0.$((n + 10))" ""
    short=$((time / 16))
    # At the shortest length the samples of one do not tell it from dense attention.
    if [[ "$n" == 11 ]]; then short=1700000,1900000,2100000,2300000,2500000,2700000,2900000,3300000; fi
    one_case "$name" "$family" PURPOSE_SCALING 1024 0 "$short"
    one_case "$name" "$family" PURPOSE_SCALING 2048 0 $((time / 4))
    one_case "$name" "$family" PURPOSE_SCALING 4096 0 "$time"
  done
} > "$TEST_TMPDIR/results.textproto"
encode < "$TEST_TMPDIR/results.textproto" > "$TEST_TMPDIR/results.pb"

copy="$TEST_TMPDIR/README.md" picture="$TEST_TMPDIR/docs/sweep.svg"
printf 'Before.\n\n<!-- redraw_readme begin techniques= -->\n\nold rows\n\n<!-- redraw_readme end -->\n\nBehind.\n' > "$copy"
run() { bash "$redraw" --readme="$copy" --picture="$picture" "$@" "$TEST_TMPDIR/results.pb"; }
run

# Twelve rows, the fastest first, dense attention among them; the slowest of the others are left out.
expected="$(printf 'near%02d\n' 13 12 11 10 9 8 7 6 5 4 3; echo dense)"
[[ "$(rows_of "$copy")" == "$expected" ]] || fail "the rows are $(rows_of "$copy")"
row='| `near10` | Attention, "near10" | 0.2 | 10x | 2 MiB | 1024 tokens or fewer |'
grep -qxF "$row" "$copy" || fail "there is no row $row in $(cat "$copy")"
row='^| `near11` | .* | 11x | 2 MiB | 1100 tokens or fewer |$'
grep -q "$row" "$copy" || fail "there is no row $row in $(cat "$copy")"
grep -q '^Medians at 4096 tokens on 2 threads of Processor, made up;' "$copy" || fail "the caption is wrong: $(cat "$copy")"
if grep -q 'old rows' "$copy"; then fail "the old rows are still there"; fi
[[ "$(head -1 "$copy") $(tail -1 "$copy")" == "Before. Behind." ]] || fail "text around the markers has changed"
grep -q '<svg' "$picture" || fail "there is no picture"

# A second run changes nothing.
cp "$copy" "$copy.once"
cp "$picture" "$picture.once"
run
cmp "$copy" "$copy.once" || fail "a second run changed the README"
cmp "$picture" "$picture.once" || fail "a second run changed the picture"

# Training steps beside the runs change nothing.
cp "$TEST_TMPDIR/results.pb" "$TEST_TMPDIR/forward.pb"
{ cat "$TEST_TMPDIR/results.textproto"
  for name in dense near01 near13; do one_case "$name" attention PURPOSE_SCALING 4096 0 1000000 PASS_TRAINING; done
} | encode > "$TEST_TMPDIR/results.pb"
run
cmp "$copy" "$copy.once" || fail "training steps changed the README"
cmp "$picture" "$picture.once" || fail "training steps changed the picture"
mv "$TEST_TMPDIR/forward.pb" "$TEST_TMPDIR/results.pb"

# A list chooses the rows, on the command line and in the marker.
run --techniques=near02,dense
[[ "$(rows_of "$copy")" == "$(printf 'near02\ndense')" ]] || fail "--techniques gave $(rows_of "$copy")"
sed -i 's/techniques= -->/techniques=near05,near01 -->/' "$copy"
run
[[ "$(rows_of "$copy")" == "$(printf 'near05\nnear01')" ]] || fail "the marker's list gave $(rows_of "$copy")"
# near01 takes as long as dense attention at every length.
grep -q '^| `near01` .* | 1.0x | 2 MiB | unclear |$' "$copy" || fail "a crossover is claimed that is unclear: $(cat "$copy")"

# Without markers, or without rows, it fails and changes nothing.
cp "$copy" "$copy.once"
if run --techniques=missing; then fail "a list of unknown techniques is accepted"; fi
cmp "$copy" "$copy.once" || fail "a failed run changed the README"
echo "no markers" > "$copy"
if run; then fail "a README without markers is accepted"; fi

# Ours and theirs: one technique under each mask, at two lengths on one thread and on two. Ours takes 1 ms for 1024 tokens and 4 ms for 2048,
# theirs three times as long, but that one of them has no time at 2048 and is once faster, one is twice as fast and wrong, and one cannot be loaded.
duel() {  # name options causal threads tokens nanoseconds status reason contestant
  printf 'cases { environment_id: "e" key { technique: "%s" options_text: "%s" device: DEVICE_TYPE_CPU dtype: ELEMENT_TYPE_F32 seed: 1 threads: %d\n' "$1" "$2" "$4"
  printf 'problem { batch: 1 query_heads: 2 kv_heads: 2 query_tokens: %d kv_tokens: %d head_dim: 64 value_dim: 64 causal: %s }\n' "$5" "$5" "$3"
  printf 'input { name: "gaussian" } purpose: PURPOSE_SCALING pass: PASS_FORWARD }\n'
  printf 'technique { display_name: "%s" title: "%s" family: "attention" exactness: EXACTNESS_EXACT input_kind: INPUT_KIND_QKV\n' "$1" "${9:-Ours}"
  if [[ -n "${9:-}" ]]; then
    printf 'contestant { file: "theirs.py" definition: "near" definition_technique: "near" definition_options_text: "w=1" '
    printf 'about { key: "torch" value: "2.9" } about { key: "torch threads" value: "%d" } about { key: "OMP_NUM_THREADS" value: "%d" } }\n' "$4" "$4"
  fi
  printf 'weights: WEIGHTS_NONE expected_growth: 2 } outcome { status: STATUS_%s reason: "%s"\n' "$7" "$8"
  printf 'against_definition { max_abs_over_max_value: %s }' "$([[ -n "${9:-}" ]] && echo 3e-7 || echo 1e-7)"
  if [[ -n "$6" ]]; then printf 'timing { clock: CLOCK_WALL run_ns: [%d, %d, %d, %d, %d, %d] }' "$6" "$6" "$6" "$6" "$6" "$6"; fi
  printf '} }\n'
}
{
  printf 'format: "tfb.ResultSet/1"\nenvironments { id: "e" cpu_model: "Processor, made up" threads: 2 logical_cores: 2 }\n'
  for causal in true false; do
    for threads in 1 2; do
      for tokens in 1024 2048; do
        time=$((tokens * tokens * 10 / threads))
        duel near w=1 "$causal" "$threads" "$tokens" "$time" OK ""
        duel far "" "$causal" "$threads" "$tokens" "$time" OK ""
        duel wrong_one@theirs "" "$causal" "$threads" "$tokens" $((time / 2)) FAILED "it is wrong" "Somebody's, of theirs"
        duel absent@gone "" "$causal" "$threads" "$tokens" "" SKIPPED "no such file" "absent, of gone"
        if [[ "$tokens" == 2048 && "$threads" == 2 ]]; then
          duel slow_one@theirs "" "$causal" "$threads" "$tokens" "" TIMEOUT "it took 7 s" "Somebody's, of theirs"
        elif [[ "$tokens" == 1024 && "$threads" == 2 && "$causal" == false ]]; then
          duel slow_one@theirs "" "$causal" "$threads" "$tokens" $((time * 3 / 4)) OK "" "Somebody's, of theirs"
        else
          duel slow_one@theirs "" "$causal" "$threads" "$tokens" $((time * 3)) OK "" "Somebody's, of theirs"
        fi
      done
    done
  done
} > "$TEST_TMPDIR/duels.textproto"
encode < "$TEST_TMPDIR/duels.textproto" > "$TEST_TMPDIR/results.pb"
printf 'Before.\n\n<!-- redraw_readme begin techniques= -->\n\nold rows\n\n<!-- redraw_readme end -->\n\n%s\n' \
  "$(printf '<!-- redraw_readme contestants begin -->\n\nold table\n\n<!-- redraw_readme contestants end -->\n\nBehind.')" > "$copy"
rm "$picture"
run
[[ ! -e "$picture" ]] || fail "a file with contestants redrew the picture"
cat > "$copy.expected" << 'END'
Before.

<!-- redraw_readme begin techniques= -->

old rows

<!-- redraw_readme end -->

<!-- redraw_readme contestants begin -->

Ours is the faster one in 5 of 6 comparisons, the slower one in 1. It is 3.0x as fast in the median, 0.75x at least and 3.0x at most.

<details><summary>The 2 rows</summary>

Medians of warm runs on Processor, made up, cpu f32, 2 heads of 64, input gaussian: how many times as fast ours is, and the milliseconds of ours : theirs.
Errors are the largest against the float64 definition, over the largest value.

| ours | mask | fastest of theirs | 1 thread 1024 | 1 thread 2048 | 2 threads 1024 | error of ours | error of theirs |
|---|---|---|---|---|---|---|---|
| `near` | causal | Somebody's | 3.0x (10.5 : 31.5) | 3.0x (41.9 : 126) | 3.0x (5.24 : 15.7) | 1e-7 | 3e-7 |
| `near` | full | Somebody's | 3.0x (10.5 : 31.5) | 3.0x (41.9 : 126) | 0.75x (5.24 : 3.93) | 1e-7 | 3e-7 |

With torch 2.9.
Without times, at tokens/threads: `wrong_one@theirs` (failed: it is wrong) at 1024/1, 2048/1, 1024/2, 2048/2; `absent@gone` (skipped: no such file) at 1024/1, 2048/1, 1024/2, 2048/2; `slow_one@theirs` (timeout: it took 7 s) at 2048/2.

</details>

<!-- redraw_readme contestants end -->

Behind.
END
diff "$copy.expected" "$copy" || fail "ours and theirs are drawn otherwise"
run
diff "$copy.expected" "$copy" || fail "a second run changed ours and theirs"

# Without their markers it fails and changes nothing.
echo "no markers" > "$copy"
if run; then fail "contestants are drawn without markers"; fi
[[ "$(cat "$copy")" == "no markers" ]] || fail "a failed run changed the README"
echo "passed"
