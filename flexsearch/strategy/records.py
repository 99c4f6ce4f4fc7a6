"""What a strategy says besides its configs: options of the whole step, what it was made for, how it was found."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field, Strict, ValidationInfo, field_validator

from flexsearch.errors import RecipeError, StrategyError
from flexsearch.files import FileModel
from flexsearch.graph import Dtype, OperatorGraph, Tracing
from flexsearch.graph.precision import Gradients, Precision, with_precision
from flexsearch.quantities import (
    MAX_COUNT,
    MAX_DEVICES,
    Capacity,
    Count,
    Digest,
    Name,
    PredictedSeconds,
    Seed,
    Shape,
    Text,
)
from flexsearch.strategy.config import read_pin
from flexsearch.sync import Recipe, parse_recipe

OptimizerName = Literal["sgd", "momentum", "adam"]
Recompute = Literal["none", "attention", "full"]
"""Which operators' forward pass is computed again in the backward pass, instead of keeping what it makes."""
SynchroniseBy = Literal["auto", "bandwidth", "all-reduce", "reduce-scatter"]
"""How gradients are summed over the devices that make them. ``auto``: each weight's by what takes least alone.
``bandwidth``: by what takes least for its bytes, whatever a start takes, which those of a bucket share. ``all-reduce``:
by an all-reduce; of weights that are kept in parts, by partial sums near each other and all-reduces of them.
``reduce-scatter``: by a reduce-scatter and, as far as they are kept whole, an all-gather. What is not possible for a
weight, and what more than 64 devices do, is as with ``auto``."""
Blocks = (
    Annotated[int, Field(ge=1, le=MAX_COUNT)]
    | Annotated[tuple[Count, ...], Strict(False), Field(min_length=1, max_length=MAX_DEVICES)]
)
"""How many regions of each stage are computed again: the same number for all stages, or one for each."""


class WeightRecipe(FileModel):
    """By which recipe (``flexsearch.sync``) replicas of some weights come to agree. ``weights``: patterns of their
    names ("encoder.*")."""

    weights: Annotated[tuple[Text, ...], Strict(False), Field(min_length=1, max_length=MAX_COUNT)] = ("*",)
    recipe: Text

    @field_validator("recipe")
    @classmethod
    def _readable(cls, recipe: str) -> str:
        try:
            parse_recipe(recipe)
        except RecipeError as error:
            raise ValueError(f"{error.message}. {error.remedy}") from error
        return recipe

    @property
    def parsed(self) -> Recipe:
        """The recipe itself."""
        return parse_recipe(self.recipe)

    def names(self, weight: str) -> bool:
        """Whether a weight synchronises by it."""
        return any(fnmatchcase(weight, pattern) for pattern in self.weights)


Recipes = Annotated[tuple[WeightRecipe, ...], Strict(False), Field(max_length=MAX_COUNT)]


def check_gradients(gradients: str | None, told: ValidationInfo) -> str | None:
    """Raise ValueError for gradients that are wider than what makes them, where that is not in half precision."""
    if gradients == "float32" and told.data.get("precision") not in ("bf16", "fp16"):
        raise ValueError("gradients float32 differ from those of the graph only with precision bf16 or fp16; give one")
    return gradients


class Options(FileModel):
    """What is chosen for the whole step. ``bucket_bytes``: gradients are synchronised, and sharded weights gathered, in
    buckets of about this size. ``synchronise_by``: see ``SynchroniseBy``. ``optimizer``: how much state an update reads
    and writes (none, one, or two tensors per weight). ``prefetch``: sharded weights are gathered so many buckets before
    the one that is read. ``precision``: of weights, activations and gradients; the optimizer keeps its states and a
    master copy of every weight in float32.
    ``gradients``: type in which those of weights are added up over microbatches, sent and read by the update.
    ``recompute``: see ``Recompute``; of each stage only the first ``recompute_blocks`` regions, if that is given: one
    number for all, or one for each stage, of which 0 means none.
    ``reshard_after_forward``: sharded weights are let go of after the forward pass of what reads them and gathered
    again in the backward pass (FSDP2), instead of being kept for it.
    ``recipes``: a weight synchronises by the first that names it, exactly as planned if none does."""

    bucket_bytes: Capacity = 25 * 2**20
    synchronise_by: SynchroniseBy = "auto"
    optimizer: OptimizerName = "momentum"
    prefetch: Count = 1
    precision: Precision = "as-is"
    gradients: Gradients = "as-is"
    recompute: Recompute = "none"
    recompute_blocks: Blocks | None = None
    reshard_after_forward: bool = False
    recipes: Recipes = ()

    _suit = field_validator("gradients")(check_gradients)

    def typed(self, graph: OperatorGraph) -> OperatorGraph:
        """The graph in the element types of plans with these options."""
        return with_precision(graph, self.precision, self.gradients)

    @property
    def exact(self) -> Options:
        """The same without recipes."""
        return self.model_copy(update={"recipes": ()}) if self.recipes else self

    def recipe_of(self, weight: str) -> WeightRecipe | None:
        """What a weight synchronises by; None: exactly, as planned."""
        return next((recipe for recipe in self.recipes if recipe.names(weight)), None)


def check_recompute(options: Options, stages: int) -> None:
    """Raise StrategyError unless ``recompute_blocks`` has a number for each stage, where it has several."""
    blocks = options.recompute_blocks
    if isinstance(blocks, tuple) and len(blocks) != stages:
        raise StrategyError(
            f"recompute_blocks: it has {len(blocks)} numbers, and there are {stages} stages",
            "Give one for each stage, or a single one for all.",
        )


class Reference(FileModel):
    """What a file was made for: the name for people, the hash for the check."""

    name: Text
    hash: Digest


class GraphReference(Reference):
    """The graph, and how its model must be imported to give it again."""

    tracing: Tracing = Tracing()


class Prediction(FileModel):
    """What the simulator said when the strategy was made. ``interval_s``: ends of the interval that holds the measured
    time in 8 of 10 cases."""

    iteration_s: PredictedSeconds
    interval_s: Annotated[tuple[PredictedSeconds, PredictedSeconds] | None, Strict(False)] = None
    data_parallel_s: PredictedSeconds | None = None
    peak_bytes: Annotated[int, Field(ge=0)] | None = None


class Measurement(FileModel):
    """What a real run took: ``iteration_s``, median over ``steps`` training steps on ``ranks`` processes."""

    iteration_s: PredictedSeconds
    steps: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    ranks: Annotated[int, Field(ge=1, le=MAX_COUNT)]


class SearchRecord(FileModel):
    """How a strategy was found: with a budget of proposals, the same graph, topology, options, pins and seed give the
    same strategy. ``proposals``, ``climbs``: made so far, searches that it was resumed from included. ``start``: what
    led to it. ``bound_s``: no plan is faster."""

    seed: Seed
    proposals: Count
    climbs: Count = 0
    start: Text = ""
    pins: tuple[Text, ...] = ()
    bound_s: PredictedSeconds | None = None

    @field_validator("pins")
    @classmethod
    def _readable(cls, pins: tuple[str, ...]) -> tuple[str, ...]:
        for pin in pins:
            try:
                read_pin(pin)
            except StrategyError as error:
                raise ValueError(error.message) from error
        return pins


class Search(SearchRecord):
    """``locally_optimal``: all changes of one operator were tried, and none made the strategy 1 % faster."""

    locally_optimal: bool = False


class Input(FileModel):
    """A tensor that the model is fed: enough to trace the model again where the strategy is used."""

    name: Name
    shape: Shape
    dtype: Dtype
