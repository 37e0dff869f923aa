#!/usr/bin/env bash
# Make .venv from the locked dependencies. Wheels are kept in a cache, so that a second clone
# installs without a network.
set -euo pipefail
python=${1:-python3}
cache=${DPRLHF_CACHE:-$HOME/.cache/dprlhf}/wheelhouse
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "dprlhf needs Python 3.11 or newer, and $("$python" --version) was found" >&2
  exit 1
}
# A wheelhouse belongs to one lock and one Python.
tag=$( { cat requirements.lock; "$python" --version; uname -m; } | sha256sum | cut -c1-16)
wheels=$cache/$tag
if [ ! -f "$wheels/complete" ]; then
  echo "fetching the locked wheels into $wheels"
  mkdir -p "$wheels"
  "$python" -m pip wheel --disable-pip-version-check --quiet --wheel-dir "$wheels" \
    -c requirements.lock ".[dev]" "hatchling>=1.27" editables
  rm -f "$wheels"/dprlhf-*.whl
  touch "$wheels/complete"
fi
"$python" -m venv --clear .venv
echo "installing into .venv"
.venv/bin/python -m pip install --disable-pip-version-check --quiet --no-index \
  --find-links "$wheels" -c requirements.lock --editable ".[dev]"
.venv/bin/python -m pip check
