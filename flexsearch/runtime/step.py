"""The training step of a plan on one rank: called with batches, it leaves gradients for an ordinary optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from flexsearch.errors import RuntimeFailure
from flexsearch.graph import Interval, OperatorGraph
from flexsearch.graph.importer import Imported
from flexsearch.graph.ops import KernelContext
from flexsearch.lower import Lowered
from flexsearch.runtime.arguments import absent, check_scale, check_steps, length_of
from flexsearch.runtime.batch_size import BatchSize
from flexsearch.runtime.clip import check_norm, scale_to, total_norm
from flexsearch.runtime.engine import Engine
from flexsearch.runtime.faults import Failures
from flexsearch.runtime.feed import Feed, Loader, batches, load, one_batch, sample_order
from flexsearch.runtime.gradients import StepLoss, add_earlier, set_aside
from flexsearch.runtime.hooks import Hooks
from flexsearch.runtime.initialise import Initialise, initialise
from flexsearch.runtime.listing import listing
from flexsearch.runtime.modes import refuse_modes
from flexsearch.runtime.optimizers import Optimizers
from flexsearch.runtime.persistence import Persistent
from flexsearch.runtime.program import compile_program
from flexsearch.runtime.recipes.plan import apart, without_synchronisation
from flexsearch.runtime.recipes.synchronisation import Synchronisation
from flexsearch.runtime.retrace import Source, on_meta
from flexsearch.runtime.stored import Stored
from flexsearch.runtime.timeline import Timeline, record
from flexsearch.runtime.torch_clip import clip_whole_gradients
from flexsearch.runtime.variant import Variant, Variants
from flexsearch.runtime.wire import Wire
from flexsearch.strategy import Strategy

Loss = Callable[..., Any]
"""Of the model's output, and of targets if there are any: a scalar, or a record whose "loss" is one."""
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
Example = tuple[Any, Any, Loss | None]
"""Inputs and targets, nested as at import, and the loss."""


@dataclass(frozen=True)
class StepOutput:
    """Of one step: ``loss`` of the whole batch (a scalar, on every rank), and on request ``outputs``: what the model
    returned for this rank's samples."""

    loss: Tensor
    outputs: Any = None


class Parallel(Persistent):
    """A model split over the ranks: a training step to call with batches. Made by ``parallelize``.

    Its parameters are this rank's pieces of the weights. A call leaves gradients in them, which add up until an
    optimizer's ``zero_grad``.
    """

    def __init__(
        self, model: nn.Module, imported: Imported, strategy: Strategy, lowered: Lowered, device: torch.device,
        run: str, seed: int, timeout_s: float, fuse: bool, compiler: str | None = None, tolerate: bool = False,
        make: MakeOptimizer | None = None, initialised: bool = False,
    ) -> None:  # fmt: skip
        self.rank, self.device, self.lowered, self.graph = dist.get_rank(), device, lowered, imported.graph
        self.strategy = strategy
        self.stored = Stored(model, imported, lowered, self.rank, device, initialised)
        self.feed = Feed(imported, lowered)
        read = {edge.tensor for edge in lowered.edges if any(entry.device == self.rank for entry in edge.need)}
        self._needed = read & {t.name for t in self.graph.of_kind("input")}
        """Inputs of which this rank reads something."""
        self.context = KernelContext(seed=seed, device=device)
        self.failures = Failures(self.rank, run)
        self.optimizer: Optimizer | None = None
        """The one of the short cut, ``parallelize(optimizer=...)``."""
        self._empty = nn.Parameter(torch.zeros(0, device=device))
        self.synchronisation = Synchronisation(
            lowered, self.stored, self._empty, self.failures, timeout_s, tolerate, make
        )
        self._hooks = Hooks(model, self.stored, self.failures)
        self._optimizers = Optimizers(model, self.stored, self._empty, self.failures, self.synchronisation.diverges)
        self._one_call = self._updated = False
        """Whether every step updates; whether the optimizer has stepped in the step at hand."""
        runs = without_synchronisation(lowered, self.synchronisation.names)
        self.apart = self.synchronisation.asynchronous or tolerate
        """Whether workers wait for each other in nothing but recipes."""
        if self.apart:
            words = "one may die, and the others go on" if tolerate else "workers go by themselves"
            runs = apart(runs, lowered.recipe_groups, words)
        self.engine = Engine(
            compile_program(runs, self.rank, fuse), Wire(runs, self.rank, device, timeout_s), self.stored.weights,
            self.stored.fixed, lambda: None, self.context, compiler,
        )  # fmt: skip
        self.variants = Variants(
            lowered, self.stored, self.feed, self.context, self.synchronisation.names, timeout_s, fuse
        )
        self._batch_size = BatchSize(self.feed, self.rank, device)
        self._evaluating = False
        clip_whole_gradients(None if self.stored.everywhere else self)

    def set_up(self, model: nn.Module, example: Example | None, function: Initialise | bool) -> None:
        """Keep what tracing again takes, and draw the first weights with ``function``, if that is one."""
        if example is not None:
            inputs, targets, loss = example
            self.feed.example = on_meta(inputs), on_meta(targets)
            self.variants.source = Source(model, loss, inputs, targets, self.feed.imported, self.feed.rows)
        if function:
            if self.stored.loaded:
                raise RuntimeFailure(
                    "the model has weights already, so initialise= has nothing to draw",
                    "Build it on the meta device: with torch.device('meta').",
                )
            initialise(model, self.stored, self.context.seed, None if function is True else function)
            self.synchronisation.restart()

    # ---- training

    def __call__(
        self, batch: Any = None, *more: Any, samples: int | None = None, scale: float = 1.0, outputs: bool = False,
        **others: Any,
    ) -> StepOutput:  # fmt: skip
        """Forward and backward of all microbatches; gradients, synchronised, are added to those of the parameters.

        ``batch``: (inputs, targets) where the loss takes targets, else the inputs, nested as at import; the whole
        global batch, or only this rank's ``sample_range`` of it: of flattened targets the rows of these samples; what
        does not run over the batch (a mask for all samples) is always whole. None on a rank whose range is empty.
        step(a, b) is step((a, b)). ``samples``: in the global batch, where it is smaller than the plan's and does not
        come from :meth:`loader`; the same on all ranks. ``scale``: of the gradients, 1 / k where k calls accumulate a
        mean. ``outputs``: return what the model returns, too, which takes another forward pass. Raises RuntimeFailure
        if a rank has failed.
        """
        batch = one_batch(batch, more, others)
        self._refuse("step")
        self._refuse_one_call("step(batch) leaves gradients for an optimizer")
        check_scale(scale)
        with self.failures.watch():
            inputs, targets = self.feed.pair(batch)
            return self._train(inputs, targets, samples, scale, outputs)

    def _refuse(self, what: str) -> None:
        """Raise RuntimeFailure if ``what`` ("step", "forward") is called where the plan cannot honour what is asked."""
        refuse_modes(what, self.stored, self._evaluating)
        self._hooks.check()

    def _refuse_one_call(self, what: str) -> None:
        """Raise RuntimeFailure where no gradients are left between a step's backward pass and its update."""
        if self.synchronisation.asynchronous:
            raise RuntimeFailure(
                f"{what}, but here the optimizer runs at the server", "Call step.step(inputs, targets)."
            )
        if self._one_call:
            raise RuntimeFailure(
                f"{what}, but parallelize(optimizer=...) has every step update the weights itself",
                "Call step.step(inputs, targets) alone, or make the optimizer from step.parameters() instead.",
            )

    def step(self, inputs: Any, targets: Any = None) -> Tensor:
        """The short cut for ``parallelize(optimizer=...)``: forward, backward, update; returns the loss of the whole
        batch. ``inputs`` and ``targets`` as the two parts of a batch (:meth:`__call__`)."""
        if not self._one_call and any(p.requires_grad for _, p in self.stored.parameters):
            raise RuntimeFailure(
                "step(inputs, targets) updates the weights, but there is no optimizer",
                "Pass parallelize(optimizer=...), or call step(batch) and then the optimizer's step().",
            )
        self._refuse("step")
        with self.failures.watch():
            return self._train(inputs, targets, None, 1.0, False).loss

    def update_by(self, make: MakeOptimizer) -> None:
        """Have every step end with that of an optimizer, which gets this rank's trained parameters."""
        if self.synchronisation.asynchronous:
            self.optimizer, self._one_call = self.synchronisation.optimizer, True
            return
        trained = [p for _, p in self.stored.parameters if p.requires_grad]
        with self.failures.watch():
            optimizer = make(trained) if trained else None
            if trained and not isinstance(optimizer, Optimizer):
                raise RuntimeFailure(
                    f"parallelize(optimizer=...) returned {optimizer!r} and no optimizer",
                    "Pass a function of the weights: lambda weights: torch.optim.SGD(weights, lr=0.1).",
                )
            self._optimizers.agree(optimizer)
        self.optimizer, self._one_call = optimizer, True
        self.engine.update = self._update

    def _train(self, inputs: Any, targets: Any, samples: int | None, scale: float, outputs: bool) -> StepOutput:
        self.stored.check_frozen()
        named = self.feed.named(inputs, targets)
        count = self._batch_size.of(named, samples, self.apart)
        returned = self.variants.forward(named, count, False, False) if outputs else None
        self.synchronisation.check()
        earlier = {} if self._one_call else set_aside(self.stored.weights)
        self._updated = False
        smaller = self._smaller_step(count) if count < self.graph.batch else None
        results = self.engine.step(self._fed(named)) if smaller is None else smaller.run(named)
        if self._one_call and not self._updated:
            self._update()
        elif not self._one_call:
            self.synchronisation.synchronise_gradients()
            add_earlier(self.stored, earlier, scale)
        for counter in self.stored.counters.values():
            counter += 1
        self._hooks.note()
        loss = self._loss(results, self.graph if smaller is None else smaller.graph)
        return StepOutput(loss.as_subclass(StepLoss), returned)

    def _loss(self, results: Mapping[str, Tensor], graph: OperatorGraph) -> Tensor:
        """Of the whole batch; where workers go by themselves of this one's samples, no number on ranks that compute
        none."""
        if not self.apart:
            return results[graph.loss]
        workers = len(self.lowered.recipe_groups[0].devices)
        value = results.get(graph.loss)
        return torch.full((), torch.nan, device=self.device) if value is None else value * workers

    def _fed(self, named: Mapping[str, Tensor]) -> dict[str, Any]:
        batch = self.graph.batch
        fed = {name: self.feed.region(name, x, self.rank, batch, self.device) for name, x in named.items()}
        if missing := sorted(self._needed - set(fed)):
            raise RuntimeFailure(f"rank {self.rank} needs {', '.join(missing)} for its samples; pass it to step")
        return fed

    def _smaller_step(self, count: int) -> Variant:
        if self.apart:
            raise RuntimeFailure(
                f"a batch of {count} samples, where the plan is for {self.graph.batch}, and workers do not wait for "
                "each other, so that they cannot share it out anew",
                "Leave out the last batch (step.loader(..., drop_last=True)).",
            )
        return self.variants.step(count)

    def _update(self) -> None:
        """What the short cut does with complete gradients."""
        self._updated = True
        self.synchronisation.synchronise_gradients()
        if self.synchronisation.asynchronous:
            self.synchronisation.synchronise_weights()
            set_aside(self.stored.weights)
        elif self.optimizer is not None:
            add_earlier(self.stored, {}, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        elif self.synchronisation:
            self.synchronisation.synchronise_weights()

    def trace(self, batch: Any, optimizer: Optimizer | None = None, steps: int = 3) -> Timeline:
        """What the tasks of a step take, and what ranks hold in memory, as ``steps`` steps on a batch are measured,
        operator by operator. Weights, gradients, buffers and dropout stay as they were. ``optimizer``: whose state is
        held, too. All ranks must call it; all get the same. ``flexsearch.save_trace`` writes it for Perfetto."""
        self.refuse_trace()
        check_steps(steps)
        earlier, drawn = set_aside(self.stored.weights), self.context.step
        one_call, update = self._one_call, self.engine.update
        self._one_call, self.engine.update = False, lambda: None

        def step() -> None:
            self(batch)
            set_aside(self.stored.weights)

        try:
            with self.synchronisation.frozen(), self.stored.buffers_kept():
                return record(self, step, steps, optimizer)
        finally:
            self._one_call, self.engine.update, self.context.step = one_call, update, drawn
            for name, parameter in self.stored.weights.items():
                parameter.grad = earlier.get(name)

    def refuse_trace(self) -> None:
        """Raise RuntimeFailure where no step is one of all ranks."""
        if self.apart:
            raise RuntimeFailure(
                "a trace is of steps that all ranks take together, and here workers do not wait for each other",
                "Trace another plan, or leave out the trace.",
            )

    if not TYPE_CHECKING:  # which would take any name for known

        def __getattr__(self, name: str) -> NoReturn:
            raise absent(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: a copy would train the original's weights."""
        raise RuntimeFailure(
            "a step cannot be copied or pickled: it is a part of a run",
            "Save step.state_dict(), or by step.save(folder, optimizer); average nn.ParameterList(step.parameters()).",
        )

    def close(self) -> None:
        """Take no more steps. Under asynchronous recipes, a rank that serves waits here for the other workers, as it
        does when the interpreter ends."""
        self.synchronisation.close()

    def listing(self) -> str:
        """What this rank runs in a step, as readable Python."""
        return listing(self.engine.program)

    # ---- parameters and gradients

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's pieces of the parameters, under the model's names; NAME.unread.0 are rows of a weight that no
        step reads. A rank without any gives one without elements, as optimizers want at least one."""
        pieces = list(self.stored.parameters)
        yield from pieces or [("empty", self._empty)]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The same without names."""
        return (parameter for _, parameter in self.named_parameters())

    def parameter_groups(self, decay: float) -> list[dict[str, Any]]:
        """Two groups for an optimizer: trained matrices with ``weight_decay=decay``, trained vectors (biases, norms)
        with none. The same groups on all ranks, also where one is empty."""
        trained = [
            (len(self.stored.model_shape(name.partition(".unread.")[0])), parameter)
            for name, parameter in self.stored.parameters
            if parameter.requires_grad
        ]
        matrices, vectors = ([p for rank, p in trained if (rank > 1) == several] for several in (True, False))
        vectors = vectors if trained else [self._empty]
        return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` of the whole model: that one would see this rank's pieces alone. Returns
        the norm of the whole gradient, to which every element counts once. All ranks must call it."""
        self._refuse_one_call("clip_grad_norm_ scales the gradients between a step and its update")
        max_norm, norm_type = check_norm(max_norm, norm_type)
        if self.synchronisation.diverges:
            raise RuntimeFailure(
                "replicas that synchronise by a recipe have gradients of their own, so the whole model has no one norm",
                "Clip by value (torch.nn.utils.clip_grad_value_), or use a recipe with the mean of all in every step.",
            )
        with self.failures.watch():
            own = [chunk.tensor for chunk in self.stored.gradients() if chunk.first]
            total = total_norm(own, norm_type, self.device)
            pieces = [p.grad for p in self.parameters() if p.grad is not None]
            scale_to(pieces, total, max_norm, error_if_nonfinite)
            return total

    # ---- prediction

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """For a while, ``forward`` runs the model in evaluation mode (no dropout, running statistics)."""
        before, self._evaluating = self._evaluating, True
        try:
            yield
        finally:
            self._evaluating = before

    def forward(
        self, batch: Any = None, *more: Any, samples: int | None = None, everything: bool = False, **others: Any
    ) -> Any:
        """What the model returns, nested as it returns it, without gradients: for this rank's samples, or those of the
        whole batch (``everything``). What does not run over the batch is whole.

        ``batch``: the model's inputs as for a step; targets may stand beside them, and are ignored. ``samples``: of a
        batch that is smaller than the plan's. Each batch size is traced once. All ranks must call it.
        """
        batch = one_batch(batch, more, others)
        self._refuse("forward")
        with self.failures.watch(), torch.inference_mode(False):  # communication needs version counters
            named = self.feed.named(self.feed.inputs(batch), None)
            count = self._batch_size.of(named, samples, self.apart)
            return self.variants.forward(named, count, self._evaluating, everything)

    # ---- data

    @property
    def sample_range(self) -> Interval:
        """[low, high) of the global batch's samples that this rank needs; (0, 0) if none."""
        return self.feed.samples[self.rank]

    def loader(
        self, dataset: Dataset[Any] | Sequence[Any], *, shuffle: bool = True, seed: int = 0, epoch: int = 0,
        drop_last: bool = False, **options: Any,
    ) -> Loader:  # fmt: skip
        """This rank's part of each global batch of a data set, in an order that all ranks draw alike; None for a part
        without samples. Iterated over again, it draws the next epoch's order; ``len`` counts its batches. Steps and
        predictions know if the batch fetched last is smaller than the plan's; who fetches several first gives
        ``samples``. ``options``: of ``torch.utils.data.DataLoader``, ``collate_fn`` for instance."""
        length, size = length_of(dataset), self.graph.batch

        def batches_of(number: int) -> Iterator[Any]:
            cut = list(batches(sample_order(length, shuffle, seed, number), size, drop_last))
            parts = [batch[slice(*self.feed.range_of(self.rank, len(batch)))] for batch in cut]
            loaded = load(dataset, parts, options)
            for batch in cut:
                with self.failures.watch():
                    part = next(loaded)
                self._batch_size.fetched(len(batch))
                yield part
            self._batch_size.ended()

        return Loader(batches_of, length // size if drop_last else -(-length // size), epoch)
