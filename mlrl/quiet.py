"""Notices of other packages that tell a user of mlrl nothing, silenced at their source and only while they are made."""

import contextlib
import logging
import warnings
from collections.abc import Iterator

from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from transformers.utils import logging as transformers_logging


@contextlib.contextmanager
def quiet_models() -> Iterator[None]:
    """Around loading, adapting and saving models: no bar for every file, no notices about calls that are not ours.

    Warnings and errors about the models themselves pass. What was set before is set again afterwards.
    """
    logging.getLogger("DeepSpeed").addFilter(_not_about_the_cpu)  # one function, so added once
    bars, downloads = transformers_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()
    if downloads:  # a bar that is worth seeing, and which the line above takes away too
        enable_progress_bars()
    try:
        with warnings.catch_warnings():
            # peft asks a model for this when it adds an adapter
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            # and corrects by itself how GPT-2 lays out its weights
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)
            yield
    finally:
        if bars:
            transformers_logging.enable_progress_bar()


def quiet_deepspeed() -> None:
    """DeepSpeed's notices in every process: the absence of a GPU, and PyTorch's new names for what it calls."""
    logging.getLogger("DeepSpeed").addFilter(_not_about_the_cpu)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", "`torch.distributed.[a-z_]*` is deprecated", FutureWarning)


def _not_about_the_cpu(record: logging.LogRecord) -> bool:
    """`save_pretrained` imports DeepSpeed where that is installed, which then reports the absence of a GPU."""
    return not record.getMessage().startswith("Setting accelerator to CPU")
