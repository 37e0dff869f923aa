"""Updates of other packages, which entry points name."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dprlhf.errors import DprlhfError, nearest, one_line
from dprlhf.recipe.private_update import PrivateUpdate

ENTRY_POINT_GROUP = "dprlhf.updates"
"""The entry-point group of updates in other packages; each names an :class:`UpdatePlugin`."""


@dataclass(frozen=True)
class UpdatePlugin:
    """An update of another package: the object that an entry point of ``dprlhf.updates`` names.

    Attributes:
        settings: A subclass of :class:`PrivateUpdate`, which validates the recipe's section and
            states how many noised sums a round releases.
        function: The update: a function of the :class:`~dprlhf.updates.PrivateRound` and of the
            settings. It reaches the users through the round alone, as the updates of this package
            do: the round clips, the gate adds the noise and charges the ledger.
    """

    settings: type[PrivateUpdate]
    function: Callable[[Any, Any], None]


def update_plugin(name: str) -> UpdatePlugin:
    """Load the update that an installed package offers under a name.

    Raises:
        DprlhfError: No package or more than one offers it, or it cannot be imported.
        ValueError: It is not an :class:`UpdatePlugin`.
    """
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    sources = sorted({point.value for point in points if point.name == name})
    if not sources:
        known = plugin_names()
        near = nearest(name, known)
        hint = f"did you mean {near!r}? " if near else ""
        raise DprlhfError(
            f"no installed package offers the update plugin {name!r}; "
            f"{hint}installed plugins: {', '.join(known) or 'none'}"
        )
    if len(sources) > 1:
        raise DprlhfError(
            f"several packages offer the update plugin {name!r} ({', '.join(sources)}): uninstall"
            " all but one"
        )
    try:
        plugin = next(point for point in points if point.name == name).load()
    except (Exception, SystemExit) as problem:
        message = one_line(problem, None)
        shown = f"{type(problem).__name__}: {message}" if message else type(problem).__name__
        raise DprlhfError(
            f"the update plugin {name!r} ({sources[0]}) cannot be loaded: {shown}"
        ) from problem
    if not isinstance(plugin, UpdatePlugin) or not issubclass(plugin.settings, PrivateUpdate):
        raise ValueError(
            f"the update plugin {name!r} is no dprlhf.recipe.UpdatePlugin(settings, function) whose"
            " settings are a subclass of dprlhf.recipe.PrivateUpdate"
        )
    return plugin


def plugin_names() -> list[str]:
    """Return the names of the updates that installed packages offer."""
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return sorted({point.name for point in points})
