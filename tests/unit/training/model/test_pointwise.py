"""Gradients that are written out are those that autograd finds, and every pass gives them bit for bit."""

import torch

from areal_core.training.model.pointwise import rms_norm, rotate

TOKENS, WIDTH, EPS = 57, 24, 1e-6


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of very different lengths, one of them all zeros."""
    scales = torch.logspace(-3, 3, TOKENS, dtype=dtype)[:, None].clone()
    scales[7] = 0
    return (drawn(TOKENS, WIDTH, seed=1, dtype=dtype) * scales).requires_grad_()


def test_norm_and_its_gradients_are_those_of_the_definition():
    x, weight, upstream = rows(), drawn(WIDTH, seed=2).requires_grad_(), drawn(TOKENS, WIDTH, seed=3)
    exact_x, exact_weight = (value.detach().double().requires_grad_() for value in (x, weight))
    exact = exact_x / (exact_x.square().mean(-1, keepdim=True) + EPS).sqrt() * exact_weight
    expected = torch.autograd.grad(exact, (exact_x, exact_weight), upstream.double())
    result = rms_norm(x, weight, EPS)
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-6)
    for gradient, wanted in zip(torch.autograd.grad(result, (x, weight), upstream), expected, strict=True):
        row = wanted.abs().amax(-1, keepdim=True)  # rounding is relative to the largest entry of a row
        assert ((gradient.double() - wanted).abs() <= 1e-5 * row + 1e-12).all()


def test_rotation_turns_pairs_and_its_gradient_turns_back():
    angles = drawn(TOKENS, 1, 4, seed=4, dtype=torch.float64)
    cos, sin = (torch.cat((table, table), -1) for table in (angles.cos(), angles.sin()))
    x = drawn(TOKENS, 3, 8, seed=5, dtype=torch.float64).requires_grad_()
    pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    turned = rotate(x, cos, sin)
    torch.testing.assert_close(turned, torch.cat((pairs.real, pairs.imag), -1))
    assert torch.autograd.gradcheck(lambda each: rotate(each, cos, sin), x)
    (back,) = torch.autograd.grad(turned, x, turned)
    torch.testing.assert_close(back, x)
