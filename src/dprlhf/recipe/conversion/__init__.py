"""Training files of other programs as recipes: every one of their settings is accounted for.

A setting is mapped where the recipe has a key of the same meaning, has no effect here, or is
refused with the reason; none is dropped silently, and an unknown one is refused, too.
"""

from dprlhf.recipe.conversion.convert import Converted, convert
from dprlhf.recipe.conversion.rules import Finding

__all__ = ["Converted", "Finding", "convert"]
