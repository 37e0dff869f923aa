"""Whole runs on a tiny model: learning, leaks, crashes, resume, several processes."""

import contextlib
import json
import logging
import math
import os
import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import accelerate.hooks
import numpy as np
import peft
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, TrainerCallback

import dprlhf
from dprlhf import DprlhfError
from dprlhf.boundary import open_private
from dprlhf.data.in_memory import InMemoryInputs
from dprlhf.privacy.ledger import read_ledger
from dprlhf.privacy.partition import allocate
from dprlhf.rewards.scoring import score_private
from dprlhf.runs.folder import JsonLines, RunFolder
from dprlhf.training import build, reinforcement, trainer
from dprlhf.updates import round as round_module
from dprlhf.updates.telemetry import ReleasedReward
from helpers import tiny
from helpers.runs import charged, lower_case, weights
from helpers.runs import run_settings as settings

CANARY = "zanzibar-7319"


class PanicError(BaseException):
    """As PyO3's, which is no ``Exception``: a panic in code compiled from Rust."""


class TestLearning:
    @pytest.mark.slow
    def test_adapter_loads_with_peft_and_acts_like_the_policy(self, model, tmp_path):
        result = dprlhf.train(**settings(model), output_dir=tmp_path / "run")
        base = AutoModelForCausalLM.from_pretrained(model)
        loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "run/policy")).eval()
        tokens = torch.arange(1, 30)[None]
        with torch.no_grad():
            tuned = loaded(tokens).logits
            ours = result.policy.model(tokens).logits
            with loaded.disable_adapter():
                untuned = loaded(tokens).logits
        torch.testing.assert_close(tuned, ours)
        assert (tuned - untuned).abs().max() > 1e-4
        card = (tmp_path / "run/policy/README.md").read_text()
        assert "## Privacy" in card
        assert "differential privacy where neighbouring" in card

    def test_a_prompt_that_the_template_refuses_stops_nobody(self, tmp_path, capfd):
        """If it ended the run, one user would decide whether there is a result."""
        folder = tmp_path / "chat"
        tiny.save(folder)
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = (
            "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception(m.content) }}"
            "{% endif %}{{ m.content }}{% endfor %}:"
        )
        tokenizer.save_pretrained(folder)
        rows = [[{"role": "user", "content": f"hi {i}"}] for i in range(39)]
        dprlhf.train(
            **settings(
                str(folder),
                prompts=[*rows, [{"role": "tool", "content": CANARY}]],
                reward=lambda completions: [float(len(c[0]["content"])) for c in completions],
            ),
            output_dir=tmp_path / "run",
        )
        assert charged(tmp_path / "run") == [1, 2, 3, 4, 5]
        lines = (tmp_path / "run/secret/telemetry-0.jsonl").read_text().splitlines()
        assert sum(json.loads(line)["users_not_readable"] or 0 for line in lines) == 1
        public = [[{"role": r, "content": CANARY}] for r in ("user", "user", "user", "tool")]
        with pytest.raises(DprlhfError, match="chat template refuses conversation 4 of 4"):
            dprlhf.train(
                **settings(str(folder), prompts=rows, evaluation_prompts=public),
                output_dir=tmp_path / "other",
            )
        assert not (tmp_path / "other").exists()
        assert CANARY not in "".join(capfd.readouterr())

    def test_a_reward_that_exits_stops_nobody(self, model: str, tmp_path: Path) -> None:
        def reward(prompts: list[str], completions: list[str]) -> list[float]:
            for number, way_out in ((7, SystemExit), (8, KeyboardInterrupt)):
                if f"user {number} says" in prompts:
                    raise way_out
            return lower_case(prompts, completions)

        dprlhf.train(**settings(model, reward=reward, rounds=1), output_dir=tmp_path / "run")
        telemetry = (tmp_path / "run/secret/telemetry-0.jsonl").read_text()
        failures = json.loads(telemetry)["reward_failures"]
        assert failures == {"SystemExit": 2, "KeyboardInterrupt": 2}


class TestLeaks:
    def test_public_files_hold_known_fields_only(self, model: str, tmp_path: Path) -> None:
        dprlhf.train(**settings(model, rounds=3), output_dir=tmp_path / "run")
        for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
            assert set(json.loads(line)) == {
                "round", "epsilon", "delta", "released_gradient_norm", "expected_noise_norm",
                "private_reward_noised", "private_reward_noise_std", "valid_share_noised",
                "valid_share_noise_std",
            }  # fmt: skip
        kinds = {e.kind: set(e.body) for e in read_ledger(tmp_path / "run/ledger.jsonl")}
        assert kinds["charge"] == {
            "round", "noise_multiplier", "clip_norm", "releases_per_round", "nonce",
        }  # fmt: skip
        assert kinds["commit"] == {"round"}
        plan = set(json.loads((tmp_path / "run/privacy.json").read_text())) & kinds["open"]
        assert kinds["open"] - plan == {"recipe_sha256", "key_commitment"}
        digest = (tmp_path / "run/secret/data-digest").read_bytes()
        key = (tmp_path / "run/secret/key").read_bytes()
        for file in (tmp_path / "run").rglob("*"):
            if file.is_file() and "secret" not in file.parts:
                content = file.read_bytes()
                assert key not in content
                assert key.hex().encode() not in content
                assert digest not in content
        for file in (tmp_path / "run/secret").iterdir():
            assert file.stat().st_mode & 0o077 == 0, file

    @pytest.mark.slow
    def test_the_reward_in_the_metrics_is_the_noised_one(self, model: str, tmp_path: Path) -> None:
        """It is the raw mean where no noise is added, and far from it where some is."""
        for name, epsilon in (("plain", math.inf), ("private", 8.0)):
            dprlhf.train(**settings(model, rounds=3, epsilon=epsilon), output_dir=tmp_path / name)
            lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
            secret = (tmp_path / name / "secret/telemetry-0.jsonl").read_text().splitlines()
            shown = [json.loads(line)["private_reward_noised"] for line in lines]
            raw = [json.loads(line)["reward_mean"] for line in secret]
            for a, b in zip(shown, raw, strict=True):
                assert (a == pytest.approx(b, abs=1e-9)) is (name == "plain")

    @pytest.mark.parametrize("kind", [RuntimeError, PanicError])
    def test_an_unexpected_error_is_one_line_and_its_text_stays_secret(
        self, kind: type[BaseException], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any, **__: Any) -> Any:
            raise kind(CANARY)

        monkeypatch.setattr(reinforcement, "score_private", broken)
        with pytest.raises(DprlhfError) as caught:
            dprlhf.train(**settings(model), output_dir=tmp_path / "run")
        assert CANARY not in str(caught.value)
        assert kind.__name__ in str(caught.value)
        assert CANARY in (tmp_path / "run/secret/error.txt").read_text()

    def test_a_warning_that_private_values_cause_is_dropped_and_one_of_public_rows_is_not(
        self,
        model: str,
        tmp_path: Path,
        capfd: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        logger = logging.getLogger("a library")
        monkeypatch.setattr(logger, "propagate", False)
        logger.addHandler(logging.StreamHandler())
        score, tell, judge = score_private, trainer.record_secret, reinforcement.evaluate

        def complain(text: str) -> None:
            warnings.warn(text, stacklevel=1)
            logger.warning(text)
            logger.warning("%d", text)  # which logging would show with a traceback
            np.log(np.zeros(1))

        def complaining(function: Any, text: str) -> Any:
            def complained(*given: Any, **named: Any) -> Any:
                complain(text)
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(complain, text).result()
                return function(*given, **named)

            return complained

        monkeypatch.setattr(reinforcement, "score_private", complaining(score, CANARY))
        monkeypatch.setattr(trainer, "record_secret", complaining(tell, CANARY))
        public = [f"public {i}" for i in range(4)]
        run = settings(model, rounds=1, evaluation_prompts=public)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dprlhf.train(**run, output_dir=tmp_path / "private")
            assert not [w for w in caught if CANARY in str(w.message) or "log" in str(w.message)]
            assert CANARY not in capfd.readouterr().err
            monkeypatch.setattr(reinforcement, "score_private", score)
            monkeypatch.setattr(trainer, "record_secret", tell)
            monkeypatch.setattr(logging, "raiseExceptions", False)
            monkeypatch.setattr(reinforcement, "evaluate", complaining(judge, "of public rows"))
            dprlhf.train(**run, output_dir=tmp_path / "public")
        assert "of public rows" in capfd.readouterr().err
        assert {w.category for w in caught if "public" in str(w.message)} == {UserWarning}
        assert [w for w in caught if "divide by zero" in str(w.message)]

    @pytest.mark.parametrize("broken", ["trainer.model_card", "reinforcement.figures"])
    def test_what_would_fail_at_the_end_fails_before_the_folder_is_made(
        self, broken: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            raise ValueError("no such thing")

        monkeypatch.setattr(f"dprlhf.training.{broken}", fail)
        given = settings(model, output_dir=tmp_path / "a", evaluation_prompts=["it was", "so it"])
        with pytest.raises(DprlhfError, match="end of the run was tried before its first round"):
            dprlhf.train(**given)
        assert not any(tmp_path.iterdir())

    @pytest.mark.slow
    def test_a_run_beside_with_a_user_of_this_one_is_named(
        self,
        model: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        first, second = ([f"user {i}" for i in range(a, a + 20)] for a in (0, 20))
        mixed = [*second[1:], first[0]]

        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

        def said(name: str, prompts: list[str], **changes: Any) -> bool:
            given = settings(model, prompts=prompts, rounds=1, **changes)
            dprlhf.train(**given, output_dir=tmp_path / name)
            shown = capsys.readouterr().err
            return "had some of the same users, and their cost is not counted here (a" in shown

        assert not said("a", first)
        assert not said("b", second)
        assert said("c", mixed)
        assert not said("d", mixed, previous=[{"run": str(tmp_path / "a")}])
        assert not said("e", mixed, epsilon=math.inf)  # it promises nothing
        monkeypatch.setattr(sys.stderr, "isatty", lambda: False)  # a log, which is passed on
        assert not said("f", mixed)

    @pytest.mark.slow
    def test_rows_that_vanish_are_counted_on_a_terminal_before_the_first_charge(
        self,
        model: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        rows = [{"prompt": f"user {i}", "user": str(i)} for i in range(20)]
        rows += [{"prompt": text, "user": "odd"} for text in (None, "", "x" * 99, "third")]
        given = settings(
            model, rounds=1, prompts=rows, data__user_column="user", data__max_prompts_per_user=3,
            data__max_prompt_tokens=64,
        )  # fmt: skip
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        shown = []
        monkeypatch.setattr(
            build, "_open_gate", lambda *_: shown.append(capsys.readouterr().err) or 1 / 0
        )
        with pytest.raises(DprlhfError, match="ZeroDivisionError"):
            dprlhf.train(**given, output_dir=tmp_path / "a")
        monkeypatch.undo()
        counts = [line for line in shown[0].splitlines() if line.startswith("  ")]
        assert [line.split()[0] for line in counts] == ["1", "1", "1", "1"]
        for said in ("beyond the first 3", "without a prompt", "empty: only", "longer than"):
            assert f"1 {said}" in shown[0]
        monkeypatch.setattr(sys.stderr, "isatty", lambda: False)  # a log, which is passed on
        run = dprlhf.train(**given | {"quiet": False}, output_dir=tmp_path / "log")
        told = capsys.readouterr().err
        assert "(said on a terminal alone)" not in told
        operator = run.folder.secret / "operator.txt"
        assert {line.strip() for line in counts} <= {*operator.read_text().splitlines()}
        assert told.count(str(operator)) == 2  # at the start and at the end, whatever it says

    def test_the_private_prompts_are_refused_for_evaluation(self, model, tmp_path):
        prompts = [f"user {i}" for i in range(20)]
        with pytest.raises(DprlhfError, match="evaluation_prompts are the private prompts"):
            dprlhf.train(
                **settings(model, prompts=prompts, evaluation_prompts=prompts),
                output_dir=tmp_path / "run",
            )
        assert not (tmp_path / "run").exists()


class TestFailingRewards:
    SHORT: ClassVar[dict[str, Any]] = {"rollout__max_new_tokens": 1, "epsilon": math.inf}

    @staticmethod
    def failing(part: int) -> Any:
        """Return a reward that fails on all users but one of each ``part``."""

        def reward(prompts: list[str], completions: list[str]) -> list[float]:
            if any(p.startswith("user") and (int(p.split()[1]) + 1) % part for p in prompts):
                raise ValueError(f"no answer to {prompts[0]}")
            return [1.0] * len(prompts)

        return reward

    @pytest.mark.slow
    def test_the_run_stops_once_the_released_share_is_surely_near_zero(self, model, tmp_path):
        changes = self.SHORT | {"reward": self.failing(10**6), "rounds": 6}
        with pytest.raises(DprlhfError, match=r"valid rewards is 0.00 ± .* are spent"):
            dprlhf.train(**settings(model, **changes), output_dir=tmp_path / "run")
        assert charged(tmp_path / "run") == [1, 2, 3, 4, 5]  # 3√(0.1/(20 t)) is then below 0.1

    def test_a_reward_that_fails_on_most_users_is_warned_of_from_released_values(
        self, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        changes = self.SHORT | {"reward": self.failing(4), "rounds": 3}
        dprlhf.train(**settings(model, **changes), output_dir=tmp_path / "run")
        warned = capsys.readouterr().err
        assert re.search(r"warning: .* valid rewards is 0.\d\d ± 0.\d\d after \d rounds", warned)
        assert "no answer" not in warned
        told = (tmp_path / "run/secret/operator.txt").read_text()
        assert re.search(r"^round 1: .*: ValueError\('no answer to user \d+ says'\)$", told, re.M)
        assert told.count("no answer") == 1

    def test_a_reward_that_couples_users_is_refused_before_any_charge(self, model, tmp_path):
        def ranking(prompts: list[str], completions: list[str]) -> list[float]:
            lengths = np.array([len(c.encode()) for c in completions], dtype=float)
            return list(lengths - lengths.mean() + np.arange(len(lengths)))

        with pytest.raises(DprlhfError, match="per_user"):
            dprlhf.train(**settings(model, reward=ranking), output_dir=tmp_path / "run")
        assert not (tmp_path / "run").exists()


class TestResume:
    def test_a_round_has_the_users_that_the_secret_key_drew(self, model, tmp_path):
        seen: list[set[str]] = [set()]

        def reward(prompts: list[str], completions: list[str]) -> list[float]:
            seen[-1] |= {p for p in prompts if p.startswith("user")}
            return lower_case(prompts, completions)

        result = dprlhf.train(
            **settings(model, reward=reward, rounds=3),
            callbacks=[lambda metrics: seen.append(set())],
            output_dir=tmp_path / "run",
        )
        drawn = open_private(allocate(result.plan, (tmp_path / "run/secret/key").read_bytes()))
        expected = [{f"user {u} says" for u in drawn.round(t)} for t in (1, 2, 3)]
        assert seen[:3] == expected
        assert min(map(len, expected)) > 20

    def test_changed_users_are_refused(self, model: str, tmp_path: Path) -> None:
        common = settings(model, rounds=2)
        dprlhf.train(**common, output_dir=tmp_path / "run")
        others = list(reversed(common["prompts"]))
        with pytest.raises(DprlhfError, match="drawn twice"):
            dprlhf.resume(tmp_path / "run", prompts=others, reward=lower_case, quiet=True)


@pytest.mark.slow
def test_a_reward_whose_column_only_users_have_is_called_for_one_user_at_a_time(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def right(completions: list[str], answer: list[str]) -> list[float]:
        calls.append(len(set(answer)))
        return [float(a in c) for a, c in zip(answer, completions, strict=True)]

    rows = [{"prompt": f"question {i}", "answer": str(i)} for i in range(40)]
    given = settings(model, prompts=rows, reward=right)
    given.pop("evaluation_prompts", None)
    dprlhf.train(**given, output_dir=tmp_path / "run")
    assert set(calls) == {1}  # 40 users, each alone
    assert "reward 'right' needs answer, which no public prompt has" in capsys.readouterr().err


def test_a_reward_for_a_task_that_public_prompts_lack_is_called_for_one_user_at_a_time(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """None says that a reward does not apply; only if none applies the run would learn nothing."""
    calls: list[set[str]] = []

    def code(prompts: list[str], completions: list[str]) -> list[float | None]:
        calls.append(set(prompts))
        return [float(len(p)) if "code" in p else None for p in prompts]

    def late(prompts: list[str], completions: list[str]) -> list[float | None]:
        return [float(len(p)) if "late" in p else None for p in prompts]

    given = settings(model, reward=[code, late], rounds=1)
    given["prompts"] = [f"code {i}" for i in range(20)]
    given["evaluation_prompts"] = [f"{'late' if i > 20 else 'plain'} {i}" for i in range(30)]
    dprlhf.train(**given, output_dir=tmp_path / "run")
    assert all(len(prompts) == 1 for prompts in calls if "code" in min(prompts))
    said = capsys.readouterr().err
    assert "reward 'code' answers None to all" in said
    assert "reward 'late'" not in said
    with pytest.raises(DprlhfError, match=r"'code' .* never applies"):
        dprlhf.train(**given | {"reward": code}, output_dir=tmp_path / "a")


@pytest.mark.parametrize("earlier", [4, 3])
def test_a_continued_run_goes_on_from_the_shares_that_it_has_released(tmp_path, earlier):
    """As without a break, five rounds of twenty users of whom nobody's reward is valid stop it."""
    released = {"valid_share_noised": 0.0, "valid_share_noise_std": 0.01}
    metrics = JsonLines(tmp_path / "metrics.jsonl")
    for t in [*range(1, earlier + 1), 5]:
        metrics.write({"round": t, **released})
    stage = reinforcement.Reinforcement(cast(Any, None), InMemoryInputs(None, None, None))
    stage._last_reward = ReleasedReward(None, None, *released.values())
    run: Any = SimpleNamespace(
        folder=RunFolder(tmp_path),
        plan=SimpleNamespace(expected_batch_size=20.0),
        processes=SimpleNamespace(on_main=lambda action: action(), main=False),
    )
    stopped = pytest.raises(DprlhfError, match="after 5 rounds")
    with stopped if earlier == 4 else contextlib.nullcontext():
        stage.check_round(run, 5)


FEW: dict[str, Any] = {"prompts": [f"user {i}" for i in range(12)], "rounds": 2}


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("begin", state.max_steps, kwargs))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        assert not kwargs  # no model, no batch, no data loader
        self.seen.append(("log", state.global_step, logs))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("end", len(state.log_history), args.output_dir))


def test_callbacks_of_transformers_see_what_is_published(model: str, tmp_path: Path) -> None:
    recorder, plain, run = Recorder(), list[Any](), tmp_path / "run"
    dprlhf.train(**settings(model, **FEW, callbacks=[recorder, plain.append]), output_dir=run)
    written = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    logs = [("log", t, line) for t, line in enumerate(written, 1)]
    assert recorder.seen == [("begin", 2, {}), *logs, ("end", 2, str(run))]
    assert plain == written


@pytest.mark.parametrize(
    "changes", [{}, {"policy__adapter": {"type": "full"}}], ids=["lora", "full"]
)
def test_weights_that_are_no_numbers_stop_the_run_after_their_round(model, tmp_path, changes):
    given = settings(model, **FEW | {"rounds": 4}, learning_rate=1e30, **changes)
    with pytest.raises(DprlhfError, match=r"round \d .* no numbers: .* of its 4 rounds \d are not"):
        dprlhf.train(output_dir=tmp_path / "run", **given)
    assert len(charged(tmp_path / "run")) < 4
    if (tmp_path / "run/checkpoint").exists():
        saved = weights(tmp_path / "run")
        assert all(w.isfinite().all() for w in saved.values())


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_run_computes_in_its_own_settings_whatever_its_program_does(model, around, tmp_path):
    """Reward, callback and a thread of the program's own change them; each round has the same."""
    seen = []

    def change() -> None:
        torch.set_grad_enabled(False)
        torch.set_num_threads(3)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        torch.autograd.set_detect_anomaly(True)

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        change()
        return lower_case(prompts, completions)

    def settings_of_torch() -> tuple[Any, ...]:
        precision = torch.get_float32_matmul_precision()
        modes = torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.get_default_dtype()
        return torch.get_num_threads(), precision, *modes

    def moved(*given: Any) -> None:  # in the middle of a round, after the rewards
        seen.append(settings_of_torch())
        ascend(*given)
        change()  # behind the back of what is wrapped, as a thread could

    ascend = round_module.ascend
    given = settings(model, **FEW, reward=reward, callbacks=[lambda metrics: change()])
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.autocast("cpu", dtype=torch.bfloat16),
        around(),
    ):
        before = settings_of_torch()
        patch.setattr(round_module, "ascend", moved)
        done = dprlhf.train(output_dir=tmp_path / "run", **given)
        assert settings_of_torch() == before
    assert seen == [(before[0], before[1], True, False, torch.float32)] * FEW["rounds"]
    assert all(p.dtype == torch.float32 for p in done.policy.parameters.values())
    assert any(w.abs().max() > 0 for n, w in weights(tmp_path / "run").items() if "lora_B" in n)


def _hooked(model: Any, seen: list[Any], put: str) -> Any:
    """Put something that sees what a model computes, and return what takes it off."""

    def see(*values: Any, **named: Any) -> None:
        seen.append(values)

    class Mode(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    if put == "like a library":
        see.__module__ = "peftwatch"
    layer = model.get_input_embeddings()
    if put == "saved":
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    if put == "mode":
        return Mode()
    if put == "accelerate":

        class Own(accelerate.hooks.ModelHook):  # type: ignore[misc]
            def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
                seen.append(args)
                return args, kwargs

        accelerate.hooks.add_hook_to_module(layer, Own())
        return contextlib.nullcontext()
    hook = {
        "forward": lambda: layer.register_forward_hook(see),
        "like a library": lambda: layer.register_forward_hook(see),
        "forward before": lambda: layer.register_forward_pre_hook(see),
        "backward": lambda: layer.register_full_backward_hook(see),
        "tensor": lambda: next(model.parameters()).register_hook(see),
        "global": lambda: register_module_forward_hook(see),
    }[put]()
    return contextlib.closing(SimpleNamespace(close=hook.remove))


HOOKS = [
    "forward", "forward before", "backward", "tensor", "global", "accelerate", "mode", "saved",
    "like a library",
]  # fmt: skip


@pytest.mark.parametrize("put", HOOKS)
def test_a_hook_of_others_is_refused_before_it_sees_a_user(model, put, tmp_path):
    given = AutoModelForCausalLM.from_pretrained(model)
    seen: list[Any] = []
    said = settings(model, **FEW) | {"model": given, "processing_class": tiny.tokenizer()}
    with _hooked(given, seen, put), pytest.raises(DprlhfError, match=r"a hook .*Remove it"):
        dprlhf.train(output_dir=tmp_path / "run", **said)
    assert not seen
    assert not (tmp_path / "run").exists()


def test_hooks_that_come_with_a_callback_end_the_run_and_those_of_libraries_stay(model, tmp_path):
    given = AutoModelForCausalLM.from_pretrained(model)
    given.enable_input_require_grads()
    given.register_state_dict_post_hook(lambda *values: None)
    seen: list[Any] = []

    def watch(metrics: dict[str, Any]) -> None:
        given.get_input_embeddings().register_forward_hook(lambda *values: seen.append(values))

    said = settings(model, **FEW) | {"model": given, "processing_class": tiny.tokenizer()}
    with pytest.raises(DprlhfError, match="the model: there is a hook in"):
        dprlhf.train(output_dir=tmp_path / "run", **said, callbacks=[watch])
    assert not seen
    assert len(charged(tmp_path / "run")) == 1


def test_a_second_run_in_a_process_is_refused(model: str, tmp_path: Path) -> None:
    """In another thread, or in a callback of the first; afterwards there may be another."""
    refused = []

    def second(place: str) -> None:
        with pytest.raises(DprlhfError, match="another run is under way in this process"):
            dprlhf.train(output_dir=tmp_path / place, **settings(model, **FEW))
        refused.append(place)

    def callback(metrics: dict[str, Any]) -> None:
        second("nested")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(second, "beside").result()

    once = settings(model, **FEW | {"rounds": 1})
    dprlhf.train(output_dir=tmp_path / "first", **once, callbacks=[callback])
    assert refused == ["nested", "beside"]
    dprlhf.train(output_dir=tmp_path / "third", **once)


def test_who_changes_the_working_directory_leaves_the_run_in_its_folder(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round was spent, and its checkpoint lay in another folder than its ledger."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    asked = []

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        asked.append("reward")
        os.chdir(there)
        return lower_case(prompts, completions)

    def callback(metrics: dict[str, Any]) -> None:
        asked.append("callback")
        os.chdir(there)

    given = settings(model, **FEW, reward=reward, callbacks=[callback])
    dprlhf.train(output_dir="run", **given)
    assert set(asked) == {"reward", "callback"}
    assert not list(there.iterdir())
    assert (here / "run" / "policy").is_dir()
