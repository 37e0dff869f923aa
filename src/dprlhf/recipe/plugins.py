"""Entry points: what other installed packages offer under a name that a recipe can use."""

from __future__ import annotations

import importlib.metadata

from dprlhf.errors import DprlhfError, nearest, one_line


def load_plugin(group: str, name: str) -> object:
    """Import the object that an installed package registers under an entry point.

    Args:
        group: The entry-point group, such as ``dprlhf.updates``.

    Raises:
        DprlhfError: No installed package or more than one offers the name, or the import fails.
    """
    points = importlib.metadata.entry_points(group=group)
    found = sorted({point.value for point in points if point.name == name})
    if not found:
        known = plugin_names(group)
        near = nearest(name, known)
        hint = f"did you mean {near!r}? " if near else ""
        raise DprlhfError(
            f"no installed package offers the update plugin {name!r}; "
            f"{hint}installed plugins: {', '.join(known) or 'none'}"
        )
    if len(found) > 1:
        raise DprlhfError(
            f"several packages offer the update plugin {name!r} ({', '.join(found)}): uninstall all"
            " but one"
        )
    try:
        return next(point for point in points if point.name == name).load()
    except (Exception, SystemExit) as problem:
        message = one_line(problem, None)
        shown = f"{type(problem).__name__}: {message}" if message else type(problem).__name__
        raise DprlhfError(
            f"the update plugin {name!r} ({found[0]}) cannot be loaded: {shown}"
        ) from problem


def plugin_names(group: str) -> list[str]:
    """Return the names that installed packages register in a group, sorted."""
    return sorted({point.name for point in importlib.metadata.entry_points(group=group)})
