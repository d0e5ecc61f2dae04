"""The memory of the process."""
import ctypes
import sys

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1                 # mallopt(3)'s names M_MMAP_THRESHOLD, M_TRIM_THRESHOLD


def keep_memory(size: int = 1 << 30) -> bool:
    """Let glibc keep what arrays of up to `size` bytes give back, for the next ones -> whether it does.

    A training step frees and takes hundreds of megabytes.  By default those of large arrays go back to the system, which gives
    them out again page by page and full of zeros: a twentieth of the step's time.  Programs call it, the package never does.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):                   # another C library
        return False
    return all([mallopt(MMAP_THRESHOLD, size), mallopt(TRIM_THRESHOLD, size)])    # older ones refuse more than 32 MB
