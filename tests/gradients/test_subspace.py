"""Subspaces of public gradients: their directions, their scale, and users' coordinates in them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dprlhf.gradients.subspace import Subspace, fit_subspace


def gradients_along(planted: torch.Tensor, users: int, noise: float = 0.0) -> torch.Tensor:
    """Gradients that vary along planted directions, ``[p, d]``, in falling strength."""
    generator = torch.Generator().manual_seed(0)
    strength = torch.linspace(3, 1, len(planted), dtype=torch.float64)
    mixed = torch.randn(users, len(planted), generator=generator, dtype=torch.float64) * strength
    rest = torch.randn(users, planted.shape[1], generator=generator, dtype=torch.float64)
    return mixed @ planted + noise * rest


def orthonormal(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(columns, rows, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(drawn).Q.T


def fit(gradients: torch.Tensor, rank: int, clip_norm: float = 1.0) -> Subspace:
    return fit_subspace(gradients, rank, clip_norm=clip_norm)


def test_they_are_the_singular_vectors_of_the_clipped_gradients() -> None:
    gradients = gradients_along(orthonormal(5, 40), 30, noise=0.3)
    norms = gradients.norm(dim=1, keepdim=True)
    clipped = gradients * (norms.median() / 2 / norms).clamp(max=1)
    truth = torch.linalg.svd(clipped, full_matrices=False).Vh[:4]
    found = fit(gradients, 4).directions
    assert torch.allclose((found @ truth.T).abs(), torch.eye(4, dtype=torch.float64), atol=1e-9)


def test_a_user_whose_gradient_is_not_finite_has_no_part_in_them() -> None:
    gradients = gradients_along(orthonormal(3, 50), 40)
    broken = torch.cat([gradients, torch.full((2, 50), math.nan, dtype=torch.float64)])
    broken[-1, 0] = math.inf
    assert torch.equal(fit(broken, 3).directions, fit(gradients, 3).directions)


def test_users_without_a_gradient_have_no_part_in_them() -> None:
    """Where most public users' responses all fail, the median of all norms is zero."""
    gradients = gradients_along(orthonormal(3, 50), 40)
    silent = torch.zeros(60, 50, dtype=torch.float64)
    found, alone = fit(torch.cat([silent, gradients]), 3), fit(gradients, 3)
    assert torch.equal(found.directions, alone.directions)
    assert found.scale == alone.scale != 1


@pytest.mark.parametrize("rank", [1, 3])
def test_the_first_direction_is_the_mean_where_it_is_asked_for(rank: int) -> None:
    # The mean is orthogonal to what varies, and too weak to be among the leading directions.
    basis = orthonormal(4, 60)
    gradients = gradients_along(basis[:3], 50, noise=1e-3) + 0.2 * basis[3]
    gradients[::2, :] = 0.4 * basis[3] - gradients[1::2, :]  # pairs: their variation cancels
    given = {"clip_norm": 1.0}
    found = fit_subspace(gradients, rank, mean_first=True, **given).directions
    assert (found[0] @ basis[3]).abs() > 0.9
    assert torch.allclose(found @ found.T, torch.eye(rank, dtype=torch.float64), atol=1e-12)
    usual = fit_subspace(gradients, rank, **given).directions
    assert (usual[0] @ basis[3]).abs() < 0.5


@pytest.mark.parametrize("mean_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_are_orthogonal_to_what_they_shall_avoid(mean_first, dtype):
    basis = orthonormal(4, 60)
    gradients = (gradients_along(basis[:3], 50, noise=1e-3) + basis[3]).to(dtype)
    other = (basis.sum(0) + 0.01 * torch.randn(30, 60, generator=torch.manual_seed(3))).to(dtype)
    avoid = torch.cat([other, torch.full((1, 60), math.nan, dtype=dtype)])
    given = {"clip_norm": 1.0, "mean_first": mean_first}
    found = fit_subspace(gradients, 2, avoid=avoid, **given).directions
    unit = other.double().mean(0) / other.double().mean(0).norm()
    exact = 1e-6 if dtype is torch.float32 else 1e-12
    assert (found.double() @ unit).abs().max() < exact
    usual = fit_subspace(gradients, 2, **given).directions
    assert (usual.double() @ unit).abs().max() > 0.1
    # The clip is set in the coordinates that are released.
    released = fit_subspace(gradients, 2, avoid=avoid, **given).coordinates(gradients)
    assert released.norm(dim=1).median() == pytest.approx(1.0 / 0.5, rel=1e-5)


@pytest.mark.parametrize("mean_first", [False, True])
def test_arbitrary_directions_avoid_it_as_well(mean_first: bool) -> None:
    """Fewer gradients than directions, or gradients along it alone, leave some of them open."""
    away = torch.eye(20)[:1] + 0.1 * torch.eye(20)[1:2]
    for gradients in (torch.eye(20)[7:8] + away, 3 * away):
        found = fit_subspace(gradients, 4, clip_norm=1.0, mean_first=mean_first, avoid=away)
        assert torch.allclose(found.directions @ found.directions.T, torch.eye(4), atol=1e-6)
        assert (found.directions @ away[0]).abs().max() < 1e-6


def test_a_natural_step_is_the_gradient_over_the_second_moment_of_public_ones() -> None:
    gradients = gradients_along(orthonormal(6, 80), 500) / 3
    gradients /= gradients.norm(dim=1, keepdim=True).clamp(min=1)
    plain = fit(gradients, 6).directions
    found = fit_subspace(gradients, 6, clip_norm=1.0, natural=True)
    vector = torch.randn(80, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    step = found.lift(found.coordinates(vector[None])[0])
    norms = gradients.norm(dim=1, keepdim=True)
    clipped = gradients / norms.clamp(min=norms.median() / 2)
    moments = plain @ (clipped.T @ clipped / len(gradients)) @ plain.T
    damped = moments + torch.eye(6) * moments.trace() / 60
    truth = plain.T @ torch.linalg.solve(damped, plain @ vector)
    assert torch.cosine_similarity(step, truth, dim=0) == pytest.approx(1, abs=1e-9)
    assert torch.cosine_similarity(step, plain.T @ plain @ vector, dim=0) < 0.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_natural_steps_do_not_follow_noise_where_public_gradients_are_silent(dtype):
    planted = orthonormal(3, 20)
    found = fit_subspace(gradients_along(planted, 40).to(dtype), 8, clip_norm=1.0, natural=True)
    lengths, silent = (
        found.directions.norm(dim=1),
        (found.directions.double() @ planted.T).norm(dim=1),
    )
    assert (silent[3:] < 1e-5).all()
    assert lengths[:3].max() > 1.5
    torch.testing.assert_close(lengths[3:], torch.ones(5, dtype=dtype))
    zero = fit_subspace(torch.zeros(9, 20, dtype=dtype), 4, clip_norm=1.0, natural=True)
    torch.testing.assert_close(zero.directions.norm(dim=1), torch.ones(4, dtype=dtype))


def test_one_loud_user_does_not_turn_them() -> None:
    planted = orthonormal(3, 50)
    gradients = gradients_along(planted, 40, noise=1e-3)
    loud = 1e6 * orthonormal(1, 50, seed=7)
    found = fit(torch.cat([gradients, loud]), 3).directions
    assert torch.linalg.svdvals(found @ planted.T).min() > 0.99


@pytest.mark.parametrize("users", [0, 1, 2, 5])
def test_fewer_gradients_than_directions_still_give_orthonormal_ones(users: int) -> None:
    found = fit(gradients_along(orthonormal(3, 20), users), 8).directions
    assert found.shape == (8, 20)
    assert torch.allclose(found @ found.T, torch.eye(8, dtype=torch.float64), atol=1e-9)


def test_gradients_that_are_all_zero_give_a_subspace_without_a_scale() -> None:
    found = fit(torch.zeros(10, 20), 4)
    assert found.scale == 1.0
    assert torch.allclose(found.directions @ found.directions.T, torch.eye(4), atol=1e-6)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_the_clip_norm_is_half_the_median(size: float) -> None:
    gradients = size * gradients_along(orthonormal(6, 80), 51, noise=0.1)
    found = fit_subspace(gradients, 4, clip_norm=0.3)
    assert found.coordinates(gradients).norm(dim=1).median() == pytest.approx(0.3 / 0.5)


@pytest.mark.parametrize("mean_first", [False, True])
@pytest.mark.parametrize("size", [2.0**-100, 2.0**100])
def test_gradients_of_any_size_have_the_same_directions(size: float, mean_first: bool) -> None:
    """A policy that diverged has had gradients of 1e27, whose squares overflow float32."""
    gradients = gradients_along(orthonormal(6, 80), 51, noise=0.1).float()
    given = {"clip_norm": 0.3, "mean_first": mean_first, "avoid": orthonormal(1, 80).float()}
    usual = fit_subspace(gradients, 4, **given)
    found = fit_subspace(size * gradients, 4, **given)
    assert torch.equal(found.directions, usual.directions)
    assert found.scale == usual.scale / size


def test_without_clipping_there_is_no_scale() -> None:
    assert fit(gradients_along(orthonormal(3, 20), 30), 3, clip_norm=math.inf).scale == 1.0


def test_coordinates_and_their_lift() -> None:
    found = fit(gradients_along(orthonormal(6, 80), 40, noise=0.2), 4)
    vectors = torch.randn(7, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    coordinates = found.coordinates(vectors)
    assert torch.allclose(coordinates, found.scale * vectors @ found.directions.T, rtol=1e-12)
    lifted = torch.stack([found.lift(c) for c in coordinates])
    projected = vectors @ found.directions.T @ found.directions
    assert torch.allclose(lifted, projected, rtol=1e-10)
    assert found.coordinates(vectors[:0]).shape == (0, 4)


@given(
    order=st.permutations(range(6)), kept=st.integers(1, 6), dimension=st.sampled_from([33, 257])
)
def test_a_users_coordinates_do_not_depend_on_the_others(order, kept, dimension):
    generator = torch.Generator().manual_seed(5)
    vectors = torch.randn(6, dimension, generator=generator)
    subspace = Subspace(torch.randn(5, dimension, generator=generator), 1.7)
    alone = [subspace.coordinates(vectors[i : i + 1])[0] for i in range(6)]
    together = subspace.coordinates(vectors[order[:kept]])
    for place, user in enumerate(order[:kept]):
        assert torch.equal(together[place], alone[user])


def test_directions_stay_on_the_device_where_they_were_put() -> None:
    """The meta device stands for a GPU: each micro-batch had copied them there."""
    made = Subspace(torch.eye(2, 5), 3.0)
    moved = made.on(torch.device("meta"))
    assert (moved.directions.device.type, moved.scale) == ("meta", 3.0)
    assert torch.equal(made.on(torch.device("cpu")).directions, made.directions)
