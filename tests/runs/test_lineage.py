"""What a model cost its users travels with its weights: pushed, merged, copied or renamed."""

import copy
import json
import shutil
import types
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import dprlhf
from dprlhf.errors import DprlhfError
from dprlhf.recipe import AnyRecipe, make_recipe
from dprlhf.runs import earlier
from dprlhf.runs.earlier import Earlier, read_earlier, records_of, total_of_runs
from dprlhf.runs.lineage import FILE, KEY, attach, carried_by
from dprlhf.runs.publish import merge
from helpers import runs, tiny
from helpers.recipes import recipe_settings

TUNED = "was tuned by a private run on users of its own"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in ``run``, its merged model in ``merged``, and a run from that in ``second``."""
    base = tmp_path_factory.mktemp("lineage")
    settings: dict[str, Any] = {
        "rounds": 1, "epsilon": 8.0, "delta": 1e-3, "policy__adapter": runs.ADAPTER,
    }  # fmt: skip
    runs.train(str(tiny.save(base / "model")), base / "run", **settings)
    merge(base / "run", base / "merged")
    previous = [{"run": str(base / "run")}]
    second = runs.run_settings(str(base / "merged"), previous=previous, **settings)
    dprlhf.train(**second, output_dir=base / "second")
    return base


def recipe(model: Any, *previous: Any, reward: bool = False) -> AnyRecipe:
    place = "rewards__1__classifier" if reward else "policy__model_name_or_path"
    names = [{"run": str(run)} for run in previous]
    return make_recipe(recipe_settings(**{place: str(model)}, previous=names))


def run_id(folder: Path) -> str:
    return records_of(folder)[0].run


def told(weights: Path) -> Any:
    with safe_open(weights, "pt") as held:
        return json.loads((held.metadata() or {})[KEY])


def front_matter(card: Path) -> Any:
    return yaml.safe_load(card.read_text()[4:].split("\n---", 1)[0])[KEY]


@pytest.mark.slow
def test_a_model_card_alone_tells_the_cost(place: Path, tmp_path: Path) -> None:
    """YAML takes a number such as 1e-05 for a text."""
    record = {**json.loads((place / "merged" / FILE).read_text())["runs"][0], "delta": 1e-5}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("---\nlibrary_name: peft\n---\n")
    attach(tmp_path, {"runs": [record]})
    for file in tmp_path.iterdir():
        if file.name != "README.md":
            file.unlink()
    assert front_matter(tmp_path / "README.md")["runs"][0]["delta"] == "1e-05"
    (told,) = records_of(tmp_path)
    assert (told.delta, earlier.total_of([told]).delta) == (1e-5, 1e-5)


def test_each_writer_of_weights_writes_it_everywhere(place: Path) -> None:
    run = run_id(place / "run")
    said = [
        json.loads((place / "run/policy" / FILE).read_text()),
        told(place / "run/policy/adapter_model.safetensors"),
        front_matter(place / "run/policy/README.md"),
        told(place / "run/checkpoint/policy.safetensors"),
        json.loads((place / "merged" / FILE).read_text()),
        json.loads((place / "merged/config.json").read_text())[KEY],
        told(place / "merged/model.safetensors"),
        front_matter(place / "merged/README.md"),
    ]
    assert [carried["runs"][0]["run"] for carried in said] == [run] * len(said)
    assert "(8, 0.001)-differential privacy" in said[0]["statement"]
    assert {r.run for r in records_of(place / "merged")} == {run}


@pytest.mark.slow
def test_a_merged_model_tells_of_every_run_before_it(place: Path, tmp_path: Path) -> None:
    merge(place / "second", tmp_path / "both")
    for said in (
        json.loads((place / "second/policy" / FILE).read_text()),
        told(place / "second/checkpoint/policy.safetensors"),
        json.loads((tmp_path / "both" / FILE).read_text()),
        json.loads((tmp_path / "both/config.json").read_text())[KEY],
        told(tmp_path / "both/model.safetensors"),
        front_matter(tmp_path / "both/README.md"),
    ):
        runs = [record["run"] for record in said["runs"]]
        assert runs == [run_id(place / "second"), run_id(place / "run")]
    assert records_of(place / "second/policy") == records_of(place / "second")


def test_the_weights_are_the_same_and_load(place: Path, tmp_path: Path) -> None:
    weights = {"odd": torch.arange(7, dtype=torch.bfloat16), "w": torch.randn(3, 5)}
    for metadata in (None, {"format": "pt"}):
        save_file(weights, tmp_path / "x.safetensors", metadata=metadata)
        attach(tmp_path, {"statement": "", "runs": [{"run": "an id that is long"}]})
        assert all(
            (v == weights[k]).all() for k, v in load_file(tmp_path / "x.safetensors").items()
        )
        with safe_open(tmp_path / "x.safetensors", "pt") as held:
            assert held.metadata() == {**(metadata or {}), KEY: held.metadata()[KEY]}
    loaded = AutoModelForCausalLM.from_pretrained(place / "merged")
    loaded.save_pretrained(tmp_path / "again")  # by transformers alone
    assert carried_by(str(tmp_path / "again"))[0]["runs"][0]["run"] == run_id(place / "run")


def keep_alone(folder: Path, name: str) -> None:
    """Take the record out of each place but one of a merged model."""
    kept = (folder / name).read_bytes()
    settings = json.loads((folder / "config.json").read_text())
    del settings[KEY]
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
    for record in ("README.md", FILE):
        (folder / record).unlink()
    (folder / name).write_bytes(kept)


@pytest.mark.parametrize("left", [FILE, "config.json", "model.safetensors", "README.md"])
@pytest.mark.parametrize("reward", [False, True], ids=["policy", "reward"])
def test_a_copied_model_is_refused_unless_its_run_is_named(place, tmp_path, left, reward):
    model = shutil.copytree(place / "merged", tmp_path / "another name")
    (model / "privacy.json").unlink()
    keep_alone(model, left)
    with pytest.raises(DprlhfError, match=TUNED) as refusal:
        read_earlier(recipe(model, reward=reward))
    assert f"previous: [{{run: {model}}}]" in str(refusal.value)  # what to write
    by_model = read_earlier(recipe(model, model, reward=reward))
    by_folder = read_earlier(recipe(model, place / "run", reward=reward))
    assert by_model.records[0].mechanism == by_folder.records[0].mechanism
    assert {r.run for r in by_model.records} == {run_id(place / "run")}


def test_a_copied_adapter_is_known_and_refused(place: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(place / "run/policy", tmp_path / "adapter")
    (adapter / FILE).unlink()
    (adapter / "README.md").unlink()
    with pytest.raises(DprlhfError, match=TUNED):
        read_earlier(recipe(adapter))
    with pytest.raises(DprlhfError, match="is an adapter: name the whole model"):
        read_earlier(recipe(adapter, place / "run"))


def test_an_adapter_without_a_record_is_no_base(place: Path, tmp_path: Path) -> None:
    """As PEFT's own save_pretrained writes it, of the policy that a run returns."""
    run = runs.train(
        str(place / "model"), tmp_path / "run", rounds=1, epsilon=8.0, policy__adapter=runs.ADAPTER
    )
    run.policy.model.save_pretrained(tmp_path / "adapter")
    assert not carried_by(str(tmp_path / "adapter"))
    with pytest.raises(DprlhfError, match="is an adapter: name the whole model"):
        read_earlier(recipe(tmp_path / "adapter"))


@pytest.mark.parametrize("name", ["merged", "run/policy"])
def test_a_pushed_model_is_known_once_it_is_on_this_machine(place, monkeypatch, name):
    here = {"config.json", "adapter_config.json", "model.safetensors", "adapter_model.safetensors"}

    def download(repo: str, file: str, *, revision: Any, local_files_only: bool) -> str:
        found = place / name / file
        if repo != "me/mine" or not found.is_file() or (local_files_only and file not in here):
            raise OSError(file)
        return str(found)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(DprlhfError, match=TUNED):
        read_earlier(recipe("me/mine"))
    assert records_of(Path("me/mine"))[0].run == run_id(place / "run")
    if name == "merged":
        assert len(read_earlier(recipe("me/mine", "me/mine")).records) == 1
    here.clear()  # before it was loaded, nothing is known of it, and the hub is not asked
    assert not read_earlier(recipe("me/mine")).records


@pytest.mark.parametrize("reward", [False, True])
@pytest.mark.parametrize("name", ["merged", "run/policy"])
def test_a_pinned_revision_is_looked_up_as_itself(place, monkeypatch, name, reward):
    def download(repo: str, file: str, *, revision: Any, local_files_only: bool) -> str:
        found = place / (name if revision == "c0ffee" else "model") / file
        if not found.is_file():
            raise OSError(file)
        return str(found)

    def pinned(revision: str | None, *previous: Any) -> AnyRecipe:
        made = recipe("me/mine", *previous, reward=reward).model_dump(mode="json")
        if reward and revision:
            made["rewards"][1]["classifier"] += f"@{revision}"
        elif not reward:
            made["policy"]["revision"] = revision
        return make_recipe(made)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert not read_earlier(pinned(None)).records  # the main branch has no record
    with pytest.raises(DprlhfError, match=TUNED):
        read_earlier(pinned("c0ffee"))
    if name == "run/policy":
        with pytest.raises(DprlhfError, match="is an adapter: name the whole model"):
            read_earlier(pinned("c0ffee", place / "run"))


def test_a_loaded_model_is_looked_up_at_its_own_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def carried(model: str, revision: str | None) -> list[Any]:
        asked.append((model, revision))
        return []

    monkeypatch.setattr(earlier, "carried_by", carried)
    config = types.SimpleNamespace(_name_or_path="me/mine", _commit_hash="c0ffee")
    assert not earlier.runs_of_object(types.SimpleNamespace(config=config))
    assert asked == [("me/mine", "c0ffee")]


LIVE: dict[str, dict[str, Any]] = {
    "full": {"policy__adapter": {"type": "full"}},
    "merged": {"policy__adapter": runs.ADAPTER},
}


def live(folder: Path, model: Any, **changes: Any) -> dict[str, Any]:
    """Settings of a run with a model that the program passes."""
    settings = runs.run_settings("", rounds=2, rollout__max_new_tokens=2, **changes)
    return settings | {"model": model, "processing_class": tiny.tokenizer(), "output_dir": folder}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIVE)
def test_a_model_in_memory_carries_the_record_as_soon_as_it_is_trained(tmp_path, kind):
    model = AutoModelForCausalLM.from_pretrained(tiny.save(tmp_path / "model"))
    first = tmp_path / "first"
    trained = dprlhf.train(**live(first, model, **LIVE[kind])).policy.model
    tuned = trained.merge_and_unload() if kind == "merged" else trained
    assert earlier.runs_of_object(tuned) == {run_id(first)}
    with pytest.raises(DprlhfError, match=f"model: this model {TUNED}"):
        dprlhf.train(**live(tmp_path / "second", copy.deepcopy(tuned), **LIVE[kind]))
    assert not (tmp_path / "second").exists()
    tuned.save_pretrained(tmp_path / "saved")
    tiny.tokenizer().save_pretrained(tmp_path / "saved")
    with pytest.raises(DprlhfError, match=TUNED):
        read_earlier(recipe(tmp_path / "saved"))
    named = live(tmp_path / "second", tuned, previous=[{"run": str(first)}], **LIVE[kind])
    total = dprlhf.train(**named).plan
    assert json.loads((tmp_path / "second/privacy.json").read_text())["total"]["epsilon"] > (
        total.guarantee.epsilon
    )


@pytest.mark.parametrize("kind", LIVE)
def test_a_run_is_not_continued_on_a_model_that_holds_its_updates(tmp_path, kind):
    model = AutoModelForCausalLM.from_pretrained(tiny.save(tmp_path / "model"))

    def stop(metrics: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    settings = live(tmp_path / "run", model, **LIVE[kind])
    with pytest.raises(KeyboardInterrupt):
        dprlhf.train(**settings, callbacks=[stop])
    given = {key: settings[key] for key in ("prompts", "reward", "evaluation_prompts", "quiet")
             if key in settings}  # fmt: skip
    given |= {"model": model, "processing_class": tiny.tokenizer()}
    said = "load the base model afresh" if kind == "merged" else "needed: load that afresh"
    with pytest.raises(DprlhfError, match=said):
        dprlhf.resume(tmp_path / "run", **given)
    if kind != "full":  # else the checkpoint holds all weights
        other = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model"))
        with pytest.raises(DprlhfError, match="base model is not the one that this run has tuned"):
            dprlhf.resume(tmp_path / "run", **{**given, "model": other})
    afresh = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    dprlhf.resume(tmp_path / "run", **{**given, "model": afresh})


def test_a_model_that_was_given_in_python_is_merged_with_its_record(tmp_path: Path) -> None:
    """What PEFT itself loads and merges carries none, so that nothing would count the run."""
    start = tiny.save(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(start)
    run, out = tmp_path / "run", tmp_path / "merged"
    dprlhf.train(**live(run, model, policy__adapter=runs.ADAPTER))
    with pytest.raises(DprlhfError, match=r"merge it there, with dprlhf\.merge\("):
        merge(run, out)
    with pytest.raises(DprlhfError, match="needed: load that afresh"):
        dprlhf.merge(run, out, model=model)
    assert not out.exists()
    afresh = AutoModelForCausalLM.from_pretrained(start)
    before = copy.deepcopy(afresh.state_dict())
    dprlhf.merge(run, out, model=afresh)
    assert all(torch.equal(weight, before[name]) for name, weight in afresh.state_dict().items())
    assert not earlier.runs_of_object(afresh)
    merged = AutoModelForCausalLM.from_pretrained(out)
    tuned = peft.PeftModel.from_pretrained(afresh, str(run / "policy")).merge_and_unload()
    assert all(
        torch.allclose(weight, tuned.state_dict()[name])
        for name, weight in merged.state_dict().items()
    )
    assert earlier.runs_of_object(merged) == {run_id(run)}
    with pytest.raises(DprlhfError, match=TUNED):
        read_earlier(recipe(out))
    assert {r.run for r in read_earlier(recipe(out, out)).records} == {run_id(run)}


@pytest.mark.parametrize("named", ["run", "merged", "run/policy", "run/checkpoint", "far/merged"])
def test_disjoint_users_are_compared_whichever_way_the_run_is_named(place, tmp_path, named):
    """The hashes are in the run's folder, and a model tells which run that was."""
    if named == "far/merged":  # the run is beside the new one, and the model elsewhere
        shutil.copytree(place / "merged", tmp_path / named)
    previous = [
        {"run": str((tmp_path if named[:3] == "far" else place) / named), "users": "disjoint"}
    ]
    settings = runs.run_settings(
        str(place / "merged"), rounds=1, rollout__max_new_tokens=2, previous=previous
    )
    with pytest.raises(DprlhfError, match="declared to have no users in common, but they have"):
        dprlhf.train(**settings, output_dir=place / "apart")
    assert not (place / "apart").exists()


def test_what_is_known_only_after_loading_is_refused_before_the_first_charge(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dprlhf.training.build.read_earlier", lambda recipe: Earlier())
    settings = runs.run_settings(str(place / "merged"), rounds=1, rollout__max_new_tokens=2)
    with pytest.raises(DprlhfError, match=TUNED):
        dprlhf.train(**settings, output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_total_of_models_is_the_total_of_their_runs(place: Path) -> None:
    runs_, cost = total_of_runs([place / "run", place / "second"])
    models, same = total_of_runs([place / "merged", place / "second/policy"])
    assert (len(models), same.epsilon) == (len(runs_), cost.epsilon)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: [],
        lambda c: {"runs": []},
        lambda c: {"runs": "x"},
        lambda c: {"runs": [{"run": {}}]},
    ],
)
def test_an_altered_record_is_refused(place, tmp_path, change):
    model = shutil.copytree(place / "merged", tmp_path / "model")
    changed = json.dumps(change(json.loads((model / FILE).read_text()))).encode()
    for content in (changed, changed + b"\xff"):
        (model / FILE).write_bytes(content)
        with pytest.raises(DprlhfError, match=r"privacy record \(dprlhf_privacy\) was altered"):
            read_earlier(recipe(model))


def test_a_model_of_somebody_else_carries_none(place: Path) -> None:
    assert carried_by(str(place / "model")) == []
    assert not read_earlier(recipe(place / "model")).records
    with pytest.raises(DprlhfError, match="nor a model that carries the record of one"):
        records_of(place / "model")


def test_an_error_of_ours_in_the_search_is_not_taken_for_a_model_without_a_record(monkeypatch):
    def download(*_: Any, **__: Any) -> str:
        raise TypeError("revision must be a string")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(TypeError):
        carried_by("me/mine")
