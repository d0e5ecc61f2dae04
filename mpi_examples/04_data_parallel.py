"""Data parallelism: every rank has its own samples, gradients are added up, and the division comes once, at the end.

    mpirun -n 4 python mpi_examples/04_data_parallel.py
    python mpi_examples/04_data_parallel.py --simulate 4              (four threads, no MPI needed)

Seven sequences of at most four tokens; a dot is padding, whose target is ignored.  Every rank holds the same W.  On four
ranks, the last of which happens to have nothing but padding:

     sample 0   x x x x                                        samples   tokens
     sample 1   x . . .                              rank 0    0 1 2     8
     sample 2   x x x .                              rank 1    3         2
     sample 3   x x . .                              rank 2    4         4
     sample 4   x x x x                              rank 3    5 6       0
     sample 5   . . . .
     sample 6   . . . .

     rank r     (loss sum_r, count_r) = cross_entropy(X_r W)     dW_r = gradient of loss sum_r
     together   dW = Σ_r dW_r / Σ_r count_r                      one all_reduce, one division

The token rule: a loss is a sum and a count, and only their totals are divided.  If each rank divides by its own count and
the means are averaged, then a token weighs more the fewer neighbours it has, and a rank without a valid target has 0/0.

What to expect: the rule by hand on two numbers, where the mean of means is 1.5 instead of 1.0909; then loss and gradients
equal to those of the whole batch on one rank, and how far off the mean of means would have been.
"""
import numpy as np

from refimpl.autograd import Layout, Tensor, value_and_grad
from refimpl.comm import Comm, Mesh, launch
from refimpl.golden import compare
from refimpl.ops import IGNORE, cross_entropy, linear
from refimpl.parallel import divide_by_count, reduce_gradients, total_over
from refimpl.rng import draw, integers, stream

LENGTHS = (4, 1, 3, 2, 4, 0, 0)                         # valid tokens of each sample
SAMPLES = {2: ((0, 3), (3, 7)), 4: ((0, 3), (3, 4), (4, 5), (5, 7))}        # number of ranks -> (first, last + 1) of each
T, D, V = 4, 6, 10                                      # positions, model width, vocabulary
VARIES_OVER_DP = Layout(frozenset({"dp"}))              # the tag of data: another value on every dp rank


def batch() -> tuple[np.ndarray, np.ndarray]:
    """x[7, T, D] and targets int[7, T], IGNORE where there is padding."""
    targets = integers(stream(0, "targets"), np.arange(len(LENGTHS) * T).reshape(len(LENGTHS), T), below=V)
    padding = np.arange(T) >= np.array(LENGTHS)[:, None]
    return draw("x", (len(LENGTHS), T, D)), np.where(padding, IGNORE, targets)


def main(comm: Comm) -> None:
    mesh = Mesh(dp=comm.size, comm=comm)

    # By hand: rank 0 has 10 tokens of loss 2.0, rank 1 has 100 of loss 1.0, the other ranks none.
    tokens, loss = [(10, 2.0), (100, 1.0), (0, 0.0), (0, 0.0)][comm.rank]
    total_loss, total_count, with_tokens, sum_of_means = total_over(mesh, tokens * loss, tokens, tokens > 0, loss)
    assert total_loss / total_count == 120 / 110 and sum_of_means / with_tokens == 1.5
    account = [f"by hand: (10·2.0 + 100·1.0)/(10 + 100) = {total_loss:.0f}/{total_count:.0f} = "
               f"{total_loss / total_count:.4f}; the mean of the means 2.0 and 1.0 is {sum_of_means / with_tokens}\n"]

    x, targets = batch()
    params = {"w": Tensor(draw("w", (D, V))), "b": Tensor(draw("b", (V,)))}      # the same on every rank

    def loss_of(x: Tensor, targets: np.ndarray):
        return lambda p: cross_entropy(linear(x, p["w"], p["b"]), targets)  # (sum, count), never a mean

    # The whole batch on one rank.
    (loss_sum, count), grads = value_and_grad(loss_of(Tensor(x), targets), params)
    serial_loss = float(loss_sum) / int(count.array)
    serial = {name: g.array for name, g in divide_by_count(grads, int(count.array)).items()}

    # This rank's samples.  The layout tag makes each gradient say itself that it is still to be summed over dp.
    own = slice(*SAMPLES[comm.size][comm.rank])
    (loss_sum, count), own_grads = value_and_grad(loss_of(Tensor(x[own], VARIES_OVER_DP), targets[own]), params)
    assert all(g.partial == {"dp"} for g in own_grads.values())
    own_loss, own_count = float(loss_sum), int(count.array)
    total_loss, total_count = total_over(mesh, own_loss, own_count)
    grads = divide_by_count(reduce_gradients(own_grads, mesh), int(total_count))    # one all_reduce, one division
    sharded = {name: g.array for name, g in grads.items()}

    worst = compare({"loss": np.array([total_loss / total_count]), **sharded},
                    {"loss": np.array([serial_loss]), **serial})[0]
    assert worst.relative <= 1e-12, f"rank {comm.rank}: {worst}"

    # The mistake: every rank divides by its own count, and the means are averaged (over ranks that have one).
    divisor = max(own_count, 1)
    with_tokens, sum_of_means = total_over(mesh, own_count > 0, own_loss / divisor)
    means = reduce_gradients(divide_by_count(own_grads, divisor), mesh)
    wrong = compare({name: g.array / with_tokens for name, g in means.items()}, serial)[0]
    assert wrong.relative > 0.1, f"rank {comm.rank}: the mean of means is found to be right: {wrong}"

    largest = comm.all_reduce(np.array(worst.relative), how="max")          # of all ranks: none has failed
    for r, (n, loss) in enumerate(comm.all_gather(np.array([[own_count, own_loss]]), axis=0)):
        own_mean = f"{loss / n:.4f}" if n else "0/0"
        account.append(f"    rank {r}   {n:2.0f} valid tokens   loss sum {loss:8.4f}   mean {own_mean}")
    mean, mean_of_means = total_loss / total_count, sum_of_means / with_tokens
    account += [f"    total    {total_count:2.0f} valid tokens   loss sum {total_loss:8.4f}   mean {mean:.4f}\n",
                f"one rank with all samples   mean {serial_loss:.4f}   loss and gradients differ by {largest:.0e}",
                f"mean of means               mean {mean_of_means:.4f}   gradients are off by {wrong.relative:.0%}"]
    if comm.rank == 0:
        print("\n".join(account))
        print("\nOK: loss and gradients equal the whole batch's on every rank; the mean of means does not")


if __name__ == "__main__":
    launch(main, ranks=(2, 4))
