"""The real checkpoints, loaded once. Their tests are marked `real`, and `long`, because pip fetches 93 and 238 MB for
them."""

from pathlib import Path

import numpy as np
import pytest
from real_checkpoint import CHECKPOINTS, NotFetched, fetch

from kvjax.models import load

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Every test of this folder gets the marks."""
    for item in items:
        if HERE in item.path.parents:
            for mark in ("real", "long", "optimized"):
                item.add_marker(mark)


@pytest.fixture(scope="session")
def fetched(request, tmp_path_factory):
    """Gives the GGUF file of a name, kept in pytest's cache if there is one. Where pip cannot fetch it, the test skips;
    in `make real` it fails."""
    cache = getattr(request.config, "cache", None)  # Bazel runs pytest without
    folder = tmp_path_factory.mktemp("fetched") if cache is None else Path(cache.mkdir("real"))

    def file(name):
        try:
            return fetch(folder, CHECKPOINTS[name])
        except NotFetched as error:
            if request.config.getoption("--require-real"):
                pytest.fail(str(error))
            pytest.skip(str(error))

    return file


@pytest.fixture(scope="session")
def gguf_file(fetched):
    """SmolLM2-135M-Instruct."""
    return fetched("smollm2")


@pytest.fixture(scope="session")
def model(gguf_file):
    """SmolLM2-135M-Instruct, in float32."""
    return load(gguf_file, dtype="float32")


@pytest.fixture(scope="session")
def gemma(fetched):
    """Gemma 3 270M, the base model, in float32."""
    return load(fetched("gemma3"), dtype="float32")


@pytest.fixture(scope="session")
def folder(model, tmp_path_factory):
    """The model saved as a folder in Hugging Face format."""
    path = tmp_path_factory.mktemp("real") / "SmolLM2-135M-Instruct"
    model.save(path)
    return path


@pytest.fixture(scope="session")
def golden():
    """What transformers computes (`make_real_golden.py`)."""
    with np.load(HERE / "golden.npz") as file:
        return dict(file)


@pytest.fixture(scope="session")
def text(golden):
    """Token ids of the license."""
    return golden["text"].tolist()
