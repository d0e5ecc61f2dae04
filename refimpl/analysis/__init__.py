"""Closed forms: parameters.py, traffic.py, activations.py, long_context.py.  Counted while it runs: flash_io.py."""
from refimpl.analysis.activations import LayerSizes, peaks, printed_overhead, selective_overhead, stored_factor
from refimpl.analysis.flash_io import (counted_flash, counted_standard, fitting_blocks, flash_traffic, paper_blocks,
                                       standard_traffic)
from refimpl.analysis.long_context import causal_share, flops_ratio, ring_context, smallest_block, smallest_shard
from refimpl.analysis.parameters import PUBLISHED
from refimpl.analysis.traffic import local_parameters, step_payload

__all__ = ["LayerSizes", "PUBLISHED", "causal_share", "counted_flash", "counted_standard", "fitting_blocks", "flash_traffic",
           "flops_ratio", "local_parameters", "paper_blocks", "peaks", "printed_overhead", "ring_context", "selective_overhead",
           "smallest_block", "smallest_shard", "standard_traffic", "step_payload", "stored_factor"]
