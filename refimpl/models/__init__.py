"""Models: read config.py, placements.py, attention.py, mlp.py, decoder.py; then init.py, context.py, presets.py and
equal_bits.py."""
from refimpl.models import decoder
from refimpl.models.config import Config
from refimpl.models.context import Context, Plan
from refimpl.models.equal_bits import EqualBits
from refimpl.models.init import init
from refimpl.models.placements import count, parameters, placements
from refimpl.models.presets import GPT2_SMALL, PRESETS

__all__ = ["Config", "Context", "EqualBits", "GPT2_SMALL", "PRESETS", "Plan", "count", "decoder", "init", "parameters",
           "placements"]
