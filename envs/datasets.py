"""Classification data for bandits: from a local folder, from OpenML, or embedded in scikit-learn."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Float, Float32, Int64, Shaped

from ensemblepp.envs.common import import_data_library
from ensemblepp.errors import ParameterError, check_choice, check_int

Scaling: TypeAlias = Literal["standard", "unit_norm"]
CLIP = 5.0
"""Standardised features are cut at this many standard deviations: one outlier must not own a linear posterior."""


@dataclass(frozen=True)
class ClassificationData:
    """Labelled rows that a `ClassificationBandit` deals out one at a time; the features count as prepared.

    Attributes:
        features: One row per example, finite.
        labels: The class of each row, in [0, num_classes).
        num_classes: The number of classes, which become arms.
        name: What to call the data in reports.
        source: Where the rows came from.

    Raises:
        ParameterError: Shapes or dtypes do not fit, a feature is not finite, or a label is out of range.
    """

    features: Float32[np.ndarray, "rows feature_dim"]
    labels: Int64[np.ndarray, " rows"]
    num_classes: int
    name: str = "custom"
    source: str = "arrays"

    def __post_init__(self) -> None:
        owner = "ClassificationData"
        features, labels = self.features, self.labels
        check_int("num_classes", owner, self.num_classes)
        if not isinstance(features, np.ndarray) or features.ndim != 2 or 0 in features.shape:
            raise ParameterError("features", owner, "be an array (rows, feature_dim), both >= 1", _describe(features))
        if features.dtype != np.float32:
            raise ParameterError("features", owner, "have dtype float32", f"dtype {features.dtype}")
        if not isinstance(labels, np.ndarray) or labels.shape != features.shape[:1]:
            raise ParameterError("labels", owner, f"have shape (rows) = ({len(features)})", _describe(labels))
        if labels.dtype != np.int64:
            raise ParameterError("labels", owner, "have dtype int64", f"dtype {labels.dtype}")
        _check_each("features", "be finite", np.isfinite(features), features)
        _check_each("labels", f"be in [0, {self.num_classes})", (labels >= 0) & (labels < self.num_classes), labels)

    @classmethod
    def from_arrays(
        cls,
        features: Shaped[np.ndarray, "rows feature_dim"],
        labels: Shaped[np.ndarray, " rows"],
        *,
        standardise: bool = True,
        name: str = "custom",
        source: str = "arrays",
    ) -> ClassificationData:
        """Make data from arrays of any numeric dtype and labels of any sortable kind.

        Args:
            features: One numeric row per example.
            labels: The classes; class number i is the i-th of the sorted distinct labels.
            standardise: Scale every column to (x - mean) / sd, clipped at +-5; a constant column becomes 0. False
                keeps the features as they are.
            name: What to call the data in reports.
            source: Where the rows came from.

        Raises:
            ParameterError: See the class.
            ImportError: `standardise` without scikit-learn.
        """
        try:
            values = np.asarray(features, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ParameterError("features", "ClassificationData", "be numeric", _describe(features)) from error
        if values.ndim != 2 or 0 in values.shape:
            rule = "be an array (rows, feature_dim), both >= 1"
            raise ParameterError("features", "ClassificationData", rule, _describe(values))
        # Before the scaler sees them: scikit-learn lets NaN through and its error on infinity names no index.
        _check_each("features", "be finite", np.isfinite(values), values)
        classes, numbers = np.unique(np.asarray(labels), return_inverse=True)
        scaled = _standardise(values) if standardise else values
        return cls(scaled.astype(np.float32), numbers.astype(np.int64), max(len(classes), 1), name, source)

    def prepared(self, scaling: Scaling = "standard", intercept: bool = False) -> ClassificationData:
        """Return the data with rows divided by their Euclidean norm ("unit_norm"), then a constant 1 appended.

        "standard" leaves the features as they are, because loading has standardised them; a zero row stays zero.

        Raises:
            ParameterError: `scaling` is neither of the two.
        """
        check_choice("scaling", "ClassificationData", scaling, ("standard", "unit_norm"))
        features = self.features
        if scaling == "unit_norm":
            norm = np.linalg.norm(features, axis=1, keepdims=True)
            features = features / np.where(norm > 0, norm, np.float32(1))
        if intercept:
            features = np.concatenate([features, np.ones((len(features), 1), np.float32)], axis=1)
        return self if features is self.features else replace(self, features=features)


@dataclass(frozen=True)
class _Table:
    """How to read one data set.

    `target` is the column that OpenML hands over apart from the others, `label` the column to predict.
    """

    file: str
    openml_id: int
    target: str
    label: str
    categorical: tuple[str, ...] | Literal["all"] = ()
    dropped: tuple[str, ...] = ()


_ADULT = ("workclass", "education", "marital-status", "occupation", "relationship", "race", "sex", "native-country")
# An OpenML data id pins one version of one set; a name would follow whatever version is active.
_TABLES = {
    "mushroom": _Table("mushroom/mushroom.csv.gz", 24, "class", "class", categorical="all"),
    "shuttle": _Table("shuttle/shuttle.csv.gz", 40685, "class", "class"),
    "letter": _Table("letter/letter.csv.gz", 6, "lettr", "lettr"),
    "adult": _Table("adult/adult.csv.gz", 1590, "income", "income", _ADULT, ("split",)),
    "adult_occupation": _Table("adult/adult.csv.gz", 1590, "income", "occupation", (*_ADULT, "income"), ("split",)),
    "magic": _Table("magic/magic.csv.gz", 1120, "class", "class"),
    "covertype": _Table("covertype/covertype_20k.csv.gz", 1596, "Cover_Type", "Cover_Type"),
}
DATASETS: tuple[str, ...] = ("digits", *_TABLES)
"""The names that `load_dataset` knows."""


def load_dataset(
    name: str, *, data_dir: str | Path | None = None, scaling: Scaling = "standard", intercept: bool = False
) -> ClassificationData:
    """Load a classification data set with numeric features.

    Numeric columns become (x - mean) / sd over all rows, clipped at +-5, constant columns 0; categorical columns
    become one 0/1 column per level, with a missing value ("?") as a level of its own. Numeric columns come first.
    Class number i is the i-th of the sorted class names, so shuttle's class "1" is label 0.

    Args:
        name: One of `DATASETS`: digits (1797 rows, 10 classes, inside scikit-learn), mushroom (8124, 2), shuttle
            (58000, 7), letter (20000, 26), adult (48842, 2: income), adult_occupation (46033 with a known occupation,
            14; income is a feature), magic (19020, 2), covertype (7 classes; 20000 rows locally, 581012 on OpenML).
        data_dir: Folder with `shuttle/shuttle.csv.gz` and so on; by default the environment variable
            ENSEMBLEPP_DATA. Without a local file the set is fetched from OpenML, unless `data_dir` was given.
        scaling: "unit_norm" also divides each row by its Euclidean norm.
        intercept: Append a constant 1 to each row, after the scaling.

    Returns:
        The features (rows, feature_dim) as float32 and the labels (rows) as int64.

    Raises:
        ParameterError: The name is unknown, or `data_dir` lacks the file.
        ImportError: scikit-learn or pandas is missing.
        FileNotFoundError: There is no local file, and OpenML did not answer.

    Source: UCI repository sets as used in Riquelme et al. (arXiv 1802.09127), section 5, and Zhou et al.
        (arXiv 1911.04462), section 7.
    """
    check_choice("name", "load_dataset", name, DATASETS)
    check_choice("scaling", "load_dataset", scaling, ("standard", "unit_norm"))
    return (_load_digits() if name == "digits" else _load_table(name, data_dir)).prepared(scaling, intercept)


def _load_digits() -> ClassificationData:
    features, labels = import_data_library("sklearn.datasets").load_digits(return_X_y=True)
    return ClassificationData.from_arrays(features, labels, name="digits", source="scikit-learn load_digits")


def _load_table(name: str, data_dir: str | Path | None) -> ClassificationData:
    table = _TABLES[name]
    frame, source = _read(name, table, data_dir)
    frame = frame.drop(columns=[column for column in table.dropped if column in frame.columns])
    if table.label == "occupation":
        frame = frame[frame["occupation"].astype(str) != "?"]  # unknown is a level as a feature, but no class
    labels = frame[table.label].astype(str).to_numpy(dtype=str)
    inputs = frame.drop(columns=table.label)
    levels = [column for column in inputs.columns if table.categorical == "all" or column in table.categorical]
    numeric = inputs.drop(columns=levels).astype("float64").to_numpy()
    blocks = [_standardise(numeric)] if numeric.shape[1] else []
    if levels:
        encoder = import_data_library("sklearn.preprocessing").OneHotEncoder(sparse_output=False, dtype=np.float32)
        blocks.append(encoder.fit_transform(inputs[levels].astype(str).to_numpy(dtype=object)))
    features = np.concatenate(blocks, axis=1)
    return ClassificationData.from_arrays(features, labels, standardise=False, name=name, source=source)


def _read(name: str, table: _Table, data_dir: str | Path | None) -> tuple[Any, str]:
    """Return the table as a pandas frame without missing values, and where it came from."""
    pandas = import_data_library("pandas")
    folder = data_dir if data_dir is not None else os.environ.get("ENSEMBLEPP_DATA") or None
    path = None if folder is None else Path(folder) / table.file
    if path is not None and path.is_file():
        # "NA" and "?" are levels of these files, not holes in them.
        return pandas.read_csv(path, keep_default_na=False, skipinitialspace=True), str(path)
    if data_dir is not None:
        raise ParameterError("data_dir", "load_dataset", f"hold {table.file} for {name!r}", str(data_dir))
    datasets = import_data_library("sklearn.datasets")
    try:
        bunch = datasets.fetch_openml(data_id=table.openml_id, as_frame=True, parser="auto")
    except (OSError, HTTPException, ValueError) as error:
        looked = f"there is no file {path}" if path else f"ENSEMBLEPP_DATA, the folder of {table.file}, is not set"
        raise FileNotFoundError(
            f"data set {name!r} is not at hand: {looked}, and OpenML (data id {table.openml_id}) failed with "
            f"{type(error).__name__}: {error}. Pass data_dir= or set ENSEMBLEPP_DATA to a folder with {table.file}."
        ) from error
    frame = bunch.data.assign(**{table.target: bunch.target})
    holes = frame.columns[frame.isna().any()]
    # OpenML turns the "?" of the UCI files into missing values.
    filled = {column: frame[column].astype(object).fillna("?") for column in holes}
    return frame.assign(**filled), f"OpenML data id {table.openml_id}"


def _standardise(values: Float[np.ndarray, "rows feature_dim"]) -> Float[np.ndarray, "rows feature_dim"]:
    scaled = np.clip(import_data_library("sklearn.preprocessing").StandardScaler().fit_transform(values), -CLIP, CLIP)
    scaled[:, values.min(axis=0) == values.max(axis=0)] = 0  # exactly, where the rounded mean left a residue
    return np.asarray(scaled)


def _describe(value: object) -> str:
    return f"shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__


def _check_each(name: str, rule: str, valid: Shaped[np.ndarray, "..."], values: Shaped[np.ndarray, "..."]) -> None:
    if not valid.all():
        index = tuple(int(i) for i in np.argwhere(~valid)[0])
        raise ParameterError(name, "ClassificationData", rule, f"{values[index]} at index {index}")
