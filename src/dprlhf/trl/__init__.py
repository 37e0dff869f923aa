"""TRL's trainers with a privacy guarantee: change the import, and add a budget.

``PrivateGRPOTrainer`` and ``PrivateRLOOTrainer`` take what TRL 1.16's ``GRPOTrainer`` and
``RLOOTrainer`` take. Underneath they make a recipe and start an ordinary run of this package. Needs
TRL (``pip install trl``).
"""

from dprlhf.trl.config import PrivateGRPOConfig, PrivateRLOOConfig
from dprlhf.trl.trainer import PrivateGRPOTrainer, PrivateRLOOTrainer

__all__ = ["PrivateGRPOConfig", "PrivateGRPOTrainer", "PrivateRLOOConfig", "PrivateRLOOTrainer"]
