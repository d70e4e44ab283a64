"""Replica-batched networks against plain loops and autograd."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ensemblepp.errors import ParameterError
from ensemblepp.networks import MLP, ParameterBlock, StateMLP
from ensemblepp.seeding import make_generator

DEPTHS: list[tuple[int, ...]] = [(), (5,), (5, 7)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=make_generator(seed, "data"), dtype=torch.float64)


def make(hidden_dims: Sequence[int], **options: Any) -> MLP:
    generator = make_generator(options.pop("seed", 0), "init")
    return MLP(3, hidden_dims, num_replicas=4, generator=generator, **({"dtype": torch.float64} | options))


def one_network(
    network: MLP, x: Tensor, parameters: dict[str, Tensor], replica: int, dropout: Tensor | None = None
) -> Tensor:
    """One replica as anybody would write it in torch."""
    start = 0
    for layer, width in enumerate(network.hidden_dims):
        weight, bias = (parameters[f"{name}_{layer}"][replica] for name in ("weight", "bias"))
        x = torch.nn.functional.linear(x, weight.T, bias[0])
        if network.layer_norm:
            x = torch.nn.functional.layer_norm(x, (width,))
        x = torch.nn.functional.relu(x)
        if dropout is not None:
            x = x * dropout[:, start : start + width]
            start += width
    return x


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("hidden_dims", DEPTHS)
def test_forward_equals_a_loop_over_replicas(hidden_dims: tuple[int, ...], layer_norm: bool) -> None:
    network, x = make(hidden_dims, layer_norm=layer_norm), normal(4, 6, 3)
    loop = torch.stack([one_network(network, x[r], network.parameters.state_dict(), r) for r in range(4)])
    torch.testing.assert_close(network(x), loop, rtol=0, atol=1e-12)
    assert network(x).shape == (4, 6, network.out_dim)


@pytest.mark.parametrize("masks", [None, 1, 6])
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("hidden_dims", DEPTHS)
def test_backward_equals_autograd(hidden_dims: tuple[int, ...], layer_norm: bool, masks: int | None) -> None:
    network, x = make(hidden_dims, layer_norm=layer_norm), normal(4, 6, 3)
    dropout = None if masks is None else normal(4, masks, sum(hidden_dims), seed=2).relu()
    top = normal(4, 6, network.out_dim, seed=1)
    parameters = {name: value.requires_grad_() for name, value in network.parameters.state_dict().items()}
    loop = torch.stack(
        [one_network(network, x[r], parameters, r, None if dropout is None else dropout[r]) for r in range(4)]
    )
    network.parameters.flat.grad.fill_(torch.nan)  # whatever is there must be overwritten
    cache = network.forward(x, dropout)
    torch.testing.assert_close(cache[0][-1], loop.detach(), rtol=0, atol=1e-12)
    network.backward(*cache, top, dropout)
    assert len(parameters) == 2 * len(hidden_dims)
    if not parameters:
        return
    gradients = torch.autograd.grad((loop * top).sum(), [*parameters.values()])
    for name, wanted in zip(parameters, gradients, strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(network.parameters.grad(name), wanted, rtol=0, atol=1e-10)


def test_layer_norm_changes_the_function_and_ignores_the_scale_of_the_weights() -> None:
    plain, normed, x = make((5,)), make((5,), layer_norm=True), normal(4, 6, 3)
    torch.testing.assert_close(plain.parameters.flat, normed.parameters.flat)
    assert float((plain(x) - normed(x)).abs().max()) > 0.1
    before = normed(x)
    normed.parameters.flat.mul_(10)
    torch.testing.assert_close(normed(x), before, rtol=0, atol=0.02)


def test_without_hidden_layers_the_features_are_the_input() -> None:
    network, x = make(()), normal(4, 2, 3)
    assert torch.equal(network(x), x)
    assert network.out_dim == 3
    assert network.flops == 0
    assert len(network.parameters.flat) == 0


def test_flops_count_two_per_multiplication_of_one_input_of_one_replica() -> None:
    assert make((5, 7)).flops == 2 * (3 * 5 + 5 * 7)


def test_initial_weights_fill_the_range_of_one_over_the_root_of_the_fan_in() -> None:
    network = MLP(16, (400, 3), num_replicas=2, generator=make_generator(0, "init"))
    for layer, bound in enumerate((0.25, 0.05)):
        for name in ("weight", "bias"):
            values = network.parameters[f"{name}_{layer}"]
            assert float(values.abs().max()) <= bound
            assert float(values.abs().max()) > 0.5 * bound
    values = network.parameters["weight_0"]
    n = values.numel()
    assert float(values.mean()) == pytest.approx(0.0, abs=4 * 0.25 / (3 * n) ** 0.5)
    # The fourth moment of U(-b, b) is b^4 / 5, so the variance of the squares is 4 b^4 / 45.
    assert float(values.square().mean()) == pytest.approx(0.25**2 / 3, abs=4 * 0.25**2 * (4 / 45 / n) ** 0.5)


def test_replicas_start_differently_and_seeds_repeat() -> None:
    weight = make((5,)).parameters["weight_0"]
    assert len(torch.unique(weight)) == weight.numel()
    assert torch.equal(weight, make((5,)).parameters["weight_0"])
    assert not torch.equal(weight, make((5,), seed=1).parameters["weight_0"])


def test_a_clone_keeps_the_values_and_shares_nothing() -> None:
    network, x = make((5, 7), layer_norm=True), normal(4, 6, 3)
    copy, before = network.clone(), network(x)
    assert torch.equal(copy(x), before)
    network.parameters.flat.add_(1)
    network.parameters.flat.grad.add_(1)
    assert torch.equal(copy(x), before)
    assert not copy.parameters.flat.grad.any()


def block() -> ParameterBlock:
    return ParameterBlock({"a": (2, 3), "b": (2, 1, 2)}, dtype=torch.float64, device="cpu")


def test_named_parameters_and_gradients_are_views_of_the_flat_ones() -> None:
    parameters = block()
    parameters.flat.copy_(torch.arange(10.0))
    parameters.flat.grad.copy_(-torch.arange(10.0))
    assert parameters["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert parameters["b"].tolist() == [[[6, 7]], [[8, 9]]]
    assert parameters.grad("b").tolist() == [[[-6, -7]], [[-8, -9]]]
    parameters["b"][1] = 5
    parameters.grad("a")[0] = 3
    assert parameters.flat.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 5]
    assert parameters.flat.grad[:3].tolist() == [3, 3, 3]
    moments = parameters.split(torch.arange(10.0))
    assert moments["b"].tolist() == [[[6, 7]], [[8, 9]]]


def test_one_optimiser_step_moves_every_named_parameter() -> None:
    parameters = block()
    parameters.grad("a").fill_(1.0)
    parameters.grad("b").fill_(-2.0)
    torch.optim.SGD([parameters.flat], lr=0.5).step()
    assert (parameters["a"] == -0.5).all()
    assert (parameters["b"] == 1.0).all()


def test_a_saved_block_is_a_copy_and_is_restored_in_place() -> None:
    parameters = block()
    parameters.flat.copy_(torch.arange(10.0))
    view, saved = parameters["a"], parameters.state_dict()
    parameters.flat.zero_()
    assert saved["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    parameters.load_state_dict(saved)
    assert torch.equal(parameters.flat, torch.arange(10.0).double())
    assert torch.equal(view, saved["a"])
    saved["a"].zero_()
    assert parameters["a"].any()


def test_a_block_of_another_shape_is_refused_by_name_and_nothing_moves() -> None:
    parameters, saved = block(), block().state_dict()
    saved["a"] += 1
    saved["b"] = torch.zeros(2, 2, 2)
    message = r"b of ParameterBlock must have shape \(as built\) = \(2, 1, 2\); got shape \(2, 2, 2\)"
    with pytest.raises(ParameterError, match=message):
        parameters.load_state_dict(saved)
    assert not parameters.flat.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_dim": 0}, "in_dim of MLP must be an int >= 1; got 0"),
        ({"hidden_dims": (4, 0)}, "hidden_dims of MLP must be an int >= 1; got 0"),
        ({"hidden_dims": (4, 2.5)}, r"hidden_dims of MLP must be an int >= 1; got 2\.5"),
        ({"hidden_dims": 4}, "hidden_dims of MLP must be a list of ints; got 4"),
        ({"hidden_dims": "64"}, "hidden_dims of MLP must be a list of ints; got '64'"),
        ({"num_replicas": 0}, "num_replicas of MLP must be an int >= 1; got 0"),
    ],
)
@pytest.mark.usefixtures("without_shape_checks")
def test_sizes_that_make_no_network_are_named(options: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"in_dim": 3, "hidden_dims": (4,)} | options
    with pytest.raises(ParameterError, match=message):
        MLP(**sizes, generator=make_generator(0, "init"))


def test_a_state_network_is_the_mlp_on_one_hot_vectors() -> None:
    states, replicas = 6, 2
    network = StateMLP(states, [5, 4], num_replicas=replicas, generator=make_generator(0, "init"), dtype=torch.float64)
    plain = MLP(states, [5, 4], num_replicas=replicas, generator=make_generator(1, "init"), dtype=torch.float64)
    plain.parameters.copy_(network.parameters)
    plain.parameters["bias_0"].fill_(0.1)
    network.parameters["bias_0"].fill_(0.1)
    x = torch.tensor([[0, 3, 3, 5], [1, 1, 1, 2]])  # states may repeat in a batch
    one_hot = torch.nn.functional.one_hot(x, states).double()
    ours, theirs = network.forward(x), plain.forward(one_hot)
    assert torch.allclose(ours[0][-1], theirs[0][-1])
    grad = torch.randn(replicas, 4, 4, generator=make_generator(2, "grad"), dtype=torch.float64)
    for _ in range(2):  # a second pass must not add to the first
        network.backward(*ours, grad)
        plain.backward(*theirs, grad)
    assert torch.allclose(network.parameters.flat.grad, plain.parameters.flat.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("states", [10, 10_000])
def test_features_of_states_have_one_length_for_any_number_of_states(states: int) -> None:
    """Rows have a mean square of 1/3 over a width of 64, and no bias points all of them the same way."""
    network = StateMLP(states, [64, 64], generator=make_generator(0, "init"))
    rows = network.parameters["weight_0"][0]
    # Five standard errors of the mean of uniform squares (variance 4/45 in units of the squared bound).
    error = 5 * (4 / 45 / rows.numel()) ** 0.5
    assert abs(float(rows.square().mean() * 64) - 1 / 3) < error
    assert not network.parameters["bias_0"].any()
    assert not network.parameters["bias_1"].any()


def test_a_state_network_needs_a_layer() -> None:
    with pytest.raises(ParameterError, match="hidden_dims of StateMLP must hold at least one width"):
        StateMLP(4, [], generator=make_generator(0, "init"))
