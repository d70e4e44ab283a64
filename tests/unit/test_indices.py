"""Index distributions: moments, supports, scaling, and how often an index looks one unit up in any direction."""

import math

import pytest
import torch
from torch import Tensor

from ensemblepp.errors import ParameterError
from ensemblepp.indices import KINDS, IndexDistribution
from ensemblepp.seeding import make_generator
from ensemblepp.testing import check_index_distribution

NUM_DRAWS = 100_000
STANDARD_ERRORS = 4.0


def make(kind: str, index_dim: int) -> IndexDistribution:
    return IndexDistribution(kind, index_dim, min(3, index_dim) if kind == "sparse" else None)


def draw(kind: str, index_dim: int, count: int = NUM_DRAWS) -> Tensor:
    return make(kind, index_dim).reference(count, generator=make_generator(0, "index"), dtype=torch.float64)


def upper_shares(kind: str, index_dim: int, directions: Tensor) -> Tensor:
    """Return the share of draws with <v, zeta> >= 1 for each row v."""
    # The tolerance keeps +-1 on the closed side in spite of rounding.
    return (draw(kind, index_dim) @ directions.T >= 1 - 1e-9).double().mean(0)


def standard_error(probability: float) -> float:
    return math.sqrt(probability * (1 - probability) / NUM_DRAWS)


def unit_vectors(index_dim: int) -> Tensor:
    """Return the first axis, the diagonal and random directions."""
    generator = make_generator(1, "directions")
    random = torch.randn(20, index_dim, generator=generator, dtype=torch.float64)
    special = torch.ones(2, index_dim, dtype=torch.float64)
    special[0, 1:] = 0
    return torch.nn.functional.normalize(torch.cat([special, random]), dim=-1)


@pytest.mark.parametrize("index_dim", [1, 2, 7, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_moments_of_both_roles(kind: str, index_dim: int) -> None:
    check_index_distribution(make(kind, index_dim))


@pytest.mark.parametrize("kind", ["sphere", "cube", "coordinate", "sparse"])
def test_reference_has_norm_root_m_and_perturbation_norm_one(kind: str) -> None:
    law = make(kind, 9)
    zeta = law.reference(100, generator=make_generator(0, "index"), dtype=torch.float64)
    z = law.perturbation(100, generator=make_generator(0, "index"), dtype=torch.float64)
    torch.testing.assert_close(zeta.norm(dim=-1), torch.full((100,), 3.0, dtype=torch.float64))
    torch.testing.assert_close(z.norm(dim=-1), torch.ones(100, dtype=torch.float64))


def test_supports() -> None:
    assert set(draw("cube", 5).flatten().tolist()) == {-1.0, 1.0}
    assert sorted(set(draw("coordinate", 4).flatten().tolist())) == [-2.0, 0.0, 2.0]
    assert bool(((draw("coordinate", 4) != 0).sum(-1) == 1).all())
    sparse = draw("sparse", 12)
    assert bool(((sparse != 0).sum(-1) == 3).all())
    assert sorted(set(sparse.flatten().tolist())) == [-2.0, 0.0, 2.0]
    assert sorted(set(draw("one_hot", 4).flatten().tolist())) == [0.0, 1.0]
    assert bool((draw("one_hot", 4).sum(-1) == 1).all())


def test_every_subset_of_a_sparse_index_is_equally_likely() -> None:
    zeta = draw("sparse", 5)
    code = ((zeta != 0).long() * 2 ** torch.arange(5)).sum(-1)
    shares = torch.bincount(code, minlength=32).double() / NUM_DRAWS
    assert int((shares > 0).sum()) == 10
    assert float((shares[shares > 0] - 0.1).abs().max()) < STANDARD_ERRORS * standard_error(0.1)


def test_gaussian_passes_one_with_probability_0_1587_in_every_direction() -> None:
    exact = 0.5 * math.erfc(1 / math.sqrt(2))
    assert exact == pytest.approx(0.1587, abs=1e-4)
    shares = upper_shares("gaussian", 8, unit_vectors(8))
    assert float((shares - exact).abs().max()) < STANDARD_ERRORS * standard_error(exact)


@pytest.mark.parametrize("index_dim", [2, 3, 8, 64])
@pytest.mark.parametrize(("kind", "bound"), [("sphere", 0.0668), ("cube", 7 / 64)])
def test_sphere_and_cube_keep_their_anti_concentration_bound(kind: str, bound: float, index_dim: int) -> None:
    shares = upper_shares(kind, index_dim, unit_vectors(index_dim))
    assert float(shares.min()) > bound - STANDARD_ERRORS * standard_error(bound)


def test_the_cube_bound_is_met_where_six_equal_coordinates_must_agree() -> None:
    # <v, zeta> >= 1 with v the diagonal of six needs at least five equal signs: (1 + 6) / 64 = 7 / 64.
    direction = torch.full((1, 6), 1 / math.sqrt(6), dtype=torch.float64)
    exact = 7 / 64
    assert float(upper_shares("cube", 6, direction)) == pytest.approx(
        exact, abs=STANDARD_ERRORS * standard_error(exact)
    )


def test_coordinate_passes_one_along_an_axis_with_probability_1_over_2m() -> None:
    exact = 1 / 16
    axis = unit_vectors(8)[:1]
    share = float(upper_shares("coordinate", 8, axis))
    assert share == pytest.approx(exact, abs=STANDARD_ERRORS * standard_error(exact))


@pytest.mark.parametrize("kind", KINDS)
def test_one_generator_state_gives_one_draw(kind: str) -> None:
    law = make(kind, 4)
    first = law.reference(2, 3, generator=make_generator(3, "index"))
    assert torch.equal(first, law.reference(2, 3, generator=make_generator(3, "index")))
    assert not torch.equal(first, law.reference(2, 3, generator=make_generator(4, "index")))


def test_one_hot_gives_no_perturbation() -> None:
    with pytest.raises(ParameterError, match=r"kind of a perturbation must have mean zero; got 'one_hot'"):
        make("one_hot", 4).perturbation(1, generator=make_generator(0, "index"))


@pytest.mark.parametrize(
    ("kind", "index_dim", "nonzeros", "message"),
    [
        ("normal", 4, None, r"kind of IndexDistribution must be one of 'coordinate', 'cube'.*; got 'normal'"),
        ("cube", 0, None, "index_dim of IndexDistribution must be an int >= 1; got 0"),
        ("cube", 4, 2, 'nonzeros of IndexDistribution must be given exactly for "sparse"; got 2'),
        ("sparse", 4, None, 'nonzeros of IndexDistribution must be given exactly for "sparse"; got None'),
        ("sparse", 4, 0, "nonzeros of IndexDistribution must be an int >= 1; got 0"),
        ("sparse", 4, 5, "nonzeros of IndexDistribution must be <= index_dim = 4; got 5"),
    ],
)
def test_errors_name_parameter_rule_and_value(kind: str, index_dim: int, nonzeros: int | None, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        IndexDistribution(kind, index_dim, nonzeros)


def test_a_size_that_is_not_an_int_is_refused(without_shape_checks: None) -> None:
    for size in (2.0, True, "4"):
        with pytest.raises(ParameterError, match="index_dim of IndexDistribution must be an int >= 1"):
            IndexDistribution("cube", size)  # type: ignore[arg-type]
