"""Devices, links, routes and presets: the machine that a plan is made for. Plain data and shortest paths, no torch."""

from flexsearch.topology.parts import Communication, Device, Link, Resource, Route
from flexsearch.topology.sources import Figure, SourceKind, Sources
from flexsearch.topology.storage import Reading, Storage
from flexsearch.topology.topology import Topology, presets

__all__ = [
    "Communication", "Device", "Figure", "Link", "Reading", "Resource", "Route", "SourceKind", "Sources", "Storage",
    "Topology", "presets",
]  # fmt: skip
