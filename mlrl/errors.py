"""The errors that mlrl raises on purpose; their messages say all that a user needs."""


class ConfigError(ValueError):
    """A setting, model, data set or callable that cannot work, found before the run starts.

    The message has the form ``<field>=<value!r>: <what is wrong>. <what would be right>``.
    """


class TaskError(RuntimeError):
    """A task's own callable returned something unusable during a run; the message names item, turn and value."""


class NonFiniteError(RuntimeError):
    """Training has diverged: gradients or logits are NaN or infinite, and going on would change nothing."""


class StorageError(OSError):
    """A file of a run cannot be written, such as on a full disk; the message names its path."""


class RolloutError(RuntimeError):
    """A server that samples for the agents died, or answers what cannot be trained on; checkpoints are as they were."""
