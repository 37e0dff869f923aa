"""One specification from which partition, clipping, noise and accounting are all built.

Because every part reads the same :class:`Plan`, they cannot disagree: the sampler that runs is the
sampler that was accounted for.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from dprlhf.errors import DprlhfError
from dprlhf.privacy import accounting
from dprlhf.privacy.accounting import (
    Adjacency,
    Mechanism,
    Partition,
    PrivacyCost,
    equal_but_for_rounding,
)
from dprlhf.privacy.gaussian import upwards
from dprlhf.privacy.partitions import partition_named
from dprlhf.privacy.partitions.base import PartitionSpec
from dprlhf.privacy.relations import DEFAULT_ADJACENCY


@dataclass(frozen=True)
class Plan:
    """What a run will release, and what that costs.

    Attributes:
        users: Number of users N, public by assumption.
        mechanism: Rounds T, partition, adjacency, participations k, releases J in a round, and the
            noise multiplier z, as the accountant reads them; with the bands b of correlated noise.
            The noise on a released sum has standard deviation z·S; zero makes the run a
            non-private baseline.
        clip_norm: S, the L2 bound on one user's contribution; infinite only without noise.
        expected_batch_size: m = kN/T (``fixed`` and ``stream``: the slots of a round), the public
            constant that every released sum is divided by.
        guarantee: ε (an upper bound; infinite for a baseline), δ and the accountant.
    """

    users: int
    mechanism: Mechanism
    clip_norm: float
    expected_batch_size: float
    guarantee: PrivacyCost

    @property
    def rounds(self) -> int:
        """The number of rounds T."""
        return self.mechanism.rounds

    @property
    def partition(self) -> Partition:
        """How users are spread over the rounds."""
        return self.mechanism.partition

    @property
    def adjacency(self) -> Adjacency:
        """What a neighbouring dataset is."""
        return self.mechanism.adjacency

    @property
    def participations(self) -> int:
        """The number k of rounds that a user takes part in."""
        return self.mechanism.participations

    @property
    def releases_per_round(self) -> int:
        """The number J of noised sums that one round takes from the same users."""
        return self.mechanism.releases_per_round

    @property
    def bands(self) -> int:
        """The number b of rounds whose noise is correlated; 1 draws each round's by itself."""
        return self.mechanism.bands

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier z of each release; 0 for a non-private baseline."""
        return self.mechanism.noise_multiplier

    @property
    def private(self) -> bool:
        """Whether the run states a finite ε."""
        return math.isfinite(self.guarantee.epsilon)

    @property
    def noise_std(self) -> float:
        """Return zS, the standard deviation of the noise on the sum."""
        return self.noise_multiplier * self.clip_norm if self.noise_multiplier else 0.0

    def noise_std_of(self, round_: int) -> float:
        """Return the standard deviation of a round's noise on the sum, zS but for correlation."""
        if self.bands == 1:
            return self.noise_std
        from dprlhf.privacy.correlated_noise import noise_gain

        return self.noise_std * noise_gain(self.rounds, self.bands, round_)

    @property
    def sensitivity(self) -> float:
        """How far one user can move the sum: S, or 2S where a user is replaced by another."""
        return self.clip_norm * (2 if self.adjacency == "replace-one" else 1)

    def continued(self, opened: Mapping[str, Any]) -> Plan:
        """Return the plan of a continued run: with the noise and the ε that its ledger states.

        The accountant's last digits differ between processors and between versions of NumPy. The
        ε that was stated belongs to the noise that was stated, so both are kept together. Where the
        terms that the ledger opened with differ by more, it will refuse the plan, which stays.
        """
        names = ("noise_multiplier", "epsilon", "epsilon_lower")
        held, mine = ([one.get(name, "") for name in names] for one in (opened, self.terms()))
        if not all(map(equal_but_for_rounding, held, mine)):
            return self
        z, upper, lower = (math.inf if value == "infinity" else float(value) for value in held)
        cost = PrivacyCost(**{**vars(self.guarantee), "epsilon": upper, "epsilon_lower": lower})
        mechanism = self.mechanism.with_noise(z)
        return Plan(**{**vars(self), "mechanism": mechanism, "guarantee": cost})

    def noise_to_clip_ratio(self, dimension: int) -> float:
        """Return zS√d/m over S: the norm of the released mean's noise in units of S."""
        return self.noise_multiplier * math.sqrt(dimension) / self.expected_batch_size

    def warnings(self, dimension: int) -> list[str]:
        """Say before the first charge: a large ε, a δ above 1/N, noise that leads."""
        if not self.private:
            return []
        messages = (
            epsilon_warning(self.guarantee.epsilon),
            delta_warning(self.guarantee.delta, self.users),
            noise_warning(self.noise_to_clip_ratio(dimension)),
        )
        return [warning for warning in messages if warning is not None]

    def terms(self) -> dict[str, Any]:
        """Return the plan as JSON-ready values, for the ledger and ``privacy.json``."""
        guarantee = asdict(self.guarantee)
        values: dict[str, Any] = {
            "users": self.users,
            **asdict(self.mechanism),
            "clip_norm": self.clip_norm,
            "divisor": self.expected_batch_size,  # the name in every stored ledger
        }
        del values["rate"]  # a declaration's alone
        for name in ("epsilon", "epsilon_lower", "delta", "accountant"):
            values[name] = guarantee[name]
        terms: dict[str, Any] = json_ready(values)
        return terms


def json_ready(value: Any) -> Any:
    """Return a value, or all that a mapping holds, for JSON: it has no infinity, text says so."""
    if isinstance(value, Mapping):
        return {name: json_ready(inner) for name, inner in value.items()}
    return "infinity" if value == math.inf else value


NO_PRIVACY = "none: no noise is added; this run is a non-private baseline"


def make_plan(
    *,
    users: int,
    rounds: int,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    clip_norm: float = 1.0,
    partition: Partition = "random-allocation",
    adjacency: Adjacency | None = None,
    participations: int = 1,
    releases_per_round: int = 1,
    bands: int = 1,
) -> Plan:
    """Build the plan from the target ε or from the noise multiplier.

    Args:
        users: Number of users N, which is public.
        rounds: Number of rounds T.
        delta: δ of the guarantee.
        epsilon: Largest ε; ``math.inf`` plans a non-private baseline. Give exactly one of
            ``epsilon`` and ``noise_multiplier``.
        noise_multiplier: Noise multiplier z; 0 plans a non-private baseline.
        clip_norm: Clip norm S, the L2 bound on one user's contribution.
        partition: How users are assigned to rounds.
        adjacency: Neighbouring datasets; None takes ``zero-out``.
        participations: Number of rounds k of each user.
        releases_per_round: Number of noised sums J of a round.
        bands: Number of rounds over which noise is correlated; 1 for independent noise.

    Raises:
        DprlhfError: A value is out of range, there are fewer users than rounds, or the partition
            does not support the adjacency.
    """
    if (epsilon is None) == (noise_multiplier is None):
        raise DprlhfError("privacy: give exactly one of epsilon and noise_multiplier")
    baseline = noise_multiplier == 0 or epsilon == math.inf
    if users < 1:
        raise DprlhfError("the dataset has no users")
    if rounds < 1:
        raise DprlhfError(f"rounds must be at least 1, not {rounds}")
    if users < rounds:
        raise DprlhfError(f"{users} users cannot fill {rounds} rounds: lower rounds to {users}")
    if not 0 < delta < 1:
        raise DprlhfError(f"delta must be above 0 and below 1, not {delta}")
    if not clip_norm > 0 or (math.isinf(clip_norm) and not baseline):
        raise DprlhfError(f"clip_norm must be a positive number, not {clip_norm}")
    cut = partition in get_args(Partition) and partition_named(partition).disjoint
    mechanism = Mechanism(
        noise_multiplier or 0.0,
        rounds,
        partition,
        adjacency or DEFAULT_ADJACENCY,
        participations,
        releases_per_round,
        bands,
    )
    if delta < mechanism.spec.least_delta and not baseline:
        raise DprlhfError(
            f"privacy.bands: correlated noise on random allocation is accounted for delta of at"
            f" least {upwards(mechanism.spec.least_delta, 3)}, not {delta:g}; use a larger delta,"
            " partition fixed, or bands 1"
        )
    mechanism, guarantee = _cost(mechanism, math.inf if baseline else epsilon, delta)
    z = mechanism.noise_multiplier
    if not baseline and not sys.float_info.min <= z * clip_norm < 1e100:
        raise DprlhfError(
            f"clip_norm {clip_norm}: its noise, {z:g} times as much, is no ordinary number; scale"
            " the reward or the learning rate instead"
        )
    return Plan(
        users=users,
        mechanism=mechanism,
        clip_norm=clip_norm,
        expected_batch_size=float(users // rounds) if cut else participations * users / rounds,
        guarantee=guarantee,
    )


def check_promise(adjacency: Adjacency | None) -> None:
    """Refuse add-remove for a run: a run publishes N, in which such neighbours differ.

    N is in the ledger and on the privacy card, and the divisor kN/T follows from it. Whoever knows
    all users but one would tell from N alone whether that one took part.
    """
    if adjacency == "add-remove":
        raise DprlhfError(
            "privacy.adjacency add-remove: a run publishes its number of users, which tells whether"
            " one was added or removed; write zero-out (the default), which costs the same epsilon"
        )


def _cost(
    mechanism: Mechanism, target: float | None, delta: float
) -> tuple[Mechanism, PrivacyCost]:
    """Return the mechanism and its cost, with its own noise if there is no ε to stay below."""
    if target == math.inf:
        none = PrivacyCost(math.inf, math.inf, delta, NO_PRIVACY, ())
        return mechanism.with_noise(0.0), none
    if target is None:
        return mechanism, accounting.epsilon(mechanism, delta)
    z, guarantee = _calibrated(mechanism, target, delta, mechanism.spec)
    return mechanism.with_noise(z), guarantee


@functools.lru_cache(64)
def _calibrated(
    mechanism: Mechanism, target: float, delta: float, spec: PartitionSpec
) -> tuple[float, PrivacyCost]:
    """Return the noise of a plan and its cost, kept by its terms and the draw's ``spec``."""
    return accounting.noise_multiplier(
        target,
        delta,
        rounds=mechanism.rounds,
        partition=mechanism.partition,
        adjacency=mechanism.adjacency,
        participations=mechanism.participations,
        releases_per_round=mechanism.releases_per_round,
        bands=mechanism.bands,
    )


LARGE_EPSILON = 10.0


def epsilon_warning(epsilon: float) -> str | None:
    """Return what to say about a large ε, which by itself promises a user next to nothing."""
    if epsilon > LARGE_EPSILON:
        return (
            f"epsilon {epsilon:.4g} is above {LARGE_EPSILON:g} and promises next to nothing: take"
            " more users, fewer rounds or a smaller epsilon"
        )
    return None


def delta_warning(delta: float, users: int) -> str | None:
    """Return what to say about a δ above 1/N, at which releasing one user outright would pass."""
    if delta > 1 / users:
        return f"delta {delta:g} is above 1/users = {1 / users:.2g}: choose a smaller delta"
    return None


def noise_warning(ratio: float) -> str | None:
    """Return what to say about a noise-to-clip ratio at which noise leads (docs/epsilon.md)."""
    if ratio > 1:
        return (
            f"noise leads (noise-to-clip ratio {ratio:.3g}, above 1): take fewer dimensions"
            " (policy.adapter: one module, few layers), more users or fewer rounds before a larger"
            " epsilon"
        )
    return None
