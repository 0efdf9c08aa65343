"""Token log-probabilities and losses: pure functions of tensors."""
