"""A run as one page: learning curves, what agents wrote, and rollout trees. Reads run folders, imports no torch."""
