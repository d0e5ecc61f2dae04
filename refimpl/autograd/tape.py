"""The tape, the sweep, `value_and_grad` and `recompute`.

The tape is a list of nodes in creation order, one tape per `value_and_grad`; the sweep pops it from the end.  Creation
order is a topological order, so a shared value's gradient is complete when its node comes up, and it is the same order
on every rank, so collectives in the backward pass meet.  Each vjp, with the arrays it keeps, is dropped as it is used.
"""
from typing import Any, Callable, Mapping, NamedTuple

from refimpl.array import Array, xp_of
from refimpl.autograd.layout import Layout, LayoutError, names
from refimpl.autograd.op import Op, derived_from, stack
from refimpl.autograd.tensor import Params, Tensor

OVER_SAMPLES = frozenset({"dp", "cp", "ep"})            # mesh axes whose ranks have samples or positions of their own
OnLeaf = Callable[[str, Tensor], None]


class Node(NamedTuple):
    op: Op
    vjp: Callable
    inputs: tuple[int | None, ...]                      # slots of the arguments, None where no gradient is wanted
    shapes: tuple[Any, ...]                             # (shape, dtype) of the arguments, to check the vjp's answers
    outputs: tuple[int, ...]
    like: tuple[Any, ...]                               # (shape, dtype) of the outputs, to make a zero cotangent
    scope: str
    weight: str | None


class Tape:
    """Nodes in creation order, and for each parameter how often it is used and which reductions its gradient needs."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.slots = 0
        self.leaves: dict[int, Tensor] = {}             # slot -> leaf
        self.uses: dict[int, int] = {}                  # slot -> nodes still to come that use the leaf
        self.reductions: dict[int, frozenset[str]] = {}  # slot -> mesh axes
        self.first_use: dict[int, str] = {}

    def new_slot(self) -> int:
        self.slots += 1
        return self.slots - 1

    def leaf(self, t: Tensor) -> Tensor:
        """`t` as an input of this tape: a parameter, or (for recompute) an activation or a value made of parameters."""
        leaf = Tensor(t.array, t.layout, self, t.name, t.cut, t.shared)
        leaf.slot = self.new_slot()
        if t.leaves and not t.name:
            leaf.made_of = (leaf,)
        self.leaves[leaf.slot], self.uses[leaf.slot] = leaf, 0
        return leaf

    def close(self) -> None:
        """Undo the references in a circle, so that arrays are freed now and not at the next garbage collection."""
        for leaf in self.leaves.values():
            leaf.tape, leaf.made_of = None, ()
        self.leaves.clear()

    def record_use(self, op_name: str, leaf: Tensor, missing: frozenset[str]) -> None:
        """The use of a parameter by an op whose output varies over `missing` axes more: its gradient is partial there."""
        before = self.reductions.setdefault(leaf.slot, missing)
        if before != missing:
            raise LayoutError(
                f"the parameter {leaf.name} is used in two ways: its gradient has to be reduced over "
                f"{names(before) or 'nothing'} for {self.first_use[leaf.slot]} and over {names(missing) or 'nothing'} for "
                f"{op_name}; copy_to it before the use that varies more")
        self.first_use.setdefault(leaf.slot, op_name)

    def append(self, op: Op, vjp: Callable, args: tuple[Any, ...], made: list[Tensor], scope: str,
               weight: str | None) -> None:
        inputs = tuple([a.slot if type(a) is Tensor and a.tape is self else None for a in args])
        for slot in inputs:
            if slot in self.uses:
                self.uses[slot] += 1
        for t in made:
            t.slot = self.new_slot()
        shapes = tuple([None if slot is None else (a.shape, a.dtype) for slot, a in zip(inputs, args)])
        self.nodes.append(Node(op, vjp, inputs, shapes, tuple([t.slot for t in made]),
                               tuple([(t.shape, t.dtype) for t in made]), scope, weight))

    def sweep(self, seeds: Mapping[int, Array], on_leaf: OnLeaf | None = None) -> dict[int, Array]:
        """The backward pass: from cotangents of some slots to those of all leaves.  Uses the tape up."""
        grads = dict(seeds)
        xp = xp_of(*seeds.values())
        before = stack.enter(stack.scope, "backward" if stack.phase == "forward" else stack.phase)
        try:
            if on_leaf:
                for unused in [s for s, uses in self.uses.items() if uses == 0]:
                    on_leaf(self.leaves[unused].name, self.gradient(unused, grads))
            while self.nodes:
                node = self.nodes.pop()
                dys = [grads.pop(s, None) for s in node.outputs]
                if node.op.collective or any(dy is not None for dy in dys):
                    self.step(node, [xp.zeros(*like) if dy is None else dy for dy, like in zip(dys, node.like)], grads)
                for slot in node.inputs:
                    if slot in self.uses:
                        self.uses[slot] -= 1
                        if on_leaf and self.uses[slot] == 0:
                            on_leaf(self.leaves[slot].name, self.gradient(slot, grads))
        finally:
            stack.enter(*before)
        return grads

    def step(self, node: Node, dys: list[Array], grads: dict[int, Array]) -> None:
        """One node: its vjp, and the sum of what arrives at each input."""
        stack.scope = node.op.call_name(node.scope, node.weight) if stack.frames else node.scope
        stack.name = stack.scope
        dxs = node.vjp(*dys)
        dxs = dxs if type(dxs) is tuple else (dxs,)
        if len(dxs) < len(node.inputs):
            raise ValueError(f"the vjp of {node.op.name} gave {len(dxs)} cotangents for {len(node.inputs)} arguments")
        for k, (slot, dx) in enumerate(zip(node.inputs, dxs)):
            if slot is None or dx is None:
                continue
            if (dx.shape, dx.dtype) != node.shapes[k]:
                raise ValueError(f"the vjp of {node.op.name} gave {dx.shape} {dx.dtype} for argument {k}, which is "
                                 f"{node.shapes[k][0]} {node.shapes[k][1]}")
            grads[slot] = grads[slot] + dx if slot in grads else dx

    def gradient(self, slot: int, grads: Mapping[int, Array]) -> Tensor:
        """A leaf's gradient as a Tensor: it varies where the parameter does and is partial over the recorded axes."""
        leaf, partial = self.leaves[slot], self.reductions.get(slot, frozenset())
        g = grads[slot] if slot in grads else xp_of(leaf.array).zeros(leaf.shape, leaf.dtype)
        return Tensor(g, Layout(leaf.varies | partial, partial), shared=leaf.shared)


def value_and_grad(fn: Callable[[Params], Any], params: Mapping[str, Tensor], on_leaf: OnLeaf | None = None
                   ) -> tuple[Any, dict[str, Tensor]]:
    """`fn(params)` and the gradient of its (first) result by every parameter.

    fn       returns a scalar Tensor, or a tuple whose first element is that scalar; the value comes back without a tape.
             Where it varies over dp, cp or ep, what is differentiated is the sum of the ranks' values
    grads    a gradient that still has to be summed over mesh axes says so: it is `partial` over them
    on_leaf  called as on_leaf(name, grad) during the sweep, once for every parameter, as soon as its gradient is complete
    Errors:  ValueError if the result is no scalar or does not depend on any parameter
    """
    tape = Tape()
    leaves = {name: tape.leaf(Tensor(t.array, t.layout, None, name, t.cut, t.shared)) for name, t in params.items()}
    try:
        return differentiated(fn, tape, leaves, on_leaf)
    finally:
        tape.close()


def differentiated(fn: Callable[[Params], Any], tape: Tape, leaves: dict[str, Tensor], on_leaf: OnLeaf | None
                   ) -> tuple[Any, dict[str, Tensor]]:
    """value_and_grad on a tape of its own."""
    value = fn(Params(leaves))
    loss = value[0] if isinstance(value, tuple) else value
    if type(loss) is not Tensor or loss.array.size != 1 or loss.tape is not tape:
        raise ValueError(f"value_and_grad needs a scalar that depends on the parameters, got {loss!r}")
    if loss.varies - OVER_SAMPLES:
        axes = loss.partial - OVER_SAMPLES or loss.varies - OVER_SAMPLES
        raise LayoutError(f"the loss {'is partial' if loss.partial else 'differs between the ranks'} over {names(axes)}: "
                          f"reduce_from it first, or gather_from what it is made of")
    grads = tape.sweep({loss.slot: xp_of(loss.array).ones(loss.shape, loss.dtype)}, on_leaf)
    detached = tuple(Tensor(t.array, t.layout) if type(t) is Tensor else t for t in value) if isinstance(value, tuple) \
        else Tensor(loss.array, loss.layout)
    return detached, {leaf.name: tape.gradient(slot, grads) for slot, leaf in tape.leaves.items()}


def recompute(fn: Callable, *args: Any) -> Any:
    """`fn(*args)`, keeping only the arguments and running `fn` again in the backward pass (activation checkpointing).

    Args are Tensors, Params, or anything else that has no gradient; what `fn` differentiates must be among them.  `fn` gives
    a Tensor, or a tuple whose Tensors are differentiated and whose other elements are passed on.
    Gradients are bitwise those of `fn(*args)`: ops are pure and dropout is a hash.
    Reference: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
    """
    flat: list[Tensor] = []
    for a in args:
        flat += [a] if type(a) is Tensor else a.values() if isinstance(a, Params) else []

    def rebuild(tensors: list[Tensor]) -> list[Any]:
        rest = iter(tensors)
        return [next(rest) if type(a) is Tensor
                else Params({a.full(name): next(rest) for name in a}, a.prefix) if isinstance(a, Params) else a for a in args]

    def detached(t: Tensor) -> Tensor:
        return t.like(t.array)

    result = fn(*rebuild([detached(t) for t in flat]))
    if any(y.tape is not None for y in tensors_of(result)):
        raise ValueError("recompute: the function uses a Tensor that is not among its arguments, whose gradient would be lost")
    scope = stack.scope

    def vjp(*dys: Array) -> tuple[Array | None, ...]:
        tape = Tape()
        inputs = [detached(t) if t.tape is None else tape.leaf(t) for t in flat]
        before = stack.enter(scope, "recompute")
        try:
            again = tensors_of(fn(*rebuild(inputs)))
            stack.enter(scope, "backward")
            grads = tape.sweep({y.slot: dy for y, dy in zip(again, dys) if y.tape is tape})
        finally:
            stack.enter(*before)
        for outer, inner in zip(flat, inputs):
            if inner.slot in tape.reductions:
                for leaf in outer.leaves:
                    outer.tape.record_use("recompute", leaf, tape.reductions[inner.slot])
        tape.close()
        return tuple(grads.get(t.slot) for t in inputs)

    tape = next((t.tape for t in flat if t.tape is not None), None)
    outs = [Tensor(y.array, y.layout, tape if y.array.dtype.kind in "fc" else None, cut=y.cut) for y in tensors_of(result)]
    for out in outs:
        out.made_of = derived_from(flat)
    if tape is not None:
        tape.append(RECOMPUTE, vjp, tuple(flat), outs, scope, None)
    if not isinstance(result, tuple):
        return outs[0]
    rest = iter(outs)
    return tuple(next(rest) if type(r) is Tensor else r for r in result)


def tensors_of(result: Any) -> list[Tensor]:
    return [r for r in (result if isinstance(result, tuple) else (result,)) if type(r) is Tensor]


RECOMPUTE = Op(recompute, collective=True)              # it may hold collectives, so its backward always runs
