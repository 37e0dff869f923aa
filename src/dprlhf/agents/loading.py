"""Load the agent that a recipe names, or take what the program passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dprlhf import recipe
from dprlhf.agents.agent import Agent, EnvironmentFactories
from dprlhf.agents.chat import Tool
from dprlhf.agents.sampling import AgentSampler
from dprlhf.errors import DprlhfError
from dprlhf.recipe import IN_MEMORY
from dprlhf.rewards.functions import load_function


def load_sampler(
    spec: recipe.Agent,
    *,
    tools: Sequence[Tool] | None = None,
    environment_factory: EnvironmentFactories | None = None,
) -> AgentSampler:
    """Return what samples the trajectories of a recipe."""
    _check_passed("tools", tools, spec.tools)
    named = spec.environment
    several = list(named.values()) if isinstance(named, dict) else [named]
    _check_passed("environment_factory", environment_factory, several)
    given = list(tools) if tools is not None else [_named(name, "tool") for name in spec.tools]
    factory = environment_factory
    if factory is None and named is not None:
        factory = (
            {name: _named(source, "environment") for name, source in named.items()}
            if isinstance(named, dict)
            else _named(named, "environment")
        )
    return AgentSampler(Agent(given, factory, spec.max_tool_calling_iterations))


def _check_passed(name: str, passed: Any, of_recipe: Sequence[str | None]) -> None:
    """Refuse an object of the program where the recipe names what to load."""
    if passed is not None and IN_MEMORY not in of_recipe:
        raise DprlhfError(f"{name}: this run has what its recipe names: pass none")


def _named(source: str, kind: str) -> Any:
    if source == IN_MEMORY:
        raise DprlhfError(f"this run's {kind} was given in Python: give it again to resume()")
    function = load_function(source, kind)
    if not callable(function):
        raise DprlhfError(f"{kind} {source!r} is a {type(function).__name__}, not a callable")
    return function
