"""What ε and δ mean, for readers without mathematics; every number is rounded against the run."""

from __future__ import annotations

import math

from dprlhf.privacy.gaussian import downwards, upwards


def right_guesses(epsilon: float, delta: float) -> float:
    """Return the largest share of right guesses about one user's presence, decided by a fair coin.

    Under (ε, δ)-differential privacy no attack is right more often than (e^ε + δ)/(1 + e^ε)
    (Kairouz, Oh & Viswanath 2015, arXiv 1311.0776, Theorem 2.1).

    >>> round(right_guesses(1.0, 0.0), 3)
    0.731
    """
    return min(1.0, (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon)))


def found_at(false_alarms: float, epsilon: float, delta: float) -> float:
    """Return the largest share of users that an attack finds, at a given share of false alarms.

    The same theorem: the share found is at most e^ε a + δ, and at most 1 − e^{−ε}(1 − δ − a).

    >>> round(found_at(0.01, 1.0, 0.0), 4)
    0.0272
    """
    high = math.exp(min(epsilon, 700.0)) * false_alarms + delta
    other = 1 - math.exp(-epsilon) * (1 - delta - false_alarms)
    return min(1.0, high, other)


def of_hundred(share: float) -> str:
    """Return a share as a number of cases in 100, rounded up to one decimal.

    >>> of_hundred(0.73106), of_hundred(0.5)
    ('73.2', '50')
    """
    return f"{min(100.0, math.ceil(share * 1000 - 1e-9) / 10):g}"


def one_in(delta: float) -> str:
    """Return a small probability as "1 in N", rounded up.

    >>> one_in(1e-5), one_in(3e-6)
    ('1 in 100,000', '1 in 333,333')
    """
    return f"1 in {math.floor(1 / delta + 1e-6):,}"


def pair(epsilon: float, delta: float) -> str:
    """Return ε and δ as upper bounds, in one phrase; "no guarantee" where ε is infinite."""
    if math.isinf(epsilon):
        return "no guarantee"
    return f"ε ≤ {upwards(epsilon, 4)} with δ = {one_in(delta)}"


def explanation(epsilon: float, delta: float) -> str:
    """Return what a finite ε means, in one paragraph with an example."""
    coin, alarm = right_guesses(epsilon, delta), found_at(0.01, epsilon, delta)
    weak = (
        " At an ε this large the promise is weak: an attack could, as far as the promise goes, be"
        " right almost every time."
        if coin > 0.99
        else ""
    )
    return (
        "ε (epsilon) limits how much the published result can give away about any one person."
        " Suppose a coin decides whether Maria's data are used, and somebody who knows everybody"
        " else's data, sees everything that was published and has unlimited computers has to say"
        " whether they were. Blind guessing is right in 50 of 100 cases. With an ε of"
        f" {upwards(epsilon, 4)} no method is right in more than {of_hundred(coin)} of 100. A"
        " method that wrongly accuses at most 1 in 100 of those whose data were not used finds at"
        f" most {of_hundred(alarm)} in 100 of those whose data were. These are limits that no"
        " attack can pass, not forecasts. ε = 0 would be no information at all; the larger ε, the"
        f" weaker the promise. δ (delta, {one_in(delta)}) is a small allowance for error that is"
        f" already counted in these numbers.{weak}"
    )


def at_least(epsilon: float) -> str:
    """Return a lower bound on ε, rounded down."""
    return downwards(epsilon, 4)
