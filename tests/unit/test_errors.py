"""The checks at the boundary and their texts."""

import numpy as np
import pytest
import torch

from ensemblepp.errors import (
    ParameterError,
    check_all,
    check_choice,
    check_finite,
    check_int,
    check_real,
    check_shape,
)


def text_of(error: pytest.ExceptionInfo[ParameterError]) -> str:
    return str(error.value)


def test_the_text_names_parameter_owner_rule_value_and_remedy() -> None:
    error = ParameterError("index_dim", "Head", "be an int >= 1", 0)
    assert str(error) == "index_dim of Head must be an int >= 1; got 0."
    assert str(ParameterError("a", "B", "be c", "d", "Do e.")) == "a of B must be c; got d. Do e."
    assert isinstance(error, ValueError)


def test_integers() -> None:
    value = check_int("n", "Owner", np.int64(3))
    assert value == 3
    assert type(value) is int
    assert check_int("n", "Owner", 0, minimum=0) == 0
    for bad in (0, -1, 1.0, True, "1", None):
        with pytest.raises(ParameterError, match="n of Owner must be an int >= 1; got"):
            check_int("n", "Owner", bad)


def test_reals() -> None:
    value = check_real("x", "Owner", np.float32(0.5), above=0.0, at_most=1.0)
    assert value == 0.5
    assert type(value) is float
    assert check_real("x", "Owner", 1, at_least=1.0) == 1.0
    assert check_real("x", "Owner", -1e300) == -1e300
    for bad in (0.0, -1, 1.5, True, "1", None, float("nan"), float("inf"), 1j, torch.tensor(0.5)):
        with pytest.raises(ParameterError, match="x of Owner must be a finite number > 0 and <= 1; got"):
            check_real("x", "Owner", bad, above=0.0, at_most=1.0)
    with pytest.raises(ParameterError, match="x of Owner must be a finite number >= 0; got -1"):
        check_real("x", "Owner", -1, at_least=0.0)


def test_choices() -> None:
    assert check_choice("kind", "Owner", "a", ("b", "a")) == "a"
    for bad in ("c", None, 1):
        with pytest.raises(ParameterError, match=f"kind of Owner must be one of 'a', 'b'; got {bad!r}"):
            check_choice("kind", "Owner", bad, ("b", "a"))


def test_shapes() -> None:
    tensor = torch.zeros(2, 3)
    assert check_shape("x", "Owner", tensor, "replicas batch", (2, None)) is tensor
    assert check_shape("x", "Owner", torch.zeros(0), "batch", (0,)).shape == (0,)
    for shape in ((3, None), (2,), (2, 3, None), (None, 0)):
        with pytest.raises(ParameterError, match=r"x of Owner must have shape \(axes\) = .*; got shape \(2, 3\)"):
            check_shape("x", "Owner", tensor, "axes", shape)
    with pytest.raises(ParameterError) as error:
        check_shape("x", "Owner", tensor, "replicas batch", (None, 4))
    assert text_of(error) == "x of Owner must have shape (replicas batch) = (any, 4); got shape (2, 3)."
    with pytest.raises(ParameterError, match=r"x of Owner must be a tensor \(batch\); got list"):
        check_shape("x", "Owner", [1.0], "batch", (1,))


def test_the_first_bad_entry_is_named() -> None:
    values = torch.tensor([[1.0, 2.0], [torch.inf, torch.nan]])
    check_finite("x", "Owner", values[:1])
    check_finite("x", "Owner", torch.zeros(0, 3))
    with pytest.raises(ParameterError) as error:
        check_finite("x", "Owner", values)
    assert text_of(error) == "x of Owner must be finite; got inf at index (1, 0)."
    with pytest.raises(ParameterError, match=r"x of Owner must be 1; got 2 at index \(1,\)"):
        check_all("x", "Owner", "be 1", torch.tensor([True, False]), torch.tensor([1, 2]))
    with pytest.raises(ParameterError, match=r"got 3\.0 at index \(\)"):
        check_all("x", "Owner", "be 1", torch.tensor(False), torch.tensor(3.0, requires_grad=True))
