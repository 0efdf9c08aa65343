"""Rollout trees: their data, how responses are sampled, and how trees are grown."""
