#!/usr/bin/env bash
# Tries an installed diloco in a temporary folder, a minute: tests/installed.sh FOLDER_OF_THE_COMMAND
set -euo pipefail
examples="$(realpath "$(dirname "$0")/../examples")"
bin="$(realpath "$1")"
place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
cd "$place"
unset PYTHONPATH  # the installed package is what is tried, not a checkout
export DILOCO_HOME="$place/home"  # what a user keeps of runs is left alone

# diloco with these words must end with the given status.
ends_with() {
  local wanted="$1" status=0
  shift
  printf '$ diloco %s\n' "$*"
  "$bin/diloco" "$@" > output 2>&1 || status=$?
  [ "$status" = "$wanted" ] || { cat output; printf 'exit status %s instead of %s\n' "$status" "$wanted"; exit 1; }
}

ends_with 0 --version
ends_with 0 --help
commands="$(grep -oE '^  [a-z]+  ' output)"
for command in $commands; do ends_with 0 "$command" --help; done
ends_with 2 nonsense
ends_with 2 simulate bandwidth --sites 0

ends_with 0 init fleet --for several
ends_with 0 plan fleet/inventory.yaml -f fleet/run.yaml
ends_with 2 simulate bandwidth --every 10
ends_with 0 simulate bandwidth --every 10 --parameters 5B

mkdir short
cp "$examples"/quickstart/*.yaml short
ends_with 0 launch short/run.yaml --set train.tokens=40k --set train.batch_tokens=256 --set sync.every=16
ends_with 0 status --watch --json
ends_with 0 verify
ends_with 0 export -o model.safetensors
echo "ok: $("$bin/diloco" --version) is installed and works"
