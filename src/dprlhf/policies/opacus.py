"""Models in a wrapper of Opacus or of torch's, as a start: the model inside, without hooks."""

from __future__ import annotations

import sys
from typing import Any

from torch.nn.parallel import DataParallel, DistributedDataParallel


def without_wrapper(model: Any) -> Any:
    """Return the model inside ``DataParallel`` or Opacus' ``GradSampleModule``, or the model."""
    # Opacus' hooks would keep a gradient of each row in memory.
    if isinstance(model, DataParallel | DistributedDataParallel):
        model = model.module
    if not hasattr(model, "to_standard_module"):
        return model
    print(
        "dprlhf: the model comes wrapped by Opacus: if it was trained on rows of users, save it,"
        " declare that with dprlhf privacy declare, and name its folder under previous",
        file=sys.stderr,
    )
    return model.to_standard_module()
