import jax.numpy as jnp
import numpy as np

from pallas_kernels.core.rope_norm import rms_norm


def test_rms_norm_computes_in_float32():
    x = jnp.asarray([[300.0, -200.0, 100.0, 0.5]], jnp.float16)  # the squares overflow float16
    weight = jnp.asarray([1.0, 2.0, 0.5, -1.0], jnp.float16)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(weight, np.float64)
    np.testing.assert_allclose(rms_norm(x, weight, 1e-6), exact, rtol=1e-3)
