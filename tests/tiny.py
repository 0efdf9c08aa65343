"""Tiny random models with a real byte-level BPE tokenizer, made offline: what the tests train and sample from.

Vocabulary: 3 special tokens, 256 bytes, up to 125 merges. Any text round-trips, and common English pieces are one
token, so that encoding a decoded text need not give the sampled ids back. Weights are spread wider than usual
(0.15), so that the next-token distribution depends visibly on the context.
"""

from pathlib import Path
from typing import Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

Kind = Literal["llama", "qwen2", "gpt2", "llama_bos"]

END, START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1, 2

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = [
    "Write one short sentence about the sea. The sea is deep and blue, and the ships go home in the evening.",
    "You are a careful assistant. Describe the answer in detail, then give a longer story about it.",
    "What is the capital of the country in the north? Tell me about the city, the river and the old town.",
    "system user assistant short detailed answer question story sentence word number 0123456789",
]


def tiny_tokenizer(kind: Kind = "llama") -> PreTrainedTokenizerFast:
    """Tokenizer of one kind.

    llama      eos = pad = <|im_end|>, ChatML template (as SmolLM2)
    qwen2      eos = <|im_end|>, pad = <|endoftext|>, ChatML template (as Qwen2)
    gpt2       eos = <|endoftext|>, no pad token, no chat template (as GPT-2)
    llama_bos  a start token put before every encoded text, and written by the template too; no pad token (as Llama 3)
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in (END, START, TURN_END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS, trainer)
    special_tokens = {
        "llama": {"bos_token": START, "eos_token": TURN_END, "pad_token": TURN_END},
        "qwen2": {"eos_token": TURN_END, "pad_token": END},
        "gpt2": {"bos_token": END, "eos_token": END},
        "llama_bos": {"bos_token": END, "eos_token": TURN_END},
    }[kind]
    if kind == "llama_bos":
        bpe.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, bpe.token_to_id(END))]),
            ]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=256, **special_tokens)
    if kind != "gpt2":
        tokenizer.chat_template = ("{{ bos_token }}" if kind == "llama_bos" else "") + CHATML
    return tokenizer


def tiny_config(kind: Kind = "llama") -> PretrainedConfig:
    """Two layers, hidden size 32 to 64; `qwen2` has more embedding rows than tokens, as the real one has."""
    ids = {"llama": (1, 2, 2), "qwen2": (None, 2, 0), "gpt2": (0, 0, None), "llama_bos": (0, 2, None)}[kind]
    common = dict(zip(("bos_token_id", "eos_token_id", "pad_token_id"), ids, strict=True), initializer_range=0.15)
    if kind == "gpt2":
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2Config(vocab_size=384, n_positions=256, n_embd=32, n_layer=2, n_head=2, **dropouts, **common)
    rope = {"max_position_embeddings": 256, "num_hidden_layers": 2}
    if kind == "qwen2":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        sizes = {"vocab_size": 448, "hidden_size": 32, "intermediate_size": 64}
        return Qwen2Config(tie_word_embeddings=True, **sizes, **heads, **rope, **common)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 96}
    return LlamaConfig(tie_word_embeddings=kind == "llama", **sizes, **heads, **rope, **common)


def tiny_model(kind: Kind = "llama", seed: int = 0) -> PreTrainedModel:
    """A float32 model in eval mode with weights drawn from `seed`; the global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32).eval()


def save_tiny(folder: str | Path, kind: Kind = "llama", seed: int = 0) -> str:
    """Write model and tokenizer into `folder` as `from_pretrained` expects them; returns the folder."""
    tiny_model(kind, seed).save_pretrained(folder)
    tiny_tokenizer(kind).save_pretrained(folder)
    return str(folder)
