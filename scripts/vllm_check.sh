#!/usr/bin/env bash
# Run the tests of sampling by vLLM against vLLM itself, with its CPU engine and a tiny model made on
# the spot, and write their rows to docs/results/places.json. Ten minutes the first time, on two cores.
#
#   bash scripts/vllm_check.sh [FOLDER]
#
# FOLDER is an environment (default: .venv-vllm); the first call makes it from requirements.lock and
# requirements-vllm.lock.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.venv-vllm}
if [ ! -f "$folder/ready" ]; then
  python3 -m venv --clear "$folder"
  install() { "$folder/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps "$@"; }
  torch=$(grep '^torch==' requirements-vllm.lock)
  install "$torch" || install --index-url https://download.pytorch.org/whl/cpu "$torch"
  grep -v -E '^(numpy|torch)==' requirements.lock > "$folder/lock.txt"
  install -r "$folder/lock.txt" -r requirements-vllm.lock
  touch "$folder/ready"
fi
export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH=src:tests
exec "$folder/bin/python" -m scripts.review.vllm
