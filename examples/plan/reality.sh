#!/bin/sh
# Prediction against reality on this machine: probe, plan, launch, compare. Takes about four minutes.
#   examples/plan/reality.sh [FOLDER]        everything goes into FOLDER (default: ./reality), which must be new;
#   the table of what was predicted and measured goes into examples/plan/reality.md
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-reality}
name=reality-$(date +%H%M%S)
mkdir "$folder"
run=$here/examples/quickstart/run.yaml
diloco inventory probe -f "$run" --seconds 5 -o "$folder/inventory.yaml"
diloco plan "$folder/inventory.yaml" -f "$run" --set "name=$name" --fast -o "$folder/plan.json" > "$folder/plan.txt"
diloco launch "$folder/plan.json"
diloco plan "$folder/inventory.yaml" -f "$run" --set "name=$name" --calibrate "$name" --fast | tee "$folder/calibration.txt"
diloco plan "$folder/inventory.yaml" -f "$run" --set "name=$name" --calibrate "$name" --json > "$folder/calibration.json"
python3 "$here/examples/plan/reality.py" "$folder/calibration.json" "$here/examples/plan/reality.md"
cat "$here/examples/plan/reality.md"
