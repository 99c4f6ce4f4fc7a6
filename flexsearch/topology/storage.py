"""Where training data lies, and how batches are read from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from flexsearch.errors import TopologyError
from flexsearch.files import FileModel, describe
from flexsearch.quantities import MAX_COUNT, Bandwidth, Capacity, LatencySeconds


class Reading(FileModel):
    """What a batch is made of, and how far ahead it is read.

    ``sample_bytes``: of a sample in its file; None: those of the graph's inputs. ``files_per_sample``: below 1 where a
    file holds several; ``files_per_batch``: opened by each host for each batch, however many samples it reads.
    ``prefetch``: batches that a host reads at the same time, ahead of the step that needs them (the worker processes of
    a loader); 0: a step reads its own batch first. ``samples``: of the data set, for a cache of so many bytes."""

    sample_bytes: Annotated[float, Field(ge=1.0, le=1e15)] | None = None
    files_per_sample: Annotated[float, Field(ge=0.0, le=1e6)] = 1.0
    files_per_batch: Annotated[float, Field(ge=0.0, le=1e9)] = 0.0
    prefetch: Annotated[int, Field(ge=0, le=4096)] = 1
    samples: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None


class Storage(FileModel):
    """The files that hosts read, in epochs after the first.

    ``kind``: "local": each host has its own copy; "shared": one file system, whose server has ``server_bandwidth``,
    B/s, for all hosts together. ``bandwidth``: of a host's own way to its files, B/s: its disk, or its link to the
    server. ``file_latency_s``: from opening a file to its first byte. In memory stay ``cache_bytes`` on each host, or
    the share ``hits`` of all samples. ``reading``: what is read, unless the user says otherwise."""

    kind: Literal["local", "shared"]
    bandwidth: Bandwidth
    server_bandwidth: Bandwidth | None = None
    file_latency_s: LatencySeconds = 0.0
    cache_bytes: Capacity | None = None
    hits: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    reading: Reading = Reading()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.kind == "shared") != (self.server_bandwidth is not None):
            raise ValueError(
                "a shared file system needs server_bandwidth" if self.kind == "shared"
                else "server_bandwidth is for shared storage; leave it out"
            )  # fmt: skip
        if self.cache_bytes is not None and self.hits is not None:
            raise ValueError("give cache_bytes or hits, not both")
        if self.cache_bytes is not None and self.reading.samples is None:
            raise ValueError("cache_bytes needs reading.samples, the number of samples; or give hits")
        return self

    def with_reading(self, fields: Mapping[str, Any]) -> Storage:
        """The same files of which batches are made otherwise. Raises TopologyError for fields that no reading has."""
        try:
            reading = Reading(**{name: getattr(self.reading, name) for name in Reading.model_fields} | dict(fields))
            return Storage(**{name: getattr(self, name) for name in Storage.model_fields} | {"reading": reading})
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            field = ".".join(map(str, problem["loc"]))
            raise TopologyError(f"reading from storage: {f'{field}: ' if field else ''}{describe(problem)}") from error

    def missing(self, sample_bytes: float) -> float:
        """Share of the samples that are not in memory. Of more data than fit, those that fit stay there."""
        if self.cache_bytes is None or self.reading.samples is None:
            return 1.0 - (self.hits or 0.0)
        return max(0.0, 1.0 - self.cache_bytes / (self.reading.samples * sample_bytes))
