"""The error function, which numpy lacks.

float64: coefficients and ranges of Sun Microsystems' fdlibm, s_erf.c (1993), whose stated error is below 1 ulp.  Measured
against math.erf: off by at most 1.2e-16.

    |x| < 0.84375            erf x = x + x·P(x²)/Q(x²)
    0.84375 ≤ |x| < 1.25     erf x = c + P(|x| - 1)/Q(|x| - 1),  c = 0.84506291151
    1.25 ≤ |x| < 6           erf x = 1 - e^(-x² - 0.5625 + R(1/x²)/S(1/x²))/x, with other R, S from 1/0.35 on
    6 ≤ |x|                  erf x = ±1

float32: erf x = tanh(x·P(x²)) in float64, one range up to |x| = 3.95, from where on it rounds to ±1.  P is our own fit (least
squares of artanh(erf x)/x, reweighted to the largest relative error of tanh(x·P), 2e-9).  Off by at most 3.2e-8: rounding.
"""
from refimpl.array import on_device, xp_of

SMALL_P = (1.28379167095512558561e-01, -3.25042107247001499370e-01, -2.84817495755985104766e-02, -5.77027029648944159157e-03,
           -2.37630166566501626084e-05)
SMALL_Q = (1.0, 3.97917223959155352819e-01, 6.50222499887672944485e-02, 5.08130628187576562776e-03, 1.32494738004321644526e-04,
           -3.96022827877536812320e-06)
MIDDLE = 8.45062911510467529297e-01
MIDDLE_P = (-2.36211856075265944077e-03, 4.14856118683748331666e-01, -3.72207876035701323847e-01, 3.18346619901161753674e-01,
            -1.10894694282396677476e-01, 3.54783043256182359371e-02, -2.16637559486879084300e-03)
MIDDLE_Q = (1.0, 1.06420880400844228286e-01, 5.40397917702171048937e-01, 7.18286544141962662868e-02, 1.26171219808761642112e-01,
            1.36370839120290507362e-02, 1.19844998467991074170e-02)
LARGE_R = (-9.86494403484714822705e-03, -6.93858572707181764372e-01, -1.05586262253232909814e+01, -6.23753324503260060396e+01,
           -1.62396669462573470355e+02, -1.84605092906711035994e+02, -8.12874355063065934246e+01, -9.81432934416914548592e+00)
LARGE_S = (1.0, 1.96512716674392571292e+01, 1.37657754143519042600e+02, 4.34565877475229228821e+02, 6.45387271733267880336e+02,
           4.29008140027567833386e+02, 1.08635005541779435134e+02, 6.57024977031928170135e+00, -6.04244152148580987438e-02)
HUGE_R = (-9.86494292470009928597e-03, -7.99283237680523006574e-01, -1.77579549177547519889e+01, -1.60636384855821916062e+02,
          -6.37566443368389627722e+02, -1.02509513161107724954e+03, -4.83519191608651397019e+02)
HUGE_S = (1.0, 3.03380607434824582924e+01, 3.25792512996573918826e+02, 1.53672958608443695994e+03, 3.19985821950859553908e+03,
          2.55305040643316442583e+03, 4.74528541206955367215e+02, -2.24409524465858183362e+01)
SINGLE = (1.12837916928, 0.102772523829, -0.000208771968472, -0.000590843539937, 6.48938027121e-05, 3.67601115757e-06,
          -1.99951980312e-06, 2.81164672909e-07, -2.10066560129e-08, 8.37681497888e-10, -1.39734565185e-11)
EDGE = 3.95
BLOCK = 1 << 15                                         # elements


def polynomial(x, coefficients):
    """Σ c_k·x^k by Horner's rule."""
    y = x * coefficients[-1]
    for c in coefficients[-2:0:-1]:
        y += c
        y *= x
    y += coefficients[0]
    return y


def ratio(x, p, q):
    y = polynomial(x, p)
    y /= polynomial(x, q)
    return y


def erf_array(x):
    """erf of a plain array, in blocks whose temporaries stay in the cache: there are dozens of passes over them."""
    flat, y = x.reshape(-1), xp_of(x).zeros(x.size, x.dtype)
    erf_block = erf_single if x.dtype == "float32" else erf_double
    step = max(1, x.size) if on_device(x) else BLOCK    # a GPU wants one large block
    for start in range(0, x.size, step):
        y[start:start + step] = erf_block(flat[start:start + step])
    return y.reshape(x.shape)


def erf_single(x):
    xp = xp_of(x)
    a = xp.minimum(xp.maximum(x, -EDGE), EDGE).astype("float64")
    p = polynomial(a * a, SINGLE)
    p *= a
    return xp.tanh(p).astype(x.dtype)


def erf_double(x):
    """Ranges are chosen by the real part, so that a complex step differentiates it."""
    xp = xp_of(x)
    sign = xp.where(x.real < 0, -1, 1).astype(x.real.dtype)
    size = clipped(xp, x * sign, 0, 6)                  # beyond, erf is ±1 in float64
    near = clipped(xp, size, 0, 0.84375)
    y = near + near * ratio(near * near, SMALL_P, SMALL_Q)
    if bool((size.real >= 0.84375).any()):
        middle = MIDDLE + ratio(clipped(xp, size, 0.84375, 1.25) - 1, MIDDLE_P, MIDDLE_Q)
        y = xp.where(size.real < 0.84375, y, middle)
    if bool((size.real >= 1.25).any()):
        far = clipped(xp, size, 1.25, 6)
        s = 1 / (far * far)
        tail = xp.where(far.real < 1 / 0.35, ratio(s, LARGE_R, LARGE_S), ratio(s, HUGE_R, HUGE_S))
        y = xp.where(size.real < 1.25, y, 1 - xp.exp(-far * far - 0.5625 + tail) / far)
    return y * sign


def clipped(xp, x, low, high):
    """x with its real part kept in [low, high]; nan stays nan."""
    return xp.where(x.real < low, xp.full_like(x, low), xp.where(x.real > high, xp.full_like(x, high), x))
