"""Splits of a folder or of a dataset on the hub, of formats that have no types."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dprlhf import recipe
from dprlhf.data.file_formats import own_cache, read_csv, read_json, read_lines
from dprlhf.errors import DprlhfError

_CSV_OPTIONS = {"sep": "delimiter", "quotechar": "quotechar"}


def read_split(builder: Any, spec: recipe.Data, texts: Collection[str]) -> Any:
    """Read the files of a folder or of a dataset on the hub as those of one's own are read."""
    import datasets

    config = builder.config
    apart = getattr(config, "field", None) or getattr(config, "sample_by", "line") != "line"
    if not config.data_files or apart:
        raise DprlhfError(
            f"data {spec.path!r}: its files are not at hand, have their rows under a key, or are"
            " texts of several lines: give a folder with the files, or Parquet"
        )
    fetch = datasets.DownloadManager(
        download_config=datasets.DownloadConfig(cache_dir=own_cache())
    ).download_and_extract
    splits = {}
    for split, files in builder.config.data_files.items():
        local = [str(file) for file in fetch(list(files))]
        if builder.name == "json":
            splits[str(split)] = read_json(local, texts)
        elif builder.name == "text":
            splits[str(split)] = read_lines(local, texts)
        else:
            options = builder.config.pd_read_csv_kwargs
            usual = type(builder.config)().pd_read_csv_kwargs
            other = sorted(
                k for k, v in options.items() if v != usual.get(k) and k not in _CSV_OPTIONS
            )
            if other:
                raise DprlhfError(
                    f"data {spec.path!r}: its CSV files are read with {', '.join(other)}, which is"
                    " not known here: give Parquet"
                )
            own = {ours: options[k] for k, ours in _CSV_OPTIONS.items() if k in options}
            splits[str(split)] = read_csv(local, texts, **own)
    chosen = datasets.ReadInstruction.from_spec(spec.split).to_absolute(
        {split: len(rows) for split, rows in splits.items()}
    )
    parts = [splits[part.splitname].select(range(part.from_, part.to)) for part in chosen]
    return datasets.concatenate_datasets(parts)
