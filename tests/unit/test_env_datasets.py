import gzip
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest

from ensemblepp.envs import DATASETS, ClassificationData, load_dataset
from ensemblepp.errors import ParameterError

FACTS = {
    # name: rows, features, rows of each class in sorted order of the class names
    "mushroom": (8124, 117, [4208, 3916]),
    "shuttle": (58000, 9, [45586, 50, 171, 8903, 3267, 10, 13]),
    "letter": (20000, 16, None),
    "adult": (48842, 6 + 102, [37155, 11687]),
    "adult_occupation": (
        46033,
        6 + 85 + 2,
        [5611, 15, 6112, 6086, 1490, 2072, 3022, 4923, 242, 6172, 983, 5504, 1446, 2355],
    ),
    "magic": (19020, 10, [12332, 6688]),
    "covertype": (20000, 54, [7232, 9728, 1275, 92, 339, 592, 742]),
}
MUSHROOM = "class,cap,odor,veil\np,x,?,w\ne,NA,1,w\ne,x,1,w\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("mushroom", "magic"):
        (tmp_path / name).mkdir()
    with gzip.open(tmp_path / "mushroom" / "mushroom.csv.gz", "wt") as file:
        file.write(MUSHROOM)
    with gzip.open(tmp_path / "magic" / "magic.csv.gz", "wt") as file:
        file.write("a,b,class\n1,7,h\n3,7,g\n")
    return tmp_path


def test_digits() -> None:
    data = load_dataset("digits")
    assert data.features.shape == (1797, 64)
    assert (data.num_classes, data.name) == (10, "digits")
    assert np.bincount(data.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert float(np.abs(data.features).max()) == 5.0
    assert not data.features[:, 0].any()  # the corner pixel is never inked


@pytest.mark.parametrize("name", FACTS)
def test_facts_of_the_sets(name: str, data_dir: Path) -> None:
    data = load_dataset(name, data_dir=data_dir)
    num_rows, num_features, balance = FACTS[name]
    assert data.features.shape == (num_rows, num_features)
    assert (data.features.dtype, data.labels.dtype) == (np.float32, np.int64)
    counts = np.bincount(data.labels, minlength=data.num_classes)
    assert len(counts) == data.num_classes == (26 if balance is None else len(balance))
    assert int(counts.min()) > 0
    if balance is not None:
        assert counts.tolist() == balance
    assert float(np.abs(data.features).max()) <= 5.0
    assert str(data_dir) in data.source
    unclipped = (np.abs(data.features) < 5).all(axis=0) & (data.features % 1 != 0).any(axis=0)
    assert np.allclose(data.features[:, unclipped].mean(axis=0), 0, atol=1e-4)
    assert np.allclose(data.features[:, unclipped].std(axis=0), 1, atol=1e-4)


def test_shuttle_is_mostly_one_class(data_dir: Path) -> None:
    assert round(100 * float((load_dataset("shuttle", data_dir=data_dir).labels == 0).mean()), 1) == 78.6


def test_mushroom_keeps_the_unknown_level(data_dir: Path) -> None:
    features = load_dataset("mushroom", data_dir=data_dir).features
    assert set(np.unique(features)) == {0.0, 1.0}
    assert set(features.sum(axis=1)) == {22.0}  # one level of each of 22 attributes
    assert 2480 in features.sum(axis=0)  # stalk-root is unknown in 2480 rows


def test_labels_follow_the_rows(data_dir: Path) -> None:
    data = load_dataset("letter", data_dir=data_dir)
    with gzip.open(data_dir / "letter" / "letter.csv.gz", "rt") as file:
        lines = [line.split(",") for line in file.read().split()[1:]]
    assert data.labels.tolist() == [ord(line[0]) - ord("A") for line in lines]
    column = np.array([float(line[3]) for line in lines])
    assert np.allclose(data.features[:, 2], np.clip((column - column.mean()) / column.std(), -5, 5), atol=1e-5)


def test_small_files_by_hand(folder: Path) -> None:
    mushroom = load_dataset("mushroom", data_dir=folder)
    # Levels in order: cap NA, x; odor 1, ?; veil w.
    assert mushroom.features.tolist() == [[0, 1, 0, 1, 1], [1, 0, 1, 0, 1], [0, 1, 1, 0, 1]]
    assert mushroom.labels.tolist() == [1, 0, 0]
    magic = load_dataset("magic", data_dir=str(folder))
    assert magic.features.tolist() == [[-1, 0], [1, 0]]
    assert magic.labels.tolist() == [1, 0]
    last = load_dataset("magic", data_dir=folder, scaling="unit_norm", intercept=True)
    assert last.features.tolist() == [[-1, 0, 1], [1, 0, 1]]


def test_the_folder_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENSEMBLEPP_DATA", str(folder))
    assert load_dataset("magic").source == str(folder / "magic" / "magic.csv.gz")


def test_a_missing_file_in_a_given_folder(tmp_path: Path) -> None:
    with pytest.raises(ParameterError) as caught:
        load_dataset("shuttle", data_dir=tmp_path)
    message = f"data_dir of load_dataset must hold shuttle/shuttle.csv.gz for 'shuttle'; got {tmp_path}."
    assert str(caught.value) == message


@pytest.mark.parametrize("given", [True, False])
def test_openml_out_of_reach(given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise URLError("no route")

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fail)
    monkeypatch.delenv("ENSEMBLEPP_DATA", raising=False)
    if given:
        monkeypatch.setenv("ENSEMBLEPP_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError) as caught:
        load_dataset("magic")
    file = "magic/magic.csv.gz"
    looked = f"there is no file {tmp_path / file}" if given else f"ENSEMBLEPP_DATA, the folder of {file}, is not set"
    assert str(caught.value) == (
        f"data set 'magic' is not at hand: {looked}, and OpenML (data id 1120) failed with URLError: <urlopen error "
        f"no route>. Pass data_dir= or set ENSEMBLEPP_DATA to a folder with {file}."
    )


def test_openml_gives_what_the_file_gives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenML hands over the target apart, with category columns, another target name, and "?" as missing."""
    import pandas

    frame = pandas.DataFrame({"cap": ["x", "NA", "x"], "odor": [None, "1", "1"], "veil": ["w", "w", "w"]})
    bunch = SimpleNamespace(data=frame.astype("category"), target=pandas.Series(["p", "e", "e"], name="class:"))
    asked: dict[str, Any] = {}

    def fetch(**kwargs: Any) -> SimpleNamespace:
        asked.update(kwargs)
        return bunch

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch)
    monkeypatch.delenv("ENSEMBLEPP_DATA", raising=False)
    fetched, read = load_dataset("mushroom"), load_dataset("mushroom", data_dir=folder)
    assert asked == {"data_id": 24, "as_frame": True, "parser": "auto"}
    assert np.array_equal(fetched.features, read.features)
    assert np.array_equal(fetched.labels, read.labels)
    assert fetched.source == "OpenML data id 24"


def test_openml_numbers_as_categories(monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas

    frame = pandas.DataFrame({"height": [1, 3, 1, 3], "soil": pandas.Series(["0", "0", "1", "1"], dtype="category")})
    bunch = SimpleNamespace(data=frame, target=pandas.Series(["2", "1", "2", "7"], dtype="category"))
    monkeypatch.setattr("sklearn.datasets.fetch_openml", lambda **_: bunch)
    monkeypatch.delenv("ENSEMBLEPP_DATA", raising=False)
    data = load_dataset("covertype")
    assert data.features.tolist() == [[-1, -1], [1, -1], [-1, 1], [1, 1]]
    assert data.labels.tolist() == [1, 0, 1, 2]


@pytest.mark.parametrize(("module", "package"), [("sklearn", "sklearn"), ("pandas", "pandas")])
def test_a_missing_extra(module: str, package: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == module or name.startswith(module + ".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError) as caught:
        load_dataset("magic", data_dir=folder)
    assert str(caught.value) == f"{package} is missing; install it with: pip install 'ensemblepp[data]'"


def test_unknown_names() -> None:
    assert set(DATASETS) == {"digits", *FACTS}
    with pytest.raises(ParameterError, match=r"name of load_dataset must be one of 'adult', .*; got 'iris'"):
        load_dataset("iris")


def test_scaling_and_clipping_of_arrays() -> None:
    values = np.concatenate([np.zeros(99), [100.0]])
    features = np.stack([values, np.full(100, 0.1)], axis=1)
    data = ClassificationData.from_arrays(features, np.array(["b", "a"] * 50))
    sd = np.sqrt(99) / 100 * 100
    assert data.features[0].tolist() == pytest.approx([-1 / sd, 0])
    assert data.features[99].tolist() == [5.0, 0.0]  # (100 - 1) / sd = 9.95, clipped
    assert not data.features[:, 1].any()
    assert data.labels[:2].tolist() == [1, 0]
    raw = ClassificationData.from_arrays(features, np.array(["b", "a"] * 50), standardise=False)
    assert np.array_equal(raw.features, features.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.bool_, np.float64])
def test_arrays_of_any_numeric_dtype(dtype: Any) -> None:
    data = ClassificationData.from_arrays(np.array([[0, 1], [1, 0]], dtype), np.array([7, 3]))
    assert data.features.tolist() == [[-1, 1], [1, -1]]
    assert data.labels.tolist() == [1, 0]


F = np.zeros((3, 2), np.float32)
L = np.array([0, 1, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (F[0], L, 2),
            "features of ClassificationData must be an array (rows, feature_dim), both >= 1; got shape (2,).",
        ),
        (
            (F[:0], L[:0], 2),
            "features of ClassificationData must be an array (rows, feature_dim), both >= 1; got shape ",
        ),
        (([[1.0]], L, 2), "features of ClassificationData must be an array (rows, feature_dim), both >= 1; got list."),
        ((F.astype(np.float64), L, 2), "features of ClassificationData must have dtype float32; got dtype float64."),
        ((F, L[:2], 2), "labels of ClassificationData must have shape (rows) = (3); got shape (2,)."),
        ((F, L.astype(np.int32), 2), "labels of ClassificationData must have dtype int64; got dtype int32."),
        ((F, L, 1), "labels of ClassificationData must be in [0, 1); got 1 at index (1,)."),
        ((F, L - 1, 2), "labels of ClassificationData must be in [0, 2); got -1 at index (0,)."),
        ((F, L, 0), "num_classes of ClassificationData must be an int >= 1; got 0."),
        (
            (np.array([[0, 1], [2, np.inf], [0, 0]], np.float32), L, 2),
            "features of ClassificationData must be finite; got inf at index (1, 1).",
        ),
    ],
)
def test_data_that_is_refused(arguments: tuple[Any, ...], message: str, without_shape_checks: None) -> None:
    with pytest.raises(ParameterError) as caught:
        ClassificationData(*arguments)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (np.array([["a", "b"]]), "features of ClassificationData must be numeric; got shape (1, 2)."),
        (np.array([[1.0, np.nan]]), "features of ClassificationData must be finite; got nan at index (0, 1)."),
        (
            np.zeros((0, 2)),
            "features of ClassificationData must be an array (rows, feature_dim), both >= 1; got shape ",
        ),
    ],
)
def test_arrays_that_are_refused(features: Any, message: str, without_shape_checks: None) -> None:
    with pytest.raises(ParameterError) as caught:
        ClassificationData.from_arrays(features, np.zeros(len(features)))
    assert str(caught.value).startswith(message)
