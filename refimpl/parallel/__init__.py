"""Parallelism: collectives.py (f, g and their kin), exchanges.py (all-to-all, ring), layouts.py (what these refuse), linear.py
(column and row cut), vocab.py (the words cut), cuts.py, data.py (the gradient rule), clip.py, replicas.py, zero.py (the
optimizer's state cut over dp).  For long contexts: sequence.py (how a sequence is cut), ring.py, ulysses.py,
attention.py, which chooses, and regather.py (what sequence parallelism keeps of a gathered input)."""
from refimpl.parallel.attention import ATTENTIONS, attention, whole_keys
from refimpl.parallel.clip import clip, gradient_norm
from refimpl.parallel.collectives import (all_gather, as_partial, broadcast, broadcast_from, copy_to, gather_from, reduce_from,
                                          reduce_scatter, scatter_to)
from refimpl.parallel.cuts import (Cut, Placement, Replicated, Rows, box, even_sizes, gather, own, own_box, parameter, shard,
                                   share)
from refimpl.parallel.data import Reduction, divide_by_count, reduce_gradients, total_over
from refimpl.parallel.exchanges import all_to_all, all_to_all_rows, ring_shift
from refimpl.parallel.linear import column_parallel_linear, row_parallel_linear
from refimpl.parallel.regather import Regathered
from refimpl.parallel.replicas import check_replicas
from refimpl.parallel.ring import ring_attention
from refimpl.parallel.sequence import LAYOUTS, SequenceLayout
from refimpl.parallel.ulysses import all_to_all_attention
from refimpl.parallel.vocab import gather_vocab, vocab_parallel_cross_entropy, vocab_parallel_embedding
from refimpl.parallel.zero import RowReduction, gather_rows, row_table, take_rows

__all__ = ["ATTENTIONS", "LAYOUTS", "Cut", "Placement", "Reduction", "Regathered", "Replicated", "RowReduction", "Rows",
           "SequenceLayout", "all_gather", "all_to_all", "all_to_all_attention", "all_to_all_rows", "as_partial", "attention",
           "box", "broadcast", "broadcast_from", "check_replicas", "clip", "column_parallel_linear", "copy_to",
           "divide_by_count", "even_sizes", "gather", "gather_from", "gather_rows", "gather_vocab", "gradient_norm", "own",
           "own_box", "parameter", "reduce_from", "reduce_gradients", "reduce_scatter", "ring_attention", "ring_shift",
           "row_parallel_linear", "row_table", "scatter_to", "shard", "share", "take_rows", "total_over",
           "vocab_parallel_cross_entropy", "vocab_parallel_embedding", "whole_keys"]
