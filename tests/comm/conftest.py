"""Scripts under mpirun."""
import sys

import pytest

from refimpl.comm import CommError
from refimpl.comm.launch import mpirun_command

from .programs import execute


@pytest.fixture(scope="module")
def mpirun():
    """Run a script on n ranks under mpirun."""
    try:
        mpirun_command(2)
    except CommError as error:
        pytest.skip(str(error))
    return lambda script, *arguments, n=2, **environment: execute(
        [*mpirun_command(n), sys.executable, str(script), *arguments], **environment)
