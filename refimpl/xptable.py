"""What the package may use of numpy and cupy: the functions, methods and operators, and for each its arguments.

It is what both libraries have, so nothing outside it enters an op.  Left out because cupy lacks it: `where=` of ufuncs,
`initial` and `where` of reductions, longdouble, the writeable flag.  Left out because it means something else there:
`add.reduceat` (differences of running sums), host arrays as indices, boolean ones (but for `x[mask] = number`), indices out
of range (they wrap round), assignment to repeated indices (no fixed winner).

Signatures read as Python's: names before `*` may be given by position, all may be given by name, none has to be given.
tests/device holds the package to this table, and the table to the real cupy.
"""

FUNCTIONS = {
    "arange": "start, stop",
    "argsort": "a, *, kind",
    "asarray": "a",
    "ascontiguousarray": "a",
    "broadcast_to": "array, shape",
    "concatenate": "tup, *, axis",
    "copyto": "dst, src, *, where",
    "cumsum": "a, *, axis, dtype",
    "einsum": "subscripts, a, b",
    "empty": "shape, dtype",
    "expand_dims": "a, axis",
    "fft.irfft": "a, *, n, axis",
    "fft.rfft": "a, *, n, axis",
    "flatnonzero": "a",
    "flip": "a, *, axis",
    "full": "shape, fill_value, dtype",
    "full_like": "a, fill_value",
    "ones": "shape, dtype",
    "ones_like": "a",
    "repeat": "a, repeats, *, axis",
    "where": "condition, x, y",
    "zeros": "shape, dtype",
    "zeros_like": "a",
}
UFUNCS = {                                              # elementwise; x1 and x2 by position only
    "cos": "x1", "exp": "x1, *, out", "isnan": "x1", "log": "x1", "log1p": "x1", "maximum": "x1, x2", "minimum": "x1, x2",
    "sin": "x1", "sqrt": "x1", "tanh": "x1",
}
CONSTANTS = ("inf", "uint64")

METHODS = {
    "any": "*, axis, keepdims",
    "astype": "dtype, *, copy",
    "conj": "",
    "copy": "",
    "max": "*, axis, keepdims",
    "mean": "*, axis, keepdims",
    "min": "",
    "reshape": "*shape",
    "sum": "*, axis, keepdims",
    "swapaxes": "axis1, axis2",
    "tobytes": "",
    "transpose": "axes",
    "view": "dtype",
}
ATTRIBUTES = ("T", "base", "dtype", "nbytes", "ndim", "real", "shape", "size")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
BINARY = ("add", "sub", "mul", "truediv", "pow", "mod", "matmul", "and", "or", "xor", "lshift", "rshift")
REFLECTED = ("radd", "rsub", "rmul", "rtruediv")        # only numbers stand on the left
IN_PLACE = ("iadd", "isub", "imul", "itruediv")
OTHERS = ("neg", "getitem", "setitem", "len", "float", "int", "bool")   # the last three wait for the device

# What numpy has not: the way to the host and back (array.py, comm/device.py).
DEVICE_FUNCTIONS = {"cuda.alloc_pinned_memory": "size"}
DEVICE_METHODS = {"get": "*, out, blocking", "set": "arr"}
DEVICE_ATTRIBUTES = ("device",)
