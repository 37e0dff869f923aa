"""TRL's trainers with a privacy guarantee: change the import, and add a budget.

``PrivateGRPOTrainer``, ``PrivateRLOOTrainer`` and ``PrivateKTOTrainer`` take what TRL 1.16's
``GRPOTrainer``, ``RLOOTrainer`` and ``KTOTrainer`` take. Underneath they make a recipe and start an
ordinary run of this package. Needs TRL (extra ``trl``).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dprlhf.trl.config import PrivateGRPOConfig, PrivateRLOOConfig
    from dprlhf.trl.kto import PrivateKTOConfig, PrivateKTOTrainer
    from dprlhf.trl.trainer import PrivateGRPOTrainer, PrivateRLOOTrainer

_HOMES = {
    "PrivateGRPOConfig": "config",
    "PrivateGRPOTrainer": "trainer",
    "PrivateKTOConfig": "kto",
    "PrivateKTOTrainer": "kto",
    "PrivateRLOOConfig": "config",
    "PrivateRLOOTrainer": "trainer",
}

__all__ = [
    "PrivateGRPOConfig",
    "PrivateGRPOTrainer",
    "PrivateKTOConfig",
    "PrivateKTOTrainer",
    "PrivateRLOOConfig",
    "PrivateRLOOTrainer",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the table of settings is read without TRL.
    if name not in _HOMES:
        raise AttributeError(f"module 'dprlhf.trl' has no attribute {name!r}")
    import importlib

    try:
        home = importlib.import_module(f"dprlhf.trl.{_HOMES[name]}")
    except ModuleNotFoundError as missing:
        if missing.name != "trl":
            raise
        raise ModuleNotFoundError(
            "dprlhf.trl needs TRL: pip install -e '.[trl]' in the clone", name="trl"
        ) from None
    return getattr(home, name)
