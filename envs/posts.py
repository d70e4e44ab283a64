"""Posts for content moderation: two public sets, a synthetic one without downloads, and hashed n-gram features."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32
from numpy.typing import NDArray

from ensemblepp.envs.common import import_data_library
from ensemblepp.envs.datasets import ClassificationData
from ensemblepp.errors import ParameterError, check_choice, check_int

_FILES = {
    "davidson": "text/davidson_labeled_data.csv.gz",
    "hatecheck": "text/hatecheck_test_suite_cases.csv.gz",
}
SOURCES = ("synthetic", *_FILES)
CLEAN, OFFENSIVE = 0, 1

# A synthetic post is one opening, one subject and one close. Insults come in spellings that a word list would miss, and
# words that insult in one frame are quoted in another.
_VOCABULARY = """
openings: honestly, well, listen, today, again, so, ok, wow, hey all, look, just saying, fyi, really, anyway
subjects: the game, this song, my team, the weather, that movie, the new update, our bus, this recipe, your photo
kind: was great, is lovely, went fine, made my day, could be better, is not bad, was a bit slow, needs work, rocks
rude: idiot, moron, loser, clown, fool, stupid, pathetic, dumb, garbage, trash
insults: you are {}, what a {}, only a {} likes it, shut up {}, such {} people, {} as always
quotes: they called me {} and it hurt, the word {} is in the lyrics, do not say {} to anyone
"""
_LINES = (line.split(": ") for line in _VOCABULARY.strip().splitlines())
_WORDS = {name: words.split(", ") for name, words in _LINES}
_MISTAKEN = 0.04
"""Share of synthetic posts with the wrong label, as annotators have them."""


@dataclass(frozen=True)
class Posts:
    """Texts, and which of them are offensive."""

    texts: list[str]
    offensive: Bool[np.ndarray, " posts"]
    name: str
    source: str

    def with_features(self, features: Float32[np.ndarray, "posts feature_dim"]) -> ClassificationData:
        """Return the posts as rows for a `ModerationBandit`: class 0 clean, class 1 offensive."""
        labels = np.where(self.offensive, OFFENSIVE, CLEAN).astype(np.int64)
        return ClassificationData(features, labels, 2, self.name, self.source)


def load_posts(name: str, *, data_dir: str | Path | None = None, num_posts: int = 6000, seed: int = 0) -> Posts:
    """Return a set of posts.

    Args:
        name: "davidson" (24,783 posts; hate and offensive language count as offensive), "hatecheck" (3,728 test cases
            of another kind; hateful counts as offensive) or "synthetic" (made here, no file needed).
        data_dir: Folder with `text/...csv.gz`; by default the environment variable ENSEMBLEPP_DATA.
        num_posts: Size of the synthetic set.
        seed: Seed of the synthetic set.

    Raises:
        ParameterError: An unknown name.
        FileNotFoundError: The file is not there.

    Source: Davidson et al. (arXiv 1703.04009); Röttger et al., HateCheck (arXiv 2012.15606).
    """
    check_choice("name", "load_posts", name, SOURCES)
    if name == "synthetic":
        return _write_posts(check_int("num_posts", "load_posts", num_posts), seed)
    folder = data_dir if data_dir is not None else os.environ.get("ENSEMBLEPP_DATA")
    path = Path(folder or ".") / _FILES[name]
    if folder is None or not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: pass data_dir= or set ENSEMBLEPP_DATA to a folder with {_FILES[name]}"
        )
    frame = import_data_library("pandas").read_csv(path, keep_default_na=False)
    if name == "davidson":
        return Posts(frame["tweet"].tolist(), (frame["class"] != 2).to_numpy(bool), name, str(path))
    return Posts(frame["test_case"].tolist(), (frame["label_gold"] == "hateful").to_numpy(bool), name, str(path))


def _write_posts(count: int, seed: int) -> Posts:
    rng = np.random.default_rng([seed, 0x9057])

    def pick(name: str) -> str:
        return _WORDS[name][rng.integers(len(_WORDS[name]))]

    texts, offensive = [], np.zeros(count, dtype=bool)
    for i in range(count):
        close = ("insults", "quotes", "kind")[rng.choice(3, p=[0.5, 0.15, 0.35])]
        text = f"{pick('openings')} {pick('subjects')} {pick(close)}"
        texts.append(text.format(_misspell(pick("rude"), rng)))
        offensive[i] = (close == "insults") != (rng.random() < _MISTAKEN)
    return Posts(texts, offensive, "synthetic", f"made with seed {seed}")


def _misspell(word: str, rng: np.random.Generator) -> str:
    place = int(rng.integers(len(word)))
    changes = [word, word, word[:place] + "*" + word[place + 1 :], word[:place] + word[place] + word[place:]]
    return changes[rng.integers(len(changes))]


def hashed_features(fitting: list[str], *others: list[str], dim: int = 64, seed: int = 0) -> list[NDArray[np.float32]]:
    """Return `dim` features of every text: hashed character n-grams, reduced by the singular vectors of `fitting`.

    Columns are scaled to standard deviation 1 on `fitting` and clipped at +-5. No labels are used.

    Args:
        fitting: Texts that set the directions and scales.
        *others: Further lists of texts, mapped in the same way.
        dim: Number of features.
        seed: Seed of the randomised decomposition.

    Raises:
        ParameterError: Fewer texts than features.
        ImportError: scikit-learn is missing.
    """
    if len(fitting) <= check_int("dim", "hashed_features", dim):
        raise ParameterError("fitting", "hashed_features", f"hold more than dim = {dim} texts", len(fitting))
    text, decomposition = (
        import_data_library("sklearn.feature_extraction.text"),
        import_data_library("sklearn.decomposition"),
    )
    hashing = text.HashingVectorizer(analyzer="char_wb", ngram_range=(2, 4), n_features=2**16, alternate_sign=False)
    reduce = decomposition.TruncatedSVD(dim, random_state=seed).fit(hashing.transform(fitting))
    found = [reduce.transform(hashing.transform(texts)) for texts in (fitting, *others)]
    return standardise(found)


def standardise(features: list[NDArray[Any]]) -> list[NDArray[np.float32]]:
    """Return arrays scaled by mean and standard deviation of the first one, clipped at +-5."""
    mean, spread = features[0].mean(0), features[0].std(0)
    spread = np.where(spread > 0, spread, 1.0)
    return [np.clip((each - mean) / spread, -5, 5).astype(np.float32) for each in features]
