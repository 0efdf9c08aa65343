"""completion_logprobs against log_softmax of the whole logits matrix in float64."""

import pytest
import torch

from mlrl.losses.logprobs import completion_logprobs


def make(length=11, hidden=6, vocabulary=37, dtype=torch.float32, seed=0, bias=False):
    generator = torch.Generator().manual_seed(seed)
    hidden_LD = torch.randn(length, hidden, generator=generator).to(dtype)
    weight_VD = torch.randn(vocabulary, hidden, generator=generator).to(dtype)
    bias_V = torch.randn(vocabulary, generator=generator).to(dtype) if bias else None
    targets_L = torch.randint(vocabulary, (length,), generator=generator)
    return hidden_LD, weight_VD, targets_L, bias_V


def reference(hidden_LD, weight_VD, targets_L, bias=None, temperature=1.0, logit_scale=1.0, softcap=None):
    logits_LV = hidden_LD @ weight_VD.T
    if bias is not None:
        logits_LV = logits_LV + bias
    logits_LV = logits_LV * logit_scale
    if softcap is not None:
        logits_LV = softcap * torch.tanh(logits_LV / softcap)
    logprobs_LV = torch.log_softmax(logits_LV / temperature, dim=-1)
    picked_L = torch.stack([logprobs_LV[row, target] for row, target in enumerate(targets_L.tolist())])
    return picked_L, -(logprobs_LV.exp() * logprobs_LV).sum(dim=-1)


def gradients(function, tensors, upstream_L, entropy_upstream_L, **settings):
    leaves = [None if tensor is None else tensor.detach().clone().requires_grad_(flag) for tensor, flag in tensors]
    logprobs_L, entropy_L = function(*leaves[:2], settings.pop("targets_L"), bias=leaves[2], **settings)
    loss = (logprobs_L * upstream_L).sum()
    if entropy_upstream_L is not None:
        loss = loss + (entropy_L * entropy_upstream_L).sum()
    loss.backward()
    return [leaf.grad for leaf in leaves if leaf is not None and leaf.requires_grad]


def assert_close(actual, expected, tolerance):
    assert actual.shape == expected.shape
    scale = max(expected.abs().max().item(), 1e-6)
    assert (actual.double() - expected.double()).abs().max().item() <= tolerance * scale


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"logit_scale": 0.25}, {"softcap": 2.0}])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy", ["none", "value", "grad"])
@pytest.mark.parametrize("trained", ["nothing", "hidden", "head", "all"])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_values_and_gradients_equal_log_softmax(settings, bias, entropy, trained, chunk_size):
    hidden_LD, weight_VD, targets_L, bias_V = make(bias=bias)
    double = [None if x is None else x.double() for x in (hidden_LD, weight_VD, bias_V)]
    settings = dict(settings)
    flags = [trained in ("hidden", "all"), trained in ("head", "all"), trained in ("head", "all")]
    leaf = hidden_LD.clone().requires_grad_(flags[0])
    actual = completion_logprobs(
        leaf, weight_VD, targets_L, bias=bias_V, chunk_size=chunk_size, entropy=entropy, **settings
    )
    expected_L, expected_entropy_L = reference(*double[:2], targets_L, bias=double[2], **settings)
    assert actual.logprobs_L.dtype == torch.float32
    assert_close(actual.logprobs_L, expected_L, 1e-6)
    if entropy == "none":
        assert actual.entropy_L is None
    else:
        assert_close(actual.entropy_L, expected_entropy_L, 5e-6)
        assert actual.entropy_L.requires_grad == (entropy == "grad" and flags[0])
    if trained == "nothing":
        assert not actual.logprobs_L.requires_grad
        return

    upstream_L = torch.linspace(-1.0, 2.0, len(targets_L))
    entropy_upstream_L = torch.linspace(0.5, -0.7, len(targets_L)) if entropy == "grad" else None
    actual_grads = gradients(
        completion_logprobs, list(zip((hidden_LD, weight_VD, bias_V), flags, strict=True)), upstream_L,
        entropy_upstream_L, targets_L=targets_L, chunk_size=chunk_size, entropy=entropy, **settings,
    )  # fmt: skip
    expected_grads = gradients(
        reference, list(zip(double, flags, strict=True)), upstream_L.double(),
        None if entropy_upstream_L is None else entropy_upstream_L.double(), targets_L=targets_L, **settings,
    )  # fmt: skip
    assert (
        len(actual_grads) == len(expected_grads) == sum(f for f, x in zip(flags, double, strict=True) if x is not None)
    )
    for actual_grad, expected_grad in zip(actual_grads, expected_grads, strict=True):
        assert_close(actual_grad, expected_grad, 2e-6)


@pytest.mark.parametrize("trained", ["hidden", "all"])
@pytest.mark.parametrize("entropy", ["none", "grad"])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradcheck(trained, entropy, softcap):
    hidden_LD, weight_VD, targets_L, bias_V = make(length=3, hidden=2, vocabulary=5, dtype=torch.float64, bias=True)
    hidden_LD.requires_grad_()
    if trained == "all":
        weight_VD.requires_grad_()
        bias_V.requires_grad_()

    def score(hidden_LD, weight_VD, bias_V):
        result = completion_logprobs(
            hidden_LD,
            weight_VD,
            targets_L,
            bias=bias_V,
            temperature=0.7,
            chunk_size=2,
            entropy=entropy,
            softcap=softcap,
        )
        return tuple(result) if entropy == "grad" else result.logprobs_L

    assert torch.autograd.gradcheck(score, (hidden_LD, weight_VD, bias_V))


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("trained", ["hidden", "all"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_no_token_and_one_token(length, trained, softcap):
    hidden_LD, weight_VD, targets_L, _ = make(length=length)
    hidden_LD.requires_grad_()
    weight_VD.requires_grad_(trained == "all")
    result = completion_logprobs(hidden_LD, weight_VD, targets_L, entropy="grad", softcap=softcap)
    assert result.logprobs_L.shape == result.entropy_L.shape == (length,)
    (result.logprobs_L.sum() + result.entropy_L.sum()).backward()
    assert hidden_LD.grad.shape == hidden_LD.shape
    assert bool(hidden_LD.grad.abs().sum() > 0) == (length == 1)
    if trained == "all":
        assert bool(weight_VD.grad.abs().sum() > 0) == (length == 1)


def test_chunk_size_does_not_change_the_result():
    hidden_LD, weight_VD, targets_L, _ = make(length=13)
    results = []
    for chunk_size in (1, 4, 13, 100):
        leaf = hidden_LD.clone().requires_grad_()
        logprobs_L, entropy_L = completion_logprobs(leaf, weight_VD, targets_L, chunk_size=chunk_size, entropy="grad")
        (logprobs_L.sum() + entropy_L.square().sum()).backward()
        results.append((logprobs_L, entropy_L, leaf.grad))
    for result in results[1:]:
        for tensor, first in zip(result, results[0], strict=True):
            assert_close(tensor.detach(), first.detach(), 1e-6)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"softcap": 2.0}])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy", ["none", "value", "grad"])
@pytest.mark.parametrize("head", [False, True])
def test_products_of_another_library(settings, bias, entropy, head):
    hidden_LD, weight_VD, targets_L, bias_V = make(length=13, bias=bias)
    shapes, results = [], []

    def matmul(a, b):
        shapes.append((tuple(a.shape), tuple(b.shape)))
        return a @ b

    for multiply in (None, matmul):
        leaves = [hidden_LD.clone().requires_grad_(), weight_VD.clone().requires_grad_(head)]
        scored = completion_logprobs(
            *leaves, targets_L, bias=bias_V, chunk_size=4, entropy=entropy, matmul=multiply, **settings
        )
        loss = scored.logprobs_L.sum() + (scored.entropy_L.square().sum() if entropy == "grad" else 0.0)
        loss.backward()
        results.append([scored.logprobs_L, scored.entropy_L, *[leaf.grad for leaf in leaves]])
    for ours, expected in zip(*results, strict=True):
        assert (ours is None) == (expected is None)
        if ours is not None:
            assert_close(ours.detach(), expected.detach(), 1e-6)
    vocab, size = weight_VD.shape
    towards, back = ((4, size), (size, vocab)), ((4, vocab), (vocab, size))
    assert shapes == [] if "softcap" in settings else {towards, back} <= set(shapes)


@pytest.mark.parametrize("trained", ["hidden", "all"])
def test_bfloat16_is_as_good_as_autograd_in_bfloat16(trained):
    hidden_LD, weight_VD, targets_L, _ = make(length=40, hidden=32, vocabulary=300, dtype=torch.bfloat16)
    hidden_LD = hidden_LD * 0.5
    flags = (True, trained == "all", False)
    upstream_L = torch.linspace(-1.0, 2.0, len(targets_L))

    def autograd(hidden_LD, weight_VD, targets_L, bias=None):
        logprobs_LV = torch.log_softmax((hidden_LD @ weight_VD.T).float() / 0.8, dim=-1)
        return logprobs_LV.gather(1, targets_L[:, None]).squeeze(1), None

    exact, exact_entropy = reference(hidden_LD.double(), weight_VD.double(), targets_L, temperature=0.8)
    actual = completion_logprobs(hidden_LD, weight_VD, targets_L, temperature=0.8, chunk_size=16, entropy="value")
    assert actual.logprobs_L.dtype == torch.float32
    # The rounding of bfloat16 logits is in both; the softmax on top of them is float32.
    assert_close(actual.logprobs_L, autograd(hidden_LD, weight_VD, targets_L)[0], 1e-5)
    assert_close(actual.entropy_L, exact_entropy, 2e-2)

    tensors = list(zip((hidden_LD, weight_VD, None), flags, strict=True))
    double = [(x if x is None else x.double(), flag) for x, flag in tensors]
    settings = {"targets_L": targets_L, "temperature": 0.8}
    ours = gradients(completion_logprobs, tensors, upstream_L, None, chunk_size=16, **settings)
    theirs = gradients(autograd, tensors, upstream_L, None, targets_L=targets_L)
    exact = gradients(reference, double, upstream_L.double(), None, **settings)
    for our, their, truth in zip(ours, theirs, exact, strict=True):
        assert our.dtype == torch.bfloat16
        our_error, their_error = ((x.double() - truth).norm() / truth.norm() for x in (our, their))
        assert our_error <= max(1.5 * their_error, 4e-3)


def test_confident_bfloat16_token_keeps_its_small_gradient():
    # p(target) = 1 − 1e-3: rounding p itself to bfloat16 would leave 1 − p = 0 or 4e-3.
    weight_VD = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16)
    hidden_LD = torch.tensor([[6.90625]], dtype=torch.bfloat16, requires_grad=True)
    completion_logprobs(hidden_LD, weight_VD, torch.tensor([0])).logprobs_L.sum().backward()
    expected = 1 / (1 + torch.tensor(6.90625).exp())  # 1 − p
    assert_close(hidden_LD.grad[0, 0], expected, 8e-3)


@pytest.mark.parametrize("size", [60.0, 3000.0])
def test_extreme_logits_stay_finite(size):
    hidden_LD = torch.tensor([[size], [-size], [size]], requires_grad=True)
    weight_VD = torch.tensor([[1.0], [-1.0], [0.0]])
    result = completion_logprobs(hidden_LD, weight_VD, torch.tensor([0, 0, 2]), entropy="grad")
    # z = (±size, ∓size, 0): log π = 0, −2·size, −size up to e^{−size}; the entropy is 0 likewise
    torch.testing.assert_close(result.logprobs_L, torch.tensor([0.0, -2 * size, -size]))
    torch.testing.assert_close(result.entropy_L, torch.zeros(3))
    (result.logprobs_L.sum() + result.entropy_L.sum()).backward()
    # ∂ log π/∂h = W_y − pW: 1 − 1, 1 − (−1), 0 − 1
    torch.testing.assert_close(hidden_LD.grad, torch.tensor([[0.0], [2.0], [-1.0]]), atol=1e-5, rtol=0)


def test_forward_only_skips_the_derivative(monkeypatch):
    from mlrl.losses import logprobs as module

    calls = []
    original = module._Head.gradient
    monkeypatch.setattr(module._Head, "gradient", lambda *a: calls.append(1) or original(*a))
    hidden_LD, weight_VD, targets_L, _ = make()
    hidden_LD.requires_grad_()
    with torch.no_grad():
        completion_logprobs(hidden_LD, weight_VD, targets_L, entropy="value")
    completion_logprobs(hidden_LD.detach(), weight_VD, targets_L)
    assert not calls
    completion_logprobs(hidden_LD, weight_VD, targets_L)
    assert calls


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"entropy": "yes"}, "entropy='yes'.*none, value, grad"),
        ({"bias": torch.zeros(3)}, "bias of shape"),
        ({"targets_L": torch.zeros(3, dtype=torch.long)}, "targets_L of shape"),
        ({"hidden_LD": torch.zeros(11, 5)}, "hidden sizes"),
        ({"hidden_LD": torch.zeros(11, 6, dtype=torch.bfloat16)}, "bfloat16"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    hidden_LD, weight_VD, targets_L, _ = make()
    arguments = {"hidden_LD": hidden_LD, "weight_VD": weight_VD, "targets_L": targets_L} | change
    with pytest.raises(ValueError, match=message):
        completion_logprobs(**arguments)


def test_vocabulary_longer_than_a_block_of_columns():
    hidden_LD, weight_VD, targets_L, bias_V = make(length=5, hidden=8, vocabulary=1300, bias=True)
    targets_L[:3] = torch.tensor([0, 512, 1299])
    hidden_LD.requires_grad_()
    actual_L, _ = completion_logprobs(hidden_LD, weight_VD, targets_L, bias=bias_V, temperature=0.7)
    actual_L.sum().backward()
    double_LD = hidden_LD.detach().double().requires_grad_()
    expected_L, _ = reference(double_LD, weight_VD.double(), targets_L, bias=bias_V.double(), temperature=0.7)
    expected_L.sum().backward()
    assert_close(actual_L.detach(), expected_L.detach(), 1e-6)
    assert_close(hidden_LD.grad, double_LD.grad, 2e-6)
