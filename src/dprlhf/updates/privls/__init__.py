"""Private least-squares regression (PrivLS) inside a training round, one file for each oracle.

Each oracle finds w with small Σ_u (w · φ_u − A_u)² for features φ ``[users, d]`` and targets A
``[users]``. Its ``solve`` takes callables that the gate answers (see
:mod:`dprlhf.updates.privls.oracle`). Oracles that no language model's round may ask, and all of
them on plain arrays, are in ``papers/regression``, beside the package.
"""
