"""The normalisation that a configuration names."""
from refimpl.autograd import Params, Tensor, scoped
from refimpl.models.config import Config
from refimpl.ops import layer_norm, rms_norm


@scoped
def norm(x: Tensor, p: Params, cfg: Config) -> Tensor:
    """x[..., D] -> y[..., D], over the last axis."""
    if cfg.norm == "layer_norm":
        return layer_norm(x, p["g"], p.get("b"), eps=cfg.eps)
    return rms_norm(x, p["g"], eps=cfg.eps, gain="1+w" if cfg.norm == "rms_norm_1+w" else "w")
