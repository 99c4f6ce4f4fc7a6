"""How lean functions are typed and translated to LLVM's language: in less time than numba takes, with the same result.

As ``linking``, the only module that imports it, it relies on inner parts of numba.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final

from llvmlite.ir import Constant
from numba import types
from numba.core import cgutils, ir, ssa
from numba.core.analysis import compute_cfg_from_blocks
from numba.core.compiler import Flags
from numba.core.interpreter import Interpreter
from numba.core.ir_utils import build_definitions
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
from numba.core.utils import BINOPS_TO_OPERATORS, INPLACE_BINOPS_TO_OPERATORS
from numba.np.arrayobj import load_item, store_item

from flexsearch.packed import PackedType, read_data, read_field, read_size


class ConstantIndices:
    """Those of numba's rewritings before types are inferred that lean functions need."""

    def run_pass(self, state: Any) -> bool:
        blocks = state.func_ir.blocks
        for rewriting in (RewriteConstGetitems(state), RewriteConstSetitems(state)):
            for label, block in blocks.items():
                if rewriting.match(state.func_ir, block, state.typemap, state.calltypes):
                    blocks[label] = rewriting.apply()
        return True


class Translator(Interpreter):
    def post_process(self, peepholes: Any, func_ir: Any) -> Any:
        """Without looking for code of blocks with ``with``, and of calls with stars."""
        return func_ir


class Translate(TranslateByteCode):
    def run_pass(self, state: Any) -> bool:
        state["func_ir"] = Translator(state["func_id"]).interpret(state["bc"])
        return True


class SingleAssignment(ReconstructSSA):
    """As numba's, looking at those blocks only that have to do with a variable; without what it then works out for
    generators."""

    def run_pass(self, state: Any) -> bool:
        blocks = state.func_ir.blocks
        cfg = compute_cfg_from_blocks(blocks)
        frontiers, variables = ssa._iterated_domfronts(cfg), ssa._CacheListVars()
        of_variable = defaultdict(set)
        for label, block in blocks.items():
            for statement in block.body:
                for variable in variables.get(statement):
                    of_variable[variable.name].add(label)
        for name in ssa._find_defs_violators(blocks, cfg):
            labels = sorted(of_variable[name])
            fresh, definitions = ssa._fresh_vars({label: blocks[label] for label in labels}, name)
            blocks.update(fresh)
            states = ssa._make_states(blocks) | {
                "varname": name, "defmap": definitions, "phimap": defaultdict(list), "cfg": cfg,
                "phi_locations": ssa._compute_phi_locations(frontiers, definitions),
            }  # fmt: skip
            rewrite = ssa._FixSSAVars(variables)
            blocks.update(ssa._run_block_rewrite({label: blocks[label] for label in labels}, states, rewrite))
            for label, phis in states["phimap"].items():
                blocks[label].body = phis + blocks[label].body
        state.func_ir._definitions = build_definitions(blocks)
        state.func_ir.generator_info = None
        return True


class StripPhis(PreLowerStripPhis):
    """As numba's, without working out where variables live: that is for counting references."""

    def run_pass(self, state: Any) -> bool:
        state.func_ir = self._strip_phi_nodes(state.func_ir)
        return True


PASSES: Final = (
    Translate, FixupArgs, RewriteSemanticConstants, DeadBranchPrune, ConstantIndices, SingleAssignment,
    DeadBranchPrune, NopythonTypeInference, StripPhis,
)  # fmt: skip
"""Those of numba's passes that lean functions need up to their translation. The others are for what they do not have:
closures, literal_unroll, expressions of whole arrays, parallel loops, references to be counted."""

ARITHMETIC: Final = {*BINOPS_TO_OPERATORS.values(), *INPLACE_BINOPS_TO_OPERATORS.values()} - {
    operator.pow, operator.ipow,
}  # fmt: skip
"""Operators whose signature does not depend on the values of constants."""

_SAME_FOR_ALL: Final = hash(Flags())


class Resolver(TypingContext):
    """Shares all that numba knows of types, and remembers which signature of an operator fits which arguments."""

    signatures: ClassVar[dict[Any, Any]] = {}

    def __init__(self, context: Any) -> None:
        self.__dict__ = context.__dict__

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        kinds: Any = types.Function | types.NumberClass | types.Dispatcher
        if kws or not (func is operator.getitem or isinstance(func, kinds)):
            return super().resolve_function_type(func, args, kws)
        if getattr(func, "typing_key", None) in ARITHMETIC and all(isinstance(arg, types.Number) for arg in args):
            args = [types.unliteral(arg) for arg in args]  # or there would be a signature for every constant
        key = func, tuple(args)
        if (signature := self.signatures.get(key)) is None:
            if _is_extreme(func, args):
                common = self.unify_types(*map(types.unliteral, args))
                signature = common(common, common)
            else:
                signature = super().resolve_function_type(func, args, kws)
            self.signatures[key] = signature
        return signature

    def resolve_getattr(self, typ: Any, attr: str) -> Any:
        if isinstance(typ, PackedType) and (field := typ.fields.get(attr)) is not None:
            return field[0]
        return super().resolve_getattr(typ, attr)

    def resolve_setitem(self, target: Any, index: Any, value: Any) -> Any:
        return self.resolve_function_type(self.resolve_value_type(operator.setitem), (target, index, value), {})


def _is_extreme(func: Any, args: Any) -> bool:
    """Whether it is the smaller or larger of two numbers. numba compiles a function for that, which can fail."""
    numbers = len(args) == 2 and all(isinstance(types.unliteral(arg), types.Number) for arg in args)
    return numbers and getattr(func, "typing_key", None) in (min, max)


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
    to do nothing, in its own time. Of a packed record's arrays only those words are read that are used."""

    def __init__(self, *args: Any, **kws: Any) -> None:
        super().__init__(*args, **kws)
        self._fields: dict[str, tuple[Any, Any, str]] = {}
        self._ranges: dict[str, tuple[Any, Any]] = {}

    def lower_normal_function(self, fndesc: Any) -> None:
        super().lower_normal_function(fndesc)
        ends = [block.terminator for block in self.function.blocks]
        results = [end.operands[0] for end in ends if end.opname == "ret"]
        self.library.never_fails = all(isinstance(code, Constant) and code.constant == 0 for code in results)

    def alloca_lltype(self, name: str, lltype: Any, datamodel: Any = None) -> Any:
        """Without asking LLVM for its size, which only debuggers need."""
        return cgutils.alloca_once(self.builder, lltype, name=name, zfill=False)

    def lower_inst(self, inst: Any) -> None:
        if not (isinstance(inst, ir.Assign) and self._is_put_off(inst.target.name, inst.value)):
            super().lower_inst(inst)

    def _is_put_off(self, name: str, value: Any) -> bool:
        """Whether it is a field of a record, or a function: nothing needs to be computed unless it is used otherwise
        than by reading elements or calling."""
        if name not in self._singly_assigned_vars:
            return False
        if isinstance(value, ir.Global | ir.FreeVar) and isinstance(self.typeof(name), types.Dispatcher):
            self._blk_local_varmap[name] = self.context.get_dummy_value()
            return True
        if isinstance(value, ir.Expr) and value.op == "call" and isinstance(self.typeof(name), types.RangeType):
            return self._is_plain_range(name, value)
        if not (isinstance(value, ir.Expr) and value.op == "getattr" and isinstance(self.typeof(name), types.Array)):
            return False
        if not isinstance(of := self.typeof(value.value.name), PackedType):
            return False
        self._fields[name] = of, self.loadvar(value.value.name), value.attr
        return True

    def _is_plain_range(self, name: str, call: Any) -> bool:
        kinds = self.fndesc.calltypes[call].args
        if getattr(self.typeof(call.func.name), "typing_key", None) is not range or len(kinds) > 2:
            return False
        ends = [self._cast_var(arg, kind) for arg, kind in zip(call.args, kinds, strict=True)]
        zero = self.context.get_constant(self.typeof(name).dtype, 0)
        self._ranges[name] = (ends[0], ends[1]) if len(ends) == 2 else (zero, ends[0])
        return True

    def loadvar(self, name: str) -> Any:
        if (ends := self._ranges.pop(name, None)) is not None:
            one = self.context.get_constant(self.typeof(name).dtype, 1)
            self._blk_local_varmap[name] = cgutils.make_anonymous_struct(self.builder, [*ends, one])
        if (field := self._fields.pop(name, None)) is not None:
            of, block, attr = field
            self._blk_local_varmap[name] = read_field(self.context, self.builder, of, block, attr)
        return super().loadvar(name)

    def storevar(self, value: Any, name: str, argidx: Any = None) -> None:
        """Without reading what was there, as numba does to drop a reference to it."""
        if name in self._singly_assigned_vars:
            self._blk_local_varmap[name] = value
        else:
            self.builder.store(value, self.getvar(name))

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

    def lower_expr(self, resty: Any, expr: Any) -> Any:
        if expr.op == "getiter" and expr.value.name in self._ranges:
            return self._begin(resty, *self._ranges[expr.value.name])
        if expr.op == "iternext" and isinstance(kind := self.typeof(expr.value.name), types.RangeIteratorType):
            return self._next(resty, kind, self.loadvar(expr.value.name))
        if expr.op == "call" and _is_extreme(self.typeof(expr.func.name), self.fndesc.calltypes[expr].args):
            return self._extreme(resty, expr)
        if expr.op in ("pair_first", "pair_second"):
            kind = self.typeof(expr.value.name)
            return self.context.data_model_manager[kind].get(self.builder, self.loadvar(expr.value.name), expr.op[5:])
        return super().lower_expr(resty, expr)

    def _extreme(self, resty: Any, call: Any) -> Any:
        """As Python: the first of two numbers unless the second is beyond it."""
        signature = self.fndesc.calltypes[call]
        first, second = (self._cast_var(arg, signature.return_type) for arg in call.args)
        beyond = operator.gt if self.typeof(call.func.name).typing_key is max else operator.lt
        compare = types.boolean(*signature.args)
        is_beyond = self.context.get_function(beyond, compare)(self.builder, (second, first))
        result = self.builder.select(is_beyond, second, first)
        return self.context.cast(self.builder, result, signature.return_type, resty)

    def _begin(self, kind: Any, start: Any, stop: Any) -> Any:
        """numba's iterator over a range whose step is one: it need not look whether the step is zero."""
        build, number = self.builder, kind.yield_type
        zero = self.context.get_constant(number, 0)
        many = build.sub(stop, start)
        begin, count = (cgutils.alloca_once_value(build, value) for value in (
            start, build.select(build.icmp_signed(">", many, zero), many, zero)))  # fmt: skip
        iterator = {"iter": begin, "stop": stop, "step": self.context.get_constant(number, 1), "count": count}
        return self._structure(kind, iterator)

    def _next(self, pair: Any, kind: Any, iterator: Any) -> Any:
        """The next number of a range and whether there is one, without a branch."""
        build, model = self.builder, self.context.data_model_manager[kind]
        begin, count, step = (model.get(build, iterator, name) for name in ("iter", "count", "step"))
        value, many = build.load(begin), build.load(count)
        one = self.context.get_constant(kind.yield_type, 1)
        build.store(build.sub(many, one, flags=["nsw"]), count)
        build.store(build.add(value, step), begin)
        more = build.icmp_signed(">", many, self.context.get_constant(kind.yield_type, 0))
        return self._structure(pair, {"first": value, "second": more})

    def _structure(self, kind: Any, members: dict[str, Any]) -> Any:
        model, value = self.context.data_model_manager[kind], Constant(self.context.get_value_type(kind), None)
        for name, member in members.items():
            value = model.set(self.builder, value, member, name)
        return value

    def _element(self, array: Any, index: Any) -> Any:
        """Address of one element, if that is what the index means without a look at its sign."""
        kind, of_index, build = self.typeof(array.name), self.typeof(index.name), self.builder
        several = isinstance(of_index, types.BaseTuple)
        kinds = of_index.types if several else (of_index,)
        if not (isinstance(kind, types.Array) and kind.layout == "C" and len(kinds) == kind.ndim):
            return None
        if self.context.enable_boundscheck or not all(map(_is_natural, kinds)):
            return None
        at = self.loadvar(index.name)
        data, size_of = self._where(array.name, kind)
        place, stride = None, None
        for k in reversed(range(kind.ndim)):
            step = self.context.cast(build, build.extract_value(at, k) if several else at, kinds[k], types.uintp)
            step = step if stride is None else build.mul(step, stride)
            place = step if place is None else build.add(step, place)
            if k:
                stride = size_of(k) if stride is None else build.mul(stride, size_of(k))
        return build.gep(data, [place])

    def _where(self, name: str, kind: Any) -> tuple[Any, Callable[[int], Any]]:
        """Address of an array's elements, and its extents by dimension."""
        context, build = self.context, self.builder
        if (field := self._fields.get(name)) is not None:
            of, block, attr = field
            place = of.fields[attr][1]
            return read_data(context, build, block, kind, place), partial(read_size, context, build, block, place)
        value, model = self.loadvar(name), context.data_model_manager[kind]
        return model.get(build, value, "data"), partial(build.extract_value, model.get(build, value, "shape"))


def call_plainly(fndesc: Any, library: Any) -> Any:
    """What numba makes the code of a call by, for a function that never fails: without looking whether it did."""

    def implement(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = context.declare_function(builder.module, fndesc)
        convention = context.call_conv
        result_at, exception_at = function.args[0].type, function.args[1].type
        with builder.goto_entry_block():
            result = builder.alloca(result_at.pointee)
        packed = convention._get_arg_packer(fndesc.argtypes).as_arguments(builder, args)
        builder.call(function, [result, Constant(exception_at, None), *packed])
        return context.get_returned_value(builder, fndesc.restype, builder.load(result))

    implement.signature, implement.libs = fndesc.argtypes, (library,)  # type: ignore[attr-defined]
    return implement


def _is_natural(kind: Any) -> bool:
    """Whether an index of that type is never negative."""
    return kind in types.unsigned_domain or (isinstance(kind, types.IntegerLiteral) and kind.literal_value >= 0)
