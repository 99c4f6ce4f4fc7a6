"""Configs by number, compiled: a split on a mesh, with the sharding of its weights.

What follows from a config (other devices, other storage, the config of a neighbour) is looked up or made here without
Python, as soon as its split is known: splits are few, meshes many.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexsearch.compiled import ONE, U32, ZERO, lean
from flexsearch.lower.change import Change, miss
from flexsearch.lower.interned import intern_layout, intern_mesh
from flexsearch.lower.keys import CONFIG, DERIVED, LIKE, MISSING, NEAREST, OVER, SHARDED, find, is_full, put
from flexsearch.lower.tables import TemplateTables
from flexsearch.strategy import OVER_ALL, States

_LEVELS, _OVER_ALL = np.uint64(len(States)), np.uint64(OVER_ALL)


@lean
def config_of(tables: TemplateTables, split: Any, mesh: Any, sharding: Any) -> Any:
    """Number of the config; MISSING, and ``full`` set, if there is no room for a new one. ``sharding``:
    rank of its ``Sharding``."""
    split, mesh, sharding = np.uint64(split), np.uint64(mesh), np.uint64(sharding)
    states, over = sharding // _OVER_ALL, sharding % _OVER_ALL
    # The key has no room for ``over``: such a config is found by the one that is sharded over all.
    every = states * _OVER_ALL + _OVER_ALL - ONE if states > ZERO else ZERO
    config = _config_of(tables, split, mesh, every, CONFIG, split, _LEVELS * mesh + states)
    if sharding == every or config == MISSING:
        return config
    return _config_of(tables, split, mesh, sharding, DERIVED, np.uint64(SHARDED) + over, np.uint64(config))


@lean
def _config_of(tables: TemplateTables, split: Any, mesh: Any, sharding: Any, kind: Any, a: Any, b: Any) -> Any:
    """As ``config_of``, by a key."""
    cached = find(tables.keys, kind, a, b)
    if cached != MISSING:
        return cached
    pools, used, splits = tables.pools, tables.used, tables.splits
    count, operands = np.uint64(splits.pieces[split]), np.uint64(splits.last[split] - splits.reads[split])
    full = is_full(tables.keys) or used.configs[0] == np.uint64(pools.config_first.shape[0])
    full = full or used.entries[0] + count > np.uint64(pools.entry_device.shape[0])
    if full or used.layouts[0] + operands > np.uint64(pools.layout.shape[0]):
        tables.full[0] = 1
        return MISSING
    number, at = used.configs[0], used.layouts[0]
    pools.config_reads[number] = at
    pools.config_writes[number] = at + np.uint64(splits.writes[split] - splits.reads[split])
    for o in range(np.uint64(splits.reads[split]), np.uint64(splits.last[split])):
        layout = _operand(tables, mesh, o)
        if layout == MISSING:
            tables.full[0] = 1
            return MISSING
        pools.layout[at] = layout
        at += ONE
    used.layouts[0] = at
    pools.config_split[number], pools.config_mesh[number], pools.config_sharding[number] = split, mesh, sharding
    _compute(tables, number, split, mesh, count)
    used.configs[0] = number + ONE
    put(tables.keys, kind, a, b, number)
    return np.uint32(number)


@lean
def _operand(tables: TemplateTables, mesh: Any, o: Any) -> Any:
    """Layout of operand row ``o`` of a split on a mesh; MISSING if there is no room for a new one."""
    splits, layouts = tables.splits, tables.layouts
    of = np.uint32(mesh)
    if splits.first[o] != MISSING:
        first, count = np.uint64(splits.first[o]), np.uint64(splits.held_by[o])
        in_blocks = splits.spread[o] == 1
        of = _in_all_blocks(tables, mesh, first, count) if in_blocks else _chosen(tables, mesh, first, count)
        if of == MISSING:
            return MISSING
    return intern_layout(layouts, splits.grid[o], of)


@lean
def _in_all_blocks(tables: TemplateTables, mesh: Any, first: Any, count: Any) -> Any:
    """As ``_chosen``, for positions of all blocks (``split.Region``)."""
    layouts, blocks = tables.layouts, tables.blocks
    begin = np.uint64(layouts.mesh_first[mesh])
    positions = np.uint64(layouts.mesh_last[mesh]) - begin
    for k in range(count):
        at = np.uint64(tables.splits.position[first + k])
        device = np.uint64(layouts.device[begin + at % positions])
        tables.scratch.device[k] = device + at // positions * blocks.devices[0]
    return intern_mesh(layouts, tables.scratch.device, ZERO, count)


@lean
def _chosen(tables: TemplateTables, mesh: Any, first: Any, count: Any) -> Any:
    """The mesh of the devices of ``mesh`` at the positions listed from ``first`` on; MISSING if there is no room."""
    begin = np.uint64(tables.layouts.mesh_first[mesh])
    for k in range(count):
        position = np.uint64(tables.splits.position[first + k])
        tables.scratch.device[k] = tables.layouts.device[begin + position]
    return intern_mesh(tables.layouts, tables.scratch.device, ZERO, count)


@lean
def _compute(tables: TemplateTables, number: Any, split: Any, mesh: Any, count: Any) -> None:
    """What the devices of a config compute."""
    pools, used, splits = tables.pools, tables.used, tables.splits
    first, at = np.uint64(tables.layouts.mesh_first[mesh]), used.entries[0]
    cost, extents = np.uint64(splits.cost[split]), np.uint64(splits.extents[split])
    unequal = splits.piece_first[split] != MISSING
    pools.config_first[number], pools.config_last[number] = at, at + count
    for k in range(count):
        device = np.uint64(tables.layouts.device[first + k])
        row = cost + np.uint64(tables.kind[device]) * extents
        pools.entry_samples[at + k] = pools.entry_part[at + k] = 0
        if unequal:
            piece = np.uint64(splits.piece_first[split]) + k
            row += np.uint64(splits.extent[piece])
            pools.entry_samples[at + k], pools.entry_part[at + k] = splits.samples[piece], splits.part[piece]
        pools.entry_device[at + k] = device
        pools.entry_forward[at + k], pools.entry_backward[at + k] = splits.forward[row], splits.backward[row]
        pools.entry_inputs[at + k], pools.entry_weight[at + k] = splits.inputs[row], splits.weight[row]
        pools.entry_cast[at + k] = splits.cast[row]
    used.entries[0] = at + count


@lean
def _allowed(tables: TemplateTables, change: Change, config: Any) -> Any:
    """The nearest config that is allowed; MISSING, and noted, if it is not known."""
    if config == MISSING or tables.ruled[0] == 0:
        return config
    return derived(tables, change, np.uint64(NEAREST), config)


@lean
def derived(tables: TemplateTables, change: Change, how: Any, config: Any) -> Any:
    """A config that Python derives from another; MISSING, and noted, if it is not known."""
    other = find(tables.keys, DERIVED, how, config)
    if other == MISSING:
        miss(change, DERIVED, how, config)
    return other


@lean
def over(tables: TemplateTables, change: Change, link: Any, config: Any) -> Any:
    """The config that follows another over a link; MISSING, and noted, if it is not known how."""
    splits, split = tables.splits, tables.pools.config_split[np.uint64(config)]
    row = find(tables.keys, OVER, link, split)
    if row == MISSING:
        miss(change, OVER, link, split)
        return MISSING
    mesh, at = tables.pools.config_mesh[np.uint64(config)], np.uint64(row)
    if splits.follow_first[at] != MISSING:
        mesh = _chosen(tables, np.uint64(mesh), np.uint64(splits.follow_first[at]), np.uint64(splits.follow_count[at]))
        if mesh == MISSING:
            tables.full[0] = 1
            return MISSING
    return _allowed(tables, change, config_of(tables, splits.follow_split[at], mesh, ZERO))


@lean
def renamed(tables: TemplateTables, change: Change, config: Any, names: U32) -> Any:
    """The same config with device d renamed to ``names[d]``."""
    layouts, device = tables.layouts, tables.scratch.device
    mesh = np.uint64(tables.pools.config_mesh[np.uint64(config)])
    first, count = np.uint64(layouts.mesh_first[mesh]), np.uint64(layouts.mesh_last[mesh] - layouts.mesh_first[mesh])
    for k in range(count):
        device[k] = names[np.uint64(layouts.device[first + k])]
    return _on(tables, change, config, count)


@lean
def swapped(tables: TemplateTables, change: Change, config: Any, a: Any, b: Any) -> Any:
    """The same config with two devices exchanged."""
    layouts, device = tables.layouts, tables.scratch.device
    mesh = np.uint64(tables.pools.config_mesh[np.uint64(config)])
    first, count = np.uint64(layouts.mesh_first[mesh]), np.uint64(layouts.mesh_last[mesh] - layouts.mesh_first[mesh])
    for k in range(count):
        device[k] = layouts.device[first + k]
        if np.uint64(device[k]) == np.uint64(a):
            device[k] = b
        elif np.uint64(device[k]) == np.uint64(b):
            device[k] = a
    return _on(tables, change, config, count)


@lean
def moved_on(tables: TemplateTables, change: Change, config: Any, devices: Any) -> Any:
    """The same config on the next devices (of so many in all, in a circle): those after the last one where it lies on
    neighbours, else the next neighbour of each."""
    layouts, device = tables.layouts, tables.scratch.device
    mesh = np.uint64(tables.pools.config_mesh[np.uint64(config)])
    first, last = np.uint64(layouts.mesh_first[mesh]), np.uint64(layouts.mesh_last[mesh])
    least, most = np.uint64(layouts.device[first]), np.uint64(layouts.device[first])
    for k in range(first, last):
        least, most = min(least, np.uint64(layouts.device[k])), max(most, np.uint64(layouts.device[k]))
    by = last - first if most - least + ONE == last - first else ONE
    for k in range(first, last):
        device[k - first] = (np.uint64(layouts.device[k]) + by) % np.uint64(devices)
    return _on(tables, change, config, last - first)


@lean
def _on(tables: TemplateTables, change: Change, config: Any, count: Any) -> Any:
    """The same config on the first ``count`` devices in ``scratch.device``."""
    mesh, number = intern_mesh(tables.layouts, tables.scratch.device, ZERO, count), np.uint64(config)
    if mesh == MISSING:
        tables.full[0] = 1
        return MISSING
    sharding = np.uint64(tables.pools.config_sharding[number])
    return _allowed(tables, change, config_of(tables, tables.pools.config_split[number], mesh, sharding))


@lean
def with_sharding(tables: TemplateTables, change: Change, config: Any, sharding: Any) -> Any:
    """The same config with its weights sharded otherwise. On one device: not at all."""
    pools, number = tables.pools, np.uint64(config)
    several = pools.config_last[number] - pools.config_first[number] > ONE or tables.blocks.replicas[0] > ONE
    kept = np.uint64(sharding) if several else ZERO
    return _allowed(tables, change, config_of(tables, pools.config_split[number], pools.config_mesh[number], kept))


@lean
def like(tables: TemplateTables, change: Change, operator: Any, config: Any) -> Any:
    """The same config for another operator; MISSING, and noted, if that one's split is not known."""
    pools, number = tables.pools, np.uint64(config)
    split = find(tables.keys, LIKE, operator, pools.config_split[number])
    if split == MISSING:
        miss(change, LIKE, operator, pools.config_split[number])
        return MISSING
    sharding = np.uint64(pools.config_sharding[number])
    return _allowed(tables, change, config_of(tables, split, pools.config_mesh[number], sharding))


@lean
def intern_config(tables: TemplateTables, split: Any, devices: U32, sharding: Any) -> Any:
    """Number of a config on these devices; MISSING, and ``full`` set, if there is no room for a new one."""
    mesh = intern_mesh(tables.layouts, devices, ZERO, np.uint64(devices.shape[0]))
    if mesh == MISSING:
        tables.full[0] = 1
        return MISSING
    return config_of(tables, split, mesh, sharding)
