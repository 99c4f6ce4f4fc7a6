"""Synchronisation recipes: each equals the published algorithm, written here from its paper, and sends what it says."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flexsearch.errors import RecipeError
from flexsearch.runtime.replicas.served import Served
from flexsearch.simulate.training import Workers
from flexsearch.sync import Payload, Recipe, Simulated, State, compression, parse_recipe
from flexsearch.sync.all_reduce import AllReduce
from flexsearch.sync.bits import pack, packed_bytes, unpack
from flexsearch.sync.compression import Sizes
from flexsearch.sync.gossip import Matrix
from flexsearch.sync.qsgd import rounded
from flexsearch.topology import Topology

P, STEPS, LR, BETA = 8, 50, 0.05, 0.9
SHAPES = ((12, 10), (7,), (6, 2, 5))
N = 187
SIZES = Sizes(SHAPES, 8)
HOSTS = (0, 0, 1, 1, 2, 2, 3, 3)
RNG = np.random.default_rng(1)
START = RNG.standard_normal(N)
CURVE = 0.5 + RNG.random((P, N))
CENTRE = RNG.standard_normal((P, N))
NOISE = 0.3 * RNG.standard_normal((STEPS, P, N))

Array = np.ndarray[Any, Any]


def gradient(i: int, w: Array, t: int) -> Array:
    """Of worker i in step t at its weights."""
    result: Array = CURVE[i] * (w - CENTRE[i]) + NOISE[t, i]
    return result


def trained(
    recipe: str | Recipe, momentum: float = BETA, on_step: Callable[[Array, State], None] | None = None
) -> Array:  # fmt: skip
    """(P, N) weights after all steps of the recipe on simulated ranks."""
    recipe = parse_recipe(recipe) if isinstance(recipe, str) else recipe
    recipe.check(P, SIZES, HOSTS, P + 4)
    group = Simulated(P, HOSTS)
    weights = torch.nn.Parameter(torch.from_numpy(START).expand(P, N).clone())
    optimizer = torch.optim.SGD([weights], lr=LR, momentum=momentum)
    state = recipe.start(weights.detach(), SIZES)
    for t in range(STEPS):
        group.exchanges.clear()
        rows = weights.detach().numpy()
        gradients = torch.from_numpy(np.stack([gradient(i, rows[i], t) for i in range(P)]))
        weights.grad, state = recipe.before_update(state, group, gradients, SIZES)
        optimizer.step()
        weights.data, state = recipe.after_update(state, group, weights.data, SIZES)
        told = recipe.exchanges(P, HOSTS, SIZES, t)
        assert told is None or told == group.exchanges
        if on_step is not None:
            on_step(gradients.numpy(), state)
    return weights.detach().numpy()


def data_parallel(momentum: float = BETA) -> Array:
    w, v = START.copy(), np.zeros(N)
    for t in range(STEPS):
        v = momentum * v + np.mean([gradient(i, w, t) for i in range(P)], axis=0)
        w = w - LR * v
    return np.tile(w, (P, 1))


def close(a: Array, b: Array, tolerance: float = 1e-12) -> None:
    assert a.shape == b.shape
    assert np.abs(a - b).max() <= tolerance


# ---- exact recipes


@pytest.mark.parametrize("form", ["backend", "ring", "tree", "halving-doubling", "everyone", "hierarchical"])
def test_every_all_reduce_is_data_parallelism(form: str) -> None:
    close(trained(f"all-reduce:form={form}"), data_parallel())


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7])
@pytest.mark.parametrize("form", ["ring", "tree", "everyone"])
def test_all_reduces_take_any_number_of_workers(form: str, size: int) -> None:
    x = torch.randn(size, 11, dtype=torch.float64)
    group, recipe = Simulated(size), AllReduce(form)
    close(recipe.mean(x, group).numpy(), x.mean(0).expand(size, -1).numpy())
    assert group.exchanges == recipe.means(size, tuple(range(size)), 11, 8)


def test_bytes_and_messages_are_those_of_the_textbook() -> None:
    """S = 8 N bytes, n = 8: ring 2 (n-1)/n S and 2 (n-1) messages of each; tree n-1 edges, twice; everyone (n-1) S."""
    whole = 8 * N
    for form, sent, count in (("tree", 2 * 7 * whole, 14), ("everyone", 56 * whole, 56)):
        phases = AllReduce(form).means(P, HOSTS, N, 8)
        assert (sum(e.sent for e in phases), sum(e.count for e in phases)) == (sent, count)
    padded = -(-N // P) * P * 8
    for form, count in (("ring", 2 * 7 * P), ("halving-doubling", 2 * 3 * P)):
        phases = AllReduce(form).means(P, HOSTS, N, 8)
        assert (sum(e.sent for e in phases), sum(e.count for e in phases)) == (2 * 7 * padded, count)


@pytest.mark.parametrize("server", ["server", "server:shards=3", "server:shards=3,on=devices"])
def test_a_synchronous_server_is_data_parallelism(server: str) -> None:
    close(trained(server), data_parallel())


@pytest.mark.parametrize(
    "recipe", ["local-sgd:period=1", "top-k:k=187", "top-k:density=1", "top-k:k=187,feedback=off", "gtop-k:k=187",
               "random-k:density=1", "threshold:tau=1e-300", "top-k:k=60+warm-up:steps=50", "powersgd:rank=6",
               "diloco:period=1,lr=1,momentum=0"],
)  # fmt: skip
def test_limits_of_lossy_recipes_are_data_parallelism(recipe: str) -> None:
    close(trained(recipe), data_parallel())


@pytest.mark.parametrize("what", ["gradients", "weights"])
def test_gossip_with_everyone_equally_is_data_parallelism(what: str) -> None:
    uniform = ((1 / P,) * P,) * P
    close(trained(Recipe(partners=Matrix(rows=uniform, what=what)), momentum=0.0), data_parallel(0.0))


def test_qsgd_with_many_levels_is_exact() -> None:
    x, top = torch.from_numpy(NOISE[0]), 2**31 - 1
    norm, level = rounded(x, torch.rand(P, N, dtype=torch.float64), top, N)
    close((level * x.sign() * norm / top).numpy(), NOISE[0], 1e-8)


# ---- when


def local_sgd(period: int) -> Array:
    w, v = np.tile(START, (P, 1)), np.zeros((P, N))
    for t in range(STEPS):
        for i in range(P):
            v[i] = BETA * v[i] + gradient(i, w[i], t)
            w[i] = w[i] - LR * v[i]
        if (t + 1) % period == 0:
            w[:] = w.mean(0)
    return w


def test_local_sgd() -> None:
    close(trained("local-sgd:period=4"), local_sgd(4))
    close(trained("local-sgd:period=4+server:shards=2"), local_sgd(4))


def test_diloco() -> None:
    """Algorithm 1, with PyTorch's Nesterov momentum outside."""
    w, v = np.tile(START, (P, 1)), np.zeros((P, N))
    outer = torch.nn.Parameter(torch.from_numpy(START.copy()))
    optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for t in range(STEPS):
        for i in range(P):
            v[i] = BETA * v[i] + gradient(i, w[i], t)
            w[i] = w[i] - LR * v[i]
        if (t + 1) % 5 == 0:
            outer.grad = outer.detach() - torch.from_numpy(w).mean(0)
            optimizer.step()
            w[:] = outer.detach().numpy()
    close(trained("diloco:period=5"), w)


def test_warm_up_then_local_sgd_is_post_local_sgd() -> None:
    w, v = np.tile(START, (P, 1)), np.zeros((P, N))
    for t in range(STEPS):
        g = np.stack([gradient(i, w[i], t) for i in range(P)])
        v = BETA * v + (g.mean(0) if t < 10 else g)
        w = w - LR * v
        if t >= 10 and (t - 10 + 1) % 3 == 0:
            w = np.tile(w.mean(0), (P, 1))
    close(trained("local-sgd:period=3+warm-up:steps=10"), w)


# ---- with whom


def test_gossip_of_gradients_meets_neighbours_at_growing_distances() -> None:
    w, v, g = np.tile(START, (P, 1)), np.zeros((P, N)), np.zeros((P, N))
    for t in range(STEPS):
        s = [1, 2, 4][t % 3]
        for i in range(P):
            g[i] = gradient(i, w[i], t)
        for i in range(P):
            around = {i, (i + s) % P, (i - s) % P}
            v[i] = BETA * v[i] + sum(g[j] for j in around) / len(around)
        w = w - LR * v
    close(trained("gossip"), w)


def test_a_ring_of_weights_is_decentralized_sgd() -> None:
    """D-PSGD, its lines 4 and 5 exchanged: x_i = sum_j K_ij (x_j - lr g_j(x_j))."""
    w = np.tile(START, (P, 1))
    for t in range(STEPS):
        g = np.stack([gradient(i, w[i], t) for i in range(P)])
        w = w - LR * g
        w = np.stack([(w[i] + w[(i + 1) % P] + w[(i - 1) % P]) / 3 for i in range(P)])
    close(trained("ring:what=weights", momentum=0.0), w)


def test_any_doubly_stochastic_matrix() -> None:
    k = 0.6 * np.eye(P) + 0.4 * np.eye(P)[[1, 0, 3, 2, 5, 6, 7, 4]]
    w = np.tile(START, (P, 1))
    for t in range(STEPS):
        w = w - LR * k @ np.stack([gradient(i, w[i], t) for i in range(P)])
    close(trained(Recipe(partners=Matrix(rows=tuple(map(tuple, k.tolist())))), momentum=0.0), w)


# ---- how much


def largest(x: Array, k: int) -> Array:
    """x with all but its k largest entries zero."""
    y = np.zeros_like(x)
    at = np.argsort(-np.abs(x))[:k]
    y[at] = x[at]
    return y


def at_least(x: Array, tau: float) -> Array:
    return np.where(np.abs(x) >= tau, x, 0.0)


def adaptive(x: Array, t: int) -> Array:
    """One entry of ten is looked at; the threshold keeps a twentieth of these, and at least one."""
    sample = np.sort(np.abs(x[t % 10 :: 10]))[::-1]
    return at_least(x, sample[int(np.ceil(0.05 * len(sample))) - 1])


def random_entries(x: Array, t: int, k: int = 30) -> Array:
    at = np.sort(np.random.default_rng((1, 0, t)).choice(len(x), k, replace=False))
    y = np.zeros_like(x)
    y[at] = x[at]
    return y


def scaled_sign(x: Array) -> Array:
    result: Array = np.abs(x).sum() / len(x) * np.where(x >= 0, 1.0, -1.0)
    return result


def compressed(
    compress: Callable[[Array, int, int], Array], feedback: bool, average: Callable[[Array], Array] | None = None
) -> Array:  # fmt: skip
    """SGD with momentum on the mean of what workers send: compress(gradient + error, step, worker)."""
    w, v, e = START.copy(), np.zeros(N), np.zeros((P, N))
    for t in range(STEPS):
        sent = np.zeros((P, N))
        for i in range(P):
            p = gradient(i, w, t) + e[i]
            sent[i] = compress(p, t, i)
            if feedback:
                e[i] = p - sent[i]
        v = BETA * v + (average or (lambda x: x.mean(0)))(sent)
        w = w - LR * v
    return np.tile(w, (P, 1))


def quantised(x: Array, t: int, i: int, bits: int = 4, bucket: int = 512) -> Array:
    """QSGD, section 3.1: norm * sign * level / s; the level is l or l + 1, l + 1 with probability |x| s / norm - l."""
    s, norm, u = 2 ** (bits - 1) - 1, np.sqrt((x**2).sum()), np.random.default_rng((2, 0, t, i)).random(len(x))
    assert len(x) <= bucket
    lower = np.floor(np.abs(x) / norm * s)
    level = lower + (u >= 1 - (np.abs(x) / norm * s - lower))
    result: Array = norm * np.sign(x) * level / s
    return result


CASES: dict[str, tuple[Callable[[Array, int, int], Array], bool]] = {
    "top-k:k=10": (lambda x, t, i: largest(x, 10), True),
    "top-k:density=0.1,feedback=off": (lambda x, t, i: largest(x, 19), False),
    "threshold:tau=0.7": (lambda x, t, i: at_least(x, 0.7), True),
    "threshold:tau=0.7,feedback=off": (lambda x, t, i: at_least(x, 0.7), False),
    "adaptive-threshold:density=0.05": (lambda x, t, i: adaptive(x, t), True),
    "random-k:k=30": (lambda x, t, i: random_entries(x, t), True),
    "random-k:k=30,feedback=off": (lambda x, t, i: random_entries(x, t) * N / 30, False),
    "qsgd": (lambda x, t, i: quantised(x, t, i), False),
    "qsgd:bits=2": (lambda x, t, i: quantised(x, t, i, 2), False),
    "qsgd:bits=6,feedback=on": (lambda x, t, i: quantised(x, t, i, 6), True),
    "qsgd:bits=8": (lambda x, t, i: quantised(x, t, i, 8), False),
    "sign:feedback=on": (lambda x, t, i: scaled_sign(x), True),
}


@pytest.mark.parametrize("recipe", CASES)
def test_compressed_gradients(recipe: str) -> None:
    compress, feedback = CASES[recipe]
    close(trained(recipe), compressed(compress, feedback))


LONG_ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "random": lambda x: x, "rising": lambda x: x * torch.linspace(0, 1, x.shape[1]),
    "of one size": torch.sign, "almost all zeros": lambda x: x * (x.abs() > 0.49), "zeros": torch.zeros_like,
    "with what is no number": lambda x: x.masked_fill(x > 0.499, torch.nan),
    "periodic": lambda x: x * (torch.arange(x.shape[1]) % compression.SAMPLED > 0),
}  # fmt: skip


@pytest.mark.parametrize("share", [0.001, 0.1, 0.9])
@pytest.mark.parametrize("kind", LONG_ROWS)
def test_the_largest_entries_of_long_rows(kind: str, share: float) -> None:
    """As topk selects them, in the same order."""
    torch.manual_seed(0)
    x = LONG_ROWS[kind](torch.rand(2, compression.LONG + 5) - 0.5)
    k = int(share * x.shape[1])
    at = compression.largest(x, k)
    assert at.shape == (2, k) and all(len(row.unique()) == k for row in at)
    selected, expected = x.abs().gather(1, at), x.abs().topk(k, 1).values
    assert torch.equal(selected.nan_to_num(nan=9.0), expected.nan_to_num(nan=9.0))


def test_long_rows_are_mostly_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    x, seen = torch.rand(1, compression.LONG), list[int]()
    topk = torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda self, *a, **b: (seen.append(self.numel()), topk(self, *a, **b))[1])
    compression.largest(x, compression.LONG // 100)
    assert len(seen) == 2 and max(seen) < compression.LONG // 40


@pytest.mark.parametrize("recipe", ["top-k:density=0.1", "threshold:tau=0.7", "sign:feedback=on"])
def test_a_server_gets_what_all_would_get(recipe: str) -> None:
    compress, feedback = {**CASES, "top-k:density=0.1": (lambda x, t, i: largest(x, 19), True)}[recipe]
    close(trained(f"server+{recipe}"), compressed(compress, feedback))


def test_sixteen_bits_add_up_in_sixteen_bits() -> None:
    """PyTorch's fp16_compress (which gets float32): cast, divide by the number of workers, all-reduce, cast back."""

    def added(sent: Array) -> Array:
        parts = [row.astype(np.float32).astype(np.float16) / np.float16(P) for row in sent]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.astype(np.float64)

    close(trained("16-bit"), compressed(lambda x, t, i: x, False, added))


def test_a_majority_of_signs() -> None:
    """Bernstein et al., algorithm 1: sign(sum_i sign(g_i)); a tie moves nothing."""
    close(
        trained("sign"),
        compressed(lambda x, t, i: np.where(x >= 0, 1.0, -1.0), False, lambda sent: np.sign(sent.sum(0))),
    )


def merged(a: dict[int, float], b: dict[int, float], k: int) -> dict[int, float]:
    total = {j: a.get(j, 0.0) + b.get(j, 0.0) for j in a.keys() | b.keys()}
    return {j: total[j] for j in sorted(total, key=lambda j: -abs(total[j]))[:k]}


def test_gtop_k() -> None:
    """Shi et al., algorithms 3 and 4: sparse vectors as dictionaries, merged in a tree; local values that are not among
    the global ones stay in the residual."""
    k, w, v, e = 12, START.copy(), np.zeros(N), np.zeros((P, N))
    for t in range(STEPS):
        e = e + np.stack([gradient(i, w, t) for i in range(P)])
        own = [{int(j): float(x[j]) for j in np.argsort(-np.abs(x))[:k]} for x in e]
        level = own
        while len(level) > 1:
            level = [merged(level[j], level[j + 1], k) for j in range(0, len(level), 2)]
        for i in range(P):
            for j in own[i].keys() & level[0].keys():
                e[i, j] = 0.0
        total = np.zeros(N)
        total[list(level[0])] = list(level[0].values())
        v = BETA * v + total / P
        w = w - LR * v
    close(trained(f"gtop-k:k={k}"), np.tile(w, (P, 1)))


def test_powersgd() -> None:
    """Vogels et al., algorithms 1 and 2; Gram and Schmidt with the authors' epsilon."""
    rank, w, v, e = 2, START.copy(), np.zeros(N), np.zeros((P, N))
    places = [(0, 12, 10), (127, 6, 10)]
    q = [np.random.default_rng((3, 0, k)).standard_normal((b, rank)) for k, (_, _, b) in enumerate(places)]
    for t in range(STEPS):
        delta = np.stack([gradient(i, w, t) for i in range(P)]) + e
        mean = delta.mean(0)
        e = delta - mean  # of what is sent exactly; nothing is left of that
        e[:, 120:127] = 0.0
        for k, (at, a, b) in enumerate(places):
            m = delta[:, at : at + a * b].reshape(P, a, b)
            p = (m @ q[k]).mean(0)
            for c in range(rank):
                p[:, c] /= np.sqrt((p[:, c] ** 2).sum()) + 1e-8
                for d in range(c + 1, rank):
                    p[:, d] -= (p[:, c] @ p[:, d]) * p[:, c]
            q[k] = (m.transpose(0, 2, 1) @ p).mean(0)
            mean[at : at + a * b] = (p @ q[k].T).ravel()
            e[:, at : at + a * b] = (m - p @ q[k].T).reshape(P, -1)
        v = BETA * v + mean
        w = w - LR * v
    # Orthogonalising columns that are nearly parallel, step after step, lets the last digits of sums grow 100-fold.
    close(trained("powersgd:rank=2"), np.tile(w, (P, 1)), 1e-9)


def test_momentum_correction_with_factor_masking() -> None:
    """Lin et al., algorithm 4: u = m u + g; v = v + u; what is sent is taken out of both."""
    w, u, v = START.copy(), np.zeros((P, N)), np.zeros((P, N))
    for t in range(STEPS):
        sent = np.zeros((P, N))
        for i in range(P):
            u[i] = 0.9 * u[i] + gradient(i, w, t)
            v[i] = v[i] + u[i]
            sent[i] = largest(v[i], 10)
            v[i][sent[i] != 0] = 0.0
            u[i][sent[i] != 0] = 0.0
        w = w - LR * sent.mean(0)
    close(trained("top-k:k=10+momentum-correction:momentum=0.9", momentum=0.0), np.tile(w, (P, 1)))


def test_momentum_is_corrected_in_exact_first_steps_too() -> None:
    recipe = "top-k:k=10+momentum-correction:momentum=0.9+warm-up:steps=50"
    close(trained(recipe, momentum=0.0), data_parallel())


# ---- combined


def test_a_period_with_compression_is_qsparse_local_sgd() -> None:
    """Basu et al., algorithm 1: workers send what their weights have changed by, compressed, with memory."""
    base, w, v, e = START.copy(), np.tile(START, (P, 1)), np.zeros((P, N)), np.zeros((P, N))
    for t in range(STEPS):
        for i in range(P):
            v[i] = BETA * v[i] + gradient(i, w[i], t)
            w[i] = w[i] - LR * v[i]
        if (t + 1) % 4 == 0:
            change = e + w - base
            sent = np.stack([largest(row, 10) for row in change])
            e = change - sent
            base = base + sent.mean(0)
            w[:] = base
    close(trained("local-sgd:period=4+top-k:k=10"), w)


def test_period_gossip_and_threshold_together() -> None:
    """The coursework's configuration 9: after each period, neighbours' changes that are large enough are averaged."""
    w, v, e = np.tile(START, (P, 1)), np.zeros((P, N)), np.zeros((P, N))
    base = w.copy()
    for t in range(STEPS):
        for i in range(P):
            v[i] = BETA * v[i] + gradient(i, w[i], t)
            w[i] = w[i] - LR * v[i]
        if (t + 1) % 4 == 0:
            s = [1, 2, 4][((t + 1) // 4 - 1) % 3]
            change = e + w - base
            sent = at_least(change, 0.05)
            e = change - sent
            for i in range(P):
                around = {i, (i + s) % P, (i - s) % P}
                w[i] = base[i] + sum(sent[j] for j in around) / len(around)
            base = w.copy()
    close(trained("local-sgd:period=4+gossip+threshold:tau=0.05"), w)


# ---- what is sent, and what is left


@pytest.mark.parametrize(
    "recipe", ["top-k:k=10", "threshold:tau=0.7", "adaptive-threshold", "random-k:k=9", "qsgd:bits=6,feedback=on",
               "sign:feedback=on", "16-bit:feedback=on", "gossip+top-k:k=5", "server:shards=2+threshold:tau=0.9"],
)  # fmt: skip
def test_what_was_sent_and_what_is_left_are_all_gradients(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, sums = parse_recipe(recipe), {"sent": np.zeros((P, N)), "gradients": np.zeros((P, N))}
    kind = type(parsed.partners)
    average = kind.average

    def watched(*arguments: Any) -> Any:
        result = average(*arguments)
        sums["sent"] += result[1].numpy()
        return result

    def check(gradients: Array, state: State) -> None:
        assert state.residual is not None
        sums["gradients"] += gradients
        close(sums["sent"] + state.residual.numpy(), sums["gradients"], 1e-11)

    monkeypatch.setattr(kind, "average", watched)
    trained(parsed, on_step=check)


def test_powersgd_conserves_the_mean_of_all() -> None:
    totals = {"gradients": np.zeros(N), "last": np.zeros(N)}

    def check(gradients: Array, state: State) -> None:
        assert state.residual is not None
        totals["gradients"] += gradients.mean(0)
        totals["last"] = state.residual.numpy().mean(0)

    w = trained("powersgd", momentum=0.0, on_step=check)
    close((START - w[0]) / LR + totals["last"], totals["gradients"], 1e-10)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_survive_packing(bits: int) -> None:
    codes = torch.from_numpy(np.random.default_rng(bits).integers(0, 2**bits, (3, 29)))
    data = pack(codes, bits)
    assert data.shape == (3, packed_bytes(29, bits)) and data.dtype == torch.uint8
    assert torch.equal(unpack(data, 29, bits).long(), codes)


def test_a_threshold_sends_a_count_and_then_what_it_counts() -> None:
    payload = parse_recipe("threshold:tau=1").compression.encode(
        torch.tensor([[2.0, 0.0, -1.0], [0.5, 0, 0]]), 0, (0, 1)
    )
    assert payload.nbytes == (4 + 2 * 8, 4)


# ---- workers that go by themselves


def served(recipe: str, times: tuple[float, ...], updates: int) -> tuple[Array, Served]:
    """The server's weights after so many updates of SGD without momentum. Steps take so long that messages do not
    change who comes when."""
    size = len(times)
    weights = torch.from_numpy(START.copy()).unsqueeze(0)

    def gradients(copies: torch.Tensor, ranks: list[int], counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [gradient(r, copies[k].numpy(), n % STEPS) for k, (r, n) in enumerate(zip(ranks, counts, strict=True))]
        return torch.from_numpy(np.stack(rows)), torch.zeros(len(rows))

    def update(g: torch.Tensor) -> torch.Tensor:
        nonlocal weights
        weights = weights - LR * g
        return weights

    cluster = Topology.load(f"ethernet-1g:{size}")
    run = Served(
        parse_recipe(recipe), Workers.timed(1.0, cluster, size, times), SIZES, gradients, update, weights, updates
    )  # fmt: skip
    run.run_until(updates)
    return weights.numpy()[0], run


def by_events(times: tuple[float, ...], updates: int, bound: int | None, compress: Any = None) -> Array:
    """Each worker: pull, compute, push; the server updates on arrival; a worker that is too far ahead waits."""
    size, w = len(times), START.copy()
    copies, steps, e = [START.copy() for _ in times], [0] * size, np.zeros((size, N))
    events = [(seconds, k, k) for k, seconds in enumerate(times)]
    waiting: list[int] = []
    for count in range(updates):
        now, _, i = heapq.heappop(events)
        g = gradient(i, copies[i], steps[i] % STEPS)
        if compress is not None:
            e[i] += g
            g = compress(e[i])
            e[i] = e[i] - g
        w = w - LR * g / size
        steps[i] += 1
        waiting.append(i)
        for j in list(waiting):
            if bound is None or steps[j] - min(steps) <= bound:
                waiting.remove(j)
                copies[j] = w.copy()
                heapq.heappush(events, (now + times[j], size + count, j))
    return w


TIMES = (100.0, 131.7, 173.3, 255.1, 397.9)


@pytest.mark.parametrize("bound", [None, 0, 1, 3])
def test_a_server_updates_on_arrival(bound: int | None) -> None:
    recipe = "async+server" if bound is None else f"stale:bound={bound}+server:shards=2"
    weights, run = served(recipe, TIMES, 120)
    close(weights, by_events(TIMES, 120, bound))
    if bound is not None:
        assert run.staleness.lead == bound
        assert max(run.steps) - min(run.steps) <= bound + 1  # the last step of each has arrived


def test_what_is_pushed_to_a_server_that_updates_on_arrival_may_be_compressed() -> None:
    weights, _ = served("async+server+top-k:k=9", TIMES, 80)
    close(weights, by_events(TIMES, 80, None, lambda x: largest(x, 9)))


def test_a_bound_of_nothing_is_data_parallelism() -> None:
    weights, run = served("stale:bound=0+server", (1.0,) * P, P * STEPS)
    close(weights, data_parallel(0.0)[0])
    assert run.staleness.lead == 0


@pytest.mark.parametrize("seed", range(5))
def test_no_worker_is_ever_further_ahead_than_the_bound(seed: int) -> None:
    times = tuple(float(x) for x in np.random.default_rng(seed).exponential(1.0, 6))
    for bound in (0, 1, 4):
        assert served(f"stale:bound={bound}+server", times, 200)[1].staleness.lead <= bound
    assert served("async+server", times, 200)[1].staleness.lead > 4


# ---- refused


REFUSED = {
    "local-sgd:period=-1": "period of local-sgd is -1",
    "local-sgd:period=0": "at least 1",
    "diloco:momentum=1.5": "momentum of diloco",
    "top-k": "either k or density",
    "top-k:density=0": "density of top-k",
    "top-k:k=3,density=0.1": "either k or density",
    "qsgd:bits=1": "from 2 to 8",
    "qsgd:bits=4,feedback=on": "bucket below 49",
    "qsgd:bits=many": "whole number",
    "threshold:tau=-1": "tau of threshold",
    "threshold:tau=nan": "Give a number",
    "stale:bound=-1+server": "bound of stale",
    "server:shards=0": "shards of server",
    "all-reduce:form=star": "halving-doubling",
    "gossip:colour=red": "has no option",
    "gossipp": "Did you mean gossip",
    "": "there is no part",
    "gossip+ring": "twice with whom",
    "warm-up": "needs steps",
    "async": "meet at a server",
    "async+gossip": "meet at a server",
    "async+server+warm-up:steps=5": "Leave out warm-up",
    "gossip:what=weights+top-k:k=3": "do not come to agree",
    "diloco+gossip": "mean of all workers",
    "local-sgd+sign": "majority of signs",
    "gossip+sign": "majority",
    "gossip+gtop-k:k=3": "tree of merges",
    "server+powersgd": "factors",
    "momentum-correction:momentum=0.9": "nothing to correct",
    "qsgd+momentum-correction:momentum=0.9": "feedback=on",
    "local-sgd+top-k:k=3+momentum-correction:momentum=0.9": "Leave out momentum-correction",
    "matrix": "needs a file",
    "matrix:file=gone.json": "cannot read",
}


@pytest.mark.parametrize("recipe", REFUSED)
def test_what_makes_no_sense_is_refused_with_the_remedy(recipe: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse_recipe(recipe)
    assert REFUSED[recipe] in str(error.value)
    assert error.value.remedy


@pytest.mark.parametrize(
    ("recipe", "size", "why"),
    [
        ("top-k:k=188", P, "187 elements"),
        ("server:shards=2+gossip", P, "twice"),
        ("server:shards=9", P, "on no host"),
        ("server:shards=2,on=devices", P, "on no host"),
        ("all-reduce", 1, "there is one"),
        ("all-reduce:form=halving-doubling", 6, "power of two"),
        ("all-reduce:form=hierarchical", P, "several hosts"),
    ],
)
def test_what_workers_cannot_do_is_refused_with_the_remedy(recipe: str, size: int, why: str) -> None:
    with pytest.raises(RecipeError, match=why) as error:
        parse_recipe(recipe).check(size, SIZES, range(size), size)
    assert error.value.remedy


@pytest.mark.parametrize(
    "rows",
    [((0.5, 0.5), (0.4, 0.6)), ((1.5, -0.5), (-0.5, 1.5)), ((1.0,), (0.0, 1.0)), ((0.5, 0.5),), ((1.0, 0.2), (0, 0.8))],
)  # fmt: skip
def test_a_matrix_must_be_doubly_stochastic(rows: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(RecipeError):
        Matrix(rows=rows)


def test_a_matrix_is_for_so_many_workers() -> None:
    with pytest.raises(RecipeError, match="2 rows"):
        Matrix(rows=((0.5, 0.5), (0.5, 0.5))).check(3, (0, 1, 2), 3)


def test_long_periods_are_warned_about() -> None:
    assert not parse_recipe("local-sgd:period=2").warnings(10_000, 4)  # 10 / 2.83 = 3.5
    assert "above T^(1/4) / N^(3/4) = 3.5" in parse_recipe("local-sgd:period=4").warnings(10_000, 4)[0]
    assert not parse_recipe("local-sgd:period=1").warnings(10, 64)
    assert not parse_recipe("gossip").warnings(10, 64)


def test_payloads_of_some_rows() -> None:
    payload = Payload((torch.arange(6).view(3, 2),), torch.tensor([1, 2, 0]))
    assert payload.rows([2, 0]).nbytes == (4, 12)
