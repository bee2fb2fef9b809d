# shellcheck shell=bash
# Sourced by .ci/run and .ci/nightly: runs the parts of a check, keeps how long each
# took and what failed, and prints both as a table at the end.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
# Warnings end the build here and not at a user's, whose compiler may be newer.
export CFLAGS="${CFLAGS:-} -Werror"
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
names=()

timed() { # NAME COMMAND...: runs it, writes its seconds and its exit status
  local begin=$SECONDS status=0
  "${@:2}" || status=$?
  echo "$status $((SECONDS - begin))" >"$logs/$1.result"
}

part() { # NAME COMMAND...: runs it, its output seen as it comes
  names+=("$1")
  echo "ci: == $1"
  timed "$@"
}

beside() { # NAME COMMAND...: runs it beside the next parts; `finish` prints its output
  names+=("$1")
  timed "$@" >"$logs/$1.log" 2>&1 &
  echo $! >"$logs/$1.pid"
}

finish() { # NAME: waits for a part that `beside` started, and prints its output
  wait "$(cat "$logs/$1.pid")"
  echo "ci: == $1"
  cat "$logs/$1.log"
}

verdict() { # prints the table; fails if a part failed
  local failed="" name status seconds
  printf '\nci: %-12s %8s\n' part seconds
  for name in "${names[@]}"; do
    read -r status seconds <"$logs/$name.result"
    [[ $status == 0 ]] || failed+=" $name"
    printf 'ci: %-12s %8d  %s\n' "$name" "$seconds" \
      "$([[ $status == 0 ]] && echo passed || echo "FAILED ($status)")"
  done
  printf 'ci: %-12s %8d\n' all "$SECONDS"
  if [[ -n $failed ]]; then
    echo "ci: FAILED:$failed"
    return 1
  fi
  echo "ci: all parts passed"
}
