"""Random signs that belong to global elements."""

import torch

from snip_megatron.sensitivity.update_error import error_signs

ROWS, COLS = torch.arange(1024), torch.arange(768)


def test_signs_are_even_and_independent() -> None:
    z = error_signs(5, ROWS, COLS)
    other = error_signs(6, ROWS, COLS)
    limit = 5.0 * z.numel() ** 0.5
    assert set(z.unique().tolist()) == {-1.0, 1.0}
    pairs = (z, z * other, z[1:] * z[:-1], z[:, 1:] * z[:, :-1], z[::2, ::2] * z[1::2, 1::2])
    # The last: the four corners of a rectangle, which a product of row and column signs would make equal.
    corners = z[::2, ::2] * z[1::2, ::2] * z[::2, 1::2] * z[1::2, 1::2]
    for product in (*pairs, corners):
        assert abs(float(product.sum())) < limit
    assert float(z.sum(0).square().mean()) < 1.3 * len(ROWS)
    assert float(z.sum(1).square().mean()) < 1.3 * len(COLS)


def test_a_shard_draws_what_the_whole_does() -> None:
    whole = error_signs(2**63 + 5, ROWS, COLS)
    rows, cols = torch.tensor([7, 3, 1000]), torch.tensor([5, 700])
    assert torch.equal(error_signs(2**63 + 5, rows, cols), whole[rows][:, cols])
