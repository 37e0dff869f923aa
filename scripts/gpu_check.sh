#!/usr/bin/env bash
# Check this project on a machine with an NVIDIA GPU, in under eight minutes: the GPU half of the
# tests, the benchmarks, and a short private run on the IMDB prompts. Prints one table last.
#
#   bash scripts/gpu_check.sh [--python PYTHON] [--wheels FOLDER] [--out FOLDER] [--results FILE]
#                             [--minutes MINUTES]
#
#   --python PYTHON   an interpreter with torch and transformers (default: python3)
#   --wheels FOLDER   install what else is needed from here, without a network
#   --out FOLDER      keep logs and figures here (default: runs/gpu-check)
#   --results FILE    add the figures to this file (default: docs/results/bench.json)
#   --minutes MINUTES take at most so many whole minutes (default: 8); what is cut keeps its figures
#
# Parts that ended well are not repeated by a further call with the same sources and --out.
#
# Exit status: 0 all passed or skipped with a reason, 1 something failed, 2 it could not start.
set -uo pipefail

stop() {
  echo "gpu_check: $1" >&2
  exit 2
}

root=$(cd "$(dirname "$0")/.." && pwd)
python=python3 wheels='' minutes=8 out=$root/runs/gpu-check results=$root/docs/results/bench.json
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,/^# Exit/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --python | --wheels | --out | --results | --minutes) [ $# -ge 2 ] || stop "$1 needs a value" ;;
    *) stop "unknown option '$1'; see --help" ;;
  esac
  case $1 in
    --python) python=$2 ;;
    --wheels) wheels=$2 ;;
    --minutes) minutes=$2 ;;
    --out) out=$2 ;;
    --results) results=$(realpath -m "$2") ;;
  esac
  shift 2
done
[[ $minutes =~ ^[1-9][0-9]?$ ]] || stop "--minutes: '$minutes' is no number from 1 to 99"
[ -z "$wheels" ] || [ -d "$wheels" ] || stop "--wheels: there is no folder '$wheels'"
python=$(command -v "$python") || stop "--python: not found; give an interpreter with torch"
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
mkdir -p "$out" || stop "--out: cannot make '$out'"
out=$(cd "$out" && pwd)
[ -z "$wheels" ] || wheels=$(cd "$wheels" && pwd)
cd "$root" || exit 2

gpu=$("$python" - 2>"$out/torch.log" <<'PY'
import torch
if torch.cuda.is_available():
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
else:
    print(f"none: torch {torch.__version__}")
PY
) || stop "$python cannot import torch ($(tail -n 1 "$out/torch.log"))"
case $gpu in
  none:*) stop "no GPU that torch can use (${gpu#none: }); run this on a machine with one" ;;
esac
echo "gpu_check: $gpu"

# What pyproject.toml asks for and this interpreter lacks goes into an environment of its own.
missing=$("$python" - 2>"$out/missing.log" <<'PY'
import importlib.metadata as metadata
import tomllib
from packaging.requirements import Requirement

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
tools = ("hypothesis>", "opacus>", "pytest>", "pytest-timeout>", "trl>")  # tests and benchmarks
used = [text for text in project["optional-dependencies"]["dev"] if text.startswith(tools)]
for text in [*project["dependencies"], *used]:
    requirement = Requirement(text)
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        found = None
    if found is None or not requirement.specifier.contains(found, prereleases=True):
        print(text)
PY
) || stop "$python cannot read what is installed ($(tail -n 1 "$out/missing.log"))"
if [ -n "$missing" ]; then
  echo "gpu_check: installing $(echo "$missing" | wc -l) missing packages"
  "$python" -m venv "$out/venv" >"$out/install.log" 2>&1 ||
    stop "$python cannot make an environment ($(tail -n 1 "$out/install.log"))"
  # The environment sees what the interpreter has, also where that is an environment itself.
  "$python" -c 'import site, sys
for folder in [*site.getsitepackages(), site.getusersitepackages()]:
    print(f"import site; site.addsitedir({folder!r})")' >"$out"/base.pth
  cp "$out/base.pth" "$("$out/venv/bin/python" -c 'import sysconfig
print(sysconfig.get_path("purelib"))')/"
  echo "$missing" >"$out/missing.txt"
  python=$out/venv/bin/python
  timeout -k 5 300 "$python" -m pip install --disable-pip-version-check --quiet \
    ${wheels:+--no-index --find-links "$wheels"} -r "$out/missing.txt" >>"$out/install.log" 2>&1 ||
    stop "packages are missing and could not be installed ($(tail -n 1 "$out/install.log"));
 without a network, give their wheels with --wheels. Missing: $(echo "$missing" | tr '\n' ' ')"
fi
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} OMP_WAIT_POLICY=PASSIVE

rows=$out/table.txt failed=0
: >"$rows"

row() { printf '%-10s %-8s %6s  %s\n' "$1" "$2" "$3" "$4" >>"$rows"; }

# at_most SECONDS: so long of eight minutes, its share of fewer or more, but no longer than is left
# (timeout takes 0 for no limit).
at_most() {
  local share=$(($1 * minutes / 8)) left=$((60 * minutes - 15 - SECONDS))
  [ "$left" -ge 1 ] || left=1
  echo $((share <= left ? share : left))
}

# step NAME SECONDS COMMAND...: run it for at most so long, and say how it went. What does not end
# when asked to, as a process that waits for the GPU, is killed five seconds later.
step() {
  local name=$1 limit log=$out/$1.log status started=$SECONDS word=ok
  if [ -e "$out/$name.done" ]; then
    row "$name" earlier '' "$(tr '\r' '\n' <"$log" | tail -n 1 | cut -c1-100)"
    return 0
  fi
  limit=$(at_most "$2")
  shift 2
  if [ "$limit" -lt 10 ]; then
    row "$name" skipped '' "the time is over"
    return 1
  fi
  echo "gpu_check: $name (at most $limit s)"
  timeout -k 5 "$limit" "$@" >"$log" 2>&1
  status=$?
  case $status in
    0) touch "$out/$name.done" ;;
    # A benchmark has kept what it measured.
    124 | 137) word=cut; [[ $* == *scripts/bench.py* ]] || failed=1 ;;
    *) word=FAILED failed=1 ;;
  esac
  row "$name" "$word" "$((SECONDS - started))s" "$(tr '\r' '\n' <"$log" | tail -n 1 | cut -c1-100)"
  return $status
}

sources=$(find src tests scripts recipes -type f -not -name '*.pyc' -print0 | sort -z |
  xargs -0 sha256sum | sha256sum)
if [ "$sources" != "$(cat "$out/sources" 2>/dev/null)" ]; then
  rm -f "$out"/*.done "$out/bench.json"
  echo "$sources" >"$out/sources"
fi
mapfile -t files < <(grep -rl 'mark\.gpu' tests --include='test_*.py')
step tests 90 "$python" -m pytest -q -m gpu "${files[@]}"
if timeout -k 5 "$(at_most 60)" "$python" -m dprlhf assets pull imdb smollm2-135m sentiment-minilm \
  >"$out/assets.log" 2>&1; then
  [ -e "$out/imdb.done" ] || rm -rf "$out/imdb"
  # The recipe's micro-batches are for a CPU.
  step imdb 60 "$python" -m dprlhf train recipes/imdb_sentiment.yaml --output-dir "$out/imdb" \
    rollout.batch_size=320 update.batch_size=160 &&
    row '' '' '' "$(grep '^reward on' "$out/imdb.log" | cut -c1-100)"
else
  row imdb skipped '' "the demo's models cannot be had: $(tail -n 1 "$out/assets.log" | cut -c1-60)"
fi
for part in "overhead 95" "opacus 40" "trl 300"; do  # the last takes what is left
  step ${part} "$python" scripts/bench.py --device cuda --parts "${part% *}" \
    --results "$out/bench.json"
done
if [ -f "$out/bench.json" ]; then
  "$python" - "$out/bench.json" "$results" >>"$rows" <<'PY'
import json
import sys
from pathlib import Path

found, kept = (Path(name) for name in sys.argv[1:])
rows = {row["name"]: row for row in json.loads(kept.read_text())} if kept.exists() else {}
for row in json.loads(found.read_text()):
    rows[row["name"]] = {**row, "command": "bash scripts/gpu_check.sh"}
    if row["goal"]:
        word = "holds" if row["holds"] else "SHORT"
        print(f"{'':10} {word:8} {row['value']:6.3g}  {row['name']} ({row['goal']})")
kept.write_text(json.dumps(list(rows.values()), indent=2) + "\n")
PY
fi

echo
echo "$gpu (logs in $out)"
cat "$rows"
exit "$failed"
