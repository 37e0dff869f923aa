"""A public random projection of features: from the size of a LoRA to a few hundred dimensions.

A count sketch (Charikar, Chen & Farach-Colton 2002): each of the d coordinates goes, with a random
sign, to one of p buckets. It is drawn from a public seed and looks at no user, so it costs no
privacy, and it acts on each user alone, so sensitivities stay what they are. E‖Ωφ‖² = ‖φ‖², and
the memory is two numbers for each coordinate, where a Gaussian matrix would need p.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from dprlhf.errors import DprlhfError
from dprlhf.privacy.randomness import uint64_stream


class CountSketch:
    """A count sketch Ω, ``[size, dimension]``: a random matrix with one ±1 in each column.

    Args:
        dimension: Dimension d of the features.
        size: Dimension p of the sketched features.
        seed: Public seed, fixed before any user's data is read.

    Raises:
        DprlhfError: The size is out of range.
    """

    def __init__(self, dimension: int, size: int, seed: str) -> None:
        if not 1 <= size <= dimension:
            raise DprlhfError(
                f"sketch: size must be from 1 to the {dimension} dimensions of the features, not"
                f" {size}; leave the sketch out to keep them all"
            )
        self.size = size
        key = hashlib.sha256(b"public sketch " + seed.encode()).digest()
        draws = uint64_stream(key, dimension, size, count=dimension)
        buckets = ((draws >> np.uint64(1)) % np.uint64(size)).astype(np.int64)
        self._bucket = torch.from_numpy(buckets)
        self._sign = torch.from_numpy(1.0 - 2.0 * (draws & np.uint64(1)).astype(np.float64))

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Return Ωφ of each user, ``[users, size]``, for features ``[users, dimension]``."""
        out = features.new_zeros(len(features), self.size)
        signed = features * self._sign.to(features)
        return out.index_add_(1, self._bucket.to(features.device), signed)

    def lift(self, w: torch.Tensor) -> torch.Tensor:
        """Return Ωᵀw, ``[dimension]``: w on sketched features predicts as Ωᵀw on the features."""
        return w[self._bucket.to(w.device)] * self._sign.to(w)
