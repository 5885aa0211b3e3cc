#!/bin/bash
# Runs find_toolkit, find_gpus, install_toolkit and tools/setup on a made-up machine: toolkits that are a folder with an nvcc that knows its
# version, a pip that writes one, and a PATH with nothing else.
set -eu

machine="$TEST_TMPDIR/machine"
cache="$machine/home/.cache/transformer-family-bench"
failures=0

# A machine with no toolkit and no pip.
new_machine() {
  rm -rf "$machine"
  mkdir -p "$machine"/{bin,home,tools/cuda}
  local tool
  for tool in bash chmod dirname grep ln mkdir mktemp mv readlink rm sed sort touch; do
    ln -s "$(command -v "$tool")" "$machine/bin/$tool"
  done
  cp tools/setup "$machine/tools"
  cp tools/cuda/{find_gpus,install_toolkit,requirements.txt} "$machine/tools/cuda"
  sed "s|/usr/local/cuda|$machine/usr-local-cuda|g" tools/cuda/find_toolkit > "$machine/tools/cuda/find_toolkit"
  chmod +x "$machine/tools/cuda/find_toolkit"
}

# new_toolkit FOLDER VERSION: as the vendor lays it out.
new_toolkit() {
  mkdir -p "$1"/{bin,lib}
  printf '#!/bin/bash\necho "Cuda compilation tools, release %s, V%s.1"\necho "Build cuda_%s"\n' "$2" "$2" "$2" > "$1/bin/nvcc"
  chmod +x "$1/bin/nvcc"
  touch "$1/lib/libcudart_static.a"
}

# new_pip [broken]: a python3 whose pip installs CUDA 13.0, or half of it and then fails.
new_pip() {
  {
    echo '#!/bin/bash'
    declare -f new_toolkit
    cat << 'END'
[[ "$1 $2" == "-m pip" ]] || exit 1
[[ "$3" == install ]] || exit 0
requirements= target= hashes=
for argument in "$@"; do
  case "$argument" in
    --requirement=*) requirements="${argument#*=}" ;;
    --target=*) target="${argument#*=}" ;;
    --require-hashes) hashes=yes ;;
  esac
done
[[ -r "$requirements" && -n "$target" && -n "$hashes" && -d "$TMPDIR" ]] || exit 1
new_toolkit "$target/nvidia/cu13" 13.0
END
    [[ "${1:-}" != broken ]] || echo 'rm "$target"/nvidia/cu13/lib/*; exit 1'
  } > "$machine/bin/python3"
  chmod +x "$machine/bin/python3"
}

# new_gpus CAPABILITY...: an nvidia-smi that names GPUs of these compute capabilities.
new_gpus() {
  {
    printf '#!/bin/bash\n[[ "$*" == "--query-gpu=compute_cap --format=csv,noheader" ]] || exit 1\n'
    (( $# == 0 )) || printf 'echo %s\n' "$@"
  } > "$machine/bin/nvidia-smi"
  chmod +x "$machine/bin/nvidia-smi"
}

# on_machine [NAME=VALUE...] COMMAND...: sets `status`, `out` and `err`.
on_machine() {
  status=0
  env -i PATH="$machine/bin" HOME="$machine/home" "$@" > "$TEST_TMPDIR/out" 2> "$TEST_TMPDIR/err" || status=$?
  out="$(cat "$TEST_TMPDIR/out")"
  err="$(cat "$TEST_TMPDIR/err")"
}

# expect WHAT ACTUAL EXPECTED, where EXPECTED is a pattern of the shell.
expect() {
  # shellcheck disable=SC2053
  if [[ "$2" != $3 ]]; then
    printf '%s: %s is "%s", not "%s"\n  status %s\n  stdout: %s\n  stderr: %s\n' \
      "${FUNCNAME[1]}" "$1" "$2" "$3" "$status" "$out" "$err" >&2
    failures=$((failures + 1))
  fi
}

find_toolkit() { on_machine "$@" "$machine/tools/cuda/find_toolkit"; }
install_toolkit() { on_machine "$@" "$machine/tools/cuda/install_toolkit"; }

a_machine_without_a_toolkit_has_none() {
  new_machine
  find_toolkit
  expect status "$status" 1
  expect stdout "$out" ""
  expect stderr "$err" ""
}

a_toolkit_is_described_in_four_lines() {
  new_machine
  new_toolkit "$machine/usr-local-cuda" 12.4
  find_toolkit
  expect status "$status" 0
  local folder="$machine/usr-local-cuda"
  expect stdout "$out" "$folder"$'\n12.4\n'"$folder/lib/libcudart_static.a"$'\nBuild cuda_12.4'
  expect stderr "$err" ""
}

cuda_home_goes_first_then_usr_local_then_path_then_the_cache() {
  new_machine
  new_toolkit "$cache/cuda-13.0" 13.0
  find_toolkit
  expect folder "${out%%$'\n'*}" "$cache/cuda-13.0"

  new_toolkit "$machine/opt/cuda" 12.1
  ln -s ../opt/cuda/bin/nvcc "$machine/bin/nvcc"
  find_toolkit
  expect folder "${out%%$'\n'*}" "$machine/opt/cuda"

  new_toolkit "$machine/usr-local-cuda" 12.2
  find_toolkit
  expect folder "${out%%$'\n'*}" "$machine/usr-local-cuda"

  new_toolkit "$machine/mine" 12.3
  find_toolkit CUDA_HOME="$machine/mine"
  expect folder "${out%%$'\n'*}" "$machine/mine"
}

what_cannot_be_used_is_passed_over_with_the_reason() {
  new_machine
  new_toolkit "$machine/usr-local-cuda" 11.8
  ln -s ../usr-local-cuda/bin/nvcc "$machine/bin/nvcc"  # the same one, of which one line is enough
  new_toolkit "$cache/cuda-13.0" 13.0
  find_toolkit CUDA_HOME="$machine/nowhere"
  expect folder "${out%%$'\n'*}" "$cache/cuda-13.0"
  expect stderr "$err" "*$machine/nowhere: no bin/nvcc"$'\n'"*$machine/usr-local-cuda: CUDA 11.8 is older than 12"
  expect "stderr's lines" "$(grep -c . <<< "$err")" 2

  rm "$cache/cuda-13.0/lib/libcudart_static.a"
  find_toolkit
  expect status "$status" 1
  expect stderr "$err" "*$cache/cuda-13.0: no libcudart_static.a"

  printf '#!/bin/bash\nexit 1\n' > "$cache/cuda-13.0/bin/nvcc"
  find_toolkit
  expect status "$status" 1
  expect stderr "$err" "*$cache/cuda-13.0: its nvcc --version names no release"
}

# A machine whose nvcc knows three GPUs.
new_machine_for_gpus() {
  new_machine
  printf '#!/bin/bash\n[[ "$*" == --list-gpu-code ]] && printf "sm_80\\nsm_89\\nsm_90\\n"\n' > "$machine/bin/nvcc"
  chmod +x "$machine/bin/nvcc"
}
find_gpus() { on_machine "$machine/tools/cuda/find_gpus" "$machine/bin/nvcc"; }

gpus_have_the_names_that_nvcc_gives_them_each_once() {
  new_machine_for_gpus
  new_gpus 9.0 8.9 9.0
  find_gpus
  expect status "$status" 0
  expect stdout "$out" sm_89$'\n'sm_90a
  expect stderr "$err" ""
}

gpus_that_nothing_can_be_compiled_for_are_said_with_the_reason() {
  new_machine_for_gpus
  find_gpus
  expect status "$status" 1
  expect stderr "$err" "*there is no nvidia-smi"
  local capability reason
  while IFS=, read -r capability reason; do
    new_gpus $capability
    find_gpus
    expect status "$status" 1
    expect stdout "$out" ""
    expect stderr "$err" "tools/cuda: kernels are not compiled for this machine's GPU: *$reason"
  done << 'END'
,nvidia-smi names none
8.0 7.5,sm_75 is older than Ampere
12.0,nvcc does not know sm_120
[N/A],its compute capability is [[]N/A]
END
  printf '#!/bin/bash\nexit 9\n' > "$machine/bin/nvidia-smi"
  find_gpus
  expect status "$status" 1
  expect stderr "$err" "*nvidia-smi fails"
}

nothing_is_installed_beside_a_toolkit() {
  new_machine
  new_toolkit "$machine/usr-local-cuda" 12.4
  install_toolkit
  expect status "$status" 0
  expect stdout "$out" "tools/setup: CUDA 12.4 is in $machine/usr-local-cuda"
}

without_pip_one_line_says_what_to_install() {
  new_machine
  install_toolkit
  expect status "$status" 1
  expect stderr "$err" "tools/setup: *python3-pip*"
  expect "stderr's lines" "$(grep -c . <<< "$err")" 1
}

a_broken_installation_leaves_nothing_and_the_next_one_goes_through() {
  new_machine
  new_pip broken
  install_toolkit
  expect status "$status" 1
  expect stderr "$err" "*pip could not install*"
  expect "the cache" "$(echo "$cache"/*)" "$cache/[*]"

  new_pip
  new_toolkit "$cache/cuda-13.0" 13.0 && rm "$cache/cuda-13.0/lib/libcudart_static.a"  # what is there is of no use
  install_toolkit XDG_CACHE_HOME="$machine/home/.cache"
  expect status "$status" 0
  expect stdout "$out" "*"$'\n'"tools/setup: CUDA 13.0 is in $cache/cuda-13.0"
  expect "the cache" "$(echo "$cache"/*)" "$cache/cuda-13.0"
  expect "nvcc's libraries" "$(echo "$cache"/cuda-13.0/lib64/*)" "*/libcudart_static.a"

  install_toolkit
  expect stdout "$out" "tools/setup: CUDA 13.0 is in $cache/cuda-13.0"
}

setup_installs_the_toolkit_before_the_packages_and_only_when_asked() {
  new_machine
  new_pip
  printf '#!/bin/bash\nshift 3\nprintf "ii  %%s\\n" "$@"\n' > "$machine/bin/dpkg-query"
  printf '#!/bin/bash\nexit 1\n' > "$machine/bin/apt-get"
  chmod +x "$machine/bin/dpkg-query" "$machine/bin/apt-get"
  on_machine "$machine/tools/setup"
  expect stdout "$out" "tools/setup: nothing to install"
  on_machine "$machine/tools/setup" --cuda
  expect stdout "$out" "*tools/setup: CUDA 13.0 is in $cache/cuda-13.0"$'\ntools/setup: nothing to install'
  on_machine "$machine/tools/setup" --gpu
  expect status "$status" 2
  expect stderr "$err" "usage: *--gpu"
}

a_machine_without_a_toolkit_has_none
a_toolkit_is_described_in_four_lines
cuda_home_goes_first_then_usr_local_then_path_then_the_cache
what_cannot_be_used_is_passed_over_with_the_reason
gpus_have_the_names_that_nvcc_gives_them_each_once
gpus_that_nothing_can_be_compiled_for_are_said_with_the_reason
nothing_is_installed_beside_a_toolkit
without_pip_one_line_says_what_to_install
a_broken_installation_leaves_nothing_and_the_next_one_goes_through
setup_installs_the_toolkit_before_the_packages_and_only_when_asked
exit "$((failures > 0))"
