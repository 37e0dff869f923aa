"""A finished run's policy for others: upload it to the Hugging Face hub, or merge it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dprlhf.errors import DprlhfError, one_line
from dprlhf.hub import hush_libraries, pinned
from dprlhf.policies.adapters import merged, quiet_peft
from dprlhf.recipe import IN_MEMORY, AnyRecipe, load_any_recipe
from dprlhf.runs.card import carried_with, model_card, read_card
from dprlhf.runs.earlier import Record, check_lineage_of_objects, records_of
from dprlhf.runs.folder import RunFolder, replaced_folder
from dprlhf.runs.lineage import FILE, attach
from dprlhf.runs.opening import how_to_continue


def push(
    run: str | Path,
    repo: str,
    *,
    private: bool = True,
    token: str | None = None,
    message: str | None = None,
    revision: str | None = None,
) -> str:
    """Upload a run's adapter with its model card, and return the address.

    Only ``policy/`` is uploaded. A failed upload changes nothing in the run folder.

    Args:
        run: The run folder.
        repo: The repository, ``owner/name``; created if it does not exist.
        private: Whether a repository that is created is private.
        token: The hub's token; None takes the one of the login.
        message: Message of the commit; None names the run.
        revision: Branch, created if it does not exist; None for the main one.

    Raises:
        DprlhfError: There is no policy yet, or a link in it, or the hub refused the upload.
    """
    from huggingface_hub import HfApi

    folder = _finished(run)
    files_to_push(run)
    if not (folder.policy / FILE).is_file():  # nobody shall get the weights without it
        attach(folder.policy, carried_with(read_card(folder), records_of(folder.path)))
    try:
        api = HfApi(token=token)
        made = api.create_repo(repo, private=private, exist_ok=True)
        repo = repo if "/" in repo else made.repo_id  # the owner is who has logged in
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder.policy,
            commit_message=message or f"Private tuning run {folder.path.resolve().name}",
            revision=revision,
        )
    except Exception as error:  # no network, no token, no such owner, a card that is refused
        raise DprlhfError(
            f"{repo}: the hub did not take the policy ({type(error).__name__}:"
            f" {one_line(error)}); it is safe in {folder.policy}, try again"
            f" with: dprlhf push {run} {repo}"
        ) from None
    return f"https://huggingface.co/{repo}"


def files_to_push(run: str | Path) -> list[tuple[str, int]]:
    """Return the name and the size in bytes of each file that :func:`push` would upload.

    Raises:
        DprlhfError: The run has no policy yet, or a link is in it.
    """
    policy = _finished(run).policy
    files = sorted(file for file in policy.rglob("*") if file.is_file())
    if links := [file for file in files if file.is_symlink()]:
        raise DprlhfError(f"{links[0]}: a link, which could lead into secret/: put a file there")
    return [(str(file.relative_to(policy)), file.stat().st_size) for file in files]


def merge(
    run: str | Path,
    out: str | Path,
    *,
    model: Any = None,
    dtype: str = "float32",
    replace: bool = False,
) -> Path:
    """Write base model and adapter as one model that needs no PEFT, with the run's record.

    Args:
        run: The run folder.
        out: The new folder; must not exist, unless ``replace`` is set.
        model: The model that the run started from, loaded afresh, where it was given in Python; it
            is copied and stays as it is. None loads the one that the recipe names.
        dtype: Dtype of the merged weights; bfloat16 may round a small change of a weight away.
        replace: Replace ``out`` where it exists.

    Raises:
        DprlhfError: The run has no policy yet, its card is damaged, the folder exists or holds the
            run, the dtype is unknown, the adapter cannot be merged, or the model holds the run's
            updates already.
    """
    hush_libraries()
    folder, out = _finished(run), Path(out)
    if out.exists() and not replace:
        raise DprlhfError(f"{out}: exists; name a new folder")
    if folder.path.resolve().is_relative_to(out.resolve()):
        raise DprlhfError(f"{out}: the run folder itself is in it, and would be replaced")
    kind = getattr(torch, dtype, None)
    if not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise DprlhfError(f"dtype {dtype!r} is unknown: use float32, bfloat16 or float16")
    try:
        write_merged(folder, out, records_of(folder.path), model=model, dtype=kind)
    except UnmergeableError as error:
        raise DprlhfError(f"{run}: {error}; load it with PeftModel.from_pretrained") from None
    return out


class UnmergeableError(DprlhfError):
    """An adapter cannot be merged into its base model, or the merged model cannot be saved."""


def write_merged(
    folder: RunFolder,
    out: Path,
    records: Sequence[Record],
    *,
    model: Any = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the model of :func:`merge`; also of a trial run, which has no ledger yet.

    Args:
        folder: The folder, with recipe, privacy card and ``policy/``.
        out: Where the model goes; a folder that is there is replaced.
        records: The run's own privacy terms, then those of the runs before it.
        model: The model that the run started from; None loads the one that the recipe names.
        dtype: Dtype of the merged weights.

    Raises:
        UnmergeableError: The adapter cannot be merged. The message names its type.
    """
    recipe, card = load_any_recipe(folder.recipe), read_card(folder)
    adapter = recipe.policy.adapter.type
    try:
        if adapter == "full":
            from transformers import AutoModelForCausalLM, AutoTokenizer

            whole = AutoModelForCausalLM.from_pretrained(folder.policy, dtype=torch.float32)
            tokenizer, right = AutoTokenizer.from_pretrained(folder.policy), True
        else:
            base, tokenizer = _base_and_tokenizer(recipe, folder, model)
            import peft

            with quiet_peft():
                tuned = peft.PeftModel.from_pretrained(base, str(folder.policy)).eval()
            whole, right = merged(tuned)
        if not right:
            raise UnmergeableError(f"merged, the adapter ({adapter}) computes something else")
        with replaced_folder(out) as fresh:
            whole.to(dtype).save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)
            readme = model_card(recipe, card, merged=True)
            (fresh / "README.md").write_text(readme, encoding="utf-8")
            # A run that starts from this model finds out which run to account for.
            (fresh / "privacy.json").write_text(folder.privacy.read_text("utf-8"), encoding="utf-8")
            attach(fresh, carried_with(card, records))
    except DprlhfError:  # which is a ValueError, too
        raise
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        raise UnmergeableError(
            f"the adapter ({adapter}) cannot be merged ({one_line(error)})"
        ) from None


def _base_and_tokenizer(recipe: AnyRecipe, folder: RunFolder, model: Any) -> tuple[Any, Any]:
    """Load or copy the model that a run started from, in float32, with its policy's tokenizer."""
    import transformers

    from dprlhf.assets import resolve
    from dprlhf.policies.classifier import load_classifier

    spec = recipe.policy
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder.policy)
    if model is not None:
        own, *before = records_of(folder.path)
        check_lineage_of_objects({"model": model}, {r.run for r in before}, own.run)
        return copy.deepcopy(model).to("cpu", torch.float32), tokenizer
    if spec.model_name_or_path == IN_MEMORY:
        raise DprlhfError(
            f"{folder.path}: its model was given in Python: merge it there, with"
            f" dprlhf.merge({str(folder.path)!r}, …, model=…) and the model loaded afresh (what"
            " PEFT merges by itself carries no record of what it cost the users)"
        )
    if recipe.classifier:  # with the random weights that it was trained on, where it has some
        base, _ = load_classifier(spec, recipe.head_labels, seed=recipe.seed)
        base.config.pad_token_id = tokenizer.pad_token_id
        return base, tokenizer
    base = transformers.AutoModelForCausalLM.from_pretrained(
        resolve(spec.model_name_or_path),
        dtype=torch.float32,
        trust_remote_code=spec.trust_remote_code,
        **pinned(spec.model_name_or_path, spec.revision, "revision"),
    )
    return base, tokenizer


def _finished(run: str | Path) -> RunFolder:
    folder = RunFolder(Path(run))
    folder.require()
    if not (folder.policy / "README.md").is_file():
        again = how_to_continue(folder, load_any_recipe(folder.recipe))
        raise DprlhfError(f"{run}: no policy yet; finish the run with: {again}")
    return folder
