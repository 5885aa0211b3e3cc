# shellcheck shell=bash disable=SC2154
# Functions that the scripts of this folder share; to be sourced after `script` is set to the script's name.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

# Prints the comment at the head of the script that calls it.
show_help() { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"; }

bad_usage() {  # MESSAGE
  echo "$script: $1; see --help" >&2
  exit 2
}

# A container's checkout may belong to another user, and git then refuses to read it. This holds for git, and for the git
# that programs start, until the script ends.
count="${GIT_CONFIG_COUNT:-0}"
export "GIT_CONFIG_KEY_$count=safe.directory" "GIT_CONFIG_VALUE_$count=$root" GIT_CONFIG_COUNT=$((count + 1))

# Removes a git worktree, its folder and what git remembers of it. Fails where the folder is something else.
remove_worktree() {  # FOLDER
  local known
  known="$(git -C "$root" worktree list --porcelain)"
  if [[ -e "$1" && $'\n'"$known"$'\n' != *$'\n'"worktree $1"$'\n'* ]]; then
    echo "$script: $1 is in the way, and is no worktree of this repository" >&2
    return 1
  fi
  # One whose making was interrupted is still locked.
  git -C "$root" worktree unlock "$1" 2> /dev/null || true
  git -C "$root" worktree remove --force "$1" 2> /dev/null || rm -rf "$1"
  git -C "$root" worktree prune
}
