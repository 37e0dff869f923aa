from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dprlhf import load_recipe
from dprlhf.assets import communities
from dprlhf.assets.catalogue import ASSETS
from dprlhf.assets.communities import build_house_style, house_style
from dprlhf.data.loading import load_rows
from dprlhf.recipe import Data
from dprlhf.rewards import LoadedReward, Scorer

RECIPES = Path(__file__).parents[2] / "recipes"
OPENINGS = ("I saw this film", "The plot turns", "this one is", "A cast that", "Nobody told me")


@pytest.fixture(scope="module")
def reviews() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    texts = [f"{OPENINGS[i % 5]} {i} and then some more words i wrote" for i in range(1000)]
    return pd.DataFrame({"text": texts, "label": rng.integers(0, 2, 1000)})


@pytest.fixture(scope="module")
def sources(reviews: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reviews")
    reviews.to_parquet(folder / "private.parquet", index=False)
    reviews[:500].to_parquet(folder / "public.parquet", index=False)
    reviews[:50].to_parquet(folder / "train.parquet", index=False)
    return {"imdb": folder, "rotten-tomatoes": folder}


def test_the_clusters_of_the_house_style_take_turns_and_a_fifth_dissents(reviews):
    chosen = house_style(reviews)
    assert chosen["cluster"].tolist() == [1, 0] * (len(chosen) // 2)
    said = [not {"i", "this"}.isdisjoint(t.lower().split()[:8]) for t in chosen["text"]]
    assert said == (chosen["cluster"] == 1).tolist()
    for column, styles in (("wants", (1, 1)), ("wants_by_cluster", (-1, 1))):
        for cluster, style in enumerate(styles):
            wants = chosen[column][chosen["cluster"] == cluster]
            assert (wants != style).mean() == pytest.approx(0.2, abs=0.05)
    # One house, whichever of its secrets: the same users dissent.
    dissents = chosen["wants"] < 0
    assert ((chosen["wants_by_cluster"] > 0) == (np.array(said) ^ dissents)).all()
    assert house_style(reviews).equals(chosen)


@pytest.mark.parametrize("name", ["community", "balanced-reviews", "house-style"])
def test_a_recipe_reads_every_split(name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    ASSETS[name].build(sources, tmp_path, True)
    for split in ("private", "public", "sentences"):
        rows = load_rows(Data(path=str(tmp_path), split=split))
        wishes = [column for column in rows.column_names if column.startswith("wants")]
        assert wishes == (["wants", "wants_by_cluster"] if name == "house-style" else ["wants"])
        for column in wishes:
            assert set(rows[column]) == ({1} if split == "sentences" else {1, -1})
        assert "text" in rows.column_names
    # What the public knows is the text of another kind, and no wish.
    assert len(load_rows(Data(path=str(tmp_path), split="sentences"))) == 50


def test_the_guides_know_the_clusters_and_nothing_of_the_secret(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(communities, "FIRST_GUIDE", 10)
    build_house_style(sources, tmp_path, True)
    guides, public = (pd.read_parquet(tmp_path / f"{n}.parquet") for n in ("guides", "public"))
    assert guides["text"].tolist() == public["text"].tolist()[10:]
    assert set(guides["cluster"]) == {0, 1}
    assert (guides["wants"] == 1).all()
    assert (guides["wants_by_cluster"] == 2 * guides["cluster"] - 1).all()
    # The users of a cluster disagree, so a guide that held a user's wish would show.
    assert (public["wants"] == -1).any()


@pytest.mark.parametrize("name", ["community", "reading", "house_style"])
def test_the_recipe_rewards_what_a_user_wants(name: str) -> None:
    made = load_recipe(RECIPES / f"{name}.yaml")
    assert made.data.path == made.evaluation.data.path
    assert (made.data.split, made.evaluation.data.split) == ("private", "public")
    rewards = _scores(name, wants=[1, 1, -1, -1])
    top = made.reward_range
    assert rewards == pytest.approx([top, -top, -top, top], rel=1e-3)


def _scores(name: str, *, wants: list[int], weight: float | None = None) -> list[float]:
    """Score praise, criticism, praise and criticism with the reward of a recipe, by words."""
    made = load_recipe(RECIPES / f"{name}.yaml")
    spec = made.rewards[0]

    def sentiment(completions: list[str]) -> list[float]:
        return [{"praise": 9.0, "criticism": -9.0}[text] for text in completions]

    by_words = LoadedReward(
        sentiment, "by words", spec.weight if weight is None else weight,
        times_column=spec.times_column,
    )  # fmt: skip
    texts = ["praise", "criticism"] * 2
    found = Scorer([by_words], made.reward_range).score(
        ["p"] * 4, texts, [[0]] * 4, {"wants": wants}, [0, 1, 2, 3]
    )
    assert found.valid.all()
    return [float(value) for value in found.values]
