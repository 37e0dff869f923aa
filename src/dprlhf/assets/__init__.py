"""The public demo assets, made from wheels on PyPI and kept in a cache folder."""

from typing import Any

from dprlhf.errors import DprlhfError

__all__ = ["path", "pull", "resolve", "status"]


def resolve(name_or_path: str) -> str:
    """Turn ``asset:NAME`` or ``asset:NAME/FILE`` into a path in the cache; return others as is."""
    if not name_or_path.startswith("asset:"):
        return name_or_path
    from dprlhf.assets.cache import path

    name, _, member = name_or_path.removeprefix("asset:").partition("/")
    folder = path(name)
    if not member:
        return str(folder)
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*"))
    if member not in files:
        raise DprlhfError(f"asset {name!r} has no file {member!r}; it has: {', '.join(files)}")
    return str(folder / member)


def __getattr__(name: str) -> Any:
    # Loaded on first use: most runs name no asset.
    if name not in __all__:
        raise AttributeError(f"module 'dprlhf.assets' has no attribute {name!r}")
    from dprlhf.assets import cache

    return getattr(cache, name)
