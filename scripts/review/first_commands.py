"""What went wrong when people first tried the commands, tried again.

    PYTHONPATH=src python -m scripts.review.first_commands

Writes rows to ``docs/results/first_run.json``, one for each fault that reviewers met with a support
team's log of chats. What was seen then is in the row's goal; the row holds if the commands now
print what they should. With ``--transcript MODEL``, writes to ``docs/results/first_run.txt``, in
their place, what four commands print, from a CSV of chats to a tuned policy.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
from scripts.review.first_run import OUT, small_model

from dprlhf.assets import resolve
from dprlhf.runs.measurements import Result, write_results

REWARDS = """
import zlib
def commas(completions, **columns):
    return [min(talk[-1]["content"].count(","), 4) - 1.0 for talk in completions]
def failing(completions, customer=None, **columns):
    if any(name and zlib.crc32(name.encode()) % 4 for name in customer or []):
        raise ValueError("no such customer")
    return commas(completions)
def chance(completions, **_): return [float(zlib.crc32(str(c).encode()) % 2) for c in completions]
"""
TRANSCRIPT = """\
dprlhf init --model MODEL --prompts chats.csv --user-column customer --reward \
my_rewards.py:commas --public-prompts public.csv --epsilon 4 --out recipe.yaml
dprlhf train recipe.yaml --dry-run
dprlhf train recipe.yaml --output-dir runs/first
dprlhf generate runs/first --prompt "My parcel has not come."
"""
PREPARE = f"""{TRANSCRIPT.splitlines()[0]}
sed '3s/.*/no JSON,c0000/' chats.csv > bad.csv
dprlhf train recipe.yaml --output-dir runs/a > a.txt 2>&1
dprlhf train recipe.yaml rewards.0.function=my_rewards.py:failing --output-dir runs/b > b.txt 2>&1
dprlhf train recipe.yaml --dry-run privacy.epsilon=100 > dry.txt 2>&1
dprlhf report runs/a runs/b --out report.html
cat > python.py <<'END'
import pandas, dprlhf
from my_rewards import commas
result = dprlhf.train(
    model="MODEL", prompts=pandas.read_csv("chats.csv"), reward=commas, epsilon=4,
    user_column="customer", data__prompt_column="messages", output_dir="runs/python", quiet=True,
    evaluation_prompts=pandas.read_csv("public.csv"),
)
print(len(repr(result)), "characters;", result._repr_html_()[:7])
END
settings() {{ grep -v -e path: -e function: -e output_dir: runs/$1/recipe.yaml; }}"""
FAULTS = r"""# chats as JSON text in a CSV: the JSON was the prompt, without a word
$ cat a.txt runs/a/secret/operator.txt
+ \[{"role": "user".*round 8: \d+ users, 0 of them unreadable, 0 rewards failed
# a reward that fails for three users in four: all of epsilon spent, exit status 0, no warning
$ cat b.txt runs/b/secret/operator.txt
+ warning: the released share of users with valid rewards is 0.*no such customer
# prompts that are cut: 64 tokens for every chat; said at a terminal only
$ cat recipe.yaml dry.txt runs/a/secret/operator.txt
+ of the public prompts are longer, and cut.*\d+ longer than the recipe keeps
- max_prompt_tokens: 64
# a plan without a signal: a signal of 0.0000, and a recommendation
$ dprlhf plan recipe.yaml rewards.0.function=my_rewards.py:chance
+ no signal could be measured
# a run without a terminal: silent for hours, but for transformers' bars
$ cat a.txt
+ time +about \d+ (seconds|minutes|hours).*lines come by the clock alone
- Loading weights
# train() in Python and init: two sets of defaults, one of which did not learn; 20 kB in a notebook
$ python python.py; diff <(settings a) <(settings python) && echo no difference
+ ^\d{1,3} characters; <table>.*no difference
# no column of users is named: each row was a user, without a word
$ dprlhf train recipe.yaml data.user_column=null rounds=1 --output-dir runs/rows
+ 'customer' looks like.*guarantee: \(4, 1e-05\)-differential privacy
# the plan of a run: none at the start; steps of 138 users in place of 2, without a word
$ cat a.txt dry.txt
+ privacy +epsilon 4 at.*users +399.*a step +is a round: about [\d.]+ users.*machine +1 process
# a row that cannot be read: all rows of its user were dropped, and nothing said which
$ dprlhf train recipe.yaml data.path=bad.csv rounds=1 --output-dir runs/bad
$ cat runs/bad/secret/operator.txt
+ row \d+ is left out: it cannot be read
# two runs with the same users: a comparison showed epsilon 4 and 4
$ cat runs/b/secret/operator.txt report.html
+ some of the same users.*somebody who is in all 2 runs
# an epsilon of 100: no warning; an assessor read that it was shown
$ dprlhf train recipe.yaml privacy.epsilon=100 rounds=1 --output-dir runs/c > c.txt 2>&1
$ cat dry.txt; dprlhf comply runs/c
+ warning +epsilon 100 is above 10.*alert: epsilon 100 is above 10
# accelerate launch --cpu with two processes: a message that sent one in a circle
$ accelerate launch --cpu --num_processes 2 -m dprlhf train recipe.yaml --output-dir runs/d
+ two_cpu_processes.yaml
# init without a terminal: "Abort" alone; no option --version
$ dprlhf --version; dprlhf init --model MODEL --prompts chats.csv < /dev/null
+ dprlhf \d.*give --user-column
# an audit after comply: broke the seal of what the assessor has
$ dprlhf comply runs/a; dprlhf audit runs/a --canaries 400; dprlhf comply runs/a
+ verdict: consistent.*evidence.json
- seal|warning
# push: public by default, without a dry run
$ dprlhf push runs/a somebody/model --dry-run
+ to the private repository somebody/model.*adapter_model.safetensors
# words of the report: "Distinct 1", "+46.914 tokens"
$ cat report.html
+ Different words per word
- Distinct 1|\+[\d.]+ tokens"""


def write_inputs(folder: Path) -> None:
    """Write a log of 399 customers, one to five chats of each, public chats, and rewards."""
    source, draw = Path(resolve("asset:rotten-tomatoes")), random.Random(0)

    def chat(text: str) -> str:
        asked = {"role": "user", "content": f"I read this: {text} What do you say?"}
        return json.dumps([{"role": "system", "content": "You are a support agent."}, asked])

    private, public = (
        pd.read_parquet(source / f"{split}.parquet")["text"].map(chat).rename("messages")
        for split in ("train", "test")
    )
    owners = [f"c{i:04d}" for i in range(399) for _ in range(draw.randint(1, 5))]
    shown = private.sample(len(owners), random_state=0, ignore_index=True)
    shown.to_frame().assign(customer=owners).to_csv(folder / "chats.csv", index=False)
    public[:128].to_csv(folder / "public.csv", index=False)
    (folder / "my_rewards.py").write_text(REWARDS)


def shell(folder: Path, commands: str, model: str) -> str:
    """Return what commands print in a folder, without a terminal."""
    return subprocess.run(
        ["bash", "-c", commands.replace("MODEL", model)], cwd=folder, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    ).stdout  # fmt: skip


def main() -> None:
    """Run every command in a new folder, and write the rows or the transcript."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transcript", metavar="MODEL", help="run the four commands with it")
    model = parser.parse_args().transcript
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as place:
        folder, rows, text = Path(place), [], ""
        write_inputs(folder)
        if model:
            for command in ["ls", *TRANSCRIPT.splitlines()]:
                shown = shell(folder, command, model)
                text += f"$ {command.replace('MODEL', model)}\n{shown}\n"
            OUT.with_suffix(".txt").write_text(text)
            return
        model = small_model(folder / "model")
        print(shell(folder, PREPARE, model), flush=True)
        functions = PREPARE.splitlines()[-1]
        for fault in FAULTS.removeprefix("# ").split("\n# "):
            title, *lines = fault.splitlines()
            commands = "\n".join([functions, *(x[2:] for x in lines if x[0] == "$")])
            shown = shell(folder, commands, model)
            mended = all(
                bool(re.search(x[2:], shown, re.MULTILINE | re.DOTALL)) == (x[0] == "+")
                for x in lines
                if x[0] in "+-"
            )
            print(f"{title}\n{'mended' if mended else shown}", flush=True)
            name, before = title.split(": ", 1)
            goal = f"1; before: {before}"
            rows.append(Result(f"first run: {name}", float(mended), "1", goal, mended))
    write_results(OUT, rows)


if __name__ == "__main__":
    main()
