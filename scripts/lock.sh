#!/usr/bin/env bash
# Writes requirements.lock: all that requirements.txt needs, directly or not, in the versions of constraints.txt, with the
# SHA-256 of each file that its package's index offers, for Python 3.11 and later on any platform. Needs uv.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v uv >/dev/null; then
    echo "error: scripts/lock.sh needs uv; install it (pip install uv)" >&2
    exit 2
fi
{
    echo "# Written by scripts/lock.sh. To install what Lockstep runs on, and nothing whose bytes differ:"
    echo "#     pip install --require-hashes -r requirements.lock"
    uv pip compile requirements.txt --constraint constraints.txt --universal --python-version 3.11 \
        --generate-hashes --no-header --no-annotate --quiet
} >requirements.lock.part
mv requirements.lock.part requirements.lock
