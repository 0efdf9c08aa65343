"""mlrl trains teams of language models with reinforcement learning."""

import importlib

__version__ = "0.1.0"

# Public names and the modules that hold them; loaded on first use, so that `import mlrl` costs nothing.
_LAZY = {"Task": "mlrl.task", "ConfigError": "mlrl.errors", "TaskError": "mlrl.errors"}

__all__ = ["ConfigError", "Task", "TaskError", "__version__"]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
