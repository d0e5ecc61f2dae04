"""The real cupy, for the tests marked gpu and gpu_check.  Nothing else imports it."""
import pytest

from refimpl.array import device_module


@pytest.fixture(scope="session")
def gpu():
    """cupy with a GPU.  Where either is missing the run ends with a sentence, and fails."""
    try:
        return device_module("cupy")
    except ValueError as error:
        pytest.exit(f"no GPU test has run: {error}", returncode=1)


@pytest.fixture(scope="session")
def cupy():
    """The package alone, which imports without a GPU."""
    import cupy
    return cupy
