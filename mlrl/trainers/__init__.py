"""Trainers and their configs."""

from mlrl.config import (
    EvaluationConfig,
    IACConfig,
    MAACConfig,
    MAGRPOConfig,
    MAREINFORCEConfig,
    MAReMaxConfig,
    MARLOOConfig,
)
from mlrl.trainers.actor_critic import IACTrainer, MAACTrainer
from mlrl.trainers.evaluator import Evaluation, evaluate_team
from mlrl.trainers.reinforce import MAGRPOTrainer, MAREINFORCETrainer, MAReMaxTrainer, MARLOOTrainer

__all__ = [
    "Evaluation",
    "EvaluationConfig",
    "IACConfig",
    "IACTrainer",
    "MAACConfig",
    "MAACTrainer",
    "MAGRPOConfig",
    "MAGRPOTrainer",
    "MAREINFORCEConfig",
    "MAREINFORCETrainer",
    "MARLOOConfig",
    "MARLOOTrainer",
    "MAReMaxConfig",
    "MAReMaxTrainer",
    "evaluate_team",
]
