"""A small random model and a text."""

import numpy as np
import pytest
from tiny_models import VOCAB, make_model


@pytest.fixture(scope="session")
def model():
    return make_model()


@pytest.fixture(scope="session")
def text():
    return np.random.default_rng(0).integers(0, VOCAB, 300).tolist()
