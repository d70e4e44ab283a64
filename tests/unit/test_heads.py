"""Index-conditioned heads against explicit sums, separate networks and autograd."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ensemblepp.errors import ParameterError
from ensemblepp.heads import EnsembleNetwork, IndependentEnsemble, IndexedOutput, PriorEnsemble
from ensemblepp.networks import StateMLP
from ensemblepp.seeding import make_generator

REPLICAS, BATCH, IN_DIM, MEMBERS = 2, 5, 3, 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=make_generator(seed, "data"), dtype=torch.float64)


def shuffled(network: Any, seed: int = 3) -> Any:
    """Move every trainable parameter away from its start, where members are zero."""
    for position, block in enumerate(network.blocks):
        block.flat.copy_(normal(len(block.flat), seed=seed + position))
    return network


def make(kind: type = EnsembleNetwork, **options: Any) -> Any:
    sizes = {"num_replicas": REPLICAS, "generator": make_generator(0, "init"), "dtype": torch.float64}
    return kind(IN_DIM, options.pop("hidden_dims", (6, 5)), options.pop("index_dim", MEMBERS), **(sizes | options))


def output(*lead: int, out: int = 2) -> IndexedOutput:
    return IndexedOutput(normal(*lead, out, seed=1), normal(*lead, out, MEMBERS, seed=2))


def test_a_sample_is_the_mean_plus_the_members_weighed_by_the_index() -> None:
    made, index = output(2, 3), normal(2, 3, MEMBERS, seed=5)
    sample = made.sample(index)
    assert sample.shape == (2, 3, 2)
    for r in range(2):
        for b in range(3):
            for k in range(2):
                wanted = float(made.mean[r, b, k])
                wanted += sum(float(index[r, b, m] * made.members[r, b, k, m]) for m in range(MEMBERS))
                assert float(sample[r, b, k]) == pytest.approx(wanted, abs=1e-12)


def test_many_samples_at_once_are_the_samples_one_by_one() -> None:
    made, index = output(2, 3), normal(2, 3, 7, MEMBERS, seed=5)
    many = made.sample(index)
    assert many.shape == (2, 3, 7, 2)
    one_by_one = torch.stack([made.sample(index[:, :, s]) for s in range(7)], dim=2)
    torch.testing.assert_close(many, one_by_one, rtol=0, atol=1e-12)


def test_the_sd_is_the_root_mean_square_over_the_scaled_coordinate_indices() -> None:
    made = output(2, 3)
    squares = []
    for m in range(MEMBERS):
        for sign in (1, -1):
            index = torch.zeros(2, 3, MEMBERS, dtype=torch.float64)
            index[..., m] = sign * MEMBERS**0.5
            squares.append((made.sample(index) - made.mean).square())
    wanted = torch.stack(squares).mean(0).sqrt()
    torch.testing.assert_close(made.standard_deviation(), wanted, rtol=0, atol=1e-12)


def test_select_takes_the_named_output_of_each_input() -> None:
    made, out = output(2, 3, out=4), torch.tensor([[0, 3, 1], [2, 2, 0]])
    chosen = made.select(out)
    assert chosen.mean.shape == (2, 3, 1)
    assert chosen.members.shape == (2, 3, 1, MEMBERS)
    for r in range(2):
        for b in range(3):
            assert chosen.mean[r, b, 0] == made.mean[r, b, out[r, b]]
            assert torch.equal(chosen.members[r, b, 0], made.members[r, b, out[r, b]])


def test_prior_functions_add_to_the_members_only() -> None:
    made, prior = output(2, 3), normal(2, 3, 2, MEMBERS, seed=6)
    scale = torch.tensor([2.0, 0.5], dtype=torch.float64).view(2, 1, 1, 1)
    both = made.with_prior(prior, scale)
    assert torch.equal(both.mean, made.mean)
    torch.testing.assert_close(both.members[1], made.members[1] + 0.5 * prior[1], rtol=0, atol=1e-12)


def by_autograd(network: EnsembleNetwork, x: Tensor, scale: float) -> tuple[IndexedOutput, dict[str, Tensor]]:
    """The documented formula, replica by replica, on copies of the parameters that autograd follows."""
    copies = {
        f"{place}/{name}": value.requires_grad_()
        for place, block in zip(("torso", "head"), network.blocks, strict=True)
        for name, value in block.state_dict().items()
    }

    def torso(parameters: dict[str, Tensor], r: int) -> Tensor:
        h = x[r]
        for layer, width in enumerate(network.torso.hidden_dims):
            h = h @ parameters[f"torso/weight_{layer}"][r] + parameters[f"torso/bias_{layer}"][r]
            h = torch.nn.functional.layer_norm(h, (width,)) if network.torso.layer_norm else h
            h = h.relu()
        return h

    means, members = [], []
    for r in range(REPLICAS):
        h = torso(copies, r)
        cut = h.detach() if network.stop_gradient else h
        weight = copies["head/weight"][r].view(network.num_outputs, 1 + network.index_dim, -1)
        bias = copies["head/bias"][r].view(network.num_outputs, 1 + network.index_dim)
        means.append(torch.einsum("bh,kh->bk", h, weight[:, 0]) + bias[:, 0])
        member = network.posterior_scale * (torch.einsum("bh,kmh->bkm", cut, weight[:, 1:]) + bias[:, 1:])
        h0 = h.detach()
        if network.prior_torso is not None:
            frozen = network.prior_torso.parameters.state_dict()
            h0 = torso({f"torso/{name}": value for name, value in frozen.items()}, r)
        if network.prior_kind != "none":
            prior = network.prior_weight[r].view(-1, network.num_outputs, network.index_dim)
            member = member + scale * torch.einsum("bh,hkm->bkm", h0, prior)
        members.append(member)
    return IndexedOutput(torch.stack(means), torch.stack(members)), copies


@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("prior", ["frozen", "features", "none"])
@pytest.mark.parametrize("posterior_scale", [1.0, 0.3])
@pytest.mark.parametrize("stop_gradient", [True, False])
def test_forward_and_backward_equal_autograd(
    stop_gradient: bool, posterior_scale: float, prior: str, num_outputs: int
) -> None:
    options = {"stop_gradient": stop_gradient, "posterior_scale": posterior_scale, "prior": prior}
    network = shuffled(make(num_outputs=num_outputs, layer_norm=prior == "features", **options))
    x = normal(REPLICAS, BATCH, IN_DIM)
    wanted, copies = by_autograd(network, x, 0.7)
    got = network(x, 0.7)
    torch.testing.assert_close(got.mean, wanted.mean, rtol=0, atol=1e-10)
    torch.testing.assert_close(got.members, wanted.members, rtol=0, atol=1e-10)
    grad = normal(REPLICAS, BATCH, num_outputs, 1 + MEMBERS, seed=9)
    columns = torch.cat([wanted.mean.unsqueeze(-1), wanted.members], dim=-1)
    gradients = torch.autograd.grad((columns * grad).sum(), [*copies.values()])
    for block in network.blocks:
        block.flat.grad.fill_(torch.nan)
    network.backward(network.forward(x)[1], grad)
    for name, gradient in zip(copies, gradients, strict=True):
        place, key = name.split("/")
        own = network.torso.parameters if place == "torso" else network.head
        assert gradient.abs().max() > 0
        torch.testing.assert_close(own.grad(key), gradient, rtol=0, atol=1e-9)


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_with_stop_gradient_nothing_of_the_members_reaches_the_torso(num_outputs: int) -> None:
    x, moved = normal(REPLICAS, BATCH, IN_DIM), {}
    grad = normal(REPLICAS, BATCH, num_outputs, 1 + MEMBERS, seed=9)
    grad[..., 0] = 0
    for stop_gradient in (True, False):
        network = shuffled(make(num_outputs=num_outputs, stop_gradient=stop_gradient))
        network.backward(network.forward(x)[1], grad)
        moved[stop_gradient] = float(network.torso.parameters.flat.grad.abs().max())
        assert network.head.flat.grad.abs().max() > 0
    assert moved[True] == 0
    assert moved[False] > 0


@pytest.mark.parametrize("kind", [EnsembleNetwork, IndependentEnsemble])
def test_gradients_of_one_replica_come_from_its_own_data_only(kind: type) -> None:
    network, x = shuffled(make(kind)), normal(REPLICAS, BATCH, IN_DIM)
    grad = normal(REPLICAS, BATCH, 1, 1 + MEMBERS, seed=9)
    grad[1] = 0
    network.backward(network.forward(x)[1], grad)
    weight = network.head.grad("weight")
    half = len(weight) // REPLICAS
    assert weight[:half].abs().max() > 0
    assert not weight[half:].any()


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_members_start_at_zero_so_that_the_spread_is_the_priors_alone(num_outputs: int) -> None:
    x = normal(REPLICAS, BATCH, IN_DIM)
    network = make(num_outputs=num_outputs)
    assert not network.forward(x)[0].members.any()
    assert network.forward(x)[0].mean.all()
    torch.testing.assert_close(network(x, 2.0).members, 2 * network.prior(x), rtol=0, atol=1e-12)
    assert network(x).standard_deviation().min() > 0
    assert not make(num_outputs=num_outputs, prior="none")(x).standard_deviation().any()


def test_the_frozen_prior_stays_while_the_features_prior_follows_the_torso() -> None:
    x = normal(REPLICAS, BATCH, IN_DIM)
    for prior, stays in (("frozen", True), ("features", False)):
        network = make(prior=prior)
        before = network.prior(x)
        shuffled(network)
        assert torch.equal(before, network.prior(x)) is stays
        torch.testing.assert_close(network.prior(x), network.prior(x, network.features(x)), rtol=0, atol=1e-12)


def test_without_members_the_network_is_a_point_estimate_without_a_prior() -> None:
    network, x = make(index_dim=0), normal(REPLICAS, BATCH, IN_DIM)
    got = network(x)
    assert network.prior_kind == "none"
    assert network.prior(x) is None
    assert got.mean.shape == (REPLICAS, BATCH, 1)
    assert got.members.shape == (REPLICAS, BATCH, 1, 0)
    assert not got.standard_deviation().any()
    wanted = network.features(x) @ network.head["weight"].mT + network.head["bias"].mT
    torch.testing.assert_close(got.mean, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_a_prior_ensemble_is_separate_networks(num_outputs: int) -> None:
    ensemble, x = make(PriorEnsemble, num_outputs=num_outputs), normal(REPLICAS, BATCH, IN_DIM)
    got = ensemble(x)
    assert got.shape == (REPLICAS, BATCH, num_outputs, MEMBERS)
    torso, head = ensemble.networks.torso, ensemble.networks.head
    for r in range(REPLICAS):
        for m in range(MEMBERS):
            place, h = r * MEMBERS + m, x[r]
            for layer in range(2):
                weight, bias = (torso.parameters[f"{name}_{layer}"][place] for name in ("weight", "bias"))
                h = (h @ weight + bias).relu()
            wanted = h @ head["weight"][place].T + head["bias"][place].T
            torch.testing.assert_close(got[r, :, :, m], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_an_independent_ensemble_and_its_gradient_are_those_of_separate_networks(num_outputs: int) -> None:
    ensemble, x = shuffled(make(IndependentEnsemble, num_outputs=num_outputs)), normal(REPLICAS, BATCH, IN_DIM)
    copies = [{name: value.requires_grad_() for name, value in block.state_dict().items()} for block in ensemble.blocks]
    torso, head = copies
    members = []
    for place in range(REPLICAS * MEMBERS):
        h = x[place // MEMBERS]
        for layer in range(2):
            h = (h @ torso[f"weight_{layer}"][place] + torso[f"bias_{layer}"][place]).relu()
        members.append(h @ head["weight"][place].T + head["bias"][place].T)
    wanted = torch.stack(members).view(REPLICAS, MEMBERS, BATCH, num_outputs).permute(0, 2, 3, 1)
    got, cache = ensemble.forward(x)
    assert not got.mean.any()
    torch.testing.assert_close(got.members, wanted, rtol=0, atol=1e-10)
    grad = normal(REPLICAS, BATCH, num_outputs, 1 + MEMBERS, seed=9)
    leaves = [*torso.values(), *head.values()]
    gradients = torch.autograd.grad((wanted * grad[..., 1:]).sum(), leaves)
    ensemble.backward(cache, grad)
    own = [block.grad(name) for block, copy in zip(ensemble.blocks, copies, strict=True) for name in copy]
    for mine, gradient in zip(own, gradients, strict=True):
        assert gradient.abs().max() > 0
        torch.testing.assert_close(mine, gradient, rtol=0, atol=1e-9)


def test_the_priors_of_an_independent_ensemble_are_networks_of_their_own() -> None:
    ensemble, x = make(IndependentEnsemble), normal(REPLICAS, BATCH, IN_DIM)
    prior, learned = ensemble.prior(x), ensemble.forward(x)[0].members
    assert prior.shape == learned.shape
    assert (prior - learned).abs().min() > 0
    shuffled(ensemble)
    assert torch.equal(prior, ensemble.prior(x))


def values(network: Any, x: Tensor) -> tuple[Tensor, ...]:
    if type(network) is PriorEnsemble:
        return (network(x),)
    made = network.forward(x)[0]
    return made.mean, made.members, torch.empty(0) if network.prior(x) is None else network.prior(x)


@pytest.mark.parametrize("prior", ["frozen", "features", "none"])
@pytest.mark.parametrize("kind", [EnsembleNetwork, PriorEnsemble, IndependentEnsemble])
def test_a_saved_network_comes_back_with_its_prior(kind: type, prior: str) -> None:
    options: dict[str, Any] = {"prior": prior} if kind is EnsembleNetwork else {}
    x, network = normal(REPLICAS, BATCH, IN_DIM), make(kind, **options)
    if kind is not PriorEnsemble:
        shuffled(network)
    other = make(kind, generator=make_generator(5, "init"), **options)
    assert not torch.equal(values(other, x)[-2:][0], values(network, x)[-2:][0])
    other.load_state_dict(network.state_dict())
    for mine, saved in zip(values(other, x), values(network, x), strict=True):
        assert torch.equal(mine, saved)


@pytest.mark.parametrize("kind", [EnsembleNetwork, PriorEnsemble, IndependentEnsemble])
def test_a_saved_network_of_another_width_is_refused(kind: type) -> None:
    with pytest.raises(ParameterError, match="weight_1 of ParameterBlock must have shape"):
        make(kind).load_state_dict(make(kind, hidden_dims=(6, 4)).state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"index_dim": -1}, "index_dim of EnsembleNetwork must be an int >= 0; got -1"),
        ({"num_outputs": 0}, "num_outputs of EnsembleNetwork must be an int >= 1; got 0"),
        ({"posterior_scale": 0.0}, r"posterior_scale of EnsembleNetwork must be a finite number > 0; got 0\.0"),
        ({"prior": "learned"}, "prior of EnsembleNetwork must be one of 'features', 'frozen', 'none'; got 'learned'"),
    ],
)
def test_values_that_make_no_network_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make(**options)


@pytest.mark.parametrize("kind", [PriorEnsemble, IndependentEnsemble])
def test_an_ensemble_of_nothing_is_refused(kind: type) -> None:
    with pytest.raises(ParameterError, match=f"index_dim of {kind.__name__} must be an int >= 1; got 0"):
        make(kind, index_dim=0)


def test_a_unit_prior_has_the_same_spread_at_every_input_and_output() -> None:
    x = 100 * torch.rand(2, 7, 3, generator=make_generator(1, "x"))
    sizes: dict[str, Any] = {"num_outputs": 4, "num_replicas": 2}
    unit, plain = (
        EnsembleNetwork(3, [8], 5, unit_prior=flag, generator=make_generator(0, "init"), **sizes)
        for flag in (True, False)
    )
    ours, theirs = unit.prior(x), plain.prior(x)
    assert ours is not None
    assert theirs is not None
    assert torch.allclose(ours.norm(dim=-1), torch.ones(2, 7, 4))
    assert torch.allclose(ours, theirs / theirs.norm(dim=-1, keepdim=True))
    assert theirs.norm(dim=-1).std() > 1


@pytest.mark.parametrize("unit", [False, True])
def test_the_prior_of_states_is_a_table_of_the_frozen_network(unit: bool) -> None:
    sizes: dict[str, Any] = {"num_outputs": 3, "num_replicas": 2, "torso": StateMLP, "unit_prior": unit}
    network = EnsembleNetwork(9, [8, 6], 4, generator=make_generator(0, "init"), **sizes)
    states = torch.tensor([[0, 8, 8], [4, 1, 0]])
    prior, torso = network.prior(states), network.prior_torso
    assert prior is not None
    assert torso is not None
    expected = (torso(states) @ network.prior_weight).view(2, 3, 3, 4)
    expected = expected / expected.norm(dim=-1, keepdim=True) if unit else expected
    assert torch.allclose(prior, expected, atol=1e-6)
    other = EnsembleNetwork(9, [8, 6], 4, generator=make_generator(5, "init"), **sizes)
    other.load_state_dict(network.state_dict())
    restored = other.prior(states)
    assert restored is not None
    assert torch.equal(restored, prior)


def test_a_copy_learns_alone_and_shares_the_prior() -> None:
    network = EnsembleNetwork(3, [4], 2, num_outputs=2, generator=make_generator(0, "init"))
    ensemble = IndependentEnsemble(3, [4], 2, num_outputs=2, generator=make_generator(0, "init"))
    x = torch.ones(1, 1, 3)
    for each in (network, ensemble):
        copy = each.clone()
        before, prior = each.prior(x), copy.prior(x)
        assert before is not None
        assert prior is not None
        assert torch.equal(before, prior)
        values = each.forward(x)[0].members.clone()
        for block in copy.blocks:
            block.flat += 1
        assert torch.equal(each.forward(x)[0].members, values)
        assert not torch.equal(copy.forward(x)[0].members, values)
