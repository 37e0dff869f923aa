"""Before a run: doctor, init, dry run, flags and the check of a reward."""

import importlib.metadata
import json
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner, Result

from dprlhf import recipe
from dprlhf.cli import doctor
from dprlhf.cli.answers import users_in
from dprlhf.cli.app import app
from dprlhf.cli.reward_check import reward_check
from dprlhf.errors import DprlhfError
from dprlhf.policies.loading import load_policy
from dprlhf.recipe import load_recipe
from dprlhf.recipe.trl_names import KEYS, overrides_of
from dprlhf.training import timing
from dprlhf.training.dry_run import dry_run, explain
from helpers import tiny

REWARDS = """
def brevity(completions, **columns):
    return [-len(c) / 10 for c in completions]
def correct(completions, answer):
    return [float(str(a) in c) for c, a in zip(completions, answer)]
def ranked(completions):
    return [len(c) - sum(map(len, completions)) / len(completions) for c in completions]
def declared(completions):
    return ranked(completions)
declared.dprlhf_per_user = True
"""


def call(*arguments: str, answers: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=answers)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "private.csv").write_text("prompt\n" + "".join(f"user {i}\n" for i in range(40)))
    public = "".join(f"public {i},{i}, the answer is {i}{'!' * i}\n" for i in range(6))
    (tmp_path / "public.csv").write_text("prompt,answer,completion\n" + public)
    return tmp_path


class TestDoctor:
    def test_this_machine_is_well(self) -> None:
        found = {finding.name: finding for finding in doctor.examine()}
        assert found["torch"].value == importlib.metadata.version("torch")
        assert "cores" in found["cpu"].value
        assert found["processes"].good
        assert {"python", "disk", "hub", "asset imdb"} <= found.keys()
        assert not [f for f in found.values() if not f.good]

    def test_a_token_is_not_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_canary")
        assert "hf_canary" not in str(doctor.examine())

    def test_a_launch_that_cannot_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        assert not doctor._processes().good


class TestInit:
    OPTIONS = (
        "--model", "gpt2", "--prompts", "private.csv", "--user-column", "prompt",
        "--reward", "my_rewards.py:brevity", "--public-prompts", "public.csv", "--epsilon", "2",
    )  # fmt: skip

    def test_options_answer_all_questions(self, here: Path) -> None:
        done = call("init", *self.OPTIONS, "--out", "mine.yaml")
        assert done.exit_code == 0, done.output
        made = load_recipe("mine.yaml")
        assert made.policy.model_name_or_path == "gpt2"
        assert made.data.path == "private.csv"
        assert made.data.user_column == "prompt"
        assert made.rewards[0].function == "my_rewards.py:brevity"
        assert made.privacy.epsilon == 2
        assert made.evaluation.data.path == "public.csv"

    def test_six_questions(self, here: Path) -> None:
        done = call("init", answers="gpt2\nprivate.csv\n\norg/toxicity\n\n\n")
        assert done.exit_code == 0, done.output
        made = load_recipe("recipe.yaml")
        assert made.data.user_column is None
        assert made.rewards[0].classifier == "org/toxicity"
        assert made.privacy.epsilon == 4
        assert made.evaluation is None
        assert made.policy.adapter.init == "random"

    @pytest.mark.parametrize(("named", "hint"), [("", True), ("user_id", False)])
    def test_a_column_that_looks_like_a_user(self, here: Path, named: str, hint: bool) -> None:
        (here / "private.csv").write_text("prompt,user_id\na,ada\nb,ben\n")
        done = call("init", *self.OPTIONS, "--user-column", named)
        assert done.exit_code == 0, done.output
        assert ("'user_id' looks like the name of a user" in done.output) is hint

    @pytest.mark.parametrize(("answer", "column"), [("", "user_id"), ("y", "user_id"), ("n", None)])
    def test_such_a_column_is_asked_about(self, here, answer, column):
        (here / "private.csv").write_text("prompt,user_id\na,ada\nb,ben\n")
        done = call("init", answers=f"gpt2\nprivate.csv\n\norg/toxicity\n\n\n{answer}\n")
        assert done.exit_code == 0, done.output
        assert load_recipe("recipe.yaml").data.user_column == column

    @pytest.mark.parametrize("kind", ["gpt2", "llama"])
    def test_a_model_that_is_not_there_yet(self, here: Path, kind: tiny.Kind) -> None:
        """What the recipe then says fits it all the same."""
        assert call("init", *self.OPTIONS).exit_code == 0
        policy = load_recipe("recipe.yaml").policy
        tiny.save(here / "gpt2", kind)
        names = load_policy(policy).parameters
        assert names
        assert {"llama": ("q_proj", "v_proj"), "gpt2": ("c_attn",)}[kind] == tuple(
            sorted({name.split(".lora_B")[0].rpartition(".")[2] for name in names})
        )

    def test_users_are_counted_not_rows(self, here: Path) -> None:
        (here / "people.csv").write_text("text,who\na,ada\nb,ada\nc,ben\n")
        assert users_in("people.csv", "who", "text") == 2
        assert users_in("people.csv", "", "text") == 3
        (here / "pairs.csv").write_text("text,a,b\na,ada,ben\nb,ben,ada\nc,cy,dan\nd,ada,dan\n")
        assert users_in("pairs.csv", "a, b", "text") == 2  # ada with ben, cy with dan
        owners = ("--prompts", "pairs.csv", "--user-column", "a, b", "--prompt-column", "text")
        assert call("init", *self.OPTIONS, *owners, "--public-prompts", "").exit_code == 0
        assert load_recipe("recipe.yaml").data.user_column == ["a", "b"]
        assert users_in("org/prompts", "", "prompt") is None
        with pytest.raises(DprlhfError, match="there is no column 'whom'"):
            users_in("people.csv", "whom", "text")

    @pytest.mark.parametrize(
        ("option", "value", "named"),
        [
            ("--prompts", "nowhere.tsv", "prompts 'nowhere.tsv': there is no such file"),
            ("--public-prompts", "no.jsonl", "public prompts 'no.jsonl': there is no such file"),
            ("--reward", "nowhere.py:f", "there is no file 'nowhere.py'"),
            ("--reward", "my_rewards.py:brevty", "has no 'brevty'; did you mean 'brevity'?"),
            ("--reward", "no_such_module:f", "no_such_module"),
            ("--user-column", "prompt,prompt", "a column is named twice"),
            ("--reward", "my_rewards.py", "name the function as well: my_rewards.py:FUNCTION"),
        ],
    )
    def test_files_that_are_not_there(self, here, option, value, named):
        done = call("init", *self.OPTIONS, option, value)
        assert isinstance(done.exception, DprlhfError)
        assert named in str(done.exception)
        assert not (here / "recipe.yaml").exists()

    def test_it_overwrites_nothing(self, here: Path) -> None:
        (here / "recipe.yaml").write_text("mine")
        done = call("init", *self.OPTIONS)
        assert isinstance(done.exception, DprlhfError)
        assert (here / "recipe.yaml").read_text() == "mine"


class TestFlags:
    def test_every_key_is_one_of_the_recipe(self) -> None:
        known = set(recipe.known_keys(recipe.Recipe))
        assert set(KEYS.values()) <= known

    def test_scale_rewards_alone_chooses_no_update(self) -> None:
        assert overrides_of(["--scale_rewards", "none"]) == ["update.scale_rewards=false"]
        both = overrides_of(["--loss_type", "dr_grpo", "--scale_rewards", "none"])
        assert both == ['update.name="pg"', 'update.baseline="loo"']

    def test_the_last_one_counts(self) -> None:
        assert overrides_of(["--loss_type", "grpo", "update.name=pg"])[-1] == "update.name=pg"
        assert overrides_of(["update.name=pg", "--loss_type=grpo"])[0] == "update.name=pg"

    def test_hyphens_underscores_and_equals(self) -> None:
        given_ = ["--num-generations", "4", "a.b=1", "--beta=0.1", "--seed", "-3"]
        assert overrides_of(given_) == ["rollout.responses=4", "a.b=1", "kl.beta=0.1", "seed=-3"]


class TestDryRun:
    @pytest.fixture
    def recipe_file(self, here: Path) -> Path:
        tiny.save(here / "model")
        call(
            "init", "--model", "nowhere", "--prompts", "private.csv", "--user-column", "",
            "--reward", "my_rewards.py:brevity", "--public-prompts", "public.csv", "--epsilon", "4",
        )  # fmt: skip
        return here / "recipe.yaml"

    def test_the_plan_is_that_of_the_run_and_nothing_is_written(self, recipe_file: Path) -> None:
        def files() -> list[Path]:  # but for the reward module's bytecode, which Python writes
            every = recipe_file.parent.rglob("*")
            return sorted(f for f in every if "__pycache__" not in f.parts)

        before = files()
        done = call(
            "train", str(recipe_file), "rounds=4", "--model_name_or_path", "model",
            "--num-generations=2", "rollout.max_new_tokens=2", "rollout.batch_size=8",
            "update.batch_size=8", "data.max_prompts_per_user=2", "evaluation.prompts=8",
            "--dry-run", "--json",
        )  # fmt: skip
        assert done.exit_code == 0, done.exception
        assert files() == before
        plan = json.loads(done.stdout.splitlines()[-1])
        assert plan["users"] == 40
        assert plan["rounds"] == 4
        assert plan["users_a_round"] == 10
        assert plan["responses_a_round"] == 20
        assert 3.9 < plan["epsilon"] <= 4
        expected = plan["noise_multiplier"] * plan["dimension"] ** 0.5 / 10
        assert plan["noise_to_clip_ratio"] == pytest.approx(expected, rel=1e-12)
        phases = plan["seconds_a_response"]
        assert set(phases) == {"rollout", "reward", "update"}
        assert all(seconds > 0 for seconds in phases.values())
        # 4 rounds of 20 responses, and 6 public prompts before and after
        both = phases["rollout"] + phases["reward"]
        assert plan["estimated_seconds"] == pytest.approx(80 * sum(phases.values()) + 12 * both)
        assert plan["memory_bytes"] > 2**20
        assert (plan["max_prompt_tokens"], plan["max_new_tokens"]) == (16, 2)
        assert plan["public_prompts_cut"] == 0
        assert sum("never differs" in w for w in plan["warnings"]) == 1  # 2 bytes of response
        assert any("max_prompts_per_user has no effect" in w for w in plan["warnings"])
        text = explain(plan)
        assert f"d = {plan['dimension']:,}" in text
        assert plan["noise_to_clip_ratio"] > 1  # 40 users are few
        assert "noise leads (noise-to-clip ratio 1.16, above 1): take fewer dimensions" in text
        assert "16 (0% of the public prompts" in text
        assert "6 responses to public prompts" in text

    QUICK = (
        "policy.model_name_or_path=model", "rounds=1", "rollout.batch_size=8",
        "update.batch_size=8", "rollout.max_new_tokens=2", "evaluation.prompts=8",
    )  # fmt: skip

    def test_no_user_is_read(self, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Only public prompts reach policy and reward."""
        (recipe_file.parent / "my_rewards.py").write_text(
            "def brevity(prompts, completions):\n"
            "    assert all(p.startswith('public') for p in prompts)\n"
            "    open('seen', 'a').write(str(prompts))\n"
            "    return [0.0] * len(prompts)\n"
        )
        timed = mock.Mock(side_effect=timing.seconds_a_response)
        monkeypatch.setattr("dprlhf.training.dry_run.seconds_a_response", timed)
        plan = dry_run(load_recipe(recipe_file, self.QUICK))
        assert timed.call_args.kwargs == {"keep": "outputs"}  # as the run's own rounds do
        assert plan["noise_to_clip_ratio"] < 1
        assert "public 1" in (recipe_file.parent / "seen").read_text()
        assert "user" not in (recipe_file.parent / "seen").read_text()

    def test_without_public_prompts_the_reward_is_tried_on_stand_ins(self, recipe_file):
        changes = [*self.QUICK, "evaluation=null", "policy.adapter.init=random"]
        changes += ["data.user_column=prompt", "data.max_prompts_per_user=2", "rollout.responses=2"]
        plan = dry_run(load_recipe(recipe_file, changes))
        assert plan["public_prompts_cut"] is None
        assert plan["responses_a_round"] == 160  # each of 40 users may have 2 prompts
        assert "4 responses to stand-in prompts" in explain(plan)
        assert "are longer" not in explain(plan)


class TestRewardCheck:
    def test_completions_and_columns_of_the_file(self, here: Path) -> None:
        report, stand_ins = reward_check("my_rewards.py:correct", "public.csv")
        assert not stand_ins
        assert report.scores == (1.0,) * 6

    def test_a_reward_that_couples_users_is_refused(self, here: Path) -> None:
        done = call("reward-check", "my_rewards.py:ranked", "--prompts", "public.csv")
        assert isinstance(done.exception, DprlhfError)
        assert "fails the check 'alone'" in str(done.exception)
        report, _ = reward_check("my_rewards.py:declared", "public.csv")
        assert report.per_user
