"""Replica-batched networks: R independent MLPs in one set of tensors, with the backward pass written out.

A torso has few layers and small batches, so most of an autograd step is bookkeeping. Written out, forward and backward
are one batched matrix product per layer and direction, and tests hold them to autograd.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ensemblepp.errors import ParameterError, check_int, check_shape
from ensemblepp.types import StateDict

_LAYER_NORM_EPS = 1e-5


class ParameterBlock:
    """Named parameters side by side in one flat tensor, and their gradients in another.

    `self[name]` and `grad(name)` are views, so that one optimiser step on `flat` moves every parameter of every
    replica. Adam works element by element: replicas never mix.

    Args:
        shapes: Name to shape; by convention the first axis is the replica.
        dtype: Of all parameters.
        device: Where they live.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], *, dtype: torch.dtype, device: torch.device | str) -> None:
        self._places: dict[str, tuple[slice, tuple[int, ...]]] = {}
        start = 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            self._places[name] = (slice(start, start + size), tuple(shape))
            start += size
        self.flat = torch.zeros(start, dtype=dtype, device=device)
        self.flat.grad = torch.zeros_like(self.flat)
        self._views = self.split(self.flat)
        self._grads = self.split(self.flat.grad)

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def grad(self, name: str) -> Tensor:
        """Return the gradient of a parameter, a view of `flat.grad`."""
        return self._grads[name]

    def clone(self) -> ParameterBlock:
        """Return a copy with its own storage."""
        shapes = {name: shape for name, (_, shape) in self._places.items()}
        copy = ParameterBlock(shapes, dtype=self.flat.dtype, device=self.flat.device)
        copy.copy_(self)
        return copy

    def copy_(self, other: ParameterBlock) -> None:
        """Take over the values of a block with the same names and shapes."""
        self.flat.copy_(other.flat)

    def sound(self, num_replicas: int) -> Bool[Tensor, " replicas"]:
        """Return, per replica, whether every parameter is finite and small enough to act on.

        The bound on each tensor's Euclidean norm is the eighth root of the largest number: four layers of such weights,
        squared, do not overflow.
        """
        largest = torch.finfo(self.flat.dtype).max ** 0.125
        rows = [view.reshape(num_replicas, -1) for view in self._views.values()]
        norms = [torch.linalg.vector_norm(row, dim=1) for row in rows]
        every: Tensor = torch.stack(norms).amax(0) <= largest
        return every

    def copy_sound_(self, other: ParameterBlock) -> None:
        """Take over the values of those replicas that are `sound`; the others stay as they are."""
        replicas = len(next(iter(self._views.values())))
        sound = other.sound(replicas)
        for name, view in self._views.items():
            view.copy_(torch.where(sound.view(-1, *[1] * (view.ndim - 1)), other[name], view))

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parts of a flat tensor, for instance of an optimiser's moments, by parameter name."""
        return {name: flat[place].view(shape) for name, (place, shape) in self._places.items()}

    def state_dict(self) -> StateDict:
        return {name: view.clone() for name, view in self._views.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values in place.

        Raises:
            ParameterError: A saved parameter has another shape; nothing has moved.
        """
        for name, view in self._views.items():
            check_shape(name, "ParameterBlock", state[name], "as built", view.shape)
        for name, view in self._views.items():
            view.copy_(state[name])


class MLP:
    """R independent ReLU MLPs without output layer: h_l = relu(norm(h_(l-1) W_l + b_l)), h_0 = x.

    `norm` is the identity or layer normalisation without learned scale. Weights and biases start uniform in
    +-1/sqrt(fan_in), torch.nn.Linear's rule.

    Args:
        in_dim: Length of x.
        hidden_dims: Width of each layer; the last one is `out_dim`. Empty: h = x.
        num_replicas: R.
        layer_norm: Normalise each layer's pre-activations.
        generator: Source of the initial weights.
        dtype: Of weights and inputs.
        device: Where they live; the generator's.

    Raises:
        ParameterError: A width below one.
    """

    def __init__(
        self,
        in_dim: int,
        hidden_dims: Sequence[int],
        *,
        num_replicas: int = 1,
        layer_norm: bool = False,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.in_dim = check_int("in_dim", "MLP", in_dim)
        self.num_replicas = check_int("num_replicas", "MLP", num_replicas)
        if isinstance(hidden_dims, str) or not isinstance(hidden_dims, Sequence):
            raise ParameterError("hidden_dims", "MLP", "be a list of ints", repr(hidden_dims))
        self.hidden_dims = tuple(check_int("hidden_dims", "MLP", width) for width in hidden_dims)
        self.out_dim = self.hidden_dims[-1] if self.hidden_dims else self.in_dim
        self.layer_norm = bool(layer_norm)
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, (fan_in, width) in enumerate(self._sizes()):
            shapes[f"weight_{layer}"] = (num_replicas, fan_in, width)
            shapes[f"bias_{layer}"] = (num_replicas, 1, width)
        self.parameters = ParameterBlock(shapes, dtype=dtype, device=generator.device)
        for layer, (fan_in, _) in enumerate(self._sizes()):
            weight, bias = self._bounds(layer, fan_in)
            self.parameters[f"weight_{layer}"].uniform_(-weight, weight, generator=generator)
            self.parameters[f"bias_{layer}"].uniform_(-bias, bias, generator=generator)

    def clone(self) -> MLP:
        """Return a copy with its own parameters."""
        copy = object.__new__(type(self))
        copy.__dict__ |= self.__dict__
        copy.parameters = self.parameters.clone()
        return copy

    def _bounds(self, layer: int, fan_in: int) -> tuple[float, float]:
        """Return the largest initial weight and the largest initial bias of a layer."""
        return 1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in)

    def _sizes(self) -> list[tuple[int, int]]:
        return list(zip((self.in_dim, *self.hidden_dims), self.hidden_dims, strict=False))

    @property
    def flops(self) -> int:
        """Floating-point operations of one forward pass of one input of one replica (2 per multiplication)."""
        return sum(2 * fan_in * width for fan_in, width in self._sizes())

    def __call__(self, x: Shaped[Tensor, "replicas batch *in_dim"]) -> Float[Tensor, "replicas batch out_dim"]:
        """Return the top activations h."""
        return self.forward(x)[0][-1]

    def forward(
        self,
        x: Shaped[Tensor, "replicas batch *in_dim"],
        dropout: Float[Tensor, "replicas #batch units"] | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return [x, h_1, ..., h_L], and with layer norm each layer's normalised values and 1/sd, for `backward`.

        Args:
            x: Inputs.
            dropout: What to multiply every h_l by, all layers side by side; all inputs alike where batch is 1.
        """
        activations, norms = [x], []
        factors = None if dropout is None else torch.split_with_sizes(dropout, self.hidden_dims, dim=-1)
        for layer in range(len(self.hidden_dims)):
            z = self._affine(layer, activations[-1])
            if self.layer_norm:
                variance, mean = torch.var_mean(z, dim=-1, keepdim=True, correction=0)
                inverse = (variance + _LAYER_NORM_EPS).rsqrt()
                z = (z - mean) * inverse
                norms += [z, inverse]
                top = z.relu()
            else:
                top = z.relu_()
            activations.append(top if factors is None else top.mul_(factors[layer]))
        return activations, norms

    def _affine(self, layer: int, below: Tensor) -> Tensor:
        """Return h_(l-1) W_l + b_l in new storage."""
        return torch.baddbmm(self.parameters[f"bias_{layer}"], below, self.parameters[f"weight_{layer}"])

    def deltas(
        self,
        activations: list[Tensor],
        norms: list[Tensor],
        grad: Float[Tensor, "replicas batch out_dim"],
        dropout: Float[Tensor, "replicas #batch units"] | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield each layer and its gradient with respect to h_(l-1) W_l + b_l, the top layer first."""
        factors = None if dropout is None else torch.split_with_sizes(dropout, self.hidden_dims, dim=-1)
        for layer in reversed(range(len(self.hidden_dims))):
            # A unit that is dropped is zero, as one below the threshold is.
            grad = grad if factors is None else grad * factors[layer]
            grad = torch.ops.aten.threshold_backward(grad, activations[layer + 1], 0.0)
            if self.layer_norm:
                normalised, inverse = norms[2 * layer : 2 * layer + 2]
                shift = grad.mean(-1, keepdim=True)
                slope = (grad * normalised).mean(-1, keepdim=True)
                grad = (grad - shift - normalised * slope) * inverse
            yield layer, grad
            if layer:
                grad = grad @ self.parameters[f"weight_{layer}"].mT

    def backward(
        self,
        activations: list[Tensor],
        norms: list[Tensor],
        grad: Float[Tensor, "replicas batch out_dim"],
        dropout: Float[Tensor, "replicas #batch units"] | None = None,
    ) -> None:
        """Write the gradients of a loss, given its gradient with respect to the top activations, into the block."""
        for layer, delta in self.deltas(activations, norms, grad, dropout):
            self._write_weight_gradient(layer, activations[layer], delta)
            torch.sum(delta, dim=1, keepdim=True, out=self.parameters.grad(f"bias_{layer}"))

    def _write_weight_gradient(self, layer: int, below: Tensor, delta: Tensor) -> None:
        torch.bmm(below.mT, delta, out=self.parameters.grad(f"weight_{layer}"))


class StateMLP(MLP):
    """An `MLP` on numbers of states: x is an int64 s, and the first layer reads row s of its weights.

    The same function as an MLP on the one-hot vector of s, without the product: reading a row costs its width, whatever
    the number of states. The rows start uniform in +-1/sqrt(width), so that they have one length (about 0.58) for any
    number of states, and all biases at zero. The usual +-1/sqrt(num_states) takes the one-hot vector's length for the
    number of its non-zero entries: rows shrink as states are added, biases are left, and the features of all states
    point the same way.

    Args:
        in_dim: Number of states.
        hidden_dims: Width of each layer, at least one.
        **options: See `MLP`.

    Raises:
        ParameterError: No layer, or a width below one.
    """

    def __init__(self, in_dim: int, hidden_dims: Sequence[int], **options: Any) -> None:
        if not hidden_dims:
            raise ParameterError("hidden_dims", "StateMLP", "hold at least one width", hidden_dims)
        super().__init__(in_dim, hidden_dims, **options)
        first = torch.arange(self.num_replicas, device=self.parameters.flat.device) * in_dim
        self._first_row = first.unsqueeze(-1)

    def rows(self, states: Int[Tensor, "replicas batch"]) -> Int[Tensor, " rows"]:
        """Return the rows of states in a table whose replicas lie one below the other."""
        return (states + self._first_row).flatten()

    def _bounds(self, layer: int, fan_in: int) -> tuple[float, float]:
        return 1 / math.sqrt(self.hidden_dims[0] if layer == 0 else fan_in), 0.0

    def _affine(self, layer: int, below: Tensor) -> Tensor:
        if layer:
            return super()._affine(layer, below)
        rows = self.parameters["weight_0"].flatten(0, 1).index_select(0, self.rows(below))
        return rows.view(*below.shape, -1).add_(self.parameters["bias_0"])

    def _write_weight_gradient(self, layer: int, below: Tensor, delta: Tensor) -> None:
        if layer:
            super()._write_weight_gradient(layer, below, delta)
            return
        gradient = self.parameters.grad("weight_0").zero_().flatten(0, 1)
        gradient.index_add_(0, self.rows(below), delta.flatten(0, 1))
