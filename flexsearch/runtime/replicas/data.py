"""Real data without downloads: digits of scikit-learn, text of Python's own library, CIFAR-10 from a folder."""

from __future__ import annotations

import importlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from flexsearch.errors import DatasetError, FileFormatError

CONTEXT: Final = 16
"""Letters that the next one is guessed from."""
LETTERS: Final = 128
"""Of the text: ASCII."""
SAMPLES: Final = 60_000
"""Of the text, for training; a tenth more is held out."""
HELD_OUT: Final = 5
"""One of so many digits is held out."""
_CIFAR_ROW: Final = 1 + 3 * 32 * 32


@dataclass(frozen=True)
class Dataset:
    """``inputs`` and ``targets`` for training, (samples, ...), and those held out; ``classes`` of the targets."""

    name: str
    inputs: Tensor
    targets: Tensor
    held_inputs: Tensor
    held_targets: Tensor
    classes: int

    @property
    def is_text(self) -> bool:
        """Whether inputs are indices of letters."""
        return not self.inputs.is_floating_point()


def load_dataset(name: str) -> Dataset:
    """ "digits", "text", or "cifar10:FOLDER". Raises DatasetError that names the remedy."""
    kind, _, path = name.partition(":")
    if kind == "digits" and not path:
        return _digits()
    if kind == "text" and not path:
        return _text()
    if kind == "cifar10":
        return _cifar10(path)
    raise DatasetError(f"there is no data set {name!r}", "Give digits, text, or cifar10:FOLDER.")


def _digits() -> Dataset:
    """1,797 images of 8x8."""
    try:
        data = importlib.import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise DatasetError(
            "the digits are part of scikit-learn, which is not installed",
            "pip install scikit-learn, or take --dataset text.",
        ) from error
    images = torch.from_numpy(np.asarray(data.data, np.float32) / 16).view(-1, 1, 8, 8)
    targets = torch.from_numpy(np.asarray(data.target, np.int64))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(images)))
    held, kept = order[: len(order) // HELD_OUT], order[len(order) // HELD_OUT :]
    return Dataset("digits", images[kept], targets[kept], images[held], targets[held], 10)


def _text() -> Dataset:
    """The source text of Python's standard library: from 16 letters, the next. Positions are drawn once, the last tenth
    of the text is held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) < 10 * (CONTEXT + 1):
        raise DatasetError(f"there is no source text in {folder}", "Take another --dataset.")
    letters = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64) % LETTERS)
    split, rng = len(letters) * 9 // 10, np.random.default_rng(0)

    def drawn(first: int, last: int, count: int) -> tuple[Tensor, Tensor]:
        at = torch.from_numpy(rng.integers(first, last - CONTEXT - 1, count)).unsqueeze(1)
        window = letters[at + torch.arange(CONTEXT + 1)]
        return window[:, :-1].contiguous(), window[:, -1].contiguous()

    return Dataset("text", *drawn(0, split, SAMPLES), *drawn(split, len(letters), SAMPLES // 10), LETTERS)


def _cifar10(path: str) -> Dataset:
    """The binary version. (The one for Python is pickled, and reading it would run what it says.)"""
    folder = Path(path)
    names = [f"data_batch_{k}.bin" for k in range(1, 6)]
    if not path or not (folder / names[0]).is_file():
        raise DatasetError(
            f"there is no data_batch_1.bin in {path!r}" if path else "where is CIFAR-10?",
            "Give cifar10:FOLDER, the folder of its binary version (cifar-10-batches-bin).",
        )
    inputs, targets = _records([folder / name for name in names if (folder / name).is_file()])
    return Dataset("cifar10", inputs, targets, *_records([folder / "test_batch.bin"]), 10)


def _records(paths: list[Path]) -> tuple[Tensor, Tensor]:
    """Images, (samples, 3, 32, 32) from -1 to 1, and labels."""
    try:
        data = np.concatenate([np.frombuffer(path.read_bytes(), np.uint8) for path in paths])
    except OSError as error:
        raise DatasetError(f"cannot read {error.filename}: {error.strerror}", "Give another folder.") from error
    if len(data) % _CIFAR_ROW or not len(data) or data[::_CIFAR_ROW].max() > 9:
        raise FileFormatError(
            f"{paths[0]} is no file of CIFAR-10's binary version: records of {_CIFAR_ROW} bytes, a label first",
            "Unpack cifar-10-binary.tar.gz anew.",
        )
    rows = torch.from_numpy(data.reshape(-1, _CIFAR_ROW).copy())
    return rows[:, 1:].view(-1, 3, 32, 32).float() / 127.5 - 1, rows[:, 0].long()
