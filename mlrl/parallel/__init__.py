"""Processes, devices, and the optimization of one trainable entity."""
