"""What ``optimize --allow`` says of recipes: the best exact plan beside the best one with an allowed recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from flexsearch.cli.common import stdout
from flexsearch.cli.progress import Live

if TYPE_CHECKING:
    from flexsearch.search.recipes import Allowed
    from flexsearch.setting import Setting
    from flexsearch.strategy import Strategy

STEPS = 10_000
"""Steps of training for which the warning about Local-SGD's period is worked out, as how many there will be is not
known."""


@dataclass(frozen=True)
class Beside:
    """``exact_s``: the best plan that synchronises exactly, as planned; ``exact``: the best one with an exact recipe;
    ``lossy``: the best one with an allowed recipe (None: none makes sense). ``path``: where that was written.
    ``topology``, ``allow``: as they were named in the command."""

    exact_s: float
    exact: Allowed | None
    lossy: Allowed | None
    path: Path
    topology: str
    allow: tuple[str, ...]

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "exact_s": self.exact_s, "exact_recipe": _data(self.exact), "allowed": _data(self.lossy),
            "allowed_path": str(self.path) if self.lossy is not None else None, "warnings": self.warnings(),
            "time_to_loss_command": self.command,
        }  # fmt: skip

    @property
    def command(self) -> str:
        """What chooses among the same recipes by the time to a loss."""
        allow = quote(",".join(self.allow))
        return f"flexsearch converge --allow {allow} -t {self.topology} --model MODEL --dataset DATA"

    def warnings(self) -> list[str]:
        """What to know of the allowed recipe."""
        if self.lossy is None:
            return []
        size = len(self.lossy.lowered.recipe_groups[0].devices)
        return self.lossy.lowered.recipe_groups[0].recipe.warnings(STEPS, size)

    def say(self) -> None:
        """Print it."""
        from flexsearch.cli.details import tell
        from flexsearch.report.recipes import recipe_words
        from flexsearch.report.units import ratio, seconds

        if self.exact is not None and self.exact.simulation.makespan_s < self.exact_s:
            tell(
                f"\nThe exact recipe {self.exact.recipe} would take {seconds(self.exact.simulation.makespan_s)}, the "
                f"plan above {seconds(self.exact_s)}."
            )
        if self.lossy is None:
            tell("\nNone of the allowed recipes makes sense for these plans, or fits into memory.")
            return
        time_s = self.lossy.simulation.makespan_s
        gain = f"{ratio(self.exact_s / time_s)} as fast" if time_s < self.exact_s else "which is slower"
        tell(
            f"\nBest exact plan: {seconds(self.exact_s)} a step. Best plan with an allowed recipe: {seconds(time_s)}, "
            f"{gain}, with"
        )
        for text in recipe_words(self.lossy.lowered):
            tell(f"  {text}", indent=2)
        for warning in self.warnings():
            tell(f"Note: {warning}.")
        tell(
            "Time per step is not time to a loss. To find the recipe that reaches a loss first, on simulated workers:\n"
            f"  {self.command}"
        )
        stdout.print(f"Wrote {self.path}.", soft_wrap=True)


def _data(one: Allowed | None) -> dict[str, Any] | None:
    """A plan with a recipe, for JSON."""
    if one is None:
        return None
    recipe = one.lowered.recipe_groups[0].recipe
    return {
        "recipe": one.recipe, "weights": list(one.weights), "iteration_s": one.simulation.makespan_s,
        "changes": recipe.changes, "moved_bytes": one.simulation.moved_bytes,
        "peak_bytes": max(one.simulation.peak_bytes),
    }  # fmt: skip


def beside(
    setting: Setting, plans: Sequence[Strategy], exact_s: float, allow: Sequence[str], output: Path, topology: str
) -> Beside:  # fmt: skip
    """The plans with every recipe that is exact or allowed; the fastest allowed one is written beside ``output``, to
    NAME.allowed.json."""
    from flexsearch.search.recipes import best_allowed
    from flexsearch.strategy import Prediction

    with Live("recipes") as live:
        allowed = best_allowed(
            setting.graph, setting.topology, setting.costs, plans, allow,
            lambda done, total: live.show("recipes", done, total, f"{done} of {total} plans"),
        )  # fmt: skip
    exact, lossy = (
        next((one for one in allowed if one.lowered.recipe_groups[0].recipe.lossy == changed), None)
        for changed in (False, True)
    )
    path = output.with_suffix(f".allowed{output.suffix}")
    if lossy is not None:
        simulation = lossy.simulation
        lossy.strategy.prediction = Prediction(
            iteration_s=simulation.makespan_s, peak_bytes=max(simulation.peak_bytes)
        )  # fmt: skip
        lossy.strategy.save(path)
    return Beside(exact_s, exact, lossy, path, topology, tuple(allow))
