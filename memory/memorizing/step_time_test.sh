#!/bin/bash
# The program on a small network: its table, and what it says of flags that are wrong.
set -eu

program="$1"
small=(--layers=2 --heads=2 --head_dim=8 --segment=16 --k=4 --threads=1 --samples=3)
output="$("$program" "${small[@]}" --stores=0,64)"
# The store's size, ms, the ratio to the first, and what the keys and values take: 64 entries of
# 2 heads of 8 channels are 16 KiB.
[[ $(grep -cE '^ +0 .* 1\.00x +0\.0$' <<< "$output") == 1 ]] || { echo "$output"; exit 1; }
[[ $(grep -cE '^ +64 +[0-9.]+ +[0-9.]+x +0\.0$' <<< "$output") == 1 ]] || { echo "$output"; exit 1; }

for wrong in --stores= --stores=-1 --samples=0 --threads=0 --segment=0 --heads=-2 --head_dim=0 --no_such_flag; do
  code=0
  message="$("$program" "${small[@]}" "$wrong" 2>&1 > /dev/null)" || code=$?
  name="${wrong%%=*}"
  # --stores= is answered with what a store is.
  [[ $code == 2 && ( "$message" == *"${name#--}"* || "$message" == *store* ) ]] || {
    echo "$wrong: exit $code, $message"
    exit 1
  }
done
