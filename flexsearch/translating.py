"""How lean functions are typed and translated to LLVM's language: in less time than numba takes, with the same result.

As ``linking``, the only module that imports it, it relies on inner parts of numba.
"""

from __future__ import annotations

import operator
from typing import Any, ClassVar, Final

from numba import types
from numba.core import cgutils
from numba.core.compiler import Flags
from numba.core.lowering import Lower
from numba.core.rewrites.static_getitem import RewriteConstGetitems, RewriteConstSetitems
from numba.core.typed_passes import NopythonTypeInference, PreLowerStripPhis
from numba.core.typing.context import Context as TypingContext
from numba.core.untyped_passes import (
    DeadBranchPrune,
    FixupArgs,
    ReconstructSSA,
    RewriteSemanticConstants,
    TranslateByteCode,
)
from numba.np.arrayobj import load_item, store_item


class ConstantIndices:
    """Those of numba's rewritings before types are inferred that lean functions need."""

    def run_pass(self, state: Any) -> bool:
        blocks = state.func_ir.blocks
        for rewriting in (RewriteConstGetitems(state), RewriteConstSetitems(state)):
            for label, block in blocks.items():
                if rewriting.match(state.func_ir, block, state.typemap, state.calltypes):
                    blocks[label] = rewriting.apply()
        return True


class StripPhis(PreLowerStripPhis):
    """As numba's, without working out where variables live: that is for counting references."""

    def run_pass(self, state: Any) -> bool:
        state.func_ir = self._strip_phi_nodes(state.func_ir)
        return True


PASSES: Final = (
    TranslateByteCode, FixupArgs, RewriteSemanticConstants, DeadBranchPrune, ConstantIndices, ReconstructSSA,
    DeadBranchPrune, NopythonTypeInference, StripPhis,
)  # fmt: skip
"""Those of numba's passes that lean functions need up to their translation. The others are for what they do not have:
closures, literal_unroll, expressions of whole arrays, parallel loops, references to be counted."""

_SAME_FOR_ALL: Final = hash(Flags())


class Resolver(TypingContext):
    """Shares all that numba knows of types, and remembers which signature of an operator fits which arguments."""

    signatures: ClassVar[dict[Any, Any]] = {}

    def __init__(self, context: Any) -> None:
        self.__dict__ = context.__dict__

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        if not isinstance(func, types.Function | types.NumberClass) or kws:
            return super().resolve_function_type(func, args, kws)
        key = func, tuple(args)
        if (signature := self.signatures.get(key)) is None:
            signature = self.signatures[key] = super().resolve_function_type(func, args, kws)
        return signature

    def resolve_setitem(self, target: Any, index: Any, value: Any) -> Any:
        return self.resolve_function_type(self.resolve_value_type(operator.setitem), (target, index, value), {})


class LeanFlags(Flags):
    """numba looks overloads up by flags, and compares two flags by all options."""

    def __eq__(self, other: object) -> bool:
        return (isinstance(other, LeanFlags) and self._values == other._values) or super().__eq__(other)

    def __hash__(self) -> int:
        return _SAME_FOR_ALL

    def copy(self) -> Any:
        return self


class LeanLower(Lower):
    """Reads and writes elements of arrays in a few instructions; numba writes some fifty, most of which LLVM finds
    to do nothing, in its own time."""

    def alloca_lltype(self, name: str, lltype: Any, datamodel: Any = None) -> Any:
        """Without asking LLVM for its size, which only debuggers need."""
        return cgutils.alloca_once(self.builder, lltype, name=name, zfill=False)

    def lower_getitem(self, resty: Any, expr: Any, value: Any, index: Any, signature: Any) -> Any:
        if (pointer := self._element(value, index)) is None:
            return super().lower_getitem(resty, expr, value, index, signature)
        item = load_item(self.context, self.builder, self.typeof(value.name), pointer)
        return self.context.cast(self.builder, item, signature.return_type, resty)

    def lower_setitem(self, target: Any, index: Any, value: Any, signature: Any) -> Any:
        kind = self.typeof(value.name)
        scalar = isinstance(kind, types.Number | types.Boolean)
        if not scalar or (pointer := self._element(target, index)) is None:
            return super().lower_setitem(target, index, value, signature)
        array = self.typeof(target.name)
        item = self.context.cast(self.builder, self.loadvar(value.name), kind, array.dtype)
        return store_item(self.context, self.builder, array, item, pointer)

    def lower_binop(self, resty: Any, expr: Any, op: Any) -> Any:
        """Without looking for code for constant operands, which only powers have."""
        if op in (operator.pow, operator.ipow):
            return super().lower_binop(resty, expr, op)
        signature = self.fndesc.calltypes[expr]
        values = [self._cast_var(side, kind) for side, kind in zip((expr.lhs, expr.rhs), signature.args, strict=True)]
        resolver = Resolver(self.context.typing_context)
        of_op = resolver.resolve_value_type(op)
        resolved = resolver.resolve_function_type(of_op, signature.args, {})
        result = self.context.get_function(of_op, resolved)(self.builder, values)
        return self.context.cast(self.builder, result, resolved.return_type, resty)

    def _element(self, array: Any, index: Any) -> Any:
        """Address of one element, if that is what the index means without a look at its sign."""
        kind, of_index, build = self.typeof(array.name), self.typeof(index.name), self.builder
        several = isinstance(of_index, types.BaseTuple)
        kinds = of_index.types if several else (of_index,)
        if not (isinstance(kind, types.Array) and kind.layout == "C" and len(kinds) == kind.ndim):
            return None
        if self.context.enable_boundscheck or not all(map(_is_natural, kinds)):
            return None
        value, at = self.loadvar(array.name), self.loadvar(index.name)
        model = self.context.data_model_manager[kind]
        shape = model.get(build, value, "shape")
        place, stride = None, None
        for k in reversed(range(kind.ndim)):
            step = self.context.cast(build, build.extract_value(at, k) if several else at, kinds[k], types.uintp)
            step = step if stride is None else build.mul(step, stride)
            place = step if place is None else build.add(step, place)
            if k:
                size = build.extract_value(shape, k)
                stride = size if stride is None else build.mul(stride, size)
        return build.gep(model.get(build, value, "data"), [place])


def _is_natural(kind: Any) -> bool:
    """Whether an index of that type is never negative."""
    return kind in types.unsigned_domain or (isinstance(kind, types.IntegerLiteral) and kind.literal_value >= 0)
