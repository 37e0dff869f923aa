"""Directions in which public users' gradients vary, and users' gradients in these coordinates.

The norm of the noise in a release of dimension d grows with √d. Gradients of different users differ
along few directions, and public prompts show which (Yu et al., arXiv 2102.12677; Zhou et al., arXiv
2007.03813): the p leading right singular vectors of the public users' gradients, P, ``[p, d]``. A
private user then contributes a · P g_u, p numbers, clipped to S; the released mean moves the policy
along Pᵀ/a times it. P and a are computed from public rows and from the policy, which is released.
So they are constants given the releases before, a user's contribution is a function of that user's
rows alone, and the clip bounds it by S, whatever P and a are.

In private updates whose steps have a divergence for length (``target_kl``), each direction is
divided by the root of the public gradients' second moment along it (AdaDPS, Li et al., arXiv
2202.05963). The step is then the natural gradient in the subspace, to first order the largest gain
a nat: along directions in which responses vary little, the same divergence is a longer step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, repr=False, eq=False)
class Subspace:
    """A subspace of the policy's parameters, in whose coordinates gradients are released."""

    directions: torch.Tensor  # Orthogonal directions P, [p, dimension]
    scale: float  # brings public users' coordinates to a known size relative to the clip norm

    @property
    def rank(self) -> int:
        """The number p of directions."""
        return len(self.directions)

    def on(self, device: torch.device) -> Subspace:
        """Return the same subspace with its directions on a device."""
        return Subspace(self.directions.to(device), self.scale)

    def coordinates(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return a · P v for each user's vector, ``[users, p]``, from ``[users, dimension]``."""
        # One product for each row, at an address of its own: in a common product, how a row is
        # rounded may depend on its place and on the number of rows, which other users decide.
        directions = self.directions.to(vectors)
        rows = [directions @ vector.clone() for vector in vectors]
        return self.scale * torch.stack(rows) if rows else vectors.new_zeros(0, self.rank)

    def lift(self, coordinates: torch.Tensor) -> torch.Tensor:
        """Return Pᵀc/a, ``[dimension]``, of coordinates c, ``[p]``."""
        return self.directions.to(coordinates).T @ coordinates / self.scale


_DAMPING = 0.1
"""Part of the mean second moment that is added to each, so that weak directions do not lead."""

CLIP_RATIO = 0.5
"""Clip norm S as a share of the median norm of the public users' scaled coordinates."""


def fit_subspace(
    gradients: torch.Tensor,  # [users, dimension]
    rank: int,
    *,
    clip_norm: float,
    mean_first: bool = False,
    natural: bool = False,  # whether coordinates have like second moments over public users
    avoid: torch.Tensor | None = None,  # [users, dimension]
) -> Subspace:
    """Return the subspace in which PUBLIC users' gradients vary most."""
    # Clipped to half their median norm first, so that no public user decides a direction alone; not
    # centred, since their mean is a direction as good as any other. Where they span fewer than p
    # directions, the others are arbitrary.
    gradients = gradients[gradients.isfinite().all(1)]
    away = gradients.new_zeros(0, gradients.shape[1])
    if avoid is not None:
        away = _unit_mean(avoid)
        gradients = _orthogonal(gradients, away)
    gradients = gradients[gradients.any(1)]
    norms = gradients.double().norm(dim=1)
    sizes = norms.clamp(min=float(norms.median()) / 2 if len(norms) else 0.0)
    # At most 1, since the squares of a diverged policy's gradients overflow float32.
    clipped = gradients / sizes.to(gradients)[:, None]
    # The Gram matrix is as large as the number of public users, whatever the dimension is.
    values, vectors = torch.linalg.eigh((clipped @ clipped.T).double())
    keep = min(rank, len(values))
    top = vectors[:, len(values) - keep :].flip(1).to(clipped).T @ clipped
    top = torch.cat([top, top.new_zeros(rank - keep, gradients.shape[1])])
    if mean_first:
        top = torch.cat([clipped.sum(0, keepdim=True), top])[:rank]
    size = top.norm(dim=1, keepdim=True)
    top = torch.where(size > 1e-6 * size.max(), top / size.clamp(min=1e-30), 0.0)
    # What is avoided comes first: the others, arbitrary ones too, are then orthogonal to it.
    directions = torch.linalg.qr(torch.cat([away.to(top), top]).T).Q.T[len(away) :].contiguous()
    if natural:
        directions = _of_like_moments(directions, clipped)
    seen = (clipped @ directions.T).double().norm(dim=1) * sizes
    return Subspace(directions, scale_for(seen, clip_norm))


def scale_for(norms: torch.Tensor, clip_norm: float) -> float:
    """Return a from the norms of PUBLIC users' coordinates, ``[users]``, before it scales them."""
    median = float(norms.median()) if len(norms) else 0.0
    return clip_norm / (CLIP_RATIO * median) if math.isfinite(clip_norm) and median > 0 else 1.0


def _of_like_moments(directions: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    """Return directions divided by the root of the gradients' second moment along each."""
    moments = (gradients @ directions.T).double().square().mean(0)
    roots = (moments + _DAMPING * moments.mean()).sqrt()
    # Noise alone moves the policy along arbitrary directions: they are no longer than the shortest.
    roots = torch.where(moments > 1e-12 * moments.max(), roots, roots.max())
    return directions * (roots.max() / roots).nan_to_num(1.0).to(directions)[:, None]


def _unit_mean(vectors: torch.Tensor) -> torch.Tensor:
    """Return the direction of the finite vectors' mean, ``[1, dimension]``; none where it is 0."""
    mean = vectors[vectors.isfinite().all(1)].mean(0, keepdim=True, dtype=torch.float64)
    length = mean.norm()
    return mean / length if length > 0 else mean[:0]  # not above 0, too: the mean over no vector


def _orthogonal(vectors: torch.Tensor, away: torch.Tensor) -> torch.Tensor:
    """Return vectors less their parts along unit vectors; 0 where that leaves rounding alone."""
    basis = torch.zeros_like(vectors)
    for row, vector in zip(basis, vectors, strict=True):  # at once, they would be float64 copies
        wide = vector.double()
        rest = wide - (wide @ away.T) @ away
        if rest.norm() > 1e-6 * wide.norm():
            row.copy_(rest)
    return basis
