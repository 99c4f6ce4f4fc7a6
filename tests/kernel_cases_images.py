"""Cases on images: convolutions, pools, windows, other sizes. Importing this module adds them to ``CASES``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from flexsearch.graph.ops.adaptive_pool import adaptive_pattern
from flexsearch.graph.ops.border import bordered, by_dimension
from flexsearch.graph.ops.resample import interpolation
from flexsearch.graph.ops.spatial import Overlap, overlap_axes
from tests.kernel_cases import Case, case, family, few, rand

_PLACES, _KERNELS = {1: "h", 2: "h w", 3: "z h w"}, {1: "KH", 2: "KH KW", 3: "KZ KH KW"}


def _windows(s: Sequence[int], p: Sequence[int], d: Sequence[int]) -> str:
    axes = zip(_PLACES[len(s)].split(), _KERNELS[len(s)].split(), s, p, d, strict=True)
    return " ".join(f"({step}*{place}+{apart}*{kernel}-{pad})" for place, kernel, step, pad, apart in axes)


@family
def conv(draw: Any) -> Case:
    rank = draw(few(1, 3))
    g, c, o = draw(few(1, 3)), draw(few(1, 3)), draw(few(1, 3))
    k, s, d = ([draw(few(1, 3)) for _ in range(rank)] for _ in range(3))
    p = [draw(few(0, 4)) for _ in range(rank)]
    size = [d[i] * (k[i] - 1) + 1 + draw(few(0, 8 // rank)) for i in range(rank)]
    operands = [rand(draw(few(1, 3)), g * c, *size), rand(g * o, c, *k)] + [rand(g * o)] * draw(few(0, 1))
    call: Any = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    template = f"n (g c) {_windows(s, p, d)}, (g o) c {_KERNELS[rank]}, +(g o) -> n (g o) {_PLACES[rank]}"
    return case(
        f"conv{rank}d",
        template,
        operands,
        lambda x, w, b=None: call(x, w, b, s, p, d, g),
        {"stride": s, "padding": p, "dilation": d, "groups": g},
        sizes={"g": g},
    )


@family
def transposed_conv(draw: Any) -> Case:
    """A result of whole blocks, whatever is added at its end."""
    rank = draw(few(1, 3))
    g, c, o = draw(few(1, 2)), draw(few(1, 3)), draw(few(1, 3))
    k, s, d = ([draw(few(1, 4)) for _ in range(rank)] for _ in range(3))
    p = [draw(few(0, d[i] * (k[i] - 1) // 2)) for i in range(rank)]
    count = [draw(few(1, 4)) for _ in range(rank)]
    size = [s[i] * (count[i] - 1) + d[i] * (k[i] - 1) + 1 - 2 * p[i] for i in range(rank)]
    blocks = [-(-size[i] // s[i]) for i in range(rank)]
    dims = [Overlap(*v) for v in zip(count, k, s, p, d, size, strict=True)]
    reads, writes, axes = overlap_axes(dims)
    operands = [rand(draw(few(1, 2)), g * c, *count), rand(g * c, o, *k)] + [rand(g * o)] * draw(few(0, 1))
    call: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    more = [s[i] * blocks[i] - size[i] for i in range(rank)]

    def reference(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        y = F.pad(call(x, w, None, s, 0, 0, g, d), [side for _ in range(rank) for side in (0, max(s))])
        for i in range(rank):
            y = y.narrow(2 + i, p[i], s[i] * blocks[i])
        return y if b is None else y + b.view(-1, *[1] * rank)

    return case(
        f"conv_transpose{rank}d",
        f"n (g c) {reads}, (g c) o {_KERNELS[rank]}, +(g o) -> n (g o) {writes}",
        operands,
        reference,
        {"stride": s, "padding": p, "dilation": d, "output_padding": more, "groups": g},
        sizes={**axes, "g": g, "c": c, "o": o},
    )


@family
def pool(draw: Any) -> Case:
    rank, largest, ceil = draw(few(1, 3)), draw(st.booleans()), draw(st.booleans())
    k = [draw(few(1, 4)) for _ in range(rank)]
    s = [draw(few(1, 4)) for _ in range(rank)]
    p = [draw(few(0, n // 2)) for n in k]
    d = [draw(few(1, 2)) if largest else 1 for _ in range(rank)]
    size = [d[i] * (k[i] - 1) + 1 + draw(few(0, 8 // rank)) for i in range(rank)]
    attributes: dict[str, Any] = {"kernel_size": k, "stride": s, "padding": p, "dilation": d, "ceil_mode": ceil}
    indices = largest and draw(st.booleans())
    if largest:
        call: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]

        def reference(x: Tensor) -> Any:
            return call(x, k, s, p, d, ceil, indices)[indices] if indices else call(x, k, s, p, d, ceil)

    else:
        include = draw(st.booleans())
        override = draw(st.sampled_from([None, 3])) if rank > 1 else None
        attributes |= {"count_include_pad": include, "divisor_override": override}

        def reference(x: Tensor) -> Any:
            if rank == 1:
                return F.avg_pool1d(x, k, s, p, ceil, include)
            return (F.avg_pool2d, F.avg_pool3d)[rank - 2](x, k, s, p, ceil, include, override)

    kind = "max_pool_indices" if indices else f"{'max' if largest else 'avg'}_pool{rank}d"
    operand = rand(draw(few(1, 3)), draw(few(1, 3)), *size)
    kernel = dict(zip(_KERNELS[rank].split(), k, strict=True))
    template = f"n c {_windows(s, p, d)} -> n c {_PLACES[rank]}"
    return case(kind, template, [operand], reference, attributes, sizes=kernel, no_grad=[0] if indices else [])


@family
def adaptive_pool(draw: Any) -> Case:
    which, rank = draw(st.sampled_from(["avg", "max"])), draw(few(1, 3))
    target = [draw(few(1, 4)) for _ in range(rank)]
    call: Any = getattr(F, f"adaptive_{which}_pool{rank}d")
    x = rand(draw(few(1, 4)), draw(few(1, 3)), *[draw(few(4, 8)) for _ in range(rank)])
    template, sizes = adaptive_pattern(rank + 2, x.shape[2:], target)
    attributes = {"output_size": target}
    return case(f"adaptive_{which}_pool{rank}d", template, [x], lambda x: call(x, target), attributes, sizes=sizes)


@family
def im2col(draw: Any) -> Case:
    k, s, d = ([draw(few(1, 3)) for _ in range(2)] for _ in range(3))
    p = [draw(few(0, 2)) for _ in range(2)]
    size = [d[i] * (k[i] - 1) + 1 + draw(few(0, 5)) for i in range(2)]
    c = draw(few(1, 3))
    h, w = ((size[i] + 2 * p[i] - d[i] * (k[i] - 1) - 1) // s[i] + 1 for i in range(2))
    return case(
        "im2col", f"n c ({s[0]}*h+{d[0]}*KH-{p[0]}) ({s[1]}*w+{d[1]}*KW-{p[1]}) -> n (c KH KW) (h w)",
        [rand(draw(few(1, 3)), c, *size)], lambda x: F.unfold(x, k, d, p, s),
        {"kernel_size": k, "dilation": d, "padding": p, "stride": s, "dtype": "float64"},
        sizes={"h": h, "w": w, "c": c, "KH": k[0], "KW": k[1]},
    )  # fmt: skip


@family
def fold(draw: Any) -> Case:
    """Whole blocks, of which the last may lack windows."""
    k, s, d = ([draw(few(1, 3)) for _ in range(2)] for _ in range(3))
    p = [draw(few(0, 2)) for _ in range(2)]
    count = [draw(few(1, 4)) for _ in range(2)]
    least = [s[i] * (count[i] - 1) + d[i] * (k[i] - 1) + 1 - 2 * p[i] for i in range(2)]
    size = [-(-max(least[i], 1) // s[i]) * s[i] for i in range(2)]
    dims = [Overlap(*v) for v in zip(count, k, s, p, d, size, strict=True)]
    reads, writes, axes = overlap_axes(dims)
    n, c = draw(few(1, 3)), draw(few(1, 3))

    def reference(x: Tensor) -> Tensor:
        full = [s[i] * (count[i] - 1) + d[i] * (k[i] - 1) + 1 for i in range(2)]
        y = F.fold(x.reshape(n, c * k[0] * k[1], -1), (full[0], full[1]), k, d, 0, s)
        y = F.pad(y, (0, s[1] + size[1], 0, s[0] + size[0]))
        return y[:, :, p[0] : p[0] + size[0], p[1] : p[1] + size[1]]

    attributes = {"stride": s, "padding": p, "dilation": d, "dtype": "float64"}
    return case(
        "fold", f"n c KH KW {reads} -> n c {writes}", [rand(n, c, *k, *count)], reference, attributes, sizes=axes
    )


@family
def interpolate(draw: Any) -> Case:
    mode = draw(st.sampled_from(["nearest", "nearest-exact", "linear", "bilinear", "trilinear", "bicubic"]))
    spatial = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}.get(mode) or draw(few(1, 3))
    corners = draw(st.booleans()) if "near" not in mode else None
    size = [draw(few(1, 8)) for _ in range(spatial)]
    if draw(st.booleans()):
        factor = draw(st.sampled_from([0.5, 1.0, 1.3, 1.5, 2.0, 3.0]))
        given: dict[str, Any] = {"scale_factor": [max(factor, 1 / n) for n in size]}
    else:
        given = {"size": [draw(st.sampled_from([1, 2, 3, n, 2 * n, 3 * n // 2 + 1])) for n in size]}
    x = rand(draw(few(1, 3)), draw(few(1, 3)), *size)
    made = F.interpolate(x, mode=mode, align_corners=corners, **given).shape
    if mode == "bicubic" and made == x.shape:
        # PyTorch then takes the gradient for that of a copy, which it is not if a scale was given (gradcheck fails).
        given = {"size": size}
    scales: list[float | None] = list(given.get("scale_factor", [None] * spatial))
    template, sizes = interpolation(mode, x.shape, made, scales, bool(corners))
    attributes = {"mode": mode, "align_corners": bool(corners), "scales": scales}
    return case("interpolate", template, [x], lambda x: F.interpolate(x, mode=mode, align_corners=corners, **given),
                attributes, sizes=sizes)  # fmt: skip


@family
def border_pad(draw: Any) -> Case:
    mode, padded = draw(st.sampled_from(["reflect", "replicate"])), draw(few(1, 3))
    size = [draw(few(2, 6)) for _ in range(padded + draw(few(0 if padded < 3 else 1, 1)) + 1)]
    most = [n - 1 if mode == "reflect" else 3 for n in reversed(size)]
    sides = [draw(few(0, most[i])) for i in range(padded) for _ in range(2)]
    template, sizes = bordered(mode, by_dimension(sides, len(size)))
    x = rand(*size)
    return case("border_pad", template, [x], lambda x: F.pad(x, sides, mode), {"mode": mode, "pad": sides}, sizes=sizes)
