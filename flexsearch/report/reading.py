"""What a step reads from storage, whether that is its limit, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexsearch.lower import Lowered
from flexsearch.lower.reading import sample_bytes
from flexsearch.report.units import count, nbytes, percent, seconds
from flexsearch.simulate.whatif import without_reading


@dataclass(frozen=True)
class Input:
    """Of the host that reads most: ``samples`` it takes in a step, ``read_bytes`` and ``files`` (means) that are not in
    its memory. ``host_s``: how long it reads for a step; ``files_s``: what of a batch's time is opening files, before
    ``prefetch`` batches share it; ``server_s``: how long the server of shared storage is busy with all ``hosts``.
    ``step_s``, ``computing_s``: of a step, and if batches were there without being read."""

    hosts: int
    samples: int
    read_bytes: float
    files: float
    prefetch: int
    host_s: float
    files_s: float
    server_s: float
    step_s: float
    computing_s: float

    @property
    def limits(self) -> bool:
        """Whether a step takes longer than it would without reading."""
        return self.step_s > self.computing_s

    def words(self) -> str:
        """For people."""
        text = (
            f"Reading: {'one host reads' if self.hosts == 1 else f'each of {self.hosts} hosts reads up to'} "
            f"{self.samples} samples a step, {nbytes(self.read_bytes)} in {count(self.files)} files that are not in "
            f"memory, which takes {seconds(self.host_s)}"
        )
        if self.server_s:
            text += f"; the server is busy with all hosts for {seconds(self.server_s)}"
        if not self.limits:
            return f"{text}. It is hidden behind the step."
        gain = percent(1.0 - self.computing_s / self.step_s)
        return (
            f"{text}. Input is the limit: without reading a step would take {seconds(self.computing_s)}, {gain} less. "
            + self._remedy()
        )

    def _remedy(self) -> str:
        if self.prefetch == 0:
            return "Read ahead (prefetch) to overlap it with computing."
        if self.server_s >= self.host_s:
            return (
                "All hosts wait for one server: copy the data to the hosts, keep more of it in memory, or give the "
                "server more bandwidth."
            )
        if 2.0 * self.files_s > self.prefetch * self.host_s:
            return (
                "Most of it is opening files: put many samples into each file, or read more batches at the same time "
                "(prefetch)."
            )
        return "It is bytes: keep more of the data in memory, or use faster disks or links to the storage."


def reading(lowered: Lowered, step_s: float) -> Input | None:
    """What a step of ``step_s`` seconds reads; None where the topology has no storage, or no operator reads inputs."""
    pieces = lowered.lowering
    if (storage := lowered.topology.storage) is None or not pieces.readers:
        return None
    of_host = pieces.samples_read(lowered.configs, lowered.stages.microbatches)
    each, options = storage.reading.sample_bytes or sample_bytes(pieces.graph), storage.reading
    most = max(of_host.values())
    count, hosts = most * storage.missing(each), len(of_host) * pieces.replicas // pieces.inside
    files = count * options.files_per_sample + storage.missing(each) * options.files_per_batch
    files_s, bytes_s = files * storage.file_latency_s, count * each / storage.bandwidth
    depth = max(1, options.prefetch)
    everyone = sum(of_host.values()) * pieces.replicas // pieces.inside * storage.missing(each) * each
    return Input(
        hosts, most, count * each, files, options.prefetch, max(bytes_s, (files_s + bytes_s) / depth), files_s,
        everyone / storage.server_bandwidth if storage.server_bandwidth is not None else 0.0, step_s,
        without_reading(lowered),
    )  # fmt: skip


def reading_data(read: Input | None) -> dict[str, Any]:
    """For JSON: ``input``, left out where nothing is read."""
    if read is None:
        return {}
    fields = {name: getattr(read, name) for name in Input.__dataclass_fields__}
    return {"input": fields | {"limits": read.limits}}
