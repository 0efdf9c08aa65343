"""The tiny models are what their fixtures say: other tests lean on these properties."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CHAT = [{"role": "user", "content": "Tell me about the sea."}]


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_llama_other", "tiny_qwen2", "tiny_gpt2", "tiny_llama_bos"])
def test_saved_model_and_tokenizer_load_and_agree(name, request):
    folder = request.getfixturevalue(name)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert len(tokenizer) <= model.config.vocab_size < 600
    assert model.dtype == torch.float32
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    text = "The ships go home — déjà vu, 12 times!"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_special_tokens_of_each_kind(tiny_llama, tiny_qwen2, tiny_gpt2, tiny_llama_bos):
    llama, qwen2, gpt2, bos = map(AutoTokenizer.from_pretrained, (tiny_llama, tiny_qwen2, tiny_gpt2, tiny_llama_bos))
    assert llama.pad_token_id == llama.eos_token_id
    assert qwen2.pad_token_id not in (None, qwen2.eos_token_id)
    assert gpt2.pad_token_id is None
    assert gpt2.chat_template is None
    assert bos("sea").input_ids[0] == bos.bos_token_id
    assert bos.apply_chat_template(CHAT, tokenize=False).startswith(bos.bos_token)
    assert llama("sea").input_ids[0] != llama.bos_token_id


def test_next_token_depends_on_the_context(tiny_llama):
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_llama), AutoModelForCausalLM.from_pretrained(tiny_llama)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        probs_LV = model(**prompt).logits[0].softmax(-1)
    total_variation = (probs_LV[-1] - probs_LV[-5]).abs().sum() / 2
    assert total_variation > 0.2
    assert probs_LV.max() < 0.9
