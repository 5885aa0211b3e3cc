#!/bin/bash
# usage: adding_test.sh README SOURCE
# Fails where a block of C++ in tools/README.md does not stand in the example's source as it is shown.
set -eu
readme="$1" source="$(cat "$2")"

blocks=0 block="" inside=false
while IFS= read -r line; do
  if [[ "$line" == '```cpp' ]]; then
    inside=true block=""
  elif [[ "$line" == '```' && "$inside" == true ]]; then
    inside=false blocks=$((blocks + 1))
    if [[ "$source" != *"$block"* ]]; then
      echo "tools/README.md shows what the source does not have:" >&2
      echo "$block" >&2
      exit 1
    fi
  elif [[ "$inside" == true ]]; then
    block+="$line"$'\n'
  fi
done < "$readme"
if [[ "$blocks" != 3 ]]; then
  echo "$blocks blocks of C++ in tools/README.md; 3 are wanted" >&2
  exit 1
fi
