"""A finished run's policy for others: upload it to the Hugging Face hub, or merge it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dprlhf.errors import DprlhfError, one_line
from dprlhf.hub import pinned
from dprlhf.policies.adapters import quiet_peft
from dprlhf.recipe import load_any_recipe
from dprlhf.runs.card import model_card
from dprlhf.runs.folder import RunFolder, replaced_folder


def push(run: str | Path, repo: str, *, private: bool = False) -> str:
    """Upload a run's adapter with its model card, and return the address.

    Only ``policy/`` travels. A failed upload changes nothing in the run folder.

    Args:
        run: the run folder.
        repo: ``owner/name``; made if it is not there.
        private: make it a private repository.

    Raises:
        DprlhfError: the run has no policy yet, or the hub did not take it.
    """
    from huggingface_hub import HfApi

    folder = _finished(run)
    try:
        api = HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder.policy,
            commit_message=f"Private tuning run {folder.path.resolve().name}",
        )
    except Exception as error:  # no network, no token, no such owner, a card that is refused
        raise DprlhfError(
            f"{repo}: the hub did not take the policy ({type(error).__name__}:"
            f" {one_line(error)}); it is safe in {folder.policy}, try again"
            f" with: dprlhf push {run} {repo}"
        ) from None
    return f"https://huggingface.co/{repo}"


def merge(
    run: str | Path, out: str | Path, *, dtype: str = "float32", replace: bool = False
) -> Path:
    """Write base model and adapter as one model that needs no PEFT.

    Args:
        run: the run folder.
        out: the new folder; must not exist.
        dtype: of the merged weights. A small change of a weight may get lost in bfloat16.
        replace: the folder may exist.

    Raises:
        DprlhfError: the run has no policy yet, the folder exists, or the adapter cannot be merged.
    """
    import peft
    import transformers

    from dprlhf.assets import resolve
    from dprlhf.policies.classifier import head_settings

    folder, out = _finished(run), Path(out)
    if out.exists() and not replace:
        raise DprlhfError(f"{out}: exists; name a new folder")
    recipe = load_any_recipe(folder.recipe)
    spec = recipe.trained
    kind, head = transformers.AutoModelForCausalLM, {}
    if recipe.classifier:
        head = head_settings(recipe.head_labels)
        kind = transformers.AutoModelForSequenceClassification
    try:
        base = kind.from_pretrained(
            resolve(spec.model_name_or_path),
            dtype=torch.float32,
            trust_remote_code=spec.trust_remote_code,
            **pinned(spec.model_name_or_path, spec.revision, "revision"),
            **({**head, "ignore_mismatched_sizes": True} if head else {}),
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder.policy)
        if head:
            base.config.pad_token_id = tokenizer.pad_token_id
        probe = torch.arange(1, 17)[None] % base.config.get_text_config().vocab_size
        with quiet_peft():
            tuned = peft.PeftModel.from_pretrained(base, str(folder.policy)).eval()
            wanted = _logits(tuned, probe)
            with tuned.disable_adapter():
                untuned = _logits(tuned, probe)
            merged = tuned.merge_and_unload()
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        raise DprlhfError(
            f"{run}: the adapter ({spec.adapter.type}) cannot be merged"
            f" ({one_line(error)}); load it with PeftModel.from_pretrained"
        ) from None
    # A merge that leaves a part of the adapter out is off by a good part of what it changed.
    off = (_logits(merged, probe) - wanted).abs().max()
    if off > 0.05 * (wanted - untuned).abs().max() + 1e-5 * wanted.abs().max():
        raise DprlhfError(
            f"{run}: merged, the adapter ({spec.adapter.type}) computes something else; load it"
            " with PeftModel.from_pretrained"
        )
    with replaced_folder(out) as fresh:
        merged.to(getattr(torch, dtype)).save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        card = json.loads(folder.privacy.read_text())
        (fresh / "README.md").write_text(model_card(recipe, card, merged=True))
        # A run that starts from this model finds out which run to account for.
        (fresh / "privacy.json").write_text(folder.privacy.read_text())
    return out


def _finished(run: str | Path) -> RunFolder:
    folder = RunFolder(Path(run))
    folder.require()
    if not (folder.policy / "README.md").is_file():
        raise DprlhfError(f"{run}: no policy yet; finish the run with: dprlhf resume {run}")
    return folder


@torch.no_grad()
def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens).logits
    return logits
