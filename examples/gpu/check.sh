#!/usr/bin/env bash
# Checks what an island does on a GPU, with the product's own code; one line a check. Exit status 1 if one fails.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python}" examples/gpu/check.py "$@"
