"""Functions compiled as one program: what compiled functions call is compiled into them, once, and nowhere else.

``numba.njit`` makes a finished program of every function: it links all that the function calls, directly and
indirectly, optimises that and makes machine code of it, again on every level of calls. Of our functions only a few are
called from Python. The others (``Part``) are only translated to LLVM's language here; what Python calls, an *entry*
(``Whole``), links all that it needs, is optimised once, and is all that is kept on disk. An entry that calls much is
not compiled into other entries: they call its machine code, and need only that where it was compiled before. Several
processes that need the same entries share the work: each entry is compiled by one, and the others load it.

This and ``translating`` use parts of numba that are not public. ``flexsearch.compiled`` imports them only with versions
of numba in which they were tried, and else falls back to ``numba.njit``.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from llvmlite import binding as llvm
from numba import typeof, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder, compile_result
from numba.core.compiler_machinery import register_pass
from numba.core.dispatcher import _FunctionCompiler  # type: ignore[attr-defined]
from numba.core.lowering import Lower
from numba.core.registry import CPUDispatcher
from numba.core.targetconfig import ConfigStack
from numba.core.typed_passes import NativeLowering, NoPythonBackend

from flexsearch.translating import PASSES, LeanFlags, LeanLower, Resolver, call_plainly

LARGE: Final = 8
"""An entry that calls so many functions is not compiled into other entries."""

_all: Final[dict[tuple[str, str], Any]] = {}
"""Functions of the program by module and name."""


def program(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """A function that may call and be called by others of the program. Its attribute ``entry`` is what Python
    calls. If ``wide`` is set, compiled functions pass it all whole numbers as uint64."""
    return Inner(function, None, {"nopython": True, "boundscheck": None, **options})


class Inner(CPUDispatcher):
    """A function as other compiled functions see it. Called from Python, it calls its entry."""

    def __init__(self, py_func: Any, locals: Any = None, targetoptions: Any = None) -> None:
        super().__init__(py_func, locals, targetoptions, Pipeline)
        self._compiler = PartCompiler(py_func, self.targetdescr, targetoptions, self.locals, Pipeline)
        self._compiler.inner = self
        self.entry = Entry(py_func, locals, targetoptions)
        compiler = EntryCompiler(py_func, self.targetdescr, targetoptions, self.locals, Pipeline)
        compiler.inner = self.entry.inner = self
        self.entry._compiler = compiler  # type: ignore[attr-defined]
        self.is_entry = self.wide = False
        self.key = py_func.__module__, py_func.__qualname__
        _all[self.key] = self

    def __call__(self, *args: Any, **kws: Any) -> Any:
        return self.entry(*args, **kws)

    def compile(self, sig: Any) -> Any:
        overload: Any = self.overloads.get(sig) if isinstance(sig, tuple) else None
        return super().compile(sig) if overload is None else overload.entry_point

    def get_call_template(self, args: Any, kws: Any) -> Any:
        args = [types.boolean if isinstance(arg, types.BooleanLiteral) else arg for arg in args]
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


class Entry(CPUDispatcher):
    """A function as Python sees it. Of several processes that need its code only one compiles it."""

    inner: Any
    _cache: Any

    def __init__(self, py_func: Any, locals: Any = None, targetoptions: Any = None) -> None:
        super().__init__(py_func, locals, targetoptions)
        self._under_way: set[Any] = set()

    @contextmanager
    def alone(self, args: Any) -> Iterator[None]:
        """While this lasts no other process compiles the function for arguments of these types."""
        yield

    def compile(self, sig: Any) -> Any:
        args = tuple(sig)
        if args in self.overloads or args in self._under_way:
            return super().compile(sig)
        with self.alone(args), _without_collections():
            self._under_way.add(args)
            try:
                return super().compile(sig)
            finally:
                self._under_way.discard(args)

    def kept(self, args: Any) -> Any:
        """What this process loaded, or another one kept on disk; None if there is nothing. Waits for a process that is
        compiling it."""
        if args in self._under_way:
            return None
        if args not in self.overloads:
            with self.alone(args):
                whole = self._cache.load_overload(args, self.targetctx)
            if whole is None:
                return None
            self.targetctx.insert_user_function(whole.entry_point, whole.fndesc, [whole.library])
            self.add_overload(whole)
        return self.overloads[args]


@contextmanager
def _without_collections() -> Iterator[None]:
    """Python's collector would look at all that compiling makes, again and again, and find little."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Part(JITCodeLibrary):
    """LLVM code of one function, for entries to link. It is never optimised or made machine code by itself."""

    owner: Any  # whose code it is
    args: tuple[Any, ...]
    symbol: str
    is_elsewhere = False  # in an entry's machine code, and not here
    never_fails = False  # whether it returns no exception

    def add_llvm_module(self, ll_module: Any) -> None:
        self._final_module.link_in(ll_module)

    def finalize(self) -> None:
        self._raise_if_finalized()
        for function in self._final_module.functions:  # what an entry does not use of it, or has inlined, vanishes
            if not function.is_declaration and function.linkage == llvm.Linkage.external:
                function.linkage = "linkonce_odr"
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        """For a library of numba's own kind, which links what it calls directly: all that this calls, too."""
        self._ensure_finalized()
        if self._shared_module is None:
            self._shared_module = self._final_module.clone()
            for library in _below(self):
                self._shared_module.link_in(_own_module(library), preserve=True)
        return self._shared_module


class Whole(JITCodeLibrary):
    """Code of an entry and of all that it calls, but for what is called in other entries (``shared``)."""

    counts_references = False
    shared: Any = ()

    def add_llvm_module(self, ll_module: Any) -> None:
        self._final_module.link_in(ll_module)

    def finalize(self) -> None:
        for library in _below(self, self.shared):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(_own_module(library), preserve=True)
        own = self._linking_libraries[0]
        for part in {*self.shared, own}:
            function = self._final_module.get_function(part.symbol)
            if part is not own or _is_large(part):
                function.linkage = llvm.Linkage.external
                function.name = _shared_name(part.owner, part.args)
        self._linking_libraries.clear()
        super().finalize()

    def _optimize_final_module(self) -> None:
        """numba optimises cheaply first, to drop needless counting of references, and then in full. Our loops run over
        few elements: vectorised or unrolled they are no faster, and take a third longer to compile."""
        if self.counts_references:
            super()._optimize_final_module()
        else:
            tuning = llvm.create_pipeline_tuning_options(speed_level=3)
            tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_unrolling = False
            builder = llvm.create_pass_builder(self._codegen._tm, tuning)
            builder.getModulePassManager().run(self._final_module, builder)


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


def _is_large(part: Any) -> bool:
    return part.is_elsewhere or sum(isinstance(other, Part) for other in _below(part)) >= LARGE


def _shared_name(owner: Inner, args: tuple[Any, ...]) -> str:
    """Of the function's machine code, the same in all processes; numba's names hold counters."""
    text = f"{owner.key} {args}"
    return f"flexsearch.{owner.key[1]}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _shared_below(part: Any) -> list[Any]:
    """The shared functions that an entry calls directly or by way of what is not shared."""
    shared: list[Any] = []
    seen = {part}
    waiting = [part]
    while waiting:
        for other in waiting.pop()._linking_libraries:
            if isinstance(other, Part) and other not in seen:
                seen.add(other)
                (shared if other.owner.is_entry and _is_large(other) else waiting).append(other)
    return shared


class PartCompiler(_FunctionCompiler):
    """Types and translates a function, unless it is a large entry that was compiled before."""

    inner: Any

    def _compile_core(self, args: Any, return_type: Any) -> Any:
        if self.inner.is_entry and (whole := self.inner.entry.kept(tuple(args))) is not None:
            symbols = {function.name for function in whole.library._get_module_for_linking().functions}
            if _shared_name(self.inner, tuple(args)) in symbols:
                part = Part(whole.target_context.codegen(), whole.library.name)
                part.finalize()
                part.is_elsewhere = True
                whole.target_context.insert_user_function(whole.fndesc, whole.fndesc, [part])
                return whole._replace(library=part, entry_point=whole.fndesc)
        return super()._compile_core(args, return_type)

    def _customize_flags(self, flags: Any) -> Any:
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        flags.forceinline = self.targetoptions.get("forceinline", False)  # else it would be the caller's
        return flags if flags.nrt else LeanFlags(flags)


class Pipeline(CompilerBase):
    """Only the passes that lean functions need, without numba's checks between them."""

    def _compile_core(self) -> Any:
        state = self.state
        if state.flags.nrt:
            return super()._compile_core()
        state.typingctx = Resolver(state.typingctx)
        passes = (*PASSES, LowerOnly, NoPythonBackend)
        analysis: dict[Any, Any] = {which: {} for which in passes}
        with ConfigStack().enter(state.flags):
            for which in passes:
                one: Any = which()
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


@register_pass(mutates_CFG=True, analysis_only=False)
class LowerOnly(NativeLowering):
    """Translate to LLVM's language; make no machine code, nor what calls it from Python or C."""

    _name = "flexsearch_lower_only"
    lowering_class: Any = None

    def run_pass(self, state: Any) -> bool:
        self.lowering_class = Lower if state.flags.nrt else LeanLower
        state.library = Part(state.targetctx.codegen(), state.func_id.func_qualname)
        super().run_pass(state)
        key = state.cr.fndesc  # what numba finds the code of a call by; else it is the machine code's entry
        if state.library.never_fails:
            call = call_plainly(state.cr.fndesc, state.library)
            state.targetctx._defns[key].append(call, call.signature)
        else:
            state.targetctx.insert_user_function(key, state.cr.fndesc, [state.library])
        state.cr = state.cr._replace(cfunc=key)
        return True


class EntryCompiler(_FunctionCompiler):
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
        needed = [partial(_load, other.owner.key, other.args) for other in library.shared]
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


def _load(key: tuple[str, str], args: Any) -> None:
    """Make an entry ready, from the disk if it is there: before others are made or loaded that call it."""
    importlib.import_module(key[0])
    _all[key].entry.compile(args)


def record(run: Callable[[], object]) -> list[tuple[Any, tuple[Any, ...]]]:
    """Run something with the Python code of compiled functions: nothing is compiled. The entries that would have been
    compiled and the types of their arguments, in the order in which they returned: those that Python called, and large
    ones that these call."""
    calls: dict[tuple[Any, tuple[Any, ...]], None] = {}
    depth = 0

    def interpret(function: Any, *args: Any) -> Any:
        nonlocal depth
        depth += 1
        result = function.py_func(*args)
        depth -= 1
        if not depth or (function.inner.is_entry and not function.inner.wide):
            calls[function, tuple(typeof(arg) for arg in args)] = None
        return result

    before = Entry.__call__
    Entry.__call__ = interpret  # type: ignore[method-assign, assignment]
    try:
        run()
    finally:
        Entry.__call__ = before  # type: ignore[method-assign]
    return list(calls)
