"""Do plans fit that ran, and not all of those that are one size larger?

    python -m benchmarks.truth_memory DATA [--quick] [--json]

llm-foundry's table has one microbatch for each model and GPU, of 40 or 80 GB. Each is planned as it ran, and again with
twice the samples a microbatch. ``fit``: plans whose predicted peak is within what plans may use of the GPU's memory:
all should be; ``doubled_fit``: the same of the larger ones: not all should be; ``peak``: median peak over the memory.
Presets leave 7 % of the memory to the driver, the communication library and fragments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.harness import Row, median, options_with_data, parser, report, say
from benchmarks.truth import FSDP_ROWS, Case, Scored, cluster_of, fsdp_cases, predict


def doubled(case: Case) -> Case:
    """With twice the samples a microbatch."""
    return replace(case, batch=2 * case.batch)


def room(row: Scored) -> int:
    """Bytes of a GPU."""
    return cluster_of(row.case.cluster, row.case.layout.devices).devices[0].memory_bytes


def lines(pairs: list[tuple[Scored, Scored]]) -> Iterator[Row]:
    """By source, of pairs of a case and of the doubled one."""
    for source in dict.fromkeys(row.case.source for row, _ in pairs):
        some = [pair for pair in pairs if pair[0].case.source == source]
        ran, larger = zip(*some, strict=True)
        yield {
            "source": source, "rows": len(some), "fit": sum(row.missing == 0 for row in ran),
            "doubled_fit": sum(row.missing == 0 for row in larger),
            "peak": median([row.peak_bytes / room(row) for row in ran]),
            "doubled_peak": median([row.peak_bytes / room(row) for row in larger]),
        }  # fmt: skip


def main() -> int:
    """Print the table."""
    options = options_with_data(parser(__doc__), FSDP_ROWS)
    cases = [case for case in fsdp_cases(options.data) if isinstance(case, Case)]
    pairs = []
    for case in cases[:: 6 if options.quick else 1]:
        say(case.label)
        pairs.append((predict(case), predict(doubled(case))))
        for row in pairs[-1][:1]:
            if row.missing:
                say(f"ran, but lacks {row.missing / 1e9:.1f} GB as predicted: {case.label}")
    report(list(lines(pairs)), "Plans that ran, and twice as large ones", options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
