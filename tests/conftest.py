"""Fixtures and settings that every test shares."""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jaxtyping
import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[1]

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of the public data sets; tests that need it skip where it is absent."""
    named = os.environ.get("ENSEMBLEPP_DATA")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; set ENSEMBLEPP_DATA")
    return folder


@pytest.fixture
def without_shape_checks() -> Iterator[None]:
    """Switch off the run-time check of annotations, to reach the library's own errors on bad shapes and types."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
