"""Returns, credit, advantages, reference-KL terms and sample weights: pure functions of tensors."""
