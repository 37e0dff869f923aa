"""The section of an agent: tools that the policy may call, or an environment that it acts in."""

from __future__ import annotations

from pydantic import model_validator

from dprlhf.recipe.base import PositiveInt, Settings


class Agent(Settings):
    """Tools and an environment, as TRL's ``GRPOTrainer`` takes them; give at least one key.

    Attributes:
        tools: Functions that the policy may call, each ``package.module:function`` or
            ``file.py:function``, with type hints and a docstring in Google's style: the chat
            template shows them to the model.
        environment: Class, or a function without arguments, that makes one environment for each
            trajectory: ``package.module:Class`` or ``file.py:Class``. Its ``reset`` gets the
            prompt's row, and its other public methods are tools. A mapping gives several by name,
            of which each row's column ``environment`` chooses one.
        max_tool_calling_iterations: Largest number of turns with tool calls; null ends a trajectory
            only at a turn without a call, or after ``rollout.max_new_tokens``.
    """

    tools: list[str] = []
    environment: str | dict[str, str] | None = None
    max_tool_calling_iterations: PositiveInt | None = None

    @model_validator(mode="after")
    def _some(self) -> Agent:
        if not self.tools and self.environment is None:
            raise ValueError("give tools, an environment or both")
        return self
