#!/usr/bin/env bash
# Make .venv from the locked dependencies, with uv, which fetches wheels in parallel, or with pip where
# uv cannot be had. Either keeps what it fetches in a cache, so that a second clone installs without a
# network.
set -euo pipefail
python=${1:-python3}
cache=${DPRLHF_CACHE:-$HOME/.cache/dprlhf}
uv_version=0.13.9
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "dprlhf needs Python 3.11 or newer, and $("$python" --version) was found" >&2
  exit 1
}
# What is kept belongs to one lock and one Python.
tag=$( { cat requirements.lock; "$python" --version; uname -m; } | sha256sum | cut -c1-16)
wheels=$cache/wheelhouse/$tag

# Let uv look where pip is told to look: uv does not read pip's settings.
take_pip_settings() {
  local settings
  settings=$("$python" -m pip config list)
  setting() { sed -n "s/^\(global\|install\|:env:\)\.$1='\(.*\)'$/\2/p" <<< "$settings" | tail -n 1; }
  local index more links cert
  index=$(setting index-url) more=$(setting extra-index-url)
  links=$(setting find-links) cert=$(setting cert)
  [ -z "$index" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
  if [ -n "$more" ]; then
    export UV_INDEX="${UV_INDEX:-${more//\\n/ }}"
    # As pip does: each index may have the locked version, not only the first that knows the name.
    export UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}"
  fi
  [ -z "$cert" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$cert}"
  [ -z "$links" ] || export UV_FIND_LINKS="${UV_FIND_LINKS:-$(tr -s ' ' ',' <<< "${links//\\n/ }")}"
}

install_with_uv() {
  local uv=$cache/uv-$uv_version offline=()
  if [ ! -x "$uv/bin/uv" ]; then
    [ ! -f "$wheels/complete" ] || return 1
    "$python" -m pip install --disable-pip-version-check --quiet --retries 1 --no-deps \
      --only-binary=:all: --target "$uv" "uv==$uv_version" 2> /dev/null || return 1
  fi
  export UV_CACHE_DIR=$cache/uv-cache
  take_pip_settings
  [ ! -f "$UV_CACHE_DIR/complete-$tag" ] || offline=(--offline)
  "$uv/bin/uv" pip install --quiet --python .venv/bin/python ${offline[@]+"${offline[@]}"} \
    -c requirements.lock --editable ".[dev]" || return 1
  touch "$UV_CACHE_DIR/complete-$tag"
}

install_with_pip() {
  if [ ! -f "$wheels/complete" ]; then
    echo "fetching the locked wheels into $wheels"
    mkdir -p "$wheels"
    "$python" -m pip wheel --disable-pip-version-check --quiet --wheel-dir "$wheels" \
      -c requirements.lock ".[dev]" "hatchling>=1.27" editables
    rm -f "$wheels"/dprlhf-*.whl
    touch "$wheels/complete"
  fi
  .venv/bin/python -m pip install --disable-pip-version-check --quiet --no-index \
    --find-links "$wheels" -c requirements.lock --editable ".[dev]"
}

"$python" -m venv --clear .venv
echo "installing into .venv"
if [ "${DPRLHF_INSTALLER:-uv}" = pip ] || ! install_with_uv; then
  install_with_pip
fi
.venv/bin/python -m pip check
