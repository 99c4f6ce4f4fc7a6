"""What measured times teach a profile: of the plans of ``optimize --verify``, or of the tasks of ``run --trace``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexsearch.cost import Profile
    from flexsearch.measure.learning import Lesson
    from flexsearch.topology import Topology


@dataclass(frozen=True)
class Learning:
    """What the file ``profile`` learned: a lesson, or the ``reason`` why there is none."""

    profile: Path
    lesson: Lesson | None
    reason: str = ""

    def data(self) -> dict[str, Any]:
        """As JSON."""
        if (lesson := self.lesson) is None:
            return {"learned": {"profile": str(self.profile), "changed": [], "reason": self.reason}}
        return {
            "learned": {
                "profile": str(self.profile), "changed": lesson.changed, "error_before": lesson.before,
                "error_after": lesson.after, "error_left_out": lesson.left_out,
                "costs": lesson.learned.model_dump(mode="json"),
            }
        }  # fmt: skip

    def words(self, topology: Topology, what: str = "plan") -> str:
        """In a sentence. ``what``: whose times were predicted."""
        from flexsearch.report.units import percent, ratio, seconds

        if (lesson := self.lesson) is None:
            return f"{self.profile} learned nothing: {self.reason}."
        if not lesson.changed:
            return (
                f"{self.profile} learned nothing: no correction of its errors (median {percent(lesson.before)}) "
                f"improved predictions for {what}s left out of the fit."
            )
        costs, start_s = lesson.learned, topology.communication.overhead_s
        network = costs.network(topology.name)
        words = {
            "compute": f"computing takes {ratio(costs.compute)} what the profile says",
            "task_s": f"each task takes {seconds(costs.task_s)} more host time",
            "time": f"moving bytes takes {ratio(network.time)} what the topology says",
            "start_s": f"a message starts in {seconds(start_s + network.start_s)}, not {seconds(start_s)}",
        }
        changed = "; ".join(words[name] for name in lesson.changed)
        plans = f"{costs.plans} plan{'s' if costs.plans != 1 else ''}"
        return (
            f"{self.profile} learned from {plans}: {changed}. Median error {percent(lesson.before)} -> "
            f"{percent(lesson.after)}; {percent(lesson.left_out)} for {what}s left out of the fit."
        )


def taught(
    path: Path, profile: Profile | None, topology: Topology, simulated_network: bool, teach: Callable[[Profile], Lesson]
) -> Learning:
    """What ``teach`` makes of the ``profile`` at ``path`` as it is (None: it is new); the file is written if it
    changes. ``simulated_network``: the ranks were processes of one machine, whatever the topology says."""
    from flexsearch.errors import ProfileError

    if simulated_network and len(topology.hosts) > 1:
        return Learning(path, None, f"the processes ran without the network of {topology.name}")
    try:
        profile = profile or new_profile(topology)
        lesson = teach(profile)
    except ProfileError as error:
        return Learning(path, None, error.message)
    if lesson.changed:
        profile.model_copy(update={"learned": lesson.learned}).save(path)
    return Learning(path, lesson)


def new_profile(topology: Topology) -> Profile:
    """A profile without measurements of single pieces. Raises ProfileError where devices differ."""
    from importlib.metadata import version

    from flexsearch.cost import Profile, ProfileDevice
    from flexsearch.errors import ProfileError

    kinds = {(device.kind, device.model) for device in topology.devices}
    if len(kinds) > 1:
        raise ProfileError(f"{topology.name} has devices of {len(kinds)} models, and a profile is of one")
    ((kind, model),) = kinds
    return Profile(device=ProfileDevice(kind=kind, model=model), torch=version("torch"))
