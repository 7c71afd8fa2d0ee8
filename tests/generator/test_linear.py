"""A linear layer computes the same for few rows and for many."""

from __future__ import annotations

import pytest
import torch

from backend.generator.linear import linear


@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 40])
@pytest.mark.parametrize("num_columns", [96, 1000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_the_matrix_product(num_rows, num_columns, has_bias):
    """Against float64; sums of up to 1,000 products of order 1."""
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, num_columns, generator=generator)
    weight = torch.randn(33, num_columns, generator=generator)
    bias = torch.randn(33, generator=generator) if has_bias else None
    before = x.clone()
    y = linear(x, weight, bias)
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    assert y.is_contiguous()
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-4)
    assert torch.equal(x, before)


@pytest.mark.parametrize("num_rows", [1, 3, 20])
def test_linear_takes_rows_that_are_not_contiguous(num_rows):
    x = torch.randn(16, num_rows, generator=torch.Generator().manual_seed(0)).T
    weight = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(linear(x, weight, None), x @ weight.T, rtol=0, atol=1e-5)
