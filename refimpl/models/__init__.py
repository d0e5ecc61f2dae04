"""Models: read config.py, placements.py, attention.py, mlp.py, decoder.py; then init.py and context.py."""
from refimpl.models import decoder
from refimpl.models.config import GPT2_SMALL, Config
from refimpl.models.context import Context
from refimpl.models.init import init
from refimpl.models.placements import parameters, placements

__all__ = ["Config", "Context", "GPT2_SMALL", "decoder", "init", "parameters", "placements"]
