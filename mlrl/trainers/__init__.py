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
from mlrl.config_preference_trainers import MADPOConfig, MADPOIterConfig, MARLHFConfig, MARLHFIterConfig
from mlrl.trainers.actor_critic import IACTrainer, MAACTrainer
from mlrl.trainers.evaluator import Evaluation, evaluate_team
from mlrl.trainers.madpo import MADPOIterTrainer, MADPOTrainer
from mlrl.trainers.marlhf import MARLHFIterTrainer, MARLHFTrainer
from mlrl.trainers.reinforce import MAGRPOTrainer, MAREINFORCETrainer, MAReMaxTrainer, MARLOOTrainer

__all__ = [
    "Evaluation",
    "EvaluationConfig",
    "IACConfig",
    "IACTrainer",
    "MAACConfig",
    "MAACTrainer",
    "MADPOConfig",
    "MADPOIterConfig",
    "MADPOIterTrainer",
    "MADPOTrainer",
    "MAGRPOConfig",
    "MAGRPOTrainer",
    "MAREINFORCEConfig",
    "MAREINFORCETrainer",
    "MARLHFConfig",
    "MARLHFIterConfig",
    "MARLHFIterTrainer",
    "MARLHFTrainer",
    "MARLOOConfig",
    "MARLOOTrainer",
    "MAReMaxConfig",
    "MAReMaxTrainer",
    "evaluate_team",
]
