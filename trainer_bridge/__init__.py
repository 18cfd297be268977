"""Lockstep's trainer side: shared weights, their publication, and the step that changes them."""

from trainer_bridge.agreement import WeightsDiffer
from trainer_bridge.algorithm import Algorithm, resolve_algorithm
from trainer_bridge.colocation import Colocation
from trainer_bridge.placement import Placement
from trainer_bridge.proof import Proof, prove
from trainer_bridge.receipt import PublicationReceipt, WeightsEcho
from trainer_bridge.scoring import score
from trainer_bridge.token_columns import TokenColumns
from trainer_bridge.trainer_config import CriticConfig, TrainerConfig
from trainer_bridge.trainer_handle import TrainerLost

__all__ = [
    "Algorithm",
    "Colocation",
    "CriticConfig",
    "Placement",
    "Proof",
    "PublicationReceipt",
    "TokenColumns",
    "TrainerConfig",
    "TrainerLost",
    "WeightsDiffer",
    "WeightsEcho",
    "prove",
    "resolve_algorithm",
    "score",
]
