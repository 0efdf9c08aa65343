"""Trainers and their configs."""

from mlrl.config import EvaluationConfig, MAGRPOConfig, MAREINFORCEConfig, MAReMaxConfig, MARLOOConfig
from mlrl.trainers.evaluator import Evaluation, evaluate_team
from mlrl.trainers.reinforce import MAGRPOTrainer, MAREINFORCETrainer, MAReMaxTrainer, MARLOOTrainer

__all__ = [
    "Evaluation",
    "EvaluationConfig",
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
