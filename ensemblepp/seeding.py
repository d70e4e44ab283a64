"""Named random streams from one root seed; the library never touches a global generator."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ensemblepp.errors import check_int


def make_generator(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return the generator of stream `name` under root `seed`.

    Streams of different names or seeds are independent (numpy's SeedSequence over seed and name), so an agent and
    an environment built with one seed share no random number.
    """
    check_int("seed", f"stream {name!r}", seed, minimum=0)
    sequence = np.random.SeedSequence([seed, zlib.crc32(name.encode())])
    return torch.Generator(device).manual_seed(int(sequence.generate_state(1, np.uint64)[0]))


class Streams:
    """The named generators of one agent or environment, saved and restored together."""

    def __init__(self, seed: int, *names: str, device: torch.device | str = "cpu") -> None:
        self._generators = {name: make_generator(seed, name, device) for name in names}

    def __getitem__(self, name: str) -> torch.Generator:
        return self._generators[name]

    def state_dict(self) -> dict[str, Tensor]:
        return {name: generator.get_state() for name, generator in self._generators.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, generator in self._generators.items():
            generator.set_state(state[name])

    @contextmanager
    def rollback(self) -> Iterator[None]:
        """Put every stream back where it was if the block raises, so that a refused call draws nothing."""
        saved = self.state_dict()
        try:
            yield
        except BaseException:
            self.load_state_dict(saved)
            raise
