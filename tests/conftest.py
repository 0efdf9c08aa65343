"""Shared fixtures. Model fixtures are folders made once a test run: load them afresh, never write into them."""

import os

# before anything imports transformers or a tracker: no test may reach the network
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("COLUMNS", None)  # the width of the terminal that the tests were started in

import pytest

from tests.tiny import save_tiny


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> str:
    """Llama, tied embeddings, grouped-query attention, eos == pad, ChatML template."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")


@pytest.fixture(scope="session")
def tiny_llama_other(tmp_path_factory) -> str:
    """The same architecture and tokenizer as `tiny_llama` with other weights."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-llama-other", "llama", seed=1)


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory) -> str:
    """Qwen2, biases in attention, more embedding rows than tokens, pad differs from eos."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-qwen2", "qwen2")


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory) -> str:
    """GPT-2, learned absolute positions, Conv1D layers, no pad token, no chat template."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-gpt2", "gpt2")


@pytest.fixture(scope="session")
def tiny_llama_bos(tmp_path_factory) -> str:
    """Llama, untied output layer, a tokenizer that puts a start token before every text; no pad token."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-llama-bos", "llama_bos")
