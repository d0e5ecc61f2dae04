"""Files as nobody should have written them."""
import numpy as np
import pytest


@pytest.fixture
def mutations():
    """mutations(data, n): n times the bytes with one of them changed, some cut out, some repeated, some put in, or the end
    missing.  The same every time."""
    def make(data: bytes, n: int):
        draw = np.random.default_rng(0)
        for _ in range(n):
            a, b = sorted(draw.integers(0, len(data) + 1, 2))
            noise = draw.integers(0, 256, 8, np.uint8).tobytes()
            digit = bytes([draw.choice(list(b'0123456789[]{},:"-.e tnN'))])
            yield (data[:a] + noise[:1] + data[a + 1:], data[:a] + digit + data[a + 1:], data[:a] + data[b:],
                   data[:b] + data[a:], data[:a] + noise + data[a:], data[:a])[draw.integers(6)]
    return make
