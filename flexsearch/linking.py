"""Functions compiled as one program: what compiled functions call is compiled into them, once, and nowhere else.

``numba.njit`` makes a finished program of every function: it links all that the function calls, directly and indirectly,
optimises that and makes machine code of it, again and again on every level of calls. Of our functions only a few are
called from Python. The others are only translated to LLVM's language here; what is called from Python, an *entry*, links
all that it needs, is optimised once, and is all that is kept on disk.

This is the only module that uses parts of numba that are not public. They were read in the versions ``KNOWN``; with any
other numba ``program`` is None, and ``flexsearch.compiled`` falls back to ``numba.njit``.
"""

from __future__ import annotations

import hashlib
import importlib
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, Final

import numba

KNOWN: Final = ((0, 68),)
"""Versions of numba whose inner workings are those that this module relies on."""


SHARED: Final = 8
"""An entry that calls so many functions is called by other entries, too; of smaller ones each has a copy."""

_all: Final[dict[tuple[str, str], Any]] = {}
"""Functions of the program by module and name."""


def _load(module: str, name: str, args: Any) -> None:
    """Make an entry ready, from the disk if it is there: before others are loaded that call it."""
    importlib.import_module(module)
    _all[module, name].entry.compile(args)


def _supported() -> bool:
    return tuple(numba.version_info[:2]) in KNOWN and not getattr(numba.config, "DISABLE_JIT", False)


def _define() -> Callable[..., Any]:
    """All that inherits from inner classes of numba: none of them is touched with a numba that is not known."""
    from llvmlite import binding as llvm
    from numba import types
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import CompilerBase, DefaultPassBuilder, Flags, compile_result
    from numba.core.compiler_machinery import register_pass
    from numba.core.dispatcher import _FunctionCompiler
    from numba.core.lowering import Lower
    from numba.core.registry import CPUDispatcher
    from numba.core.targetconfig import ConfigStack
    from numba.core.typed_passes import (
        IRLegalization,
        NativeLowering,
        NoPythonBackend,
        NopythonTypeInference,
        PreLowerStripPhis,
    )
    from numba.core.typing import Context as TypingContext
    from numba.core.untyped_passes import (
        DeadBranchPrune,
        FixupArgs,
        GenericRewrites,
        IRProcessing,
        ReconstructSSA,
        RewriteSemanticConstants,
        TranslateByteCode,
    )
    from numba.np.arrayobj import load_item, store_item

    class Part(JITCodeLibrary):  # type: ignore[misc]
        """LLVM code of one function, for entries to link. It is never optimised or made machine code by itself."""

        def add_llvm_module(self, ll_module: Any) -> None:
            self._final_module.link_in(ll_module)

        def finalize(self) -> None:
            self._raise_if_finalized()
            _hide(self._final_module, llvm.Linkage.external, "linkonce_odr")
            self._finalized = True

        def _get_module_for_linking(self) -> Any:
            """For a library of numba's own kind, which links what it calls directly: all that this calls, too."""
            self._ensure_finalized()
            if self._shared_module is None:
                self._shared_module = self._final_module.clone()
                for library in _below(self):
                    self._shared_module.link_in(_own_module(library), preserve=True)
            return self._shared_module

    class Whole(JITCodeLibrary):  # type: ignore[misc]
        """Code of an entry and of all that it calls."""

        counts_references = False
        shared: Any = ()  # what is called in other entries

        def add_llvm_module(self, ll_module: Any) -> None:
            self._final_module.link_in(ll_module)

        def finalize(self) -> None:
            for library in _below(self, self.shared):
                self._reload_init.update(library._reload_init)
                self._final_module.link_in(_own_module(library), preserve=True)
            own = self._linking_libraries[0]
            for part in {*self.shared, own}:
                function = self._final_module.get_function(part.symbol)
                if part is not own or _is_shared(part):
                    function.linkage = llvm.Linkage.external
                    function.name = _shared_name(part)
            self._linking_libraries.clear()
            super().finalize()

        def _optimize_final_module(self) -> None:
            """numba optimises cheaply first, to drop needless counting of references, and then in full."""
            if self.counts_references:
                super()._optimize_final_module()
            else:
                passes, builder = self._codegen._module_pass_manager()
                passes.run(self._final_module, builder)

    def _hide(module: Any, linkage: Any, instead: str) -> None:
        for function in module.functions:
            if not function.is_declaration and function.linkage == linkage:
                function.linkage = instead

    def _own_module(library: Any) -> Any:
        return library._final_module if isinstance(library, Part) else library._get_module_for_linking()

    def _below(library: Any, without: Any = ()) -> Iterator[Any]:
        """All that a library needs, each once, but for some and what only they need."""
        seen = {library, *without}
        waiting = [library]
        while waiting:
            for other in waiting.pop()._linking_libraries:
                if other not in seen:
                    seen.add(other)
                    yield other
                    if isinstance(other, Part):
                        waiting.append(other)

    def _is_shared(part: Any) -> bool:
        """Whether other entries call the function in its own entry, for it is one, and calls so much that they would be
        compiled for long with a copy of it."""
        return part.owner.is_entry and sum(isinstance(other, Part) for other in _below(part)) >= SHARED

    def _shared_name(part: Any) -> str:
        """Of the function's machine code, the same in all processes; numba's names hold counters."""
        text = f"{part.owner.key} {part.args}"
        return f"flexsearch.{part.owner.key[1]}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def _shared_below(part: Any) -> list[Any]:
        """The shared functions that an entry calls directly or by way of what is not shared."""
        found = []
        seen = {part}
        waiting = [part]
        while waiting:
            for other in waiting.pop()._linking_libraries:
                if isinstance(other, Part) and other not in seen:
                    seen.add(other)
                    (found if _is_shared(other) else waiting).append(other)
        return found

    class LeanLower(Lower):  # type: ignore[misc]
        """Reads and writes elements of arrays in a few instructions; numba writes some fifty, most of which LLVM finds
        to do nothing, in its own time."""

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
            found = resolver.resolve_function_type(of_op, signature.args, {})
            result = self.context.get_function(of_op, found)(self.builder, values)
            return self.context.cast(self.builder, result, found.return_type, resty)

        def _element(self, array: Any, index: Any) -> Any:
            """Address of one element, if that is what the index means without a look at its sign."""
            kind, of_index, build = self.typeof(array.name), self.typeof(index.name), self.builder
            several = isinstance(of_index, types.BaseTuple)
            kinds = of_index.types if several else (of_index,)
            if not (isinstance(kind, types.Array) and kind.layout == "C" and len(kinds) == kind.ndim):
                return None
            if not all(isinstance(k, types.Integer) and not (k.signed and getattr(k, "literal_value", -1) < 0) for k in kinds):
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

    @register_pass(mutates_CFG=True, analysis_only=False)
    class LowerOnly(NativeLowering):  # type: ignore[misc]
        _name = "flexsearch_lower_only"

        @property
        def lowering_class(self) -> Any:
            return LeanLower

        def run_pass(self, state: Any) -> bool:
            """Translate to LLVM's language; make no machine code, nor what calls it from Python or C."""
            state.library = Part(state.targetctx.codegen(), state.func_id.func_qualname)
            super().run_pass(state)
            key = state.cr.fndesc  # what numba finds the code of a call by; else it is the machine code's entry
            state.targetctx.insert_user_function(key, state.cr.fndesc, [state.library])
            state.cr = state.cr._replace(cfunc=key)
            return True

    class Resolver(TypingContext):  # type: ignore[misc]
        """Shares all that numba knows of types, and remembers which signature of an operator fits which arguments."""

        known: ClassVar[dict[Any, Any]] = {}

        def __init__(self, context: Any) -> None:
            self.__dict__ = context.__dict__

        def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
            if not isinstance(func, types.Function) or kws:
                return super().resolve_function_type(func, args, kws)
            key = func, tuple(args)
            if (known := self.known.get(key)) is None:
                known = self.known[key] = super().resolve_function_type(func, args, kws)
            return known

    class LeanFlags(Flags):  # type: ignore[misc]
        """numba looks overloads up by flags, and compares two flags by all options."""

        def __eq__(self, other: object) -> bool:
            return self is other or super().__eq__(other)

        def __hash__(self) -> int:
            return same_for_all

        def copy(self) -> Any:
            return self

    same_for_all = hash(Flags())

    class Pipeline(CompilerBase):  # type: ignore[misc]
        """Only the passes that lean functions need, without numba's checks between them."""

        def _compile_core(self) -> Any:
            state = self.state
            if state.flags.nrt:
                return super()._compile_core()
            state.typingctx = Resolver(state.typingctx)
            analysis: dict[Any, Any] = dict.fromkeys(LEAN_PASSES, {})
            with ConfigStack().enter(state.flags):
                for which in LEAN_PASSES:
                    one = which()
                    one.analysis = analysis
                    one.run_pass(state)
            state.pipeline = None
            return state.cr

        def define_pipelines(self) -> list[Any]:
            passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
            passes.passes = [
                (LowerOnly, text) if which is NativeLowering else (which, text) for which, text in passes.passes
            ]
            passes._finalized = False
            passes.finalize()
            return [passes]

    LEAN_PASSES = (
        TranslateByteCode, FixupArgs, IRProcessing, RewriteSemanticConstants, DeadBranchPrune, GenericRewrites,
        ReconstructSSA, DeadBranchPrune, NopythonTypeInference, PreLowerStripPhis, IRLegalization, LowerOnly, NoPythonBackend,
    )  # fmt: skip

    class PartCompiler(_FunctionCompiler):  # type: ignore[misc]
        def _customize_flags(self, flags: Any) -> Any:
            flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
            return flags if flags.nrt else LeanFlags(flags)

    class EntryCompiler(_FunctionCompiler):  # type: ignore[misc]
        """Makes an entry of a function that was translated."""

        inner: Any

        def _compile_core(self, args: Any, return_type: Any) -> Any:
            self.inner.compile(args)
            part = self.inner.overloads[tuple(args)]
            context = part.target_context
            library = Whole(context.codegen(), part.library.name)
            library.counts_references = context.enable_nrt
            library.enable_object_caching()
            library.add_linking_library(part.library)
            library.shared = _shared_below(part.library)
            needed = [partial(_load, *other.owner.key, other.args) for other in library.shared]
            for load in needed:
                load()
            with context.push_code_library(library):
                context.create_cpython_wrapper(library, part.fndesc, part.environment, part.call_helper, True)
            entry_point = context.get_executable(library, part.fndesc, part.environment)
            whole = part._asdict() | {"library": library, "entry_point": entry_point}
            whole |= {"reload_init": [*library._reload_init, *needed], "metadata": {}}
            result = compile_result(**whole)
            for environment in result._find_referenced_environments():
                library.codegen.set_env(environment.env_name, environment)
            return result

    class Inner(CPUDispatcher):  # type: ignore[misc]
        """A function as other compiled functions see it. Called from Python, it calls its entry."""

        def __init__(self, py_func: Any, locals: Any = None, targetoptions: Any = None) -> None:
            super().__init__(py_func, locals, targetoptions, Pipeline)
            self._compiler = PartCompiler(py_func, self.targetdescr, targetoptions, self.locals, Pipeline)
            self.entry = CPUDispatcher(py_func, locals, targetoptions)
            compiler = EntryCompiler(py_func, self.targetdescr, targetoptions, self.locals, Pipeline)
            compiler.inner = self
            self.is_entry = self.wide = False
            self.key = py_func.__module__, py_func.__qualname__
            _all[self.key] = self
            self.entry._compiler = compiler

        def __call__(self, *args: Any, **kws: Any) -> Any:
            return self.entry(*args, **kws)

        def get_call_template(self, args: Any, kws: Any) -> Any:
            if self.wide:
                args = [types.uint64 if isinstance(arg, types.Integer) else arg for arg in args]
            return super().get_call_template(args, kws)

        def add_overload(self, cres: Any) -> None:
            args = tuple(cres.signature.args)
            part = cres.library
            part.owner, part.args, part.symbol = self, args, cres.fndesc.llvm_func_name
            self.overloads[args] = cres

        @property
        def stats(self) -> Any:
            return self.entry.stats

    def program(function: Callable[..., Any], options: dict[str, Any]) -> Any:
        """A function that may call and be called by others of the program. Its attribute ``entry`` is what Python
        calls. If ``wide`` is set, compiled functions pass it all whole numbers as uint64."""
        return Inner(function, None, {"nopython": True, "boundscheck": None, **options})

    return program


program: Final = _define() if _supported() else None
"""Makes a function part of the program; None: this numba is not known, or compiling is off."""
