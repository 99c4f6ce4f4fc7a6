"""Ten recipes that show what each level saves, alone and combined."""

from __future__ import annotations

from math import log2


def configurations(workers: int) -> tuple[str, ...]:
    """Exact all-reduce; a period of 16, gossip with growing distances, and a threshold, alone and combined, of which
    the ninth has all three; QSGD with 4 bits and gTop-k beside them. The threshold leaves a share 1 / log2(P) of the
    entries of P workers: with feedback an entry then waits log2(P) exchanges on average, as long as gossip takes to
    bring it to everyone. ``workers``: a power of two, at least 4."""
    threshold = f"adaptive-threshold:density={1 / log2(workers):.4g}"
    return (
        "all-reduce",
        "local-sgd:period=16",
        "gossip",
        threshold,
        "local-sgd:period=16+gossip",
        f"local-sgd:period=16+{threshold}",
        f"gossip+{threshold}",
        "qsgd:bits=4",
        f"local-sgd:period=16+gossip+{threshold}",
        "gtop-k:density=0.01",
    )
