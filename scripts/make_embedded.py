"""Makes src/cfedavg/data/mnist_subset.npz: `python scripts/make_embedded.py FOLDER`.

FOLDER holds MNIST as the Hugging Face hub has it (`ylecun/mnist`): train-*.parquet and test-*.parquet in
the official order. Of each class the first 1,000 train and 200 test images are taken.
"""

import sys
from pathlib import Path

import numpy as np

from cfedavg.data import Images, load

TARGET = Path(__file__).parents[1] / "src" / "cfedavg" / "data" / "mnist_subset.npz"
TAKEN = {"train": 1000, "test": 200}


def first_of_each_class(labels: np.ndarray, n: int) -> np.ndarray:
    """The indices of the first n samples of each class, in their original order."""
    return np.sort(np.concatenate([np.flatnonzero(labels == c)[:n] for c in np.unique(labels)]))


def subset(images: Images, n: int) -> Images:
    chosen = first_of_each_class(images.labels, n)
    return Images(images.pixels[chosen], images.labels[chosen])


def main(folder: str) -> None:
    mnist = load("mnist", data_dir=folder)
    arrays = {}
    for split, n in TAKEN.items():
        part = subset(getattr(mnist, split), n)
        arrays |= {f"{split}_pixels": part.pixels, f"{split}_labels": part.labels}
    np.savez_compressed(TARGET, **arrays)
    print(f"{TARGET.name}: {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
